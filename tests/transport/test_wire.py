"""Messages: what was sent comes, and what is no message is refused before it costs anything."""

import itertools
import json
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hocket.messages import HEADER, MAGIC, MOST_BODY, MOST_HEAD, VERSION, Decoder, WireError, encode
from hocket.transport.wire import Bell, Closed, Wire

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
HEADS = st.dictionaries(st.text(), PLAIN, max_size=6)


@contextmanager
def wires(timeout: float = 5.0, **caps: int) -> Iterator[tuple[Wire, Wire]]:
    left, right = socket.socketpair()
    left.settimeout(timeout)
    right.settimeout(timeout)
    with left, right:
        yield Wire(left), Wire(right, **caps)


def frame(head: bytes = b"{}", body: bytes = b"", **fields: Any) -> bytes:
    values = {"magic": MAGIC, "version": VERSION, "kind": 5, "nothing": 0, "generation": 0, "sequence": 1,
              "heads": len(head), "bodies": len(body)} | fields  # fmt: skip
    return HEADER.pack(*values.values()) + head + body


def hear(data: bytes, **caps: int) -> Any:
    """What a wire makes of bytes after which the other end closes."""
    with wires(**caps) as (mine, theirs):
        sender = threading.Thread(target=_send, args=(mine.connection, data))
        sender.start()
        try:
            message = theirs.receive()
            return message, theirs.receive_bytes(min(message.body, 1 << 20))
        finally:
            theirs.close()
            sender.join()


def _send(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        pass


@given(
    kind=st.integers(0, 255),
    sequence=st.integers(0, 2**64 - 1),
    generation=st.integers(0, 2**32 - 1),
    head=HEADS,
    parts=st.lists(st.binary(max_size=300), max_size=100),
    cuts=st.lists(st.integers(0, 300), max_size=5),
)
def test_what_is_sent_comes(
    kind: int, sequence: int, generation: int, head: dict[str, Any], parts: list[bytes], cuts: list[int]
) -> None:
    whole = b"".join(parts)
    with wires() as (left, right):
        left.send(kind, sequence, head, [memoryview(part) for part in parts], generation)
        message = right.receive()
        assert message == (kind, generation, sequence, json.loads(json.dumps(head)), len(whole))
        into = bytearray(len(whole))
        ends = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
        right.receive_into([memoryview(into)[a:b] for a, b in itertools.pairwise(ends)])
        assert into == whole
        assert left.sent == right.received


def test_a_body_longer_than_the_buffers_of_the_system_comes() -> None:
    body = bytes(range(256)) * (1 << 14)
    with wires() as (left, right):
        sender = threading.Thread(target=left.send, args=(1, 1, {}, [memoryview(body)] * 3))
        sender.start()
        message = right.receive()
        assert right.receive_bytes(message.body) == body * 3
        sender.join()


@pytest.mark.few(15)
@pytest.mark.parametrize("length", range(len(frame(b'{"a":1}', b"body"))))
def test_every_truncation_is_an_end(length: int) -> None:
    with pytest.raises(Closed):
        hear(frame(b'{"a":1}', b"body")[:length])


def test_a_part_of_a_message_is_waited_for_only_so_long() -> None:
    with wires(timeout=0.05) as (left, right):
        left.connection.sendall(frame()[:7])
        with pytest.raises(TimeoutError):
            right.receive()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"magic": b"HTTP"}, "no message of Hocket's"),
        ({"nothing": 1}, "no message of Hocket's"),
        ({"version": VERSION + 1}, "install the same Hocket"),
        ({"heads": MOST_HEAD + 1}, "longer than is allowed"),
        ({"heads": 2**32 - 1}, "longer than is allowed"),
        ({"bodies": MOST_BODY + 1}, "longer than is allowed"),
        ({"bodies": 2**64 - 1}, "longer than is allowed"),
    ],
)
def test_corrupt_headers_are_refused(bad: dict[str, Any], words: str) -> None:
    with pytest.raises(WireError, match=words):
        hear(frame(**bad))


@given(st.lists(st.tuples(HEADS, st.binary(max_size=300)), max_size=5), st.integers(1, 40))
def test_a_decoder_gives_whole_messages_however_they_are_cut(messages: list[tuple[Any, bytes]], step: int) -> None:
    data = b"".join(encode(7, head, body) for head, body in messages)
    decoder, got = Decoder(), []
    for start in range(0, len(data), step):
        got += decoder.feed(data[start : start + step])
    expected = [(7, json.loads(json.dumps(head)), body) for head, body in messages]
    assert [(message.kind, message.head, body) for message, body in got] == expected


