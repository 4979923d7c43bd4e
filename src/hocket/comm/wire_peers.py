"""Links between real workers, over sockets: each has a door, and a wire to the door of every other worker.

A wire carries messages one way: a thread of its own sends them, in the order in which they were given, and a thread at
the other end receives them. A thread that receives never sends (it leaves that to the threads that do), so that two
workers which both have much to say cannot block each other. A worker whose wire ends has died, or has said goodbye.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from hocket.comm.peers import Gather, Peers, Sending
from hocket.config import Config
from hocket.errors import JobError
from hocket.transport import door, handoff, tls
from hocket.transport.area import Area
from hocket.transport.door import Door
from hocket.transport.wire import Closed, Wire, until

_RETRY = 0.02
_KNOCK = 10.0  # seconds in which another worker must let this one in
_GOODBYE = 1.0  # seconds in which messages that were given to be sent still are
_WELCOME = 0  # the one message that goes the other way: this worker is heard


class WirePeers(Peers):
    """Links to all other real workers, over sockets.

    Args:
        config: The configuration of this worker.
        secret: The secret of the job.
    """

    def __init__(self, config: Config, secret: bytes) -> None:
        super().__init__(config.rank)
        self._config, self._secret = config, secret
        self._doors: list[Door] = []
        self._out: dict[int, _Outgoing] = {}
        self._incoming: dict[int, Wire] = {}
        self._where: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_connecting = True  # until all are connected, a wire may end, and another take its place
        self._process = os.getpid()

    def join(self, gather: Gather) -> None:
        try:
            self._join(gather)
        except BaseException:
            self.close()
            raise

    def repair(self, broken: Iterable[tuple[int, int]], gather: Gather) -> None:
        others = sorted({other for pair in broken if self.rank in pair for other in pair} - {self.rank})
        for other in others:
            self._lose(other)  # if only the other side has noticed, these wires are still there
            with self._lock:
                self.lost.pop(other, None)
                self._incoming.pop(other, None)
            print(
                f"hocket: rank {self.rank} has lost its link to rank {other}, and makes a new one",
                file=sys.stderr,
                flush=True,
            )
        self._is_connecting = True
        gather("gossip: links that are lost", b"")
        self._connect(others, gather)

    @property
    def live(self) -> list[int]:
        with self._lock:
            return sorted([self.rank, *self._out])

    def is_beside(self, rank: int) -> bool:
        with self._lock:
            return rank in self._out and self._out[rank].wire.is_local

    def send(
        self, rank: int, kind: int, head: dict[str, Any], parts: Sequence[memoryview] = (), *, sequence: int = 0,
        sent: Sending | None = None, area: Area | None = None,
    ) -> None:  # fmt: skip
        with self._lock:
            out = self._out.get(rank)
        if out is None:
            if sent is not None:
                sent.note()
            return
        out.put(_Item(kind, sequence, head, parts, sent, area))

    def close(self) -> None:
        if self._is_closed or self._process != os.getpid():
            return
        self._is_closed = True
        with self._lock:
            leaving = list(self._out.values())
            self._out = {}
        for out in leaving:
            out.end()
        deadline = time.monotonic() + _GOODBYE
        for out in leaving:
            out.close(deadline)
        for each in self._doors:
            each.close()
        for wire in list(self._incoming.values()):
            wire.close()

    def _join(self, gather: Gather) -> None:
        said = json.dumps(self._open()).encode()
        self._where = {rank: json.loads(data) for rank, data in gather("gossip: where workers are", said).items()}
        self._connect([rank for rank in self._where if rank != self.rank], gather)

    def _connect(self, others: Sequence[int], gather: Gather) -> None:
        failures: dict[int, str] = {}
        for rank in others:
            try:
                wire = self._reach(rank)
            except JobError as error:
                failures[rank] = str(error)
            else:
                with self._lock:
                    self._out[rank] = _Outgoing(rank, wire, self._lose_outgoing)
        told = gather("gossip: links between workers", json.dumps(failures).encode())
        with self._lock:
            self._is_connecting = False
            ended = [rank for rank in others if rank not in self._incoming or rank in failures]
        for rank in ended:
            self._lose(rank)
        for rank, data in told.items():
            for other, why in json.loads(data).items():
                if int(other) in told:  # it has not died
                    raise JobError(
                        f"rank {rank} cannot reach rank {other}, and gossip goes from worker to worker: {why}"
                    )

    def _reach(self, rank: int) -> Wire:
        """A wire on which the other worker has said that it hears this one; if it was too busy, a new one."""
        deadline = time.monotonic() + min(self._config.timeout, _KNOCK)
        while True:
            wire = self._knock(self._where[rank], deadline)
            try:
                wire.connection.settimeout(until(deadline))
                wire.receive()
                wire.connection.settimeout(None)
                return wire
            except (Closed, TimeoutError) as error:
                wire.close()
                if time.monotonic() > deadline:
                    raise JobError(f"it does not answer ({error})") from None
                time.sleep(_RETRY)

    def _open(self) -> dict[str, Any]:
        config = self._config
        said: dict[str, Any] = {"socket": None, "address": None, "port": None}

        def make(listener: Any, *security: Any) -> None:
            self._doors.append(Door(listener, self._secret, self.rank, self._let_in, lambda _: None, *security))

        if config.rendezvous is not None and config.transport != "gloo":
            said["socket"] = f"{config.rendezvous}-worker-{self.rank}-{secrets.token_hex(4)}"
            make(door.listen_here(said["socket"]))
        if config.host_address is not None or not self._doors:
            address = config.host_address or "127.0.0.1"
            make(door.listen(address, 0), *(tls.make_context() if self._encrypts(address) else ()))
            said |= {"address": address, "port": self._doors[-1].port}
        return said

    def _knock(self, said: dict[str, Any], deadline: float) -> Wire:
        config = self._config
        beside = config.rendezvous is not None and str(said["socket"]).startswith(f"{config.rendezvous}-worker-")
        if beside and config.transport != "gloo":
            return door.knock_here(said["socket"], self._secret, self.rank, deadline)
        address = said["address"]
        return door.knock(address, said["port"], self._secret, self.rank, deadline, encrypted=self._encrypts(address))

    def _encrypts(self, address: str) -> bool:
        return self._config.tls == "on" or (self._config.tls == "auto" and not door.is_loopback(address))

    def _let_in(self, wire: Wire, rank: int) -> None:
        """Hear a worker until its wire ends."""
        with self._lock:
            before = self._incoming.get(rank)
            is_known = 0 <= rank < self._config.size and rank not in self.lost
            if not is_known or self._is_closed or (before is not None and not self._is_connecting):
                return
            self._incoming[rank] = wire
        if before is not None:
            before.close()  # a wire that the other worker has given up
        try:
            wire.send(_WELCOME, 0, {})
            while True:
                message = wire.receive()
                self.handlers[message.kind](rank, message, wire)
        except Closed:
            pass
        except Exception as error:  # any kind of error may come from outside
            if not self._is_closed:
                print(f"hocket: a message of rank {rank} was refused: {error!r}", file=sys.stderr, flush=True)
        with self._lock:
            is_lost = self._incoming.get(rank) is wire  # else there is a new link
            if is_lost and self._is_connecting:
                is_lost = False
                self._incoming.pop(rank)
        if is_lost:
            self._lose(rank)

    def _lose_outgoing(self, out: _Outgoing) -> None:
        if self._out.get(out.rank) is out:
            self._lose(out.rank)

    def _lose(self, rank: int) -> None:
        """A wire of a worker has ended: close both wires, so that the worker notices if it is alive after all."""
        with self._lock:
            out, wire = self._out.pop(rank, None), self._incoming.get(rank)
            if self._is_closed or rank in self.lost:
                return
            self.lost[rank] = time.monotonic()
        if out is not None:
            out.end()
            out.wire.close()
        if wire is not None:
            wire.close()
        for callback in self.on_loss:
            callback(rank)


class _Outgoing:
    """The messages to be sent to one worker, and the thread that sends them."""

    def __init__(self, rank: int, wire: Wire, lose: Callable[[_Outgoing], None]) -> None:
        self.rank, self.wire, self._lose = rank, wire, lose
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._is_broken = False
        self._thread = threading.Thread(target=self._send, daemon=True, name=f"hocket-to-{rank}")
        self._thread.start()

    def put(self, item: _Item) -> None:
        self._queue.put(item)
        if self._is_broken:
            self._drain()

    def end(self) -> None:
        """No more messages will be given."""
        self._queue.put(None)

    def close(self, deadline: float) -> None:
        """Close the wire when all is sent, or at the monotonic time ``deadline``."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self.wire.close()

    def _send(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                kind, sequence, head, parts, sent, area = item
                try:
                    self.wire.send(kind, sequence, head, parts)
                    if area is not None:
                        handoff.give(self.wire.connection, area.descriptor)
                finally:
                    if sent is not None:
                        sent.note()
        except (Closed, OSError):
            self._lose(self)
        except Exception as error:  # whatever it was, nothing more can be sent
            print(f"hocket: nothing can be sent to rank {self.rank}: {error!r}", file=sys.stderr, flush=True)
            self._lose(self)
        self._is_broken = True
        self._drain()

    def _drain(self) -> None:
        """Settle messages that will never be sent, so that nobody waits for them."""
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return
            if item is not None and item.sent is not None:
                item.sent.note()


class _Item(NamedTuple):
    """A message to be sent; ``sent`` is told when it is, and ``area`` goes with it."""

    kind: int
    sequence: int
    head: dict[str, Any]
    parts: Sequence[memoryview]
    sent: Sending | None
    area: Area | None
