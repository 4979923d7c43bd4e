"""Worker processes that tests share: importing torch takes 1.5 s, so they are started once.

A test runs a function of its module on the first P of them, each time as a new group with a new worker.
"""

import contextlib
import dataclasses
import faulthandler
import gc
import importlib
import multiprocessing
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hocket import specs
from hocket.config import Config
from hocket.coordinator.hosting import HostedCoordinator
from hocket.launch.local_crew import reserve_port

MOST = 5
DEADLINE = 60.0


class RemoteError(Exception):
    """What a worker raised; ``text`` is its traceback, ``kind`` the name of the exception."""

    def __init__(self, rank: int, kind: str, message: str, text: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {message}\n{text}")
        self.rank, self.kind, self.message = rank, kind, message


@dataclass
class Member:
    process: Any
    pipe: Connection
    is_ready: bool = False

    def wait(self) -> None:
        """Wait until it has imported what it needs: no deadline of a test is about that."""
        if not self.is_ready:
            self.is_ready = True
            with contextlib.suppress(EOFError):  # it is dead, which is noticed as in the middle of a test
                self.pipe.recv()


def needs(strategy: str) -> dict[str, Any]:
    """What ``Pool.run`` must be told for a strategy that the function itself names: one server, or the coordinator."""
    spec = specs.parse(strategy)
    return {"servers": int(spec.servers == "needed"), "coordinated": spec.meets_at_coordinator}


class Pool:
    """Up to ``MOST`` processes, started when first needed."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._members: list[Member] = []
        self._servers: list[Member] = []
        self.served: list[dict[str, Any]] = []  # what the servers of the last run have reported
        self.said: list[str] = []  # and what its coordinator has said

    def pids(self) -> list[int]:
        return [member.process.pid for member in self._members + self._servers]

    def run(self, size: int, function: Callable[..., Any], *args: Any, **settings: Any) -> list[Any]:
        """``function(*args)`` on ``size`` workers; the results by rank, or the first error."""
        results = self.outcomes(size, function, *args, **settings)
        for result in results:
            if isinstance(result, RemoteError) and result.kind != "WorkerLost":
                raise result
        for result in results:
            if isinstance(result, RemoteError):
                raise result
        return results

    def outcomes(
        self,
        size: int,
        function: Callable[..., Any],
        *args: Any,
        dead: Collection[int] = (),
        replaced: Collection[int] = (),
        hosts: Sequence[int] | None = None,
        servers: int = 0,
        coordinated: bool = False,
        **settings: Any,
    ) -> list[Any]:
        """As ``run``, with a ``RemoteError`` in place of the result of a rank that raised.

        Ranks that are ``replaced`` die, and a new process becomes each of them. ``hosts`` has the number of workers on
        each of several hosts, which all are this machine; ``servers`` is the number of parameter servers. If
        ``coordinated``, workers meet at the coordinator, as with gossip and hogwild.
        """
        self._grow(size)
        name = f"hocket-{secrets.token_hex(8)}"
        strategy = settings.get("strategy")
        coordinated = coordinated or (strategy is not None and specs.parse(strategy).meets_at_coordinator)
        hosted = servers or coordinated or settings.get("on_loss", "end") != "end" or settings.get("share_gpus", False)
        reserved = reserve_port() if hosts is not None or hosted else None
        port = reserved.getsockname()[1] if reserved is not None else None
        coordinator, said = None, list[str]()
        if hosted:
            settings |= {"servers": servers, "coordinator_port": port}
            fields = {"size": size, "rendezvous": name, **settings}
            if hosts is not None and "on_loss" in settings:  # workers are not beside the coordinator
                fields, settings = {**fields, "host_address": "127.0.0.1"}, {**settings, "host_address": "127.0.0.2"}
            coordinator = HostedCoordinator(Config(**{"timeout": 20.0, **fields}), SECRET)
            coordinator.service.say = said.append
            self._start_servers(servers, fields)
        try:
            return self._outcomes(size, function, args, dead, replaced, hosts, name, port, settings, coordinated)
        finally:
            for member in self._servers[:servers]:
                member.pipe.send(None)
            self.served, self.said = [member.pipe.recv() for member in self._servers[:servers]], said
            if coordinator is not None:
                coordinator.close()
            if reserved is not None:
                reserved.close()

    def _start_servers(self, count: int, fields: dict[str, Any]) -> None:
        while len(self._servers) < count:
            self._servers.append(self._start(_be_server))
        for number, member in enumerate(self._servers[:count]):
            member.wait()
            member.pipe.send({**fields, "server": number})

    def _outcomes(
        self,
        size: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        dead: Collection[int],
        replaced: Collection[int],
        hosts: Sequence[int] | None,
        name: str,
        port: int | None,
        settings: dict[str, Any],
        coordinated: bool,
    ) -> list[Any]:
        for member in self._members[:size]:
            member.wait()
        for rank, member in enumerate(self._members[:size]):
            fields = {
                "rank": rank,
                "size": size,
                "local_rank": rank,
                "local_size": size,
                "rendezvous": name,
                **settings,
            }
            if hosts is not None:
                places = [(group, i, count) for group, count in enumerate(hosts) for i in range(count)]
                group, local_rank, local_size = places[rank]
                fields |= {
                    "local_rank": local_rank,
                    "local_size": local_size,
                    "group": group,
                    "host_name": f"host{group}",
                    "rendezvous": f"{name}-{group}",
                    "port": port,
                }
            member.pipe.send((function.__module__, function.__qualname__, args, fields, coordinated))
        for rank in replaced:
            self._await_death(rank)
            fields = {"rank": rank, "size": size, "local_rank": rank, "local_size": size, "rendezvous": name}
            fields |= {**settings, "newcomer": True}
            self._members[rank].wait()
            self._members[rank].pipe.send((function.__module__, function.__qualname__, args, fields, coordinated))
        results: list[Any] = []
        for rank, member in enumerate(self._members[:size]):
            if rank not in dead and not member.pipe.poll(DEADLINE):  # children of the dead one may keep its pipe open
                self.close()
                raise TimeoutError(f"rank {rank} of {size} did not finish {function.__qualname__}")
            try:
                results.append(("result", None) if rank in dead else member.pipe.recv())
            except EOFError:
                self.close()
                raise RuntimeError(f"rank {rank} of {size} died in {function.__qualname__}") from None
        return [RemoteError(rank, *r[1]) if r[0] == "error" else r[1] for rank, r in enumerate(results)]

    def outcomes_with_death(
        self, size: int, function: Callable[..., Any], dead: int | Collection[int], *args: Any, **settings: Any
    ) -> list[Any]:
        """As ``outcomes``, where one rank or several die; they are replaced for the tests that follow."""
        self._grow(size)
        lost = [dead] if isinstance(dead, int) else dead
        try:
            return self.outcomes(size, function, *args, dead=lost, **settings)
        finally:
            for rank in lost:
                if rank < len(self._members):
                    self._await_death(rank)

    def _await_death(self, rank: int) -> None:
        """Wait until a member has died, and start another one in its place."""
        member = self._members[rank]
        deadline = time.monotonic() + 60
        while member.process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.005)  # join(60) would wait for children of the dead one, too
        if member.process.exitcode is None:
            said = member.pipe.recv() if member.pipe.poll() else "nothing"
            self.close()
            raise RuntimeError(f"a rank that should have died said {said}")
        member.pipe.close()
        self._members[rank] = self._start()

    def close(self) -> None:
        for member in self._members + self._servers:
            member.process.kill()
            member.process.join()
            member.pipe.close()
        self._members, self._servers = [], []

    def _grow(self, size: int) -> None:
        while len(self._members) < size:
            self._members.append(self._start())

    def _start(self, target: Callable[..., None] | None = None) -> Member:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target or _serve, args=(theirs, [str(Path(__file__).parent)]))
        process.start()
        theirs.close()
        return Member(process, ours)


SECRET = b"s" * 32


def _be_server(pipe: Connection, paths: list[str]) -> None:
    """A server process: one server after the other, until each is told to end."""
    import torch

    from hocket.server.front import Front
    from hocket.server.server_service import Service

    sys.path[:0] = paths
    torch.set_num_threads(1)
    pipe.send("ready")
    while True:
        try:
            fields = pipe.recv()
        except EOFError:
            return
        config = Config(**{"timeout": 20.0, **fields})
        service = Service(config.server or 0, config.size, config.timeout)
        front = Front(config, SECRET, service)
        pipe.recv()
        front.close()
        pipe.send(dataclasses.asdict(service.report()))


def _secret_pipe() -> int:
    reader, writer = os.pipe()
    os.write(writer, SECRET)
    os.close(writer)
    return reader


def _serve(pipe: Connection, paths: list[str]) -> None:
    import torch

    from hocket.job import rendezvous, worker
    from hocket.transport.gate import STACK_SIGNAL

    multiprocessing.set_start_method("fork", force=True)  # for data loaders, as in a script
    sys.path[:0] = paths
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    torch.set_num_threads(1)
    known = 0
    pipe.send("ready")
    while True:
        try:
            module, name, args, fields, coordinated = pipe.recv()
        except EOFError:
            return
        try:
            config = Config(**{"timeout": 20.0, "launched": True, **fields})
            if config.coordinator_port is not None:
                config = dataclasses.replace(config, secret_fd=_secret_pipe())
            torch.manual_seed(config.rank)
            join = rendezvous.join_at_coordinator if coordinated else rendezvous.join
            worker.become(worker.Worker(config, join(config)))
            result = getattr(importlib.import_module(module), name)(*args)
            worker.current().training.loops.catch_up("the end")  # as at the end of a script
            answer: tuple[str, Any] = ("result", result)
        except BaseException as error:
            answer = ("error", (type(error).__name__, str(error), traceback.format_exc()))
        if (ended := worker.find()) is not None:
            ended.communicator.leave(answer[0] == "error")
            _forget(ended.training.parameters.values())
        worker.become(None)
        ended = None
        pipe.send(answer)
        del answer
        result = None
        gc.collect()  # models and their hooks hold each other, and with them shared memory and its descriptors
        if len(sys.modules) != known:
            known = len(sys.modules)
            gc.freeze()  # or each collection would walk all that modules hold, 300,000 objects


def _forget(parameters: Iterable[Any]) -> None:
    """Remove the hooks through which trained parameters hold their strategy: the collector does not see these."""
    for parameter in parameters:
        for hooks in (parameter._post_accumulate_grad_hooks, parameter._backward_hooks):
            if hooks:
                hooks.clear()
