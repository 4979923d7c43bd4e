"""How fast the links between the members of a group are, and how long an algorithm takes over them.

Each algorithm is asked itself what it would send: it runs without data, for each member, and what it would send and
receive is replayed over the measured links. A link counts with what it carries while all others are busy, too; where
hosts share a machine, they share its processors, and what these can move.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from hocket.comm.algorithms.collective_algorithm import CollectiveAlgorithm
from hocket.comm.algorithms.hierarchical import Group
from hocket.transport.point_to_point import Members

_LONG_WAY = 3e-3  # seconds; within a building, a message takes a tenth of that
_CLOSE = 3.0  # how many times slower than the fastest a link may be to be one of the same site

Calls = list[list[tuple[int, int, bool]]]
"""For each member, with whom it exchanges how many bytes, and whether it sends them, one after the other."""


@dataclass(frozen=True)
class LinkModel:
    """The links of a group; the same numbers on all members.

    Attributes:
        latency: Seconds that a small message takes, at both ends and between.
        rates: Bytes per second from each member to each other, while all are busy.
        overhead: The part of the latency, at each end, in which nothing else is sent or received there.
        small: By what predicted latencies are multiplied, from all-reduces that were timed.
        large: By what predicted times of bytes are multiplied, from an all-reduce that was timed.
        at_once: How many members can be busy with messages at the same time; 0 is all of them.
        handling: The seconds for which each end is busy with a byte, where not all members can be busy at once.
        alone: How many times as fast a link is while all others rest.
        corrections: By what predictions are multiplied for an algorithm, from all-reduces of several sizes that were
            timed: its name, the sizes in order, and a factor for each.
    """

    latency: float
    rates: tuple[tuple[float, ...], ...]
    overhead: float = 0.0
    small: float = 1.0
    large: float = 1.0
    at_once: int = 0
    handling: float = 0.0
    alone: float = 1.0
    corrections: tuple[tuple[str, tuple[tuple[int, float], ...]], ...] = ()

    @property
    def size(self) -> int:
        return len(self.rates)

    @functools.cached_property
    def slowest(self) -> float:
        """The bytes per second of the slowest link."""
        return min((rate for a, row in enumerate(self.rates) for b, rate in enumerate(row) if a != b), default=0.0)

    @property
    def is_long(self) -> bool:
        """Whether bytes are under way for long, so that one stream does not fill a link, and who waits is idle."""
        return self.latency >= _LONG_WAY

    @functools.cached_property
    def sites(self) -> Group:
        """Members that are close to each other, in groups, groups of groups, and so on, as rates fall apart."""
        groups: list[tuple[Group, list[int]]] = [([rank], [rank]) for rank in range(self.size)]
        while len(groups) > 1:
            near = [[self._between(a[1], b[1]) for b in groups] for a in groups]
            best = max(near[a][b] for a in range(len(groups)) for b in range(a))
            joined = _connected([[rate * _CLOSE >= best for rate in row] for row in near])
            groups = [
                groups[part[0]]
                if len(part) == 1
                else (
                    [rank for each in part for rank in groups[each][1]]
                    if all(len(groups[each][1]) == 1 for each in part)
                    else [groups[each][0] for each in part],
                    [rank for each in part for rank in groups[each][1]],
                )
                for part in joined
            ]
        return groups[0][0]

    @property
    def has_sites(self) -> bool:
        """Whether some members are closer to each other than to others."""
        return any(not isinstance(each, int) for each in self.sites)

    @functools.cached_property
    def order(self) -> list[int]:
        """The members in an order in which those who are close follow each other."""
        return list(_flat(self.sites))

    def describe(self) -> str:
        """The links in words."""
        rates = sorted(rate for a, row in enumerate(self.rates) for b, rate in enumerate(row) if a != b)
        spread = f"{rates[0] / 1e6:,.0f}" + (f" to {rates[-1] / 1e6:,.0f}" if rates[-1] > 1.1 * rates[0] else "")
        sites = f", sites {self.sites}" if self.has_sites else ""
        return f"{self.latency * 1e3:.2f} ms, {spread} MB/s{sites}"

    def of(self, members: Sequence[int]) -> LinkModel:
        """The links between some of the members, in their order."""
        return replace(self, rates=tuple(tuple(self.rates[a][b] for b in members) for a in members))

    def predict(self, algorithm: CollectiveAlgorithm, nbytes: int, order: Sequence[int] | None = None) -> float:
        """Seconds that an all-reduce of ``nbytes`` takes."""
        return self.replay(rehearse(algorithm, self.size, nbytes, order)) * self._correct(algorithm.name, nbytes)

    def _correct(self, name: str, nbytes: int) -> float:
        """By what a prediction is multiplied: as it was at the sizes that were timed, and even between them."""
        known = next((factors for each, factors in self.corrections if each == name), ((1, 1.0),))
        below = max((each for each in known if each[0] <= nbytes), default=known[0])
        above = min((each for each in known if each[0] >= nbytes), default=known[-1])
        if below[0] == above[0]:
            return below[1]
        part = math.log(nbytes / below[0]) / math.log(above[0] / below[0])
        return math.exp((1 - part) * math.log(below[1]) + part * math.log(above[1]))

    def replay(self, made: Calls) -> float:
        """Seconds until all members have made their calls."""
        calls = [deque(each) for each in made]
        overhead = self.overhead * self.small
        handling = self.handling * self.large
        between = max(self.latency * self.small - 2 * overhead, 0.0)
        free: dict[tuple[object, ...], float] = {}
        idle = [0.0] * (self.at_once or self.size)  # from when on each processor has nothing to do
        arrived: dict[tuple[int, int], deque[float]] = {}
        waiting: dict[tuple[int, int], float] = {}
        end = 0.0
        # What happens next: a member goes on, or the first byte of a message is at the next part of its way.
        events: list[tuple[float, int, int, int, int, int, float]] = []
        numbers = itertools.count()
        for rank in range(self.size):
            heapq.heappush(events, (0.0, next(numbers), rank, -1, 0, 0, 0.0))
        while events:
            now, _, rank, peer, part, nbytes, last = heapq.heappop(events)
            if peer < 0:
                self._go_on(rank, now, calls[rank], overhead, handling, idle, events, numbers, arrived, waiting)
                end = max(end, now)
                continue
            way = self._ways[rank][peer]
            if part == len(way):
                arrived.setdefault((rank, peer), deque()).append(now)
                if (rank, peer) in waiting:
                    since = waiting.pop((rank, peer))
                    heapq.heappush(events, (max(now, since), next(numbers), peer, -1, 0, 0, 0.0))
                continue
            what, rate = way[part]
            start = max(now, free.get(what, 0.0))
            free[what] = start + nbytes / rate * self.large
            last = max(last, free[what])
            then = last + between if part == len(way) - 1 else start
            heapq.heappush(events, (then, next(numbers), rank, peer, part + 1, nbytes, last))
        return end

    @staticmethod
    def _go_on(
        rank: int,
        now: float,
        calls: deque[tuple[int, int, bool]],
        overhead: float,
        handling: float,
        idle: list[float],
        events: list[tuple[float, int, int, int, int, int, float]],
        numbers: Iterator[int],
        arrived: dict[tuple[int, int], deque[float]],
        waiting: dict[tuple[int, int], float],
    ) -> None:
        """A member makes its next call, or waits until it can."""
        if not calls:
            return
        peer, nbytes, sends = calls[0]
        came = arrived.get((peer, rank))
        if not sends and not came:
            waiting[peer, rank] = now
            return
        if came and not sends:
            now = max(now, came.popleft())
        done = max(now, idle[0]) + overhead + nbytes * handling
        heapq.heapreplace(idle, done)
        if sends:
            heapq.heappush(events, (done, next(numbers), rank, peer, 0, nbytes, 0.0))
        calls.popleft()
        heapq.heappush(events, (done, next(numbers), rank, -1, 0, 0, 0.0))

    @functools.cached_property
    def _ways(self) -> list[list[list[tuple[tuple[object, ...], float]]]]:
        size, sites = self.size, [list(_flat([each])) for each in self.sites]
        site_of = {rank: number for number, ranks in enumerate(sites) for rank in ranks}
        ends: list[list[tuple[object, ...]]] = [[(way, rank) for rank in range(size)] for way in ("from", "to")]
        out = [max(row[b] for b in range(size) if b != a) for a, row in enumerate(self.rates)]
        into = [max(self.rates[a][b] for a in range(size) if a != b) for b in range(size)]

        def way(a: int, b: int) -> list[tuple[tuple[object, ...], float]]:
            between = (site_of[a], site_of[b])
            if between[0] == between[1] or not self.has_sites:
                middle: tuple[tuple[object, ...], float] = (("link", a, b), self.rates[a][b] * self.alone)
            else:
                middle = (("sites", *between), self._trunk(sites[between[0]], sites[between[1]]))
            return [(ends[0][a], out[a] * self.alone), middle, (ends[1][b], into[b] * self.alone)]

        return [[way(a, b) if a != b else [] for b in range(size)] for a in range(size)]

    def _trunk(self, here: list[int], there: list[int]) -> float:
        """What goes from one site to another, by what several links carried at the same time.

        They had as many bytes each, so all of these were over when the slowest link had its own.
        """
        found = []
        for pairs in rounds(self.size):
            at_once = [self.rates[a][b] for pair in pairs for a, b in (pair, pair[::-1]) if a in here and b in there]
            found.append(len(at_once) * min(at_once, default=0.0))
        return max(found)

    def _between(self, some: list[int], others: list[int]) -> float:
        return max((min(self.rates[a][b], self.rates[b][a]) for a in some for b in others if a != b), default=0.0)


def rehearse(algorithm: CollectiveAlgorithm, size: int, nbytes: int, order: Sequence[int] | None = None) -> Calls:
    """What each of ``size`` members does in an all-reduce of ``nbytes``."""
    told = [_Recorder(rank, size) for rank in range(size)]
    for links in told:
        data = torch.empty(max(nbytes // 4, 1), dtype=torch.float32, device="meta")
        algorithm.allreduce(links if order is None else Members(links, order), data, "sum")
    return [links.calls for links in told]


def leaves(group: Group) -> Iterator[list[int]]:
    """The innermost groups."""
    ranks = [each for each in group if isinstance(each, int)]
    if ranks:
        yield ranks
    for each in group:
        if not isinstance(each, int):
            yield from leaves(each)


def rounds(size: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds in which all members meet in pairs, each member each other once."""
    places: list[int | None] = [*range(size), *([None] if size % 2 else [])]
    for _ in range(len(places) - 1):
        halves = zip(places[: len(places) // 2], reversed(places[len(places) // 2 :]), strict=True)
        yield [(a, b) for a, b in halves if a is not None and b is not None]
        places = [places[0], places[-1], *places[1:-1]]


def _connected(touch: list[list[bool]]) -> list[list[int]]:
    """The numbers of rows in groups, in each of which one leads to the other."""
    left, groups = list(range(len(touch))), []
    while left:
        group = [left.pop(0)]
        for member in group:
            near = [other for other in left if touch[member][other]]
            group += near
            left = [other for other in left if other not in near]
        groups.append(sorted(group))
    return groups


def _flat(group: Group) -> Iterator[int]:
    for each in group:
        if isinstance(each, int):
            yield each
        else:
            yield from _flat(each)


class _Recorder:
    """Notes what a member would send and receive; see ``PointToPoint``."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.calls: list[tuple[int, int, bool]] = []

    def send(self, to: int, *parts: torch.Tensor) -> None:
        self.calls.append((to, sum(part.nbytes for part in parts), True))

    def receive(self, source: int, *into: torch.Tensor) -> None:
        self.calls.append((source, sum(part.nbytes for part in into), False))

    def flush(self) -> None:
        pass
