"""Messages between the launcher and agents: whole, capped, and never blocking."""

import json
import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import JobError
from hocket.launch import frames
from hocket.launch.channel import Channel
from hocket.launch.frames import Frame


@given(st.lists(st.tuples(st.text(), st.binary(max_size=300)), max_size=5), st.integers(1, 40))
def test_frames_arrive_whole_however_they_are_cut(messages: list[tuple[str, bytes]], step: int) -> None:
    data = b"".join(frames.encode("output", body, text=text) for text, body in messages)
    decoder = frames.Decoder()
    got: list[Frame] = []
    for start in range(0, len(data), step):
        got += decoder.feed(data[start : start + step])
    assert [(frame.kind, frame.head["text"], frame.body) for frame in got] == [("output", t, b) for t, b in messages]


def raw(head: bytes, body: bytes = b"", magic: bytes = b"HKT1") -> bytes:
    return struct.pack("!4sII", magic, len(head), len(body)) + head + body


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"Welcome to node1!\n", "no message of Hocket's"),
        (raw(b'{"kind": "x"}', magic=b"HKT2"), "no message of Hocket's"),
        (struct.pack("!4sII", b"HKT1", frames.MOST_HEAD + 1, 0), "at most"),
        (struct.pack("!4sII", b"HKT1", 2, 0xFFFFFFFF), "at most"),
        (raw(b"not json"), "without a kind"),
        (raw(b"[1]"), "without a kind"),
        (raw(b"{}"), "without a kind"),
        (raw(json.dumps({"kind": 3}).encode()), "without a kind"),
        (raw(b"\xff\xff"), "without a kind"),
    ],
)
def test_what_is_no_frame_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(JobError, match=message):
        frames.Decoder().feed(data)


@given(st.binary(min_size=12, max_size=100))
def test_noise_never_becomes_a_frame(data: bytes) -> None:
    with pytest.raises(JobError):
        frames.Decoder().feed(b"x" + data)


def test_a_channel_never_blocks_and_notices_the_end() -> None:
    (reader, there), (back, writer) = os.pipe(), os.pipe()
    near, far = Channel(reader, writer), Channel(back, there)
    for number in range(100):
        near.send("output", bytes(1 << 16), number=number)
    assert near.pending > 1 << 20, "nobody reads, and nobody waits"
    got: list[Frame] = []
    while len(got) < 100:
        got += far.receive()
        near.flush()
    assert [frame.head["number"] for frame in got] == list(range(100)) and not near.pending
    assert near.receive() == [] and near.is_open
    far.close()
    assert near.receive() == [] and not near.is_open
    near.send("output")
    near.close()
