"""The contract of a shard: parameters that one server owns, and the update rule that changes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from hocket.server import rule
from hocket.server.terms import Definition

Gradient = list[torch.Tensor]
"""A dense shard has one flat tensor per range; a table of rows has the numbers of rows, and their gradients."""


class Contribution(NamedTuple):
    """A worker's gradient on its way into an update."""

    rank: int
    gradient: Gradient
    weight: float
    present: bytes | None
    staleness: int
    fault: int = 0
    done: tuple[int, int] | None = None
    applied: Callable[[], None] = lambda: None  # called when it is in the parameters, before anybody sees them


@dataclass(frozen=True)
class Stored:
    """One entry of an optimizer's state for (a part of) a parameter.

    Attributes:
        index: The index of the parameter.
        start: Where the part begins: an element of the workers' bucket, or the first row.
        key: The optimizer's name for the entry.
        value: A tensor, or plain data.
    """

    index: int
    start: int
    key: str
    value: Any


class Shard(ABC):
    """Parameters that one server owns, and their optimizer."""

    optimizer: Optimizer

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self._told: list[dict[str, Any]] | None = None

    def set_groups(self, groups: list[dict[str, Any]] | None) -> None:
        """Take over what a worker says of learning rates and the like."""
        if groups is not None and groups != self._told:
            rule.set_groups(self.optimizer, groups)
            self._told = groups

    def factors(self, contributions: Sequence[Contribution]) -> list[float]:
        """By what gradients are multiplied before they are added up."""
        total = 1.0 if self.definition.terms.adds else sum(each.weight for each in contributions)
        return [each.weight / total for each in contributions]

    @abstractmethod
    def combine(self, contributions: Sequence[Contribution]) -> tuple[Gradient, bytes | None]:
        """The weighted mean of several gradients, or their sum, and which parameters have one."""

    @abstractmethod
    def scale(self, gradient: Gradient, factor: float) -> Gradient:
        """A gradient times a number; the gradient may be changed in place."""

    @abstractmethod
    def square(self, gradient: Gradient) -> float:
        """The sum of a gradient's squares."""

    @abstractmethod
    def apply(self, gradient: Gradient, present: bytes | None) -> None:
        """One step of the optimizer."""

    @abstractmethod
    def state(self) -> list[Stored]:
        """The optimizer's state; its tensors are not copied."""

    @abstractmethod
    def load_state(self, stored: Sequence[Stored]) -> None:
        """Replace the optimizer's state by this one."""

    @contextmanager
    def rate_divided(self, divisor: float) -> Iterator[None]:
        """Divide the learning rates inside this context."""
        if divisor == 1:
            yield
            return
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] / divisor
        try:
            yield
        finally:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
