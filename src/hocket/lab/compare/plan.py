"""Which strategies a comparison has (given, or chosen because they fit), and which runs, in which order."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hocket import specs
from hocket.errors import StrategyError, UsageError
from hocket.lab.compare.results import Contender, Result
from hocket.launch import host_list, machine

ON_ONE_HOST = ("mirrored", "central", "local_sgd(period=16)", "asynchronous")
ON_SEVERAL = ("mirrored", "local_sgd(period=16)", "diloco(period=64)", "gossip", "asynchronous")
_OPEN, _CLOSE, _QUOTES = "([{", ")]}", "'\""


@dataclass(frozen=True)
class Way:
    """One strategy on so many workers.

    Attributes:
        strategy: The strategy, as the user wrote it.
        workers: How many.
        servers: How many processes beside them.
    """

    strategy: str
    workers: int
    servers: int = 0

    @property
    def name(self) -> str:
        """The name of the run, as in the table."""
        return Contender(self.strategy, self.workers, ()).name


BASELINE = Way("mirrored", 1)


@dataclass(frozen=True)
class Planned:
    """One run that is to be made; ``repeat`` is its number among those of its kind, from 0, and its seed."""

    way: Way
    repeat: int

    @property
    def key(self) -> tuple[str, int, int]:
        """The key by which the run's result is found."""
        return self.way.strategy, self.way.workers, self.repeat


def order(ways: Iterable[Way], repeats: int) -> list[Planned]:
    """All runs: each way once, the baseline first, before any of them comes again."""
    return [Planned(way, repeat) for repeat in range(repeats) for way in (BASELINE, *ways)]


def missing(planned: Sequence[Planned], results: Iterable[Result]) -> list[Planned]:
    """The planned runs that have no good result."""
    good = {key_of(result) for result in results if not result.failure}
    return [run for run in planned if run.key not in good]


def key_of(result: Result) -> tuple[str, int, int]:
    """The key of the planned run that ``result`` belongs to."""
    return result.strategy, result.workers, result.repeat


def entries(ways: Iterable[Way], results: Iterable[Result]) -> tuple[Contender, ...]:
    """Results together, by way; a way without any has none."""
    found: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        found.setdefault((result.strategy, result.workers), []).append(result)
    return tuple(
        Contender(way.strategy, way.workers, tuple(sorted(found[key], key=lambda result: result.repeat)))
        for way in (BASELINE, *ways)
        if (key := (way.strategy, way.workers)) in found
    )


def signature(wanted: dict[str, Any]) -> str:
    """A text that is equal for comparisons of which one continues the other."""
    return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:16]


def split(texts: Sequence[str]) -> list[str]:
    """Strategies, each once, from texts with commas outside of parentheses, or semicolons, between them."""
    found: list[str] = []
    for text in texts:
        part, depth, quote = "", 0, ""
        for letter in text:
            quote = "" if letter == quote else quote or (letter if letter in _QUOTES else "")
            depth += 0 if quote else (letter in _OPEN) - (letter in _CLOSE)
            if not quote and (letter == ";" or (letter == "," and depth <= 0)):
                found.append(part)
                part, depth = "", 0
            else:
                part += letter
        found.append(part)
    names = list(dict.fromkeys(name.strip() for name in found if name.strip()))
    if not names:
        raise UsageError("--strategies without any: write for example 'mirrored, local_sgd(period=16)'")
    return names


def counts(text: str | None, rig: int, named: Sequence[host_list.Host]) -> list[int]:
    """How many workers: ``4``, or several numbers such as ``1,2,4``; one is the baseline, which is always there."""
    if text is None and named:
        slots = [host.slots for host in named]
        if None in slots:
            raise UsageError("hosts without a number of workers: say how many with -n 4, or write node1:4,node2:4")
        text = str(sum(slot or 0 for slot in slots))
    elif text is None:
        text = str(max(2, rig or machine.cores()))
    found = []
    for part in text.split(","):
        if part.strip() == "auto":
            found.append(max(2, machine.cores()))
        elif part.strip().isdecimal() and int(part) >= 1:
            found.append(int(part) if named else machine.worker_count(part.strip()))
        else:
            raise UsageError(f"-n {text}: must be a number of workers, or several: 4, or 1,2,4")
    found = sorted({count for count in found if count > 1})
    if not found:
        raise UsageError(f"-n {text}: one worker is the baseline; compare it with more, for example -n 2")
    return found


def way(strategy: str, workers: int, servers: int) -> Way:
    """A strategy on so many workers, with as many servers as it needs.

    Raises:
        StrategyError: There is none such, or it does not fit.
    """
    spec = specs.parse(strategy)
    needed = servers if spec.servers == "needed" else 0
    spec.check_fit(workers, needed)
    return Way(strategy, workers, needed)


def given(strategies: Sequence[str], workers: Sequence[int], servers: int) -> list[Way]:
    """Those of ``--strategies``, each on all numbers of workers; one that is wrong raises."""
    return [way(strategy, count, servers) for strategy in strategies for count in workers]


def fitting(
    workers: Sequence[int], servers: int, told: Mapping[str, Any], *, several_hosts: bool
) -> tuple[list[Way], list[str]]:
    """A handful that fits the machine and, once the baseline has told, the script; and what was left out, with why."""
    names, notes = list(ON_SEVERAL if several_hosts else ON_ONE_HOST), []
    if "LBFGS" in str(told.get("optimizer", "")):
        names = ["full_batch"]
        notes.append("The optimizer is L-BFGS, which needs gradients of all the data: full_batch alone is compared.")
    if "central" in names and not (sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")):
        names.remove("central")
        notes.append("central was left out: it needs shared memory, which is for x86-64 Linux.")
    found: list[Way] = []
    for name in names:
        try:
            found += given([name], workers, servers)
        except StrategyError as error:
            notes.append(f"{name} was left out: {error}.")
    return found, notes
