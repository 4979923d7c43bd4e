"""Nodes of a Ray cluster: placement groups hold room for workers and servers, and an actor on each node has an agent.

Ray gives the places and brings the script along; who is in the job, and all that it sends, is Hocket's own business.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hocket import config
from hocket.errors import UsageError
from hocket.launch.agent_links import AgentLink
from hocket.launch.dialing import Call
from hocket.launch.engines.engine import Engine
from hocket.launch.engines.ray_actor import make_actor
from hocket.launch.engines.ray_places import RayPlaces, RayTexts, read_places
from hocket.launch.environment import Job
from hocket.launch.host_list import Host, Wishes
from hocket.launch.reception import Reception
from hocket.transport.door import listen
from hocket.transport.interfaces import addresses

_OLDEST = (2, 40)
_ANSWER = 3.0  # seconds that a cluster has to answer at its address
_LOOK = 0.25  # seconds between two looks at the cluster
_SETTLE = 0.5  # seconds in which more workers than the fewest may find their places, before a job begins
_BRING = 5.0  # seconds that the agent of rank 0 has to end, when there is something to be brought from there
RESULTS = ("result.json", "result.safetensors")
_PLACE = 2.0  # seconds in which Ray places what it can


@dataclass
class _Node:
    """What the job has of a node: bundles of placement groups, each with its number there."""

    identity: str
    workers: list[tuple[Any, int]] = field(default_factory=list)
    servers: list[int] = field(default_factory=list)
    server_bundles: list[tuple[Any, int]] = field(default_factory=list)


class RayEngine(Engine):
    """Agents on the nodes of a cluster; they dial.

    Args:
        places: What the user wants of the cluster.
        secret: The job's secret, which travels to agents through Ray's own object store.
        exported: The environment that workers get.
        excluded: Files and folders below the working folder that are not brought along.
        encrypted: Whether agents talk over TLS.
        results: Where files go that rank 0 leaves in its working folder; None if there are none.

    Attributes:
        servers: The numbers of the servers on each host that has some; known after ``first``.
    """

    patience = 60.0

    def __init__(
        self,
        places: RayPlaces,
        secret: bytes,
        exported: dict[str, str],
        excluded: Sequence[str] = (),
        *,
        encrypted: bool = True,
        results: Path | None = None,
    ) -> None:
        self._places, self._secret, self._encrypted, self._results = places, secret, encrypted, results
        self._exported = {name: value for name, value in exported.items() if name != "PYTHONPATH"}
        self._path = exported.get("PYTHONPATH", "")  # in which agents find Hocket; Ray may have put more into theirs
        self._excluded = list(excluded)
        self.folder = "." if self._runtime_env().get("working_dir") else None
        self._ray: Any = None
        self._groups: list[Any] = []  # the first has all that the job needs, each other has one more worker
        self._nodes: dict[str, _Node] = {}
        self._runs: dict[AgentLink, tuple[Any, Any]] = {}  # the actor of an agent, and what its end will say
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._listed: list[Host] | None = None  # what is new
        self._noticed: list[str] = []
        self._trouble = self._said = ""
        self.servers: dict[str, list[int]] = {}

    def first(self) -> list[Host]:
        ray = self._ray = _connect(self._places.address, self._runtime_env())
        least = self._places.least or self._room()
        extra = (self._places.most or least) - least
        worker, server = self._places.per_worker, self._places.per_server
        needed = [worker] * least + [server] * self._places.servers
        self._groups = [ray.util.placement_group(needed, strategy=self._places.placement)]
        self._await_places(needed, least)
        self._groups += [ray.util.placement_group([worker]) for _ in range(extra)]
        end = time.monotonic() + _SETTLE
        while extra and time.monotonic() < end and len(self._groups) > len(self._placed()):
            time.sleep(0.02)
        hosts = self._find()
        self.servers = {name: node.servers for name, node in self._nodes.items() if node.servers}
        own = ray.util.get_node_ip_address()
        listener = listen("::" if ":" in own else "0.0.0.0", 0)
        self.reception = Reception(listener, self._secret, encrypted=self._encrypted)
        self._addresses = tuple(dict.fromkeys([own, *(address for _, address in addresses())]))
        self._thread = threading.Thread(target=self._watch, args=(hosts,), name="hocket-ray", daemon=True)
        self._thread.start()
        return hosts

    def wishes(self, interface: str | None) -> Wishes:
        """What the job is to have of the cluster; finds places for it."""
        hosts, places = self.first(), self._places
        least = places.least if places.most != places.least else None
        most = places.most if least is not None else None
        return Wishes(hosts, most, self, interface, self._exported, self.servers, least)

    def begin(self, host: Host, number: int) -> AgentLink:
        """Ray gives the place on this machine, too."""
        return self.begin_elsewhere(host, number)

    def begin_elsewhere(self, host: Host, number: int) -> AgentLink:
        assert self.reception is not None
        with self._lock:
            node = self._nodes.get(host.name)
        if node is None:
            raise UsageError("Ray has taken its place away")
        call = Call(
            self._addresses, self.reception.port, self._secret, number, host.name, self._encrypted, self.patience
        )
        cores = max(1, math.floor(self._places.per_worker.get("CPU", 1)))
        environment = {"OMP_NUM_THREADS": str(cores), "PYTHONPATH": self._path}
        try:
            actor, ended = make_actor(
                self._ray, node.workers or node.server_bundles, call.write(), environment,
                self._places.per_worker.get("GPU", 0) if node.workers else 0,
                RESULTS if self._results is not None and number == 0 else (),
            )  # fmt: skip
        except Exception as error:  # of Ray, which has many
            raise UsageError(f"Ray cannot start its agent: {_first_line(error)}") from None
        link = AgentLink(host, number)
        self._runs[link] = (actor, ended)
        return link

    def why_silent(self, link: AgentLink) -> str:
        ended = self._runs[link][1]
        if not self._ray.wait([ended], timeout=0)[0]:
            where = f"{', '.join(self._addresses)}, port {self.reception.port if self.reception else 0}"
            return f"its agent has not come within {self.patience:.0f} s: it has to reach this machine at {where}"
        try:
            said = self._ray.get(ended)[0].strip() or "it said nothing"
        except Exception as error:
            said = _first_line(error)
        if "No module named 'hocket" in said or "No module named hocket" in said:
            return "Hocket is not installed there: install the same environment on every node"
        return f"its agent has ended: {said.splitlines()[-1]}"

    def look(self, say: Callable[[str], None]) -> Sequence[Host] | None:
        if self._trouble != self._said:
            self._said = self._trouble
            if self._trouble:
                say(f"hocket: Ray does not answer ({self._trouble}); the job goes on with the hosts that it has")
        with self._lock:
            listed, self._listed = self._listed, None
        return listed

    def notices(self) -> Sequence[tuple[str, str]]:
        with self._lock:
            found, self._noticed = self._noticed, []
        return [(name, "Ray drains its node") for name in found]

    def close(self, status: int = 1) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        ray, self._ray = self._ray, None
        if ray is not None:
            self._bring_results(ray)
            for actor, _ in self._runs.values():
                ray.kill(actor)
            for group in self._groups:
                ray.util.remove_placement_group(group)
            ray.shutdown()
        super().close(status)

    def _bring_results(self, ray: Any) -> None:
        """Write here what rank 0 has left there."""
        for link, (_, ended) in self._runs.items():
            if self._results is not None and link.number == 0 and ray.wait([ended], timeout=_BRING)[0]:
                with contextlib.suppress(Exception):  # of Ray: the node is lost, and so is what was there
                    for name, data in ray.get(ended)[1].items():
                        (self._results / name).write_bytes(data)

    def _runtime_env(self) -> dict[str, Any]:
        """What Ray brings to the nodes: the working folder, unless the user has it otherwise."""
        given = {"working_dir": ".", **self._places.runtime_env}
        given = {name: value for name, value in given.items() if value is not None}
        if given.get("working_dir") == ".":
            given["excludes"] = [*self._excluded, *given.get("excludes", ())]
        return given

    def _room(self) -> int:
        """For how many workers the cluster has room now."""
        free = self._ray.available_resources()
        servers = {name: self._places.servers * amount for name, amount in self._places.per_server.items()}
        room = [
            math.floor((free.get(name, 0) - servers.get(name, 0)) / amount)
            for name, amount in self._places.per_worker.items() if amount
        ]  # fmt: skip
        return max(1, min(room, default=1))

    def _await_places(self, needed: Sequence[Mapping[str, float]], workers: int) -> None:
        """Wait until the first placement group has its places."""
        begun, said = time.monotonic(), False
        while not self._groups[0].wait(timeout_seconds=_PLACE):
            lack = self._lack(needed, workers)
            if time.monotonic() - begun > (self._places.wait if lack else max(self._places.wait, 2 * _PLACE)):
                raise UsageError(lack or self._unplaced(workers))
            if self._places.wait and not said:
                said = True
                print(
                    f"hocket: waiting for places in the Ray cluster: {lack or self._unplaced(workers)}", file=sys.stderr
                )

    def _lack(self, needed: Sequence[Mapping[str, float]], workers: int) -> str:
        """What the cluster does not have, in words; empty if it has enough of everything."""
        there, free = self._ray.cluster_resources(), self._ray.available_resources()
        for name in {name: None for bundle in needed for name in bundle}:
            asked = sum(bundle.get(name, 0) for bundle in needed)
            if asked > there.get(name, 0):
                servers = f" and {self._places.servers} servers" if self._places.servers else ""
                return (
                    f"-n {workers}{servers} with --per-worker '{json.dumps(self._places.per_worker)}' needs "
                    f"{asked:g} {name}, and the Ray cluster has {there.get(name, 0):g} ({free.get(name, 0):g} free): "
                    "use fewer, add nodes, or wait for them with --wait 600"
                )
        return ""

    def _unplaced(self, workers: int) -> str:
        nodes = sum(node["Alive"] for node in self._ray.nodes())
        return (
            f"{workers} workers do not fit into the {nodes} nodes of the Ray cluster with --placement "
            f"{self._places.placement} and --per-worker '{json.dumps(self._places.per_worker)}': use another "
            "placement, fewer workers, or wait for free nodes with --wait 600"
        )

    def _placed(self) -> list[tuple[Any, dict[int, str]]]:
        """The placement groups that have places: the node of each of their bundles."""
        tables = self._ray.util.placement_group_table()
        found = []
        for group in self._groups:
            table = tables.get(group.id.hex(), {})
            nodes = {int(number): node for number, node in table.get("bundles_to_node_id", {}).items() if node}
            if nodes and (table["state"] == "CREATED" or group is self._groups[0]):
                found.append((group, nodes))
        return found

    def _find(self) -> list[Host]:
        """The nodes on which the job has places now, the one of the first worker first."""
        alive = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        draining = _draining()
        found: dict[str, _Node] = {}
        workers = len(self._groups[0].bundle_specs) - self._places.servers
        for group, nodes in self._placed():
            for bundle, identity in sorted(nodes.items()):
                if identity not in alive:
                    continue
                name = f"{alive[identity]['NodeManagerHostname']}-{identity[:6]}"
                node = found.setdefault(name, _Node(identity))
                if group is self._groups[0] and bundle >= workers:
                    node.servers.append(bundle - workers)
                    node.server_bundles.append((group, bundle))
                else:
                    node.workers.append((group, bundle))
        with self._lock:
            leaving = [name for name, node in found.items() if node.identity in draining]
            self._noticed += [name for name in leaving if name in self._nodes]
            self._nodes = {name: node for name, node in found.items() if name not in leaving}
            return [Host(name, len(node.workers)) for name, node in self._nodes.items() if node.workers]

    def _watch(self, last: list[Host]) -> None:
        """From a thread of its own, since Ray may be slow to answer: note which hosts there are."""
        while not self._stop.wait(_LOOK):
            try:
                hosts = self._find()
                self._trouble = ""
            except Exception as error:
                self._trouble = _first_line(error)
                continue
            if sorted(hosts, key=str) != sorted(last, key=str):
                last = hosts
                with self._lock:
                    self._listed = hosts


def _connect(address: str | None, runtime_env: Mapping[str, Any]) -> Any:
    """Ray, connected to a cluster."""
    try:
        version = importlib.metadata.version("ray")
    except ImportError:
        raise UsageError("--on ray needs Ray, which is not installed here: pip install 'hocket[ray]'") from None
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise UsageError(f"--on ray: Ray {version} is too old: install 2.40 or later, here and on all nodes")
    import ray

    where = address or config.environment().get("RAY_ADDRESS") or "this machine"
    name, _, port = where.rpartition(":")
    if port.isdecimal() and "/" not in name:
        try:  # Ray itself would try for a minute, and print what happens
            socket.create_connection((name.strip("[]"), int(port)), timeout=_ANSWER).close()
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageError(f"--on ray: no Ray cluster answers at {where} ({reason}): check --address") from None
    with _quiet():
        try:
            ray.init(
                address or "auto", runtime_env=dict(runtime_env), log_to_driver=False, configure_logging=False,
                logging_level=logging.ERROR, namespace=f"hocket-{os.getpid()}",
            )  # fmt: skip
        except Exception as error:
            raise UsageError(
                f"--on ray: no Ray cluster can be used at {where} ({_first_line(error)}): start one with ray start "
                "--head, or name it with --address"
            ) from None
    return ray


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _draining() -> set[str]:
    """The nodes that Ray will take away soon. Ray's own libraries ask in the same way; there is no public call."""
    from ray._private.state import state

    return set(state.get_draining_nodes())


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def make(
    texts: RayTexts, job: Job, settings: Mapping[str, str], exported: dict[str, str], *own: Path | None
) -> RayEngine:
    """The engine that a job on Ray needs, after a look at what the user says; connects to nothing.

    Args:
        texts: What the user wants of the cluster.
        job: The job.
        settings: Its settings, as texts.
        exported: Variables for the environment of all workers.
        own: A folder for logs, which stays here, and a file beside which results are to lie.
    """
    places = read_places(texts, job.servers)
    logs, report = own
    here = Path.cwd()
    stays = [
        settings.get("run-dir", config.SETTINGS["run-dir"].default),
        settings.get("checkpoint", ""),
        str(logs or ""),
    ]
    paths = [Path(here, folder) for folder in stays if folder]
    excluded = [f"/{path.relative_to(here)}" for path in paths if path.is_relative_to(here) and path != here]
    encrypted = settings.get("tls", "auto") != "off"
    results = None if report is None else report.parent
    return RayEngine(places, job.secret, exported, excluded, encrypted=encrypted, results=results)
