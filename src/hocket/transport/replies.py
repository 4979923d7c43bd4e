"""The end that answers requests: lets peers in, over any number of connections, and answers each of them.

A request is answered once: one that was sent again because its connection broke gets the answer that it would have got.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import sys
import threading
import time
import traceback
from typing import Any, NamedTuple, Protocol

from hocket.config import Config
from hocket.errors import HocketError, JobError
from hocket.messages import Message, WireError
from hocket.transport import handoff, tls
from hocket.transport.area import Area
from hocket.transport.door import Door, listen, listen_here
from hocket.transport.requests import WATCH, Talk, encrypted
from hocket.transport.waiting import Note
from hocket.transport.wire import Closed, Wire

NO_SENSE = "messages that make no sense"
GRACE = 1.0  # seconds in which a peer whose connection broke can come back; a live one does so at once
_SUCCESSION = 15.0  # seconds in which the end of a peer may become known of whom another one takes the place
_FIRST_WORDS = 30.0  # seconds that a peer has to say who it is
_MOST_DROPPED = 1 << 36  # bytes of a message that are thrown away; a push that was sent twice may be long


class Body(Protocol):
    """The bytes of a message, to be received when it is clear where they go."""

    length: int

    def into(self, parts: list[memoryview]) -> None:
        """Receive all bytes, straight into ``parts``, which must have the same total length."""
        ...

    def read(self) -> bytes:
        """Receive all bytes."""
        ...

    def area(self) -> Area:
        """The shared memory that comes with the message."""
        ...


class Answer(NamedTuple):
    """A head, and the bytes that go with it, which stay as they are until the peer's next message."""

    head: dict[str, Any]
    parts: list[memoryview] = []
    area: Area | None = None  # shared memory for a peer of this host


class Handler(Protocol):
    """What a server or the coordinator does for its peers. Every method may be called by many threads at once."""

    who: str
    """The name of this end, for messages."""

    def welcome(self, peer: int, said: dict[str, Any]) -> dict[str, Any]:
        """A peer has come, or has come back; returns what it is told.

        Raises:
            HocketError: the peer is not let in, and raises this error itself.
            KeyError, TypeError, ValueError: it makes no sense that this peer comes here.
        """
        ...

    def answer(self, peer: int, kind: int, head: dict[str, Any], body: Body, note: Note) -> Answer:
        """The answer to a request; blocks while the peer has to wait.

        A wait that is over when the peer is gone for good asks ``note`` for that: see ``waiting.Asker``.

        Raises:
            HocketError: the peer is to raise this error.
            KeyError, TypeError, ValueError: the message makes no sense.
        """
        ...

    def lose(self, peer: int, why: str) -> None:
        """A peer has gone for good; ``why`` is empty if it has said goodbye."""
        ...

    def refuse(self, why: str) -> None:
        """Count a peer or a message that was turned away, by a reason in words that are always the same."""
        ...


