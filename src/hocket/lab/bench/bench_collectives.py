"""Links and algorithms between hosts, measured and predicted, for ``hocket bench links`` and ``collectives``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hocket.comm.algorithm_choice import Pick, choices
from hocket.comm.changing_group import RegroupingCommunicator
from hocket.comm.link_model import LinkModel
from hocket.comm.tcp_group import TcpGroup
from hocket.job.worker import current
from hocket.lab.bench.bench_worker import alternate, milliseconds, ratio
from hocket.transport.point_to_point import PointToPoint

Row = dict[str, object]
_MEASURED = 1 << 30  # bytes of an exchange for which links are measured
_MOVES = 1 << 20  # bytes of a sum from which on who sends more bytes stays behind
_BEHIND = 100  # percent that an algorithm may take more than the fastest, to be measured at the next size


def links() -> list[Row]:
    """A row for each member: what it sends to each other."""
    _, model = _connect()
    rows: list[Row] = []
    for source, rates in enumerate(model.rates):
        row: Row = {"from": f"host {source + 1}", "latency_ms": model.latency * 1e3}
        rows.append(
            row | {f"to host {to + 1}_MB/s": 0.0 if to == source else rates[to] / 1e6 for to in range(model.size)}
        )
    return rows


def collectives(rounds: str, sizes: str, algorithms: str) -> list[Row]:
    """A row for each size and algorithm: medians of the times, what was predicted, and what ``auto`` takes.

    Unless algorithms are given, those that took more than twice as long as the fastest at one size, of 1 MiB or more,
    are left out at the next ones.
    """
    group, model = _connect()
    rows: list[Row] = []
    behind: set[str] = set()
    for nbytes in (int(size) << 10 for size in sizes.split(",")):
        picks = {name: group.choice.predict(name, nbytes) for name in choices(model)}
        if model.has_sites:
            picks["ring in order"] = picks["ring"]
            picks["ring"] = Pick(picks["ring"].algorithm, _alternating(model), None)
        data, taken = torch.zeros(nbytes // 4), group.choice.pick(nbytes).algorithm.name
        if taken == "ring" and model.has_sites:
            taken = "ring in order"
        wanted = algorithms.split(",") if algorithms else [name for name in picks if name not in behind]
        ways = {name: _way(group, pick, data) for name, pick in picks.items() if name in {*wanted, taken}}
        found = alternate(ways, int(rounds), 0.1, least=1)
        fastest = min(found, key=lambda name: milliseconds(found[name]))
        for name, times in found.items():
            predicted = model.predict(picks[name].algorithm, nbytes, picks[name].order) * 1e3
            took, over = milliseconds(times), (ratio(found, name, fastest) - 1) * 100
            row: Row = {"algorithm": name, "size_KiB": nbytes / 1024, "measured_ms": took, "predicted_ms": predicted}
            row |= {"error_%": (predicted / took - 1) * 100, "over the fastest_%": over}
            rows.append(row | {"auto": "takes it" if name == taken else ""})
            if over > _BEHIND and nbytes >= _MOVES:
                behind.add(name)
    return rows


def _connect() -> tuple[TcpGroup, LinkModel]:
    """The group that carries exchanges between hosts, whose links are measured; collective."""
    communicator = current().communicator
    if isinstance(communicator, RegroupingCommunicator):
        communicator = communicator.group
    lane = communicator.open_lane(_MEASURED)
    group = lane.groups[0] if lane is not None and len(lane.topology.local) == 1 else None
    if not isinstance(group, TcpGroup) or group.choice.model is None:
        raise SystemExit("hocket bench links and collectives measure TCP between hosts: leave out --transport")
    return group, group.choice.model


def _way(group: TcpGroup, pick: Pick, data: torch.Tensor) -> Callable[[], object]:
    def call(links: PointToPoint) -> None:
        pick.allreduce(links, data, "sum")

    return lambda: group.run(call, data.nbytes, "a benchmark")


def _alternating(model: LinkModel) -> list[int]:
    """The members in an order that goes to another site with every step."""
    half = -(-model.size // 2)
    first, second = model.order[:half], model.order[half:]
    return [rank_ for pair in zip(first, second, strict=False) for rank_ in pair] + first[len(second) :]
