"""Links between real workers, over sockets: each has a door, and a wire to the door of every other worker.

A wire carries messages one way: a thread of its own sends them, in the order in which they were given, and a thread at
the other end receives them (see ``outgoing``). A thread that receives sends nothing but how many messages it has heard
(it leaves the rest to the threads that send), so that two workers which both have much to say cannot block each other.

A wire that breaks is made anew at once, and goes on after the last message that was heard: every message is heard once.
A link that the other end has given up is not taken up again: there its count of messages heard would begin at 0.
A worker to which no wire can be made has died, or has said goodbye. A newcomer makes wires to all others, and says on
each where it is reached: before it is heard there, a wire leads back to it; and it hears nobody before it can answer.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hocket.comm.outgoing import WELCOME, Item, Outgoing
from hocket.comm.peers import Gather, Peers, Sending
from hocket.config import Config
from hocket.errors import JobError
from hocket.transport import door, tls
from hocket.transport.area import Area
from hocket.transport.door import Door
from hocket.transport.requests import encrypted, reach
from hocket.transport.wire import Closed, Wire, until

_RETRY = 0.02
_KNOCK = 10.0  # seconds in which another worker must let this one in
_AGAIN = 1.0  # seconds in which a wire that broke can be made anew
_GOODBYE = 1.0  # seconds in which messages that were given to be sent still are
_HELLO = 0  # the first message on a wire: to which link it belongs


@dataclass
class _Incoming:
    """What another worker says to this one, over all wires of one link."""

    link: str
    wire: Wire
    heard: int = 0  # messages
    lock: threading.Lock = field(default_factory=threading.Lock)  # held by the thread that hears


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
        self._out: dict[int, Outgoing] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._where: dict[int, dict[str, Any]] = {}
        self._lock = threading.Condition(threading.Lock())  # told when there is one more link, or all are there
        self._coming = threading.Lock()  # held while a newcomer is welcomed
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

    def where(self) -> dict[int, dict[str, Any]]:
        return {rank: self._where[rank] for rank in self.live}

    def enter(self, where: Mapping[int, dict[str, Any]]) -> None:
        mine = self._where[self.rank]
        with self._lock:
            self._where |= where
            self._is_connecting = True
        others = [rank for rank in where if rank != self.rank]
        failures = self._reach_all(others, {"where": mine})
        with self._lock:
            self._is_connecting = False
            self._lock.notify_all()
            ended = [rank for rank in others if rank not in self._incoming or rank in failures]
        for rank in ended:
            self._lose(rank)

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
                sent.note(heard=False)
            return
        out.put(Item(kind, sequence, head, parts, sent, area))

    def close(self) -> None:
        if self._is_closed or self._process != os.getpid():
            return
        with self._lock:
            self._is_closed = True
            leaving = list(self._out.values())
            self._out = {}
            self._lock.notify_all()
        for out in leaving:
            out.end()
        deadline = time.monotonic() + _GOODBYE
        for out in leaving:
            out.close(deadline)
        for each in self._doors:
            each.close()
        for incoming in list(self._incoming.values()):
            incoming.wire.close()

    def _join(self, gather: Gather) -> None:
        said = json.dumps(self._open()).encode()
        self._where = {rank: json.loads(data) for rank, data in gather("gossip: where workers are", said).items()}
        self._connect([rank for rank in self._where if rank != self.rank], gather)

    def _connect(self, others: Sequence[int], gather: Gather) -> None:
        failures = self._reach_all(others, {})
        told = gather("gossip: links between workers", json.dumps(failures).encode())
        with self._lock:
            self._is_connecting = False
            self._lock.notify_all()
            ended = [rank for rank in others if rank not in self._incoming or rank in failures]
        for rank in ended:
            self._lose(rank)
        for rank, data in told.items():
            for other, why in json.loads(data).items():
                if int(other) in told:  # it has not died
                    raise JobError(
                        f"rank {rank} cannot reach rank {other}, and gossip goes from worker to worker: {why}"
                    )

    def _reach_all(self, others: Sequence[int], said: dict[str, Any]) -> dict[int, str]:
        """Make a link to each of ``others``, to which something is said; why that has failed, by rank."""
        failures: dict[int, str] = {}
        for rank in others:
            link = secrets.token_hex(8)
            try:
                wire, _ = self._reach(rank, self._where[rank], {**said, "link": link}, _KNOCK)
            except JobError as error:
                failures[rank] = str(error)
            else:
                with self._lock:
                    self._out[rank] = Outgoing(rank, link, wire, self._renew, self._lose_outgoing)
                    self._lock.notify_all()
        return failures

    def _reach(self, rank: int, where: dict[str, Any], said: dict[str, Any], seconds: float) -> tuple[Wire, int]:
        """A wire on which the other worker has said how much it has heard; if it was too busy, a new one."""
        deadline = time.monotonic() + min(self._config.timeout, seconds)
        while True:
            wire = reach(self._config, self._secret, self.rank, where, deadline, waits=False)
            try:
                wire.connection.settimeout(until(deadline))
                wire.send(_HELLO, 0, said)
                message = wire.receive()
                wire.connection.settimeout(None)
                return wire, message.sequence
            except (Closed, TimeoutError) as error:
                wire.close()
                if time.monotonic() > deadline:
                    raise JobError(f"it does not answer ({error})") from None
                time.sleep(_RETRY)

    def _renew(self, out: Outgoing) -> tuple[Wire, int] | None:
        """A new wire in the place of one that broke; None if the other worker is gone."""
        with self._lock:  # a newcomer with the same rank is elsewhere
            where, is_known = self._where[out.rank], self._out.get(out.rank) is out
        if self._is_closed or not is_known:
            return None
        try:
            return self._reach(out.rank, where, {"link": out.link, "goes_on": True}, _AGAIN)
        except JobError:
            return None

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
            make(door.listen(address, 0), *(tls.make_context() if encrypted(address, config) else ()))
            said |= {"address": address, "port": self._doors[-1].port}
        return said

    def _let_in(self, wire: Wire, rank: int) -> None:
        """Hear a worker until its wire ends."""
        try:
            wire.connection.settimeout(_KNOCK)
            said = wire.receive().head
            link, where, goes_on = str(said["link"]), said.get("where"), bool(said.get("goes_on"))
            wire.connection.settimeout(None)
        except (JobError, OSError, KeyError):
            return
        if where is not None and not self._welcome(rank, link, wire, where):
            return
        incoming = self._find(link, wire, rank, is_known=goes_on)
        if incoming is None:
            return
        with incoming.lock:  # whoever has heard the wire before this one has come to an end
            try:
                wire.send(WELCOME, incoming.heard, {})
                with self._lock:  # what is heard may have to be answered
                    self._lock.wait_for(lambda: rank in self._out or not self._is_connecting or self._is_closed)
                while True:
                    message = wire.receive()
                    self.handlers[message.kind](rank, message, wire)
                    incoming.heard += 1
                    wire.send(WELCOME, incoming.heard, {})
            except (Closed, OSError):  # a worker that lives makes another wire; who sends to it knows if it does not
                return
            except Exception as error:  # any kind of error may come from outside
                if not self._is_closed:
                    print(f"hocket: a message of rank {rank} was refused: {error!r}", file=sys.stderr, flush=True)
        self._lose(rank)

    def _welcome(self, rank: int, link: str, wire: Wire, where: dict[str, Any]) -> bool:
        """A newcomer has come, and is reached ``where`` it says: connect to it; whether that was possible."""
        with self._coming:
            with self._lock:
                known = self._incoming.get(rank)
                if known is not None and known.link == link:
                    return True  # its wire broke at once, and this is another one
            self._lose(rank)  # the worker before it with its rank, if nobody has noticed its end
            back = secrets.token_hex(8)
            try:
                out_wire, _ = self._reach(rank, where, {"link": back}, _KNOCK)
            except JobError:
                return False
            with self.gate:
                for callback in self.on_join:
                    callback(rank)
                with self._lock:
                    if self._is_closed:
                        out_wire.close()
                        return False
                    self.lost.pop(rank, None)
                    self._where[rank], self._incoming[rank] = where, _Incoming(link, wire)
                    self._out[rank] = Outgoing(rank, back, out_wire, self._renew, self._lose_outgoing)
        return True

    def _find(self, link: str, wire: Wire, rank: int, *, is_known: bool) -> _Incoming | None:
        """To what a new wire belongs, which is a link known to both ends or a new one; None if it is not wanted."""
        with self._lock:
            is_one = 0 <= rank < self._config.size or rank in self._where
            if not is_one or rank in self.lost or self._is_closed:
                return None
            found = before = self._incoming.get(rank)
            if found is None or found.link != link:
                if is_known or not self._is_connecting:
                    return None
                found = self._incoming[rank] = _Incoming(link, wire)
            ended = before.wire if before is not None else None
            found.wire = wire
        if ended is not None and ended is not wire:
            ended.close()  # a wire that the other worker has given up
        return found

    def _lose_outgoing(self, out: Outgoing) -> None:
        self._lose(out.rank, out)

    def _lose(self, rank: int, ended: Outgoing | None = None) -> None:
        """No wire leads to a worker: close both, so that the worker notices if it is alive after all.

        If it is known what has ``ended``, this does nothing where another link is in its place.
        """
        with self._lock:
            if ended is not None and self._out.get(rank) is not ended:
                return
            out, incoming = self._out.pop(rank, None), self._incoming.get(rank)
            if self._is_closed or rank in self.lost:
                return
            self.lost[rank] = time.monotonic()
        if out is not None:
            out.stop()
        if incoming is not None:
            incoming.wire.close()
        for callback in self.on_loss:
            callback(rank)