class Reception:
    """Lets peers in through any number of doors, and answers each in a thread of its own.

    Args:
        handler: Answers the requests.
        secret: The secret of the job.
        name: The number of this end in proofs.
    """

    def __init__(self, handler: Handler, secret: bytes, name: int) -> None:
        self._handler, self._secret, self._name = handler, secret, name
        self._doors: list[Door] = []
        self._peers: dict[int, _Peer] = {}
        self._lock = threading.Lock()

    def open(self, listener: socket.socket, context: ssl.SSLContext | None = None, binding: bytes = b"") -> Door:
        """Let peers in at ``listener``, with TLS if there is a context."""
        door = Door(listener, self._secret, self._name, self._let_in, self._handler.refuse, context, binding)
        self._doors.append(door)
        return door

    def open_for(self, config: Config, label: str, port: int = 0) -> dict[str, Any]:
        """Open the doors that a process of the job needs: for its host, and for others where there are any.

        Args:
            config: The configuration of this process.
            label: Names the socket of this host, which begins with the job's name.
            port: The TCP port; 0 is any that is free.

        Returns:
            Where this end is reached: what ``requests.reach`` wants.
        """
        said: dict[str, Any] = {"socket": None, "address": None, "port": None}
        if config.rendezvous is not None and config.transport != "gloo":
            said["socket"] = f"{config.rendezvous}-{label}"
            self.open(listen_here(said["socket"]))
        if config.host_address is not None or not self._doors:
            address = config.host_address or config.address
            security = tls.make_context() if encrypted(address, config) else ()
            said |= {"address": address, "port": self.open(listen(address, port), *security).port}
        return said

    def wire_of(self, peer: int) -> Wire:
        """The connection of a peer that is here."""
        wire = self._peers[peer].wire
        assert wire is not None
        return wire

    def drop(self, peer: int) -> None:
        """Close the connection of a peer, which may come back, unless another process has taken its place by then.

        What it has sent and nobody has read is lost.
        """
        if (found := self._peers.get(peer)) is not None and found.wire is not None:
            with found.coming:
                found.is_lost = True  # its last request may wait for others for long
                found.wire.close()

    def give_up(self, peer: int) -> None:
        """The process of a peer has ended, as another connection of it tells: nobody waits for it to come back."""
        self._peers.get(peer, _Peer("")).has_ended = True

    def close(self) -> None:
        """Close all doors and connections."""
        for door in self._doors:
            door.close()
        for peer in list(self._peers.values()):
            peer.is_gone = peer.is_let_go = True  # this end waits for nobody now
            if peer.wire is not None:
                peer.wire.close()

    def _let_in(self, wire: Wire, number: int) -> None:
        """Talk with a peer that has come in, until its connection ends."""
        try:
            wire.connection.settimeout(_FIRST_WORDS)
            message = wire.receive()
            wire.connection.settimeout(None)
            if message.kind != Talk.JOIN or message.body:
                raise WireError(f"a message of kind {message.kind} before joining")
            nonce, said = str(message.head["nonce"]), dict(message.head["said"])
            peer = self._find(number, nonce, replaces=bool(said.get("newcomer")))
            if peer.nonce != nonce:
                self._handler.refuse("a second process of a rank")
                raise JobError(f"there are two processes of rank {number}: start the script once for each rank")
            self._welcome(peer, number, wire, said)
        except Closed:
            return
        except HocketError as error:
            if not isinstance(error, WireError):
                with contextlib.suppress(HocketError, OSError):
                    wire.send(Talk.ERROR, 0, {"error": type(error).__name__, "text": str(error)})
                return
            self._turn_away(error)
            return
        except Exception as error:  # any kind of error may come from outside
            self._turn_away(error)
            return

    def _find(self, number: int, nonce: str, *, replaces: bool) -> _Peer:
        """The peer with this number; a new one in the place of one that is lost, if the new one says so."""
        deadline = time.monotonic() + _SUCCESSION
        while True:
            with self._lock:
                peer = self._peers.setdefault(number, _Peer(nonce))
                if peer.nonce == nonce or not replaces:
                    return peer
                if peer.is_lost:
                    self._peers[number] = _Peer(nonce)
                    return self._peers[number]
            if time.monotonic() > deadline:
                return peer
            time.sleep(0.01)  # its connection may not be known to have ended yet

    def _welcome(self, peer: _Peer, number: int, wire: Wire, said: dict[str, Any]) -> None:
        session = _Session(self._handler, peer, number, wire)
        with peer.coming:
            told = self._handler.welcome(number, said)  # a peer that is not let in is told why
            before, peer.wire, peer.is_lost = peer.wire, wire, False
        try:
            if before is not None:
                before.close()
            wire.send(Talk.REPLY, 0, {**told, "answered": peer.sequence})
            session.run()
        finally:
            session.end()

    def _turn_away(self, error: Exception) -> None:
        self._handler.refuse(NO_SENSE)
        print(f"hocket: a peer was refused: {error!r}", file=sys.stderr, flush=True)


class _Peer:
    """A peer, over all connections that it makes."""

    def __init__(self, nonce: str) -> None:
        self.nonce = nonce
        self.lock = threading.Lock()  # held while a message of this peer is received and answered
        self.coming = threading.Lock()  # held while it is decided whether the peer is there or lost
        self.sequence = 0  # the number of the last message that was answered
        self.answer: tuple[int, Answer] = (Talk.REPLY, Answer({}))
        self.wire: Wire | None = None
        self.is_gone = False  # the peer has said goodbye, or was let go
        self.is_lost = False  # it is gone for good, and those who care were told
        self.has_ended = False  # its process has, as far as is known
        self.is_let_go = False  # this end has closed, and nobody is told of anything any more


