"""How much of the data a run has only predicted, in a line."""

from __future__ import annotations

from hocket.events import Facts


class PredictedSummary:
    """Of one run, from what its workers tell; all of them tell the same."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}

    def take(self, record: Facts) -> None:
        """Remember the last counts."""
        if "batches only predicted" in record.values:
            self._told = record.values

    def lines(self) -> list[str]:
        """What is said at the end of a run: nothing, if it trained on all batches."""
        if not self._told:
            return []
        batches = self._told["batches only predicted"]
        told = f"{batches:,} batch{'' if batches == 1 else 'es'} of each worker"
        if "samples only predicted" in self._told:
            samples = self._told["samples only predicted"]
            of = samples + self._told["samples trained on"]
            told = f"{samples:,} of {of:,} samples ({told})"
        return [f"hocket: {told} were only predicted, and not trained on"]
