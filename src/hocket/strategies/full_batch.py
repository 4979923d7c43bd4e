"""``full_batch``: gradients of all the data, exchanged once for each call of a closure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hocket.errors import UsageError, WorkerLost
from hocket.specs import FullBatch
from hocket.strategies.base import BatchAtWork, Context
from hocket.strategies.mirrored import MirroredTraining
from hocket.strategies.optimizer_step import step_with_closure
from hocket.updates.update import Step


class FullBatchTraining(MirroredTraining):
    """Backward passes add up on this worker; the end of a closure, or ``step()`` without one, exchanges the sum.

    All ranks then have the same gradient and the same loss, so that optimizers which decide by them (line searches)
    decide alike, and call the closure equally often. If a worker is lost, the others repeat the call of the closure in
    hand, on data that is divided anew: the optimizer sees the gradient and the loss of all the data, as before.
    """

    def __init__(self, context: Context, spec: FullBatch) -> None:
        super().__init__(context, spec)
        self._adds = spec.reduction == "sum"
        self.collector.held = 1  # for good: only ``_exchange_sum`` exchanges gradients
        self._weigh = self.collector.weigh
        self._forget = self.collector.forget
        self.collector.weigh = self._take_weight  # type: ignore[method-assign]
        self.collector.forget = self._begin_anew  # type: ignore[method-assign]
        self._began = context.communicator.generation
        self._since: int | None = None  # the generation of the first batch since the last exchange, if there was one
        self._weight = 1.0  # weight of this rank's part of the batch at work, relative to other ranks
        self._part: float | None = None  # size of the batch at work, relative to an average one; None outside of a loop
        self._parts: list[float] = []  # relative sizes of the batches since the last exchange
        self._first = 0  # samples of the first batch since the last exchange
        self._passes = 0  # backward passes when the batch at work came
        self._count: _Count = (None, 1.0)  # the count of the batch at work
        self._seen: set[_Count] = set()  # counts of the batches since the last exchange
        self._used: set[_Count] = set()  # counts of those batches that had a backward pass

    def begin_batch(self, batch: BatchAtWork) -> None:
        super().begin_batch(batch)
        everywhere = batch.everywhere
        self._look_back()
        if self.collector.backward.count == self._passes and self._parts and everywhere:
            self._parts.pop()  # another loader's part of the same batch, as with zip()
        self._first = self._first if self._parts else everywhere
        self._passes, self._part = self.collector.backward.count, None
        if everywhere:
            self._since = self._communicator.generation if self._since is None else self._since
            self._part = everywhere / (batch.mean or self._first)
            self._parts.append(self._part)
        self._weigh(self._now())
        self._count = (self._part, self.collector.weight)
        self._seen.add(self._count)

    def _begin_anew(self) -> None:
        """The sum was exchanged or thrown away: begin a new one; the batch at work may have more backward passes."""
        self._forget()
        self._passes, self._seen, self._used = self.collector.backward.count, set(), set()
        self._parts = [self._part] if self._part is not None else []

    def _take_weight(self, weight: float) -> None:
        self._weight = weight
        self._weigh(self._now())

    def _now(self) -> float:
        """How much a backward pass counts. Where samples are added up, each counts once; repeated batches count 0."""
        return float(self._weight > 0) if self._adds else self._weight * (self._part or 1.0)

    def _look_back(self) -> None:
        """Note whether there was a backward pass since the last batch came."""
        if self.collector.backward.count > self._passes:
            self._used.add(self._count)

    def step(self, original: Step, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        optimizer = self._optimizer
        assert optimizer is not None
        self._members.check_groups(optimizer)
        if closure is None:
            if self._exchange_sum() != self._communicator.generation:
                raise WorkerLost(
                    "a worker was lost while gradients of all the data were added up without a closure, so this cannot "
                    "be repeated: give optimizer.step() a closure that goes over the loader"
                )
            return original(**options) if self._exchange.before_step(optimizer) else None

        def whole() -> Any:
            while True:
                generation, losses = self._communicator.generation, _Losses(self._now)
                with losses.recorded():
                    loss = closure()
                self._exchange_sum()
                loss = self._reduce(loss, losses, self._factor)
                if self._communicator.generation == generation:
                    return loss
                optimizer.zero_grad(set_to_none=True)

        return step_with_closure(original, optimizer, whole, lambda: self._exchange.before_step(optimizer), **options)

    @torch.no_grad()
    def _exchange_sum(self) -> int:
        """Exchange the sum of the gradients of all backward passes; collective.

        The sum has a factor, so that batches count on the average as much as the script means them to.

        Returns:
            The generation in which the first batch of the sum came.
        """
        collector, since = self.collector, self._began if self._since is None else self._since
        self._look_back()
        uneven = {count for count in self._seen if count[0] is not None and count != (1.0, 1.0)}
        if uneven - self._used and since == self._communicator.generation:  # else the sum is not used
            raise UsageError(
                "some batches are smaller than others, or repeated to keep ranks in step, and there was no backward() "
                "for each of them: call it inside of the loop over the loader, or use drop_last=True"
            )
        self._factor = factor = float(self._communicator.size) if self._adds else 1.0
        if not self._adds and self._parts:
            self._factor = factor = len(self._parts) / math.fsum(self._parts)
        gradients = [p.grad for p in collector.parameters if p.grad is not None]
        if gradients and factor != 1:
            torch._foreach_mul_(gradients, factor)
        held, collector.held = collector.held, 0
        collector.passes = max(0, collector.passes - 1)  # a pass that is exchanged counts itself
        try:
            collector.end()
        finally:
            collector.held = held
            self._begin_anew()
        if self._since is None and self._communicator.generation != self._began:
            raise WorkerLost(
                "a worker was lost, and with it data that did not come from the loader, which only that worker had: go "
                "over the loader of hocket.distribute() in the closure"
            )
        self._since = None
        return since

    @torch.no_grad()
    def _reduce(self, loss: Any, losses: _Losses, factor: float) -> Any:
        """The loss over all ranks, as the kind of number that the closure has returned."""
        is_tensor = isinstance(loss, torch.Tensor)
        if not (isinstance(loss, (int, float)) or (is_tensor and loss.is_floating_point())):
            return loss
        value = loss.detach().clone() if is_tensor else torch.tensor(float(loss), dtype=torch.float64)
        value = losses.weigh(value.contiguous()).mul_(factor)
        self._communicator.allreduce(value, "mean")
        return value if is_tensor else float(value)


_Count = tuple[float | None, float]  # the relative size of a batch, and how much this rank's gradients of it count


class _Losses:
    """The losses and weights of the backward passes of a closure, whose result must be weighed in the same way."""

    def __init__(self, weight: Callable[[], float]) -> None:
        self._weight = weight
        self._used: list[tuple[float, torch.Tensor]] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside this context, every call of ``backward()`` is noted."""
        original = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **options: Any) -> None:
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            self._used += [(self._weight(), root.detach()) for root in roots if root.numel() == 1]
            original(tensors, *args, **options)

        torch.autograd.backward = backward
        try:
            yield
        finally:
            torch.autograd.backward = original

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss that the closure has returned, weighed as its gradients are; in place.

        As a rule the loss is the sum of what ``backward()`` was called on; else it is taken to be proportional to that.
        """
        if all(weight == 1 for weight, _ in self._used):
            return loss
        roots = [(weight, float(root)) for weight, root in self._used]
        plain, weighed = math.fsum(root for _, root in roots), math.fsum(weight * root for weight, root in roots)
        if loss.numel() == 1 and abs(float(loss) - plain) <= 1e-6 * math.fsum(abs(root) for _, root in roots):
            return loss.fill_(weighed)  # losses of either sign may cancel each other, and have no proportion then
        return loss.mul_(weighed / plain if plain else 1.0)
