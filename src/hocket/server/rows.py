"""A shard of a large table of which every push touches a few rows: only those travel, and only those are updated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hocket.errors import StrategyError
from hocket.server import rule
from hocket.server.shard import Contribution, Gradient, Shard, Stored
from hocket.server.terms import Definition


class RowShard(Shard):
    """Rows ``first`` to ``last`` of a table; gradients are given as rows and their values.

    Attributes:
        table: The rows.
    """

    def __init__(self, definition: Definition) -> None:
        super().__init__(definition)
        rows = definition.rows
        assert rows is not None
        self.first, self.count, self.width = rows.first, rows.last - rows.first, rows.width
        self.table = torch.zeros(self.count, self.width, dtype=getattr(torch, rows.dtype))
        self._parameter = nn.Parameter(self.table)
        torch.sparse.check_sparse_tensor_invariants.disable()  # rows are checked here, and PyTorch warns otherwise
        self.optimizer = rule.build(definition.rule, [[self._parameter]])

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """The values of rows, by their numbers in the whole table."""
        return self.table[self._here(numbers)]

    def combine(self, contributions: Sequence[Contribution]) -> tuple[Gradient, bytes | None]:
        numbers = torch.cat([each.gradient[0] for each in contributions])
        factors = self.factors(contributions)
        values = [each.gradient[1] * factor for each, factor in zip(contributions, factors, strict=True)]
        return [numbers, torch.cat(values)], None

    def scale(self, gradient: Gradient, factor: float) -> Gradient:
        return [gradient[0], gradient[1] * factor]

    def square(self, gradient: Gradient) -> float:
        return float(self._sparse(gradient).values().double().square().sum())

    def apply(self, gradient: Gradient, present: bytes | None) -> None:
        self._parameter.grad = self._sparse(gradient)
        try:
            self.optimizer.step()
        except RuntimeError as error:
            raise StrategyError(
                f"{type(self.optimizer).__name__} cannot take the sparse gradient of an embedding ({error}): use SGD "
                "without momentum and weight decay, Adagrad or SparseAdam, or make the embedding with sparse=False"
            ) from error
        finally:
            self._parameter.grad = None

    def state(self) -> list[Stored]:
        return [Stored(0, self.first, key, value) for key, value in self.optimizer.state[self._parameter].items()]

    def load_state(self, stored: Sequence[Stored]) -> None:
        self.optimizer.state.clear()
        for each in stored:
            self.optimizer.state[self._parameter][each.key] = each.value

    def _sparse(self, gradient: Gradient) -> torch.Tensor:
        numbers, values = self._here(gradient[0]), gradient[1]
        sparse = torch.sparse_coo_tensor(
            numbers.unsqueeze(0),
            values,
            self.table.shape,
            check_invariants=False,  # the rows have been checked
            is_coalesced=bool((numbers[1:] > numbers[:-1]).all()),
        )
        return sparse.coalesce()

    def _here(self, numbers: torch.Tensor) -> torch.Tensor:
        here = numbers - self.first
        if here.numel() and (int(here.min()) < 0 or int(here.max()) >= self.count):
            raise StrategyError(f"a row outside of {self.first} to {self.first + self.count - 1} was asked for")
        return here
