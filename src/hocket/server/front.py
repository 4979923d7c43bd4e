"""The front of a server process: its doors, who comes in, and its place among the other servers."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from hocket import errors
from hocket.config import Config
from hocket.errors import HocketError, JobError, ServerLost
from hocket.server.service import Service
from hocket.server.session import NO_SENSE, Peer, Session
from hocket.server.terms import Kind
from hocket.transport import door, tls
from hocket.transport.door import Door
from hocket.transport.wire import Closed, Wire, WireError

SERVER = 1 << 30  # added to the number of a server, to tell it from a rank in proofs
SLACK = 30.0  # seconds that others have beyond the time in which they have to answer


def socket_name(rendezvous: str, server: int) -> str:
    """The socket of a server for the workers of its host."""
    return f"{rendezvous}-server-{server}"


def encrypted(address: str, config: Config) -> bool:
    """Whether connections to ``address`` are."""
    return config.tls == "on" or (config.tls == "auto" and not door.is_loopback(address))


class Front:
    """Opens the doors of server ``config.server``; with several servers, joins server 0.

    Args:
        config: Of this process.
        secret: The job's.
        service: What it does.
    """

    def __init__(self, config: Config, secret: bytes, service: Service) -> None:
        assert config.server is not None
        self._config, self._secret, self._service = config, secret, service
        self._peers: dict[int, Peer] = {}
        self._lock = threading.Lock()
        self._doors: list[Door] = []
        self._first: Wire | None = None  # to server 0
        self._others: list[Wire] = []  # on server 0, to the others
        self._asking = threading.Lock()
        self._said: dict[str, Any] = {"socket": None, "address": None, "port": None}
        try:
            self._open()
            if config.server == 0:
                service.roster.join(0, self._said)
                service.total = lambda table, update, value: service.add(0, table, update, value)
            else:
                self._join_first()
                service.total = self._ask_total
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of all workers and servers."""
        for each in self._doors:
            each.close()
        for peer in list(self._peers.values()):
            peer.is_gone = True  # for this server, which waits for nobody now
            if peer.wire is not None:
                peer.wire.close()
        for wire in self._others:
            wire.close()
        if self._first is not None:
            self._first.close()
        self._service.close()

    def _open(self) -> None:
        config, number = self._config, self._config.server or 0

        def make(listener: Any, *security: Any) -> None:
            self._doors.append(
                Door(listener, self._secret, SERVER + number, self._let_in, self._service.refuse, *security)
            )

        if config.rendezvous is not None and config.transport != "gloo":
            self._said["socket"] = socket_name(config.rendezvous, number)
            make(door.listen_here(self._said["socket"]))
        if config.host_address is not None or config.transport == "gloo":
            address = config.host_address or config.address
            listener = door.listen(address, (config.port or 0) if number == 0 else 0)
            make(listener, *(tls.make_context() if encrypted(address, config) else ()))
            self._said |= {"address": address, "port": self._doors[-1].port}

    def _join_first(self) -> None:
        config, number = self._config, self._config.server or 0
        deadline = time.monotonic() + config.timeout
        self._first = connect(config, self._secret, SERVER + number, deadline)
        self._first.connection.settimeout(config.timeout + SLACK)
        self._first.send(Kind.JOIN, 0, {"role": "server", "number": number, "nonce": "", "said": self._said})
        self._first.receive()

    def _let_in(self, wire: Wire, name: int) -> None:
        """Talk with whoever has come in, to the end."""
        try:
            wire.connection.settimeout(SLACK)
            message = wire.receive()
            wire.connection.settimeout(None)
            if message.kind != Kind.JOIN or message.body:
                raise WireError(f"a message of kind {message.kind} before joining")
            number, nonce = int(message.head["number"]), str(message.head["nonce"])
            if message.head["role"] == "server" and name == SERVER + number:
                self._talk_with_server(wire, number, dict(message.head["said"]))
            elif message.head["role"] == "worker" and name == number < self._config.size:
                self._talk_with_worker(wire, number, nonce)
            else:
                raise WireError("it proved to be another one than it says")
        except Closed:
            pass
        except Exception as error:  # of any kind: it came from outside
            self._service.refuse(NO_SENSE)
            print(f"hocket: a peer was refused: {error!r}", file=sys.stderr, flush=True)

    def _talk_with_worker(self, wire: Wire, rank: int, nonce: str) -> None:
        with self._lock:
            peer = self._peers.setdefault(rank, Peer(nonce))
        if peer.nonce != nonce:
            self._service.refuse("a second process of a rank")
            text = f"there are two processes of rank {rank}: start the script once for each rank"
            wire.send(Kind.ERROR, 0, {"error": "JobError", "text": text})
            return
        try:
            servers = self._service.roster.everyone() if self._config.server == 0 else []
        except HocketError as error:
            wire.send(Kind.ERROR, 0, {"error": type(error).__name__, "text": str(error)})
            return
        wire.send(Kind.REPLY, 0, {"servers": servers, "answered": peer.sequence})
        Session(self._service, peer, rank, wire).run()

    def _talk_with_server(self, wire: Wire, number: int, said: dict[str, Any]) -> None:
        """Another server: it tells where it is, and later its part of sums over all servers."""
        self._others.append(wire)
        self._service.roster.join(number, said)
        wire.send(Kind.REPLY, 0, {})
        try:
            while True:
                message = wire.receive()
                table, update = int(message.head["table"]), int(message.head["update"])
                try:
                    total = self._service.add(number, table, update, float(message.head["value"]))
                    wire.send(Kind.REPLY, message.sequence, {"total": total})
                except (Closed, WireError):
                    raise
                except HocketError as error:
                    wire.send(Kind.ERROR, message.sequence, {"error": type(error).__name__, "text": str(error)})
        finally:
            self._service.norms.fail(f"server {number} has ended: see its output")

    def _ask_total(self, table: int, update: int, value: float) -> float:
        """On another server: what ``Service.add`` gives on server 0."""
        assert self._first is not None
        try:
            with self._asking:
                self._first.send(Kind.NORM, update, {"table": table, "update": update, "value": value})
                message = self._first.receive()
        except (Closed, WireError, TimeoutError) as error:  # of server 0, and not of the worker that is waiting here
            raise ServerLost(f"server 0 has ended ({error}): see its output") from error
        if message.kind == Kind.ERROR:
            raise getattr(errors, str(message.head["error"]), JobError)(message.head["text"])
        return float(message.head["total"])


def connect(config: Config, secret: bytes, name: int, deadline: float) -> Wire:
    """Connect to server 0, whom the launcher has told of."""
    if config.transport != "gloo" and config.rendezvous is not None and config.host_address in (None, config.address):
        return door.knock_here(socket_name(config.rendezvous, 0), secret, name, deadline)
    if config.port is None:
        raise JobError("MASTER_PORT is not set: start servers and workers with hocket run --servers")
    return door.knock(config.address, config.port, secret, name, deadline, encrypted=encrypted(config.address, config))
