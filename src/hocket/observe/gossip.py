"""What gossip found in a run, in a line: the graphs that there were, and how far workers were from consensus."""

from __future__ import annotations

from hocket.events import Facts, Metrics

CONSENSUS = "distance from consensus"


class GossipSummary:
    """Of one run, from what its workers tell; all of them measure the same."""

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
        """What is said at the end of a run: nothing, if there was no gossip."""
        if not self._graphs:
            return []
        graphs = ", then ".join(f"{name} (spectral gap {gap:.3g})" for name, gap in self._graphs.items())
        told = ""
        if self._distances:
            (_, first), (_, last) = min(self._distances), max(self._distances)
            told = f"; distance from consensus {last:.1e} at the end of the last loop, {first:.1e} of the first"
        return [f"hocket: gossip on {graphs}{told}"]
