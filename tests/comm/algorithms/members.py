"""Members of a group in one process: threads that pass messages in memory, and simulated ones; and what they have."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from hocket.comm.algorithms.collective_algorithm import CollectiveAlgorithm
from hocket.comm.algorithms.direct import Direct
from hocket.comm.algorithms.halving_doubling import HalvingDoubling
from hocket.comm.algorithms.hierarchical import Group, Hierarchical
from hocket.comm.algorithms.ring import Ring
from hocket.comm.algorithms.star import Star
from hocket.comm.algorithms.tree import Tree
from hocket.transport.point_to_point import PointToPoint
from hocket.transport.simulated import Simulation, Speed
from hocket.transport.simulated_links import SimulatedLinks, SimulatedWires, Trunk

TYPES = [torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bfloat16, torch.float16]
OPERATIONS = ["sum", "max", "min", "product"]
DEADLINE = 20.0


def halves(size: int) -> Group:
    """All members in pairs, the pairs in two sites."""
    pairs = [list(range(start, min(start + 2, size))) for start in range(0, size, 2)]
    middle = -(-len(pairs) // 2)
    return [pairs[:middle], pairs[middle:]] if len(pairs) > 1 else pairs


MAKES: dict[str, Callable[[int], CollectiveAlgorithm]] = {
    "ring": lambda _: Ring(),
    "tree": lambda _: Tree(),
    "halving_doubling": lambda _: HalvingDoubling(),
    "star": lambda _: Star(),
    "direct": lambda _: Direct(),
    "hierarchical": lambda size: Hierarchical(halves(size)),
}
"""What makes each algorithm for so many members, by its name."""


class Lines:
    """Queues between the members of a group. What is sent is read when it is received, and not before."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.queues = {
            (a, b): queue.SimpleQueue[tuple[tuple[torch.Tensor, ...], threading.Event]]()
            for a in range(size)
            for b in range(size)
        }


class Member:
    def __init__(self, lines: Lines, rank: int) -> None:
        self.rank, self.size, self._lines = rank, lines.size, lines
        self._sent: list[threading.Event] = []

    def send(self, to: int, *parts: torch.Tensor) -> None:
        assert all(part.is_contiguous() for part in parts)
        self._sent.append(threading.Event())
        self._lines.queues[self.rank, to].put((parts, self._sent[-1]))

    def receive(self, source: int, *into: torch.Tensor) -> None:
        parts, taken = self._lines.queues[source, self.rank].get(timeout=DEADLINE)
        whole = torch.cat(parts)
        assert whole.numel() == sum(part.numel() for part in into)
        for part, came in zip(into, whole.split([part.numel() for part in into]), strict=True):
            part.copy_(came)
        taken.set()

    def flush(self) -> None:
        assert all(taken.wait(DEADLINE) for taken in self._sent)


class Counting:
    """Messages of a member, which are counted."""

    def __init__(self, links: PointToPoint) -> None:
        self.rank, self.size, self._links = links.rank, links.size, links
        self.sent: dict[int, int] = {}  # bytes, by the member to which they went
        self.received = self.messages = 0

    def send(self, to: int, *parts: torch.Tensor) -> None:
        self.messages += 1
        self.sent[to] = self.sent.get(to, 0) + sum(part.nbytes for part in parts)
        self._links.send(to, *parts)

    def receive(self, source: int, *into: torch.Tensor) -> None:
        self._links.receive(source, *into)
        self.received += sum(part.nbytes for part in into)

    def flush(self) -> None:
        self._links.flush()

    @property
    def nbytes(self) -> int:
        return sum(self.sent.values())


def in_threads(size: int, call: Callable[[PointToPoint], object]) -> list[Counting]:
    """``call`` for each member, in a thread of its own."""
    lines = Lines(size)
    members = [Counting(Member(lines, rank)) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        list(threads.map(call, members))
    assert all(line.empty() for line in lines.queues.values())
    return members


class Busy:
    """Messages of a simulated member that is busy for some time with each."""

    def __init__(self, links: PointToPoint, simulation: Simulation, seconds: float) -> None:
        self.rank, self.size, self.flush = links.rank, links.size, links.flush
        self._links, self._simulation, self._seconds = links, simulation, seconds

    def send(self, to: int, *parts: torch.Tensor) -> None:
        self._simulation.sleep(self._seconds)
        self._links.send(to, *parts)

    def receive(self, source: int, *into: torch.Tensor) -> None:
        self._links.receive(source, *into)
        self._simulation.sleep(self._seconds)


def simulated(
    size: int,
    call: Callable[[PointToPoint], Any],
    speed: Speed,
    trunk: Trunk | None = None,
    busy: float = 0.0,
    simulation: Simulation | None = None,
) -> tuple[list[Counting], float]:
    """``call`` for each simulated member; the members, and the virtual seconds until all have ended."""
    simulation = simulation or Simulation()
    wires = SimulatedWires(simulation, size, speed, trunk)
    members = [Counting(Busy(SimulatedLinks(wires, rank), simulation, busy)) for rank in range(size)]
    simulation.run([lambda member=member: call(member) for member in members])  # type: ignore[misc]
    assert wires.messages == [member.messages for member in members]
    assert wires.nbytes == [member.nbytes for member in members]
    return members, simulation.now()


def values(size: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(count)
    return [(torch.rand(count, generator=random) * 3 + 0.5).to(dtype) for _ in range(size)]


def reference(parts: list[torch.Tensor], operation: str) -> torch.Tensor:
    stacked = torch.stack(parts)
    if not stacked.dtype.is_floating_point:
        whole = {"sum": stacked.sum, "max": stacked.amax, "min": stacked.amin, "product": stacked.prod}[operation](0)
        return whole.to(stacked.dtype)
    wide = stacked.double()
    whole = {"sum": wide.sum, "max": wide.amax, "min": wide.amin, "product": wide.prod}[operation](0)
    return whole.to(stacked.dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor, size: int) -> None:
    error = size * torch.finfo(found.dtype).eps if found.dtype.is_floating_point else 0.0
    assert torch.allclose(found.double(), expected.double(), rtol=error, atol=0)
