"""What communication between hosts cost a run, in a few lines: how much of it was hidden, and who waited for whom."""

from __future__ import annotations

from statistics import fmean

from hocket.events import Traffic

_LEAST = 0.1  # seconds of waiting that are worth a word


class TrafficSummary:
    """Of one run, from what its workers tell."""

    def __init__(self) -> None:
        self._last: dict[int, Traffic] = {}

    def take(self, rank: int, record: Traffic) -> None:
        """What a worker has told last counts."""
        self._last[rank] = record

    def facts(self) -> dict[str, str]:
        """The same for a record."""
        found = {}
        under_way = sum(record.under_way for record in self._last.values())
        if under_way:
            hidden = 1 - sum(record.exposed for record in self._last.values()) / under_way
            found["communication hidden"] = f"{hidden:.0%}"
        for host, waits in self._waits().items():
            found[f"{host} waited"] = ", ".join(f"{seconds:.1f} s for {other}" for other, seconds in waits.items())
        return found

    def lines(self) -> list[str]:
        """What is said at the end of a run."""
        facts = self.facts()
        hidden = facts.pop("communication hidden", None)
        said = [] if hidden is None else [f"{hidden} of the communication between hosts was hidden by computation."]
        said += [f"{what} {waits}." for what, waits in facts.items()]
        return [f"hocket: {line}" for line in said]

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
