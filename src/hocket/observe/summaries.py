"""What is said of a run at its end, in a few lines: communication between hosts, servers, gossip, what was predicted.

Each summary takes the records of one job as they come; ``lines`` are for the screen, ``facts`` for the run's record.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from hocket.events import BATCHES_AGAIN, SAMPLES_AGAIN, Facts, Metrics, PassDone, ServerReport, Traffic

CONSENSUS = "distance from consensus"
_REFUSED = "refused between workers"
_LINKS, _RATES, _SUMS = "links between hosts", "MB/s between hosts", "sums between hosts by"
_LEAST = 0.1  # seconds of waiting that are worth a word
_MOST_WORKERS = 8  # that are shown one by one on the screen; a record has them all
_MOST_BARS = 6  # of a histogram in a line


class SampleCount:
    """Which samples have counted, epoch by epoch, and what was done twice because workers were lost."""

    def __init__(self) -> None:
        self._epochs = self._batches = self._samples = 0
        self._wrong: dict[str, list[int]] = {}
        self._last: dict[int, int] = {}  # the last epoch of each loader

    def take(self, record: PassDone) -> dict[str, Any]:
        """An epoch is over, as one of the workers tells; the facts for the record."""
        if record.epoch <= self._last.get(record.loader, 0):
            return {}
        self._last[record.loader] = record.epoch
        self._epochs += 1
        if record.samples != record.whole:
            self._wrong[str(record.epoch)] = [record.samples, record.whole]
        return {"epochs": self._epochs, "samples of an epoch": record.whole, "epochs that differ": self._wrong}

    def take_change(self, details: Mapping[str, Any]) -> dict[str, Any]:
        """Workers have changed; the facts for the record."""
        if SAMPLES_AGAIN not in details:
            return {}
        self._batches += details[BATCHES_AGAIN]
        self._samples += details[SAMPLES_AGAIN]
        return {BATCHES_AGAIN: self._batches, SAMPLES_AGAIN: self._samples}

    @staticmethod
    def lines(facts: Mapping[str, Any]) -> list[str]:
        """What the facts of a record say to a person."""
        said = []
        wrong = facts.get("epochs that differ", {})
        if epochs := facts.get("epochs", 0) - len(wrong):
            each = "each of them" if epochs > 1 else "it"
            said.append(
                f"every sample counted once in {_some(epochs, 'epoch')}: {facts['samples of an epoch']:,} in {each}"
            )
        said += [f"epoch {epoch}: {found:,} of {whole:,} samples counted" for epoch, (found, whole) in wrong.items()]
        if batches := facts.get(BATCHES_AGAIN):
            samples = _some(facts[SAMPLES_AGAIN], "sample")
            said.append(f"{_some(batches, 'batch', 'es')} of lost workers were done twice, with {samples}")
        return said


def _some(count: int, what: str, ending: str = "s") -> str:
    return f"{count:,} {what}{ending if count != 1 else ''}"


def _reasons(refused: Iterable[Mapping[str, int]]) -> str:
    """What several processes have refused, in words."""
    total = sum(map(Counter, refused), Counter[str]())
    return ", ".join(f"{reason} {times:,}×" for reason, times in total.most_common())


class TrafficSummary:
    """What communication between hosts cost: how much of it was hidden, and who waited for whom."""

    def __init__(self) -> None:
        self._last: dict[int, Traffic] = {}

    def take(self, rank: int, record: Traffic) -> None:
        """Take a record of a worker, which replaces the one before."""
        self._last[rank] = record

    def facts(self) -> dict[str, str]:
        """The facts for the record."""
        found = {}
        under_way = sum(record.under_way for record in self._last.values())
        if under_way:
            hidden = 1 - sum(record.exposed for record in self._last.values()) / under_way
            found["communication hidden"] = f"{hidden:.0%}"
        found |= self._algorithms()
        if refused := _reasons(record.refused for record in self._last.values()):
            found[_REFUSED] = refused
        for host, waits in self._waits().items():
            found[f"{host} waited"] = ", ".join(f"{seconds:.1f} s for {other}" for other, seconds in waits.items())
        return found

    def lines(self) -> list[str]:
        """The lines that are printed at the end of a run."""
        facts = self.facts()
        hidden = facts.pop("communication hidden", None)
        said = [] if hidden is None else [f"{hidden} of the communication between hosts was hidden by computation."]
        facts.pop(_RATES, None)
        if (links := facts.pop(_LINKS, None)) is not None:
            said.append(f"Measured between hosts: {links}.")
        said += [f"{what}{':' if what.startswith((_SUMS, _REFUSED)) else ''} {text}." for what, text in facts.items()]
        return [f"hocket: {line}" for line in said]

    def _algorithms(self) -> dict[str, str]:
        """What the worker of the lowest rank has measured of the links, and how long its sums took, by algorithm."""
        first = self._last[min(self._last)] if self._last else None
        if first is None:
            return {}
        found = {_LINKS: first.links} if first.links else {}
        if first.rates:
            found[_RATES] = "; ".join(", ".join(f"{rate:g}" if rate else "-" for rate in row) for row in first.rates)
        for name, (times, nbytes, seconds, predicted, told, least, most, sent) in first.uses.items():
            size = f"{least / 1e6:,.2f} to {most / 1e6:,.2f}" if most > least else f"{nbytes / times / 1e6:,.2f}"
            as_bytes = f" as {sent / times / 1e6:,.3f} MB to the wire" if sent else ""
            text = f"{times:,.0f} of {size} MB{as_bytes}, {seconds / times * 1e3:,.2f} ms each"
            found[f"{_SUMS} {name.replace('_', '-')}"] = text + (
                f" (predicted {predicted / told * 1e3:,.2f} ms)" if told else ""
            )
        return found

    def _waits(self) -> dict[str, dict[str, float]]:
        """For each host, the seconds that one of its workers has waited for each host on average, the most first."""
        by_host: dict[str, list[Traffic]] = {}
        for _, record in sorted(self._last.items()):
            by_host.setdefault(record.host, []).append(record)
        waits = {}
        for host, records in by_host.items():
            others = {other for record in records for other in record.waited_for} - {host}
            means = {other: fmean(record.waited_for.get(other, 0.0) for record in records) for other in others}
            kept = {other: seconds for other, seconds in means.items() if seconds >= _LEAST}
            if kept:
                waits[host] = dict(sorted(kept.items(), key=lambda item: -item[1]))
        return waits


@dataclasses.dataclass
class _Pushes:
    """What all servers tell of one worker; each push goes to every server, so counts are not added up."""

    staleness: Counter[int] = dataclasses.field(default_factory=Counter)
    pushes: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    late: int = 0
    lost: bool = False

    def add(self, told: Mapping[str, Any]) -> None:
        for value, times in told.get("staleness", {}).items():
            self.staleness[int(value)] += int(times)
        self.pushes = max(self.pushes, told.get("pushes", 0))
        self.seconds = max(self.seconds, told.get("seconds", 0.0))
        self.waited = max(self.waited, told.get("waited", 0.0))
        self.late = max(self.late, told.get("late", 0))
        self.lost = self.lost or bool(told.get("lost"))

    def __str__(self) -> str:
        parts = [f"{self.pushes:,} push{'' if self.pushes == 1 else 'es'}"]
        if self.seconds > 0 and self.pushes > 1:
            parts = [f"{(self.pushes - 1) / self.seconds:,.1f} pushes/s"]
        if any(self.staleness):
            parts.append(f"staleness {_mean(self.staleness):.1f} ({histogram(self.staleness)})")
        if self.waited >= _LEAST:
            parts.append(f"waited {self.waited:.1f} s")
        return ", ".join(parts + ["lost"] * self.lost)


class ServedSummary:
    """What parameter servers did: staleness, how fast each worker pushed, and the load of the servers."""

    def __init__(self) -> None:
        self._last: dict[int, ServerReport] = {}

    def take(self, record: ServerReport) -> None:
        """Take a report of a server, which replaces the one before."""
        self._last[record.server] = record

    def facts(self) -> dict[str, str]:
        """For a record: a line each of staleness, every worker, every server, and what was refused."""
        workers = self._workers()
        total = sum((worker.staleness for worker in workers.values()), Counter[int]())
        found = {}
        if total:
            found["staleness"] = f"mean {_mean(total):.1f}, most {max(total)}"
        found |= {f"rank {rank}": str(worker) for rank, worker in workers.items()}
        for server, record in sorted(self._last.items()):
            if not (record.workers or record.updates or record.received):
                continue  # it holds no parameters, and only deals out batches
            found[f"server {server} on {record.host}"] = _load(record)
        if late := {rank: worker.late for rank, worker in workers.items() if worker.late}:
            found["pushes refused as too late"] = ", ".join(f"{times:,} of rank {rank}" for rank, times in late.items())
        if refused := _reasons(record.refused for record in self._last.values()):
            found["refused"] = refused
        return found

    def lines(self) -> list[str]:
        """The lines that are printed at the end of a run."""
        facts = self.facts()
        staleness = facts.pop("staleness", None)
        said = []
        if staleness is not None:
            said.append(f"staleness (updates between a worker's pull and its push): {staleness}")
        ranks = [name for name in facts if name.startswith("rank ")]
        for name in ranks[_MOST_WORKERS:]:
            del facts[name]
        for name, value in facts.items():
            said.append(f"{name}: {value}")
            if len(ranks) > _MOST_WORKERS and name == ranks[_MOST_WORKERS - 1]:
                said.append(f"{len(ranks) - _MOST_WORKERS} more ranks: hocket runs show")
        return [f"hocket: {line}" for line in said]

    def _workers(self) -> dict[int, _Pushes]:
        workers: dict[int, _Pushes] = {}
        for record in self._last.values():
            for rank, told in record.workers.items():
                workers.setdefault(int(rank), _Pushes()).add(told)
        return dict(sorted(workers.items()))


def histogram(counts: Mapping[int, int]) -> str:
    """``0:12% 1:50% 2:38%``; what is too long for a line is one last bar, ``5+:9%``."""
    total, values = sum(counts.values()), sorted(value for value, times in counts.items() if times)
    bars = [(str(value), counts[value]) for value in values]
    if len(values) > _MOST_BARS:
        first = values[_MOST_BARS - 1]
        bars[_MOST_BARS - 1 :] = [(f"{first}+", sum(counts[value] for value in values if value >= first))]
    return " ".join(f"{name}:{times / total:.0%}" for name, times in bars)


def _mean(counts: Mapping[int, int]) -> float:
    return sum(value * times for value, times in counts.items()) / max(1, sum(counts.values()))


def _load(record: ServerReport) -> str:
    busy = record.busy / record.seconds if record.seconds > 0 else 0.0
    return (
        f"busy {min(1.0, busy):.0%}, {record.updates:,} update{'s' if record.updates != 1 else ''}, "
        f"{size(record.received)} in, {size(record.sent)} out"
    )


def size(count: float) -> str:
    """``3.1 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


