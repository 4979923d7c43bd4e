"""The contract of a divided update: each worker runs the user's optimizer on its own part of the shared copy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from hocket.strategies.base import Step

Range = tuple[int, int, int]
"""Elements of a flat buffer: bucket, start, end."""


class Update(ABC):
    """One step: ``prepare``, put the gradients of those ranges in place, ``step``, and ``share`` if anyone has news."""

    @abstractmethod
    def prepare(self, present: bytes) -> list[Range]:
        """Decide what this worker updates, of the parameters that have a gradient (a byte each).

        Collective when the script has loaded an optimizer state since the last step.
        """

    @abstractmethod
    def step(self, original: Step, **options: Any) -> Any:
        """Run the optimizer on this worker's part; afterwards the optimizer looks untouched again."""

    @abstractmethod
    def news(self) -> bool:
        """Whether the optimizer keeps something on this worker that is not in the shared copy yet."""

    @abstractmethod
    def share(self) -> None:
        """Bring that to the shared copy and into every rank's ``optimizer.state``; collective."""
