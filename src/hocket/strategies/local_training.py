"""What strategies with a replica on each worker have in common: local steps, and rounds of batches."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from hocket import spans
from hocket.specs import Spec
from hocket.strategies.averaged_gradients import check_exchanged
from hocket.strategies.averaging import average_once, copy_to, floating_buffers, look_up
from hocket.strategies.base import Context, DoneBatch, Strategy, Why
from hocket.strategies.nan_policy import NanPolicy
from hocket.strategies.optimizer_state import CommonState, merged_state
from hocket.strategies.optimizer_step import SUPPORTS_SCALING, step_with_closure, without_scaler
from hocket.updates.update import Step

_SHORTEST = 50e-6  # seconds of the shortest exchange that is worth a span; most batches exchange nothing


class LocalTraining(Strategy):
    """The script's optimizer runs as it is, on this worker's own gradients; ``_exchange`` ends a batch.

    ``state_dict()`` on a rank is that rank's own. ``settle`` makes all equal when a training loop ends or is left.

    Attributes:
        batches: How many batches there have been.
    """

    def __init__(self, context: Context, spec: Spec) -> None:
        super().__init__(context, spec)
        communicator, optimizer, members = context.communicator, context.optimizer, context.members
        self._communicator, self._optimizer, self._members = communicator, optimizer, members
        self._places = floating_buffers(context.model)
        self.steps = self.batches = 0
        self._is_settled, self._has_moved = True, False  # both say what happened since the last exchange
        self._unsettled = 0  # batches since the last exchange
        self._unstepped: list[int] = []  # samples of the batches since the last step
        self._gaps: deque[int] = deque(maxlen=3)  # batches that the last steps were for
        self._since_step = 0
        self._nan_policy = NanPolicy(members.names, context.on_nan)
        self._hooks = self.capture_in_place()
        self._scaling = getattr(optimizer, SUPPORTS_SCALING, False)

    @property
    def skipped(self) -> int:
        return self._nan_policy.skipped

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._unstepped.clear()
        self._note_settled()
        self._has_moved = False

    def end_batch(self, batch: DoneBatch) -> None:
        self.batches += 1
        self._unsettled += 1
        self._is_settled = self._has_moved = False
        self._unstepped.append(batch.samples)
        self._since_step += 1
        if batch.stepped:
            self._gaps.append(self._since_step)
            self._since_step = 0
        elif len(self._unstepped) < min(self._gaps, default=1):
            return  # gradients are accumulated; else a step was left out here, and others may wait in theirs
        self._count()

    def settle(self, why: Why) -> None:
        if why.makes_equal:
            self._count()
            self._settle()
        super().settle(why)
        if why is Why.SWITCH_AWAY:
            CommonState(self._communicator, self._optimizer).make_equal()

    def _settle(self) -> None:
        """Give every worker the model that the strategy stands for; collective."""
        if not self._is_settled:
            begin = time.perf_counter()
            self._make_equal()
            self._note_settled()
            self._note_exchange(begin)

    @property
    def owes(self) -> str:
        if self._is_settled or not self._unsettled:
            return ""
        return f"{self._unsettled} batch{'es' if self._unsettled != 1 else ''} after the last average"

    def _count(self) -> None:
        """Count the batches since the last step in the round."""
        if self._unstepped:
            self._communicator.begin()
            batches, samples = len(self._unstepped), sum(self._unstepped)
            self._unstepped.clear()
            begin = time.perf_counter()
            self._exchange(batches, samples)
            self._note_exchange(begin)

    def _note_settled(self) -> None:
        self._is_settled, self._unsettled = True, 0

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Inside this context, parameters, buffers and optimizer state are the means over all ranks."""
        equal = torch.tensor([int(self._is_settled and not self._has_moved)])
        self._communicator.allreduce(equal, "min")
        tensors = [] if bool(equal) else self._tensors()  # the mean of equal numbers may be rounded
        own = [tensor.detach().clone() for tensor in tensors]
        average_once(self._communicator, tensors)
        try:
            with merged_state(self._communicator, self._optimizer):
                yield
        finally:
            copy_to(tensors, own)

    def _note_exchange(self, begin: float) -> None:
        end = time.perf_counter()
        self.exchanging += end - begin
        if end - begin > _SHORTEST:
            spans.add(spans.EXCHANGE, "exchange models", begin, end, number=self.batches)

    @abstractmethod
    def _exchange(self, batches: int, samples: int) -> None:
        """Some batches are done since the last call: exchange what is due now."""

    @abstractmethod
    def _make_equal(self) -> None:
        """Give all ranks the same model; collective."""

    @property
    def _buffers(self) -> list[torch.Tensor]:
        return look_up(self._places)

    def _tensors(self) -> list[torch.Tensor]:
        """The tensors that are averaged: parameters, and floating-point buffers."""
        return [*self._members.parameters, *self._buffers]

    def captured(self) -> None:
        """A backward pass is over."""
        self._has_moved = True
        self._take_every_step(True)
        self._members.check_homes()
        nonfinite = self.collector.nonfinite
        self._nan_policy.record({} if nonfinite is None else {self._communicator.rank: nonfinite})

    def step(self, original: Step, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        optimizer = self._optimizer
        assert optimizer is not None
        self._members.check_groups(optimizer)
        self._has_moved, self._is_settled = True, False
        self._take_every_step(False)
        result = None
        if closure is not None:
            result = step_with_closure(original, optimizer, closure, lambda: self._may_step(optimizer), **options)
        elif self._unscale(optimizer) and self._may_step(optimizer):
            with without_scaler(optimizer) if not self._scaling else nullcontext():
                result = original(**options)
        self.steps += 1
        return result

    def _take_every_step(self, always: bool) -> None:
        """Have GradScaler call ``step`` also where it finds a gradient that is not finite: a round may end in it."""
        if self._optimizer is not None:
            setattr(self._optimizer, SUPPORTS_SCALING, always or self._scaling)

    @torch.no_grad()
    def _unscale(self, optimizer: Optimizer) -> bool:
        """Unscale gradients where neither GradScaler nor the optimizer does; returns whether a step may be taken."""
        found, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
        if found is not None and bool(found):
            return False
        if scale is not None and not self._scaling:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            for gradient in gradients:
                gradient.div_(float(scale))
        return True

    def _may_step(self, optimizer: Optimizer) -> bool:
        check_exchanged(self.collector)
        return self._nan_policy.allows_step(optimizer)
