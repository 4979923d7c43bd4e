"""The contract of a divided update: each of several processes runs the user's optimizer on its own part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from hocket.comm.bucket_layout import Place

Step = Callable[..., Any]
"""``optimizer.step`` as the user's class has it."""

Range = tuple[int, int, int]
"""Elements of a flat buffer: bucket, start, end."""


class Trained(Protocol):
    """Parameters, their names, and the number of the optimizer group that each is in (-1: none)."""

    names: list[str]
    parameters: list[torch.nn.Parameter]
    groups: list[int]


class Owners(Protocol):
    """The processes among which an update is divided, as one of them sees it."""

    @property
    def rank(self) -> int:
        """The number of this process."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def one_copy(
        self, dtype: torch.dtype, count: int, places: Sequence[Place], purpose: str
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """``count`` elements, all zero, that all of them have: flat, and as one tensor for each of ``places``."""
        ...

    def barrier(self, what: str = ...) -> None:
        """Wait until all processes are here."""
        ...


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
        """Bring this news to the shared copy and into every rank's ``optimizer.state``; collective."""

    @abstractmethod
    def end(self) -> None:
        """All workers have taken the step."""

    @abstractmethod
    def regroup(self, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Divide steps among the workers that there are now; collective. A step that was not ended is undone.

        If a worker is lost meanwhile, nothing has changed for those who are left, and they call this again.

        Args:
            parameters: The shared parameters from now on, flat; rank 0 undoes the step there, too.
            gradients: Where this worker finds averaged gradients from now on.
        """
