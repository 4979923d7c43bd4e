"""Where nobody has said which addresses connect the hosts (torchrun, schedulers): the hosts try each other's.

The first worker of each host listens and tries; all read in the job's store what came of it.
"""

from __future__ import annotations

import json
import time
from typing import Any

from hocket.comm.topology import Topology
from hocket.errors import UsageError
from hocket.transport.interfaces import Listener, Target, addresses, try_addresses
from hocket.transport.routes import Node, choose, explain
from hocket.transport.store import Store

_SECONDS = 5.0


def reach(store: Store, topology: Topology, secret: bytes, interface: str | None) -> str:
    """The address of this host that all others reach; collective.

    Raises:
        UsageError: there is none; on all ranks.
    """
    numbers = range(len(topology.hosts))
    if topology.local_rank == 0:
        _try_others(store, topology, secret, interface)
    listed = [_read(store, f"listens {number}") for number in numbers]
    reached = [_read(store, f"reaches {number}") for number in numbers]
    _wait_for_readers(store, topology)
    for number, there in enumerate(listed):
        if not there["addresses"]:
            raise UsageError(
                f"{topology.names[number]} has no interface {interface!r} that is up, but "
                f"{', '.join(there['interfaces'])}: use HOCKET_INTERFACE={interface},NAME"
            )
    nodes = [
        Node(
            topology.names[number],
            [(name, address) for name, address in listed[number]["addresses"]],
            reached_by={topology.names[o]: set(reached[o][str(number)]) for o in numbers if o != number},
        )
        for number in numbers
    ]
    routes = [choose(node, same_network=False) for node in nodes]
    for node, route in zip(nodes, routes, strict=True):
        if route is None:
            raise UsageError(f"{node.name}: {explain(node, interface)}")
    mine = routes[topology.host]
    assert mine is not None
    return mine[1]


def _try_others(store: Store, topology: Topology, secret: bytes, interface: str | None) -> None:
    others = [number for number in range(len(topology.hosts)) if number != topology.host]
    listener = Listener(secret, f"host {topology.host}")
    try:
        names = list(dict.fromkeys(name for name, _ in addresses()))
        here = {"port": listener.port, "addresses": addresses(interface), "interfaces": names}
        store.set(f"listens {topology.host}", json.dumps(here))
        targets = []
        for number in others:
            there = _read(store, f"listens {number}")
            targets += [Target(f"host {number}", address, there["port"]) for _, address in there["addresses"]]
        found = try_addresses(targets, secret, _SECONDS)
        by_host = {n: [target.address for target in found if target.identity == f"host {n}"] for n in others}
        store.set(f"reaches {topology.host}", json.dumps(by_host))
        for number in others:
            store.get(f"reaches {number}")  # until then they may still try this host
    finally:
        listener.close()


def _wait_for_readers(store: Store, topology: Topology) -> None:
    """All must have read what they raise errors about: the store may end with rank 0."""
    deadline = time.monotonic() + _SECONDS
    store.add("have read", 1)
    while topology.rank == 0 and store.add("have read", 0) < topology.size and time.monotonic() < deadline:
        time.sleep(0.01)


def _read(store: Store, key: str) -> Any:
    return json.loads(bytes(store.get(key)))
