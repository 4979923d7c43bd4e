"""What a step overwrites, as it was before the step: others can undo the step of a worker that dies in the middle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hocket.updates.update import Owners

Key = tuple[int, str]
"""A flat buffer: a bucket, and the optimizer's name of a state, or nothing for the parameters."""

_LINE = 8  # numbers of a cache line


class ChangedRange(NamedTuple):
    """What a worker changes of one flat buffer: elements ``start`` to ``end`` of ``live``."""

    key: Key
    live: torch.Tensor
    start: int
    end: int


class UndoLog:
    """Copies of what the next step changes, in memory that outlives every worker.

    Each worker copies its own part, says so, and only then changes it. What a dead worker had not copied it has not
    changed either.

    Args:
        owners: The workers among which steps are divided, until ``renew``.

    Attributes:
        size: Among how many workers the step is divided that the log is of.
    """

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        self.renew()

    def renew(self) -> None:
        """Begin anew with the workers that there are now."""
        self.size = self._owners.size
        self._copies: dict[Key, torch.Tensor] = {}
        self._marks: torch.Tensor | None = None
        self._step = 0

    def keep(self, parts: Sequence[ChangedRange]) -> None:
        """Copy what this worker's next step changes; collective if there is something that no step has changed so far.

        Args:
            parts: This worker's parts, with the same keys on all workers.
        """
        if self._marks is None:
            self._marks, _ = self._owners.one_copy(torch.int64, self.size * _LINE, [], "marks")
        for part in parts:
            if part.key not in self._copies:
                live = part.live
                self._copies[part.key], _ = self._owners.one_copy(live.dtype, live.numel(), [], "undoing a step")
        self._step += 1
        for key, live, start, end in parts:
            self._copies[key][start:end].copy_(live[start:end])
        self._marks[self._owners.rank * _LINE] = self._step

    def has_begun(self, rank: int) -> bool:
        """Whether a worker may have changed its part in the step that is going on; it has a copy of it then."""
        return self._marks is not None and int(self._marks[rank * _LINE]) == self._step

    def undo(self, key: Key, flat: torch.Tensor, start: int, end: int) -> None:
        """Put back in ``flat`` what was there before the step."""
        flat[start:end].copy_(self._copies[key][start:end])