@pytest.mark.parametrize(
    "data", [b"Welcome!", b"x" + frame(), frame(heads=101), frame(bodies=2**62), frame(b"[1]"), frame(version=99)]
)
def test_a_decoder_refuses_what_is_no_message(data: bytes) -> None:
    with pytest.raises(WireError):
        Decoder(most_head=100, most_body=100).feed(data)


@pytest.mark.parametrize("head", [b"[1]", b"7", b"null", b'"text"'])
def test_a_head_that_is_no_object_is_refused(head: bytes) -> None:
    with pytest.raises(WireError, match="no object"):
        hear(frame(head))


@pytest.mark.parametrize(
    "head", [b"{", b"\xff\xfe", b"{}x", b'{"a":}', b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000]
)
def test_a_head_that_is_no_json_is_refused(head: bytes) -> None:
    with pytest.raises(WireError):
        hear(frame(head))


def test_memory_is_taken_as_bytes_come() -> None:
    """A header may say that a terabyte follows; it is believed when it is there."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with wires() as (left, right):
        left.connection.sendall(frame(body=b"only this", bodies=MOST_BODY))
        left.connection.shutdown(socket.SHUT_WR)
        message = right.receive()
        assert message.body == MOST_BODY
        with pytest.raises(Closed):
            right.receive_bytes(message.body)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (64 << 10)  # kilobytes


def test_what_is_too_long_is_not_sent() -> None:
    with wires() as (left, right):
        left.most_head = 100
        with pytest.raises(WireError, match="longer"):
            left.send(1, 1, {"long": "x" * 200})
        left.send(1, 2, {})
        assert right.receive().sequence == 2


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.binary(max_size=200) | st.builds(lambda tail: MAGIC + bytes([VERSION]) + tail, st.binary(max_size=200)))
@example(b"")
@example(frame())
def test_arbitrary_bytes_are_a_message_or_refused(data: bytes) -> None:
    try:
        hear(data, most_body=1 << 20)
    except (WireError, Closed, TimeoutError):
        pass


@settings(max_examples=300)
@given(data=st.data(), head=HEADS, body=st.binary(max_size=50))
def test_mutations_of_a_message_are_a_message_or_refused(
    data: st.DataObject, head: dict[str, Any], body: bytes
) -> None:
    genuine = bytearray(frame(json.dumps(head).encode(), body))
    for _ in range(data.draw(st.integers(1, 4))):
        genuine[data.draw(st.integers(0, len(genuine) - 1))] = data.draw(st.integers(0, 255))
    try:
        hear(bytes(genuine), most_body=1 << 20)
    except (WireError, Closed, TimeoutError):
        pass


def test_the_end_of_a_wire_is_seen_before_the_last_bytes_are_received() -> None:
    with wires() as (left, right):
        left.send(3, 1, {"a": 1})
        assert not right.has_ended()
        left.close()
        assert right.has_ended()
        assert right.receive().head == {"a": 1}
        right.close()
        assert right.has_ended()


def test_a_descriptor_is_not_given_back_while_a_call_uses_it() -> None:
    """Under its number there may soon be another file, to which TLS would send its last words."""
    seen, go = threading.Event(), threading.Event()

    class Slow(socket.socket):
        def recv_into(self, *args: Any) -> int:  # type: ignore[override]
            count = super().recv_into(*args)
            seen.set()
            assert go.wait(10)
            return count

    left, right = socket.socketpair()
    slow = Slow(fileno=right.detach())
    with left, slow:
        wire, errors = Wire(slow), []

        def hear() -> None:
            try:
                wire.receive()
            except Closed as error:
                errors.append(error)

        thread = threading.Thread(target=hear)
        thread.start()
        left.send(b"H")
        assert seen.wait(10)
        wire.close()
        assert slow.fileno() >= 0
        go.set()
        thread.join()
        assert slow.fileno() == -1 and len(errors) == 1
        with pytest.raises(Closed):
            wire.send(1, 1, {})


def test_who_waits_at_a_wire_is_woken_by_a_message_or_a_bell() -> None:
    bell = Bell()
    with wires() as (left, right):
        assert not right.wait(bell, 0.0)
        bell.ring()
        bell.ring()
        assert not right.wait(bell, 3600.0)  # it was the bell, which is calm again
        assert not right.wait(bell, 0.0)
        left.send(5, 1, {})
        assert right.wait(bell, 3600.0)
        right.receive()
        later = threading.Thread(target=bell.ring)
        later.start()
        assert not right.wait(bell, 3600.0)
        later.join()
        left.close()
        assert right.wait(bell, 3600.0)
        with pytest.raises(Closed):
            right.receive()
    bell.close()


def test_the_end_of_a_process_is_seen_though_its_child_lives() -> None:
    with wires() as (left, right):
        child = os.fork()
        if not child:
            signal.pause()
            os._exit(0)
        try:
            left.connection.close()
            with pytest.raises(Closed):
                right.receive()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
