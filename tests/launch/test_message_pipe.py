"""The line between the launcher and an agent: nobody blocks, and what is no message is refused."""

import os

import pytest

from hocket import messages
from hocket.errors import JobError
from hocket.launch.message_pipe import Frame, MessagePipe


def line() -> tuple[MessagePipe, MessagePipe]:
    (reader, there), (back, writer) = os.pipe(), os.pipe()
    return MessagePipe(reader, writer), MessagePipe(back, there)


@pytest.mark.parametrize(
    "data",
    [
        b"Welcome to node1!\n",
        messages.encode(3, {"kind": "x"}, b""),
        messages.encode(0, {}, b""),
        messages.encode(0, {"kind": 3}, b""),
    ],
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    near, far = line()
    near.send_raw(data)
    with pytest.raises(JobError, match=r"no message of Hocket's|without a kind"):
        far.receive()
    assert not far.is_open
    near.close(), far.close()


def test_a_channel_never_blocks_and_notices_the_end() -> None:
    near, far = line()
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
    new = os.pipe()
    near.close(), far.close()
    for descriptor in new:  # they have the numbers of those that were closed before
        os.close(descriptor)