class _Session:
    """Talks with one peer over one connection, until that ends."""

    def __init__(self, handler: Handler, peer: _Peer, number: int, wire: Wire) -> None:
        self._handler, self._peer, self._number, self._wire = handler, peer, number, wire
        self._asker = _Asker(peer, is_watched=bool(number & WATCH))

    def run(self) -> None:
        """Answer until the peer says goodbye or its connection ends."""
        peer = self._peer
        try:
            while not peer.is_gone:
                self._serve_one(self._wire.receive())
        except Closed:
            pass
        except _Replayed as error:
            self._refuse("messages that were sent before", error)
        except WireError as error:
            self._refuse(NO_SENSE, error)

    def _serve_one(self, message: Message) -> None:
        peer, body = self._peer, _WireBody(self._wire, message.body)
        with peer.lock:
            if message.sequence == peer.sequence:
                if message.head.get("shared"):
                    os.close(body.area().descriptor)
                body.drop()  # the request was answered, but the answer did not arrive
                self._handler.refuse("messages that came twice")
            elif message.sequence != peer.sequence + 1:
                raise _Replayed(f"message {message.sequence} after {peer.sequence}")
            else:
                peer.answer = self._answer(message, body)
                peer.sequence = message.sequence
            kind, answer = peer.answer
            try:
                self._wire.send(kind, message.sequence, answer.head, answer.parts)
            except Closed:
                if not self._number & WATCH:  # what a watched peer said before its end is heard
                    raise
            if answer.area is not None:
                self._give(answer.area)

    def _answer(self, message: Message, body: _WireBody) -> tuple[int, Answer]:
        """Answer a message; an error is an answer, too: the message must not be handled a second time."""
        if message.kind == Talk.BYE:
            self._peer.is_gone = True
            return Talk.REPLY, Answer({})
        try:
            answer = self._handler.answer(self._number, message.kind, message.head, body, self._asker)
            return Talk.REPLY, answer
        except (Closed, WireError):
            raise
        except HocketError as error:
            told = error
        except (RuntimeError, MemoryError) as error:
            traceback.print_exc()
            told = JobError(f"{self._handler.who} failed: {type(error).__name__}: {error}")
        except Exception as error:
            self._refuse(NO_SENSE, error)
            told = JobError(
                f"{self._handler.who} refused a message of kind {message.kind} that makes no sense ({error!r}): "
                "install the same Hocket on all hosts"
            )
        body.drop()
        return Talk.ERROR, Answer({"error": type(told).__name__, "text": str(told)})

    def _give(self, area: Area) -> None:
        try:
            handoff.give(self._wire.connection, area.descriptor)
        except OSError as error:
            raise Closed(str(error)) from error

    def _refuse(self, why: str, error: Exception) -> None:
        self._handler.refuse(why)
        print(f"hocket: a message of rank {self._number} was refused: {error!r}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """The connection is over: the peer is lost unless it comes back soon, or at once if it is watched."""
        peer = self._peer
        self._wire.close()  # so that a live peer knows, and comes back
        if not peer.is_gone and self._asker.may_come_back(self._wire):
            deadline = time.monotonic() + GRACE
            while time.monotonic() < deadline and peer.wire is self._wire and not (peer.is_gone or peer.has_ended):
                time.sleep(0.02)
        with peer.coming:
            if not peer.is_let_go and (peer.is_gone or peer.wire is self._wire):
                self._handler.lose(self._number, "" if peer.is_gone else "was lost")
                peer.is_lost = True


class _Asker:
    """A peer that waits for an answer, over whichever connection it has: see ``waiting.Asker``."""

    def __init__(self, peer: _Peer, *, is_watched: bool) -> None:
        self._peer, self._is_watched = peer, is_watched
        self._ended: tuple[Wire, float] | None = None  # the connection of the peer that has ended, and since when
        self._is_given_up = False

    def __call__(self, ranks: list[int], seconds: float, /) -> None:
        """Send a note to the peer; if the peer has gone, that is found out otherwise."""
        if self._peer.wire is not None:
            with contextlib.suppress(Closed, OSError):
                self._peer.wire.send(Talk.NOTE, 0, {"ranks": ranks, "seconds": seconds})

    def look(self) -> None:
        """Raise Closed if the connection has ended, and the peer has not come back over another one."""
        wire, now = self._peer.wire, time.monotonic()
        if wire is None or not wire.has_ended():
            return
        if self._ended is None or self._ended[0] is not wire:
            self._ended = wire, now
        if not self.may_come_back(wire) or now >= self._ended[1] + GRACE:
            self._is_given_up = True
            raise Closed("the connection ended while an answer was waited for")

    def may_come_back(self, wire: Wire) -> bool:
        """Whether the peer may make a new connection in the place of one that has ended."""
        return not (wire.is_local or self._is_watched or self._is_given_up or self._peer.has_ended)


class _Replayed(WireError):
    """A message whose number is not the next one."""


class _WireBody:
    """The body of a message that came over a wire."""

    def __init__(self, wire: Wire, length: int) -> None:
        self._wire, self.length = wire, length
        self._left = length

    def into(self, parts: list[memoryview]) -> None:
        self._left = 0
        self._wire.receive_into(parts)

    def read(self) -> bytes:
        left, self._left = self._left, 0
        return self._wire.receive_bytes(left)

    def area(self) -> Area:
        try:
            descriptor = handoff.take(self._wire.connection)
        except (OSError, JobError) as error:
            raise Closed(f"no shared memory came ({error})") from error
        try:
            return Area(descriptor)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise ValueError(f"what came is no shared memory ({error})") from error

    def drop(self) -> None:
        """Receive what is left and throw it away, unless it is too long."""
        if self._left > _MOST_DROPPED:
            raise WireError(f"a body of {self._left:,} bytes that nobody wants")
        while self._left:
            count = min(self._left, 1 << 20)
            self._left -= count
            self._wire.receive_bytes(count)
