"""One worker's connections to a server: every message is answered once, whatever happens to the connection."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from typing import Any

from hocket.errors import HocketError
from hocket.server.answers import Answer, Answers
from hocket.server.service import Service
from hocket.server.terms import Kind
from hocket.transport import handoff
from hocket.transport.area import Area
from hocket.transport.wire import Closed, Message, Wire, WireError

GRACE = 1.0  # seconds in which a worker whose connection broke can come back; a live one does so at once


class Peer:
    """A worker, over all connections that it makes."""

    def __init__(self, nonce: str) -> None:
        self.nonce = nonce
        self.lock = threading.Lock()  # held while a message of it is received and answered
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
        peer, before = self._peer, self._peer.wire
        peer.wire = self._wire
        if before is not None:
            before.close()
        self._service.welcome(self._rank)
        why = "was lost"
        try:
            while not peer.is_gone:
                self._serve_one(self._wire.receive())
        except Closed:
            pass
        except (WireError, KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
            self._service.refused["messages that make no sense"] += 1
            print(f"hocket: a message of rank {self._rank} was refused: {error!r}", file=sys.stderr, flush=True)
        self._end(why)

    def _serve_one(self, message: Message) -> None:
        peer = self._peer
        body = _WireBody(self._wire, message.body)
        with peer.lock:
            if message.sequence == peer.sequence:
                if message.head.get("shared"):
                    os.close(body.area().descriptor)
                body.drop()  # it was answered, and the answer did not arrive
            elif message.sequence != peer.sequence + 1:
                self._service.refused["messages that were sent before"] += 1
                raise WireError(f"message {message.sequence} after {peer.sequence}")
            else:
                peer.answer = self._answer(message, body)
                peer.sequence = message.sequence
            kind, answer = peer.answer
            self._wire.send(kind, message.sequence, answer.head, answer.parts)

    def _answer(self, message: Message, body: _WireBody) -> tuple[int, Answer]:
        if message.kind == Kind.BYE:
            self._peer.is_gone = True
            return Kind.REPLY, Answer({})
        try:
            return Kind.REPLY, self._answers.answer(message.kind, message.head, body)
        except HocketError as error:
            if isinstance(error, Closed | WireError):
                raise
            body.drop()
            return Kind.ERROR, Answer({"error": type(error).__name__, "text": str(error)})
        except RuntimeError as error:  # the optimizer's, for example
            body.drop()
            traceback.print_exc()
            text = f"server {self._service.number} failed: {type(error).__name__}: {error}"
            return Kind.ERROR, Answer({"error": "JobError", "text": text})

    def _note(self, ranks: list[int], seconds: float) -> None:
        head: dict[str, Any] = {"ranks": ranks, "seconds": seconds, "server": self._service.number}
        self._wire.send(Kind.NOTE, 0, head)

    def _end(self, why: str) -> None:
        """The connection is over."""
        peer = self._peer
        if peer.is_gone:
            self._service.lose(self._rank, "")
            return
        if not self._wire.is_local:
            deadline = time.monotonic() + GRACE
            while time.monotonic() < deadline and peer.wire is self._wire:
                time.sleep(0.02)
        if peer.wire is self._wire:
            self._service.lose(self._rank, why)


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
        return Area(handoff.take(self._wire.connection))

    def drop(self) -> None:
        """Receive what is left, for nothing."""
        while self._left:
            count = min(self._left, 1 << 20)
            self._left -= count
            self._wire.receive_bytes(count)
