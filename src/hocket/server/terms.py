"""What workers and servers agree on: what a table of parameters is, and how its updates are paced. Plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class Kind(IntEnum):
    """What a worker asks a server for."""

    DEFINE = 32
    ASSIGN = 33
    PUSH = 34
    PULL = 35
    PULL_ROWS = 36
    STATE = 37
    LOAD = 38
    LEAVE = 39
    ENTER = 40
    VERSION = 41


@dataclass(frozen=True)
class Terms:
    """How the updates of a table are paced.

    Attributes:
        staleness: How many clocks a worker may be ahead of the slowest; None is without bound.
        groups: Updates for as many gradients as there are workers: a server collects workers / groups gradients
            for each (softsync). 0 is an update for every push.
        aware: Whether the rate is divided by the measured staleness.
        clip: The largest norm of an averaged gradient, over all servers; None is any.
        patience: Seconds after which a worker that holds back others is waited for no longer, until it comes.
        adds: Whether gradients that are collected are added up, and not averaged, because losses are sums.
    """

    staleness: int | None = 0
    groups: int = 1
    aware: bool = False
    clip: float | None = None
    patience: float | None = None
    adds: bool = False

    @property
    def is_collected(self) -> bool:
        """Whether gradients are collected before an update, rather than applied on arrival."""
        return self.groups > 0


@dataclass(frozen=True)
class Slice:
    """Elements ``start`` to ``end`` of a worker's flat bucket, which are (a part of) one parameter.

    Attributes:
        index: The index of the parameter.
        bucket: The number of the bucket in the worker's layout.
        start: The first element, at the beginning of a cache line.
        end: Where the parameter, or this part of it, ends.
        group: The parameter's group in the optimizer, or -1 if it is in none.
        shape: The shape of the parameter, for an optimizer that needs whole tensors: then a slice is a whole parameter.
        stride: The stride of the parameter, for an optimizer that needs whole tensors.
    """

    index: int
    bucket: int
    start: int
    end: int
    group: int
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Rows:
    """The part of a large table of which only rows travel: rows ``first`` to ``last`` (excluded)."""

    first: int
    last: int
    width: int
    dtype: str


@dataclass(frozen=True)
class Definition:
    """One server's part of a table.

    Attributes:
        number: The number of the table.
        workers: How many workers use the table.
        terms: How the table's updates are paced.
        rule: The optimizer (see ``rule.describe``).
        buckets: Type and number of elements of each flat buffer of a worker.
        slices: The slices on this server, in the order of the flat buffers.
        rows: The rows on this server, for a table of rows, which has no slices.
    """

    number: int
    workers: int
    terms: Terms
    rule: dict[str, Any]
    buckets: tuple[tuple[str, int], ...] = ()
    slices: tuple[Slice, ...] = ()
    rows: Rows | None = None

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Definition:
        """The definition that ``as_data`` gave; raises KeyError, TypeError or ValueError for other data."""
        return cls(
            number=int(data["number"]),
            workers=int(data["workers"]),
            terms=Terms(**data["terms"]),
            rule=dict(data["rule"]),
            buckets=tuple((str(dtype), int(count)) for dtype, count in data["buckets"]),
            slices=tuple(_slice(each) for each in data["slices"]),
            rows=Rows(**data["rows"]) if data["rows"] is not None else None,
        )

    @property
    def ranges(self) -> list[tuple[int, int, int]]:
        """Bucket, start and end of what is on this server: one piece of each bucket at most, whole cache lines."""
        found: dict[int, tuple[int, int]] = {}
        for each in self.slices:
            start, end = found.get(each.bucket, (each.start, each.end))
            found[each.bucket] = min(start, each.start), max(end, each.end)
        return [(bucket, start, end) for bucket, (start, end) in found.items()]


def _slice(data: dict[str, Any]) -> Slice:
    shape, stride = data["shape"], data["stride"]
    numbers = {name: int(data[name]) for name in ("index", "bucket", "start", "end", "group")}
    if not 0 <= numbers["start"] <= numbers["end"]:
        raise ValueError(f"a slice from {numbers['start']} to {numbers['end']}")
    return Slice(
        **numbers, shape=None if shape is None else tuple(shape), stride=None if stride is None else tuple(stride)
    )


@dataclass(frozen=True)
class Push:
    """What a worker says of a gradient that it pushes.

    Attributes:
        epoch: The epoch that the worker is in; the bound on staleness holds within one epoch.
        weight: How much the gradient counts in an average, such as the number of its samples; 0 for an empty push.
        present: One byte per slice: whether its parameter has a gradient; None if all have.
        groups: Learning rates and other values of the optimizer's groups; None if they are as before.
        batches: The batches that this gradient completes: queue, epoch and number of each.
        fault: Why nothing that is collected with this push may be applied, as a number that servers only pass on; 0 if
            there is no reason.
        done: Backward passes and batches since the push before, if they are as many on all workers; None if they need
            not be.
    """

    epoch: int = 0
    weight: float = 1.0
    present: bytes | None = None
    groups: list[dict[str, Any]] | None = None
    batches: tuple[tuple[int, int, int], ...] = ()
    fault: int = 0
    done: tuple[int, int] | None = None


@dataclass(frozen=True)
class PushOutcome:
    """What servers say of a push; true if all have accepted it.

    Attributes:
        accepted: False if the push came too late for the bound on staleness, and does not count.
        faults: The faults for which nothing was applied, by the rank of the worker that told each; empty if there were
            none among the gradients that were collected with this one.
    """

    accepted: bool = True
    faults: dict[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.accepted

    def __and__(self, other: PushOutcome) -> PushOutcome:
        return PushOutcome(self.accepted and other.accepted, self.faults | other.faults)
