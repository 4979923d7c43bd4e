"""One worker's connections to a server: every message is answered once, whatever happens to the connection."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from typing import Any

from hocket.errors import HocketError, JobError
from hocket.server.answers import Answer, Answers
from hocket.server.service import Service
from hocket.server.terms import Kind
from hocket.transport import handoff
from hocket.transport.area import Area
from hocket.transport.wire import Closed, Message, Wire, WireError

NO_SENSE = "messages that make no sense"
GRACE = 1.0  # seconds in which a worker whose connection broke can come back; a live one does so at once
_MOST_DROPPED = 1 << 36  # bytes; a push that was sent twice may be long


class Peer:
    """A worker, over all connections that it makes."""

    def __init__(self, nonce: str) -> None:
        self.nonce = nonce
        self.lock = threading.Lock()  # held while a message of it is received and answered
        self.coming = threading.Lock()  # held while it is decided whether it is there or lost
        self.sequence = 0  # of the last message that was answered
        self.answer: tuple[int, Answer] = (Kind.REPLY, Answer({}))
        self.wire: Wire | None = None
        self.is_gone = False


class Session:
    """Talks with one worker over one connection, until that ends."""

    def __init__(self, service: Service, peer: Peer, rank: int, wire: Wire) -> None:
        self._service, self._peer, self._rank, self._wire = service, peer, rank, wire
        self._answers = Answers(service, rank, self._note)

    def run(self) -> None:
        """Answer until the worker says goodbye or its connection ends; then, unless it comes back, it is lost."""
        peer = self._peer
        with peer.coming:
            before, peer.wire = peer.wire, self._wire
            self._service.welcome(self._rank)
        if before is not None:
            before.close()
        try:
            while not peer.is_gone:
                self._serve_one(self._wire.receive())
        except Closed:
            pass
        except _Replayed as error:
            self._refuse("messages that were sent before", error)
        except WireError as error:
            self._refuse(NO_SENSE, error)
        self._end()

    def _serve_one(self, message: Message) -> None:
        peer = self._peer
        body = _WireBody(self._wire, message.body)
        with peer.lock:
            if message.sequence == peer.sequence:
                if message.head.get("shared"):
                    os.close(body.area().descriptor)
                body.drop()  # it was answered, and the answer did not arrive
                self._service.refuse("messages that came twice")
            elif message.sequence != peer.sequence + 1:
                raise _Replayed(f"message {message.sequence} after {peer.sequence}")
            else:
                peer.answer = self._answer(message, body)
                peer.sequence = message.sequence
            kind, answer = peer.answer
            self._wire.send(kind, message.sequence, answer.head, answer.parts)
            if answer.area is not None:
                self._give(answer.area)

    def _answer(self, message: Message, body: _WireBody) -> tuple[int, Answer]:
        """Whatever goes wrong with a message is an answer, too: it must not be done a second time."""
        if message.kind == Kind.BYE:
            self._peer.is_gone = True
            return Kind.REPLY, Answer({})
        try:
            return Kind.REPLY, self._answers.answer(message.kind, message.head, body)
        except (Closed, WireError):
            raise
        except HocketError as error:
            told = error
        except (RuntimeError, MemoryError) as error:
            traceback.print_exc()
            told = JobError(f"server {self._service.number} failed: {type(error).__name__}: {error}")
        except Exception as error:
            self._refuse(NO_SENSE, error)
            told = JobError(
                f"server {self._service.number} refused a message of kind {message.kind} that makes no sense "
                f"({error!r}): install the same Hocket on all hosts"
            )
        body.drop()
        return Kind.ERROR, Answer({"error": type(told).__name__, "text": str(told)})

    def _give(self, area: Area) -> None:
        try:
            handoff.give(self._wire.connection, area.descriptor)
        except OSError as error:
            raise Closed(str(error)) from error

    def _note(self, ranks: list[int], seconds: float) -> None:
        """To where the worker is now; that it may have gone is found out when it is answered."""
        wire = self._peer.wire or self._wire
        head: dict[str, Any] = {"ranks": ranks, "seconds": seconds, "server": self._service.number}
        with contextlib.suppress(Closed, OSError):
            wire.send(Kind.NOTE, 0, head)

    def _refuse(self, why: str, error: Exception) -> None:
        self._service.refuse(why)
        print(f"hocket: a message of rank {self._rank} was refused: {error!r}", file=sys.stderr, flush=True)

    def _end(self) -> None:
        """The connection is over."""
        peer = self._peer
        self._wire.close()  # so that a live worker knows, and comes back
        if not peer.is_gone and not self._wire.is_local:
            deadline = time.monotonic() + GRACE
            while time.monotonic() < deadline and peer.wire is self._wire and not peer.is_gone:
                time.sleep(0.02)
        with peer.coming:
            if peer.is_gone or peer.wire is self._wire:
                self._service.lose(self._rank, "" if peer.is_gone else "was lost")


class _Replayed(WireError):
    """A message that cannot come now."""


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
        """Receive what is left, for nothing; if it is not too much for that."""
        if self._left > _MOST_DROPPED:
            raise WireError(f"a body of {self._left:,} bytes that nobody wants")
        while self._left:
            count = min(self._left, 1 << 20)
            self._left -= count
            self._wire.receive_bytes(count)