class GossipSummary:
    """The graphs of gossip, and how far workers were from consensus; all workers measure the same."""

    def __init__(self) -> None:
        self._graphs: dict[str, float] = {}
        self._distances: list[tuple[float, float]] = []  # time and value

    def take(self, record: Facts | Metrics) -> None:
        """Remember graphs, by their gap, and distances at the ends of loops."""
        if isinstance(record, Facts):
            if "gossip" in record.values and "spectral gap" in record.values:
                self._graphs[str(record.values["gossip"])] = float(record.values["spectral gap"])
        elif CONSENSUS in record.values:
            self._distances.append((record.time, record.values[CONSENSUS]))

    def lines(self) -> list[str]:
        """The lines that are printed at the end of a run: none, if there was no gossip."""
        if not self._graphs:
            return []
        graphs = ", then ".join(f"{name} (spectral gap {gap:.3g})" for name, gap in self._graphs.items())
        told = ""
        if self._distances:
            (_, first), (_, last) = min(self._distances), max(self._distances)
            told = f"; distance from consensus {last:.1e} at the end of the last loop, {first:.1e} of the first"
        return [f"hocket: gossip on {graphs}{told}"]


class PredictedSummary:
    """How much of the data was only predicted; all workers tell the same."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}

    def take(self, record: Facts) -> None:
        """Remember the last counts."""
        if "batches only predicted" in record.values:
            self._told = record.values

    def lines(self) -> list[str]:
        """The lines that are printed at the end of a run: none, if it trained on all batches."""
        if not self._told:
            return []
        batches = self._told["batches only predicted"]
        told = f"{batches:,} batch{'' if batches == 1 else 'es'} of each worker"
        if "samples only predicted" in self._told:
            samples = self._told["samples only predicted"]
            of = samples + self._told["samples trained on"]
            told = f"{samples:,} of {of:,} samples ({told})"
        return [f"hocket: {told} were only predicted, and not trained on"]
