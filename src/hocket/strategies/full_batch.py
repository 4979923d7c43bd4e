"""``full_batch``: gradients of all the data, exchanged once for each call of a closure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hocket.comm.communicator import Communicator
from hocket.errors import UsageError
from hocket.strategies.choices import FullBatch
from hocket.strategies.members import Members
from hocket.strategies.mirrored import MirroredTraining
from hocket.updates.update import Step


class FullBatchTraining(MirroredTraining):
    """Backward passes add up on this worker; the end of a closure, or ``step()`` without one, exchanges the sum.

    All ranks then have the same gradient and the same loss, so that optimizers which decide by them (line searches)
    decide alike, and call the closure equally often.
    """

    def __init__(
        self,
        communicator: Communicator,
        model: nn.Module,
        optimizer: Optimizer,
        members: Members,
        choice: FullBatch,
        on_nan: str,
    ) -> None:
        super().__init__(communicator, model, optimizer, members, on_nan)
        self._adds = choice.reduction == "sum"
        self._losses: _Losses | None = None
        self.collector.held = 1  # for good: ``_exchange_sum`` is the only end
        self._weigh = self.collector.weigh
        self.collector.weigh = self._take_weight  # type: ignore[method-assign]

    def _take_weight(self, weight: float) -> None:
        """Where samples are added up, each counts once; repeated batches never count."""
        self._weigh(float(weight > 0) if self._adds else weight)
        if self._losses is not None:
            self._losses.see(self.collector.weight)

    def _step(self, original: Step, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        optimizer = self._optimizer
        assert optimizer is not None
        self._members.check_groups(optimizer)
        if closure is None:
            self._exchange_sum()
            return original(**options) if self._exchange.before_step(optimizer) else None

        def whole() -> Any:
            self._losses = _Losses(self.collector.weight)
            try:
                with self._losses.recorded(lambda: self.collector.weight):
                    loss = closure()
                share = self._losses.share()
            finally:
                self._losses = None
            self._exchange_sum()
            if not self._exchange.before_step(optimizer):
                optimizer.zero_grad(set_to_none=True)
            return self._reduce(loss, share)

        return original(whole, **options)

    @torch.no_grad()
    def _exchange_sum(self) -> None:
        """Exchange what all backward passes have added up; collective."""
        collector = self.collector
        held, collector.held = collector.held, 0
        collector.passes = max(0, collector.passes - 1)  # a pass that is exchanged counts itself
        try:
            collector.end()
        finally:
            collector.held = held
        if self._adds:
            torch._foreach_mul_(self._exchange.results, self._communicator.size)

    @torch.no_grad()
    def _reduce(self, loss: Any, share: float) -> Any:
        """The loss over all ranks, as the kind of number that the closure has returned."""
        is_tensor = isinstance(loss, torch.Tensor)
        if not (isinstance(loss, (int, float)) or (is_tensor and loss.is_floating_point())):
            return loss
        value = loss.detach().clone() if is_tensor else torch.tensor(float(loss), dtype=torch.float64)
        value = value.contiguous().mul_(share)
        self._communicator.allreduce(value, "sum" if self._adds else "mean")
        return value if is_tensor else float(value)


class _Losses:
    """What the backward passes of a closure began with, and what each counts: the loss must be weighed as they are."""

    def __init__(self, weight: float) -> None:
        self._seen, self._used = {weight}, []  # type: set[float], list[tuple[float, torch.Tensor]]
        self._missed = False

    def see(self, weight: float) -> None:
        """What the batch that comes now counts."""
        self._seen.add(weight)

    @contextmanager
    def recorded(self, weight: Callable[[], float]) -> Iterator[None]:
        """Within, every call of ``backward()`` is noted."""
        original = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **options: Any) -> None:
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            self._used += [(weight(), root.detach()) for root in roots if root.numel() == 1]
            original(tensors, *args, **options)

        torch.autograd.backward = backward
        try:
            yield
        finally:
            torch.autograd.backward = original

    def share(self) -> float:
        """By which the loss of the closure is multiplied to be weighed as its gradients are."""
        if self._seen == {1.0}:
            return 1.0
        if not self._seen - {1.0} <= {weight for weight, _ in self._used}:
            raise UsageError(
                "some batches are smaller than others, or repeated to keep ranks in step, and the closure did not call "
                "backward() for each of them: call it inside of the loop over the loader, or use drop_last=True"
            )
        plain = float(sum(float(root) for _, root in self._used))
        return sum(weight * float(root) for weight, root in self._used) / plain if plain else 1.0
