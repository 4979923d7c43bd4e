"""Which runs a comparison has, in which order, and by what one knows it again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hocket.compare.results import Entry, Result


@dataclass(frozen=True)
class Way:
    """One strategy on so many workers.

    Attributes:
        strategy: As it was given.
        workers: How many.
        servers: How many processes beside them.
    """

    strategy: str
    workers: int
    servers: int = 0

    @property
    def name(self) -> str:
        """As in the table."""
        return Entry(self.strategy, self.workers, ()).name


BASELINE = Way("mirrored", 1)


@dataclass(frozen=True)
class Planned:
    """One run that is to be made; ``repeat`` is its number among those of its kind, from 0, and its seed."""

    way: Way
    repeat: int

    @property
    def key(self) -> tuple[str, int, int]:
        """By which its result is found."""
        return self.way.strategy, self.way.workers, self.repeat


def order(ways: Iterable[Way], repeats: int) -> list[Planned]:
    """All runs: each way once, the baseline first, before any of them comes again."""
    return [Planned(way, repeat) for repeat in range(repeats) for way in (BASELINE, *ways)]


def missing(planned: Sequence[Planned], results: Iterable[Result]) -> list[Planned]:
    """Those that have no good result."""
    good = {key_of(result) for result in results if not result.failure}
    return [run for run in planned if run.key not in good]


def key_of(result: Result) -> tuple[str, int, int]:
    """Of the planned run that it is the result of."""
    return result.strategy, result.workers, result.repeat


def entries(ways: Iterable[Way], results: Iterable[Result]) -> tuple[Entry, ...]:
    """Results together, by way; a way without any has none."""
    found: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        found.setdefault((result.strategy, result.workers), []).append(result)
    return tuple(
        Entry(way.strategy, way.workers, tuple(sorted(found[key], key=lambda result: result.repeat)))
        for way in (BASELINE, *ways)
        if (key := (way.strategy, way.workers)) in found
    )


def signature(wanted: dict[str, Any]) -> str:
    """The same for comparisons of which one continues the other."""
    return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:16]
