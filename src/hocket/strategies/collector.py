"""Catches gradients as autograd makes them, and says when a backward pass is over.

Large gradients are copied to this rank's slot the moment they exist, while they are in the cache, and
``p.grad`` is set to None so that the next layer can use the same memory. Small ones follow at the end in one call.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import nn

from hocket.comm.layout import Layout
from hocket.errors import StrategyError

LARGE = 1 << 14  # elements from which a gradient is copied at once
_NONFINITE = 1 << 62  # flag of a payload; below it the parameter's number, and below that what is missing
_NUMBER = 32


class Collector:
    """Brings the gradients of ``parameters`` to slots.

    ``on_end`` is called at the end of each outermost backward pass that is to be exchanged; gradients are then
    in ``views``, zero where there was none.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        slot_sets: Sequence[Sequence[torch.Tensor]],
        on_end: Callable[[], None],
        *,
        check_finite: bool,
    ) -> None:
        self.number = next(_numbers)
        self.names, self.parameters = list(names), list(parameters)
        self._view_sets = [layout.views(slots) for slots in slot_sets]
        self._slot_sets = slot_sets
        self.held = 0  # depth of accumulate() contexts
        self.passes = 0  # backward passes since the last exchange that were held back
        self.mean = False  # whether those are averaged
        self.missing = bytes(len(self.parameters))  # one byte per parameter without a gradient here, of the last pass
        self._on_end = on_end
        self._check_finite = check_finite
        self.unfinished = False  # gradients have arrived in a pass whose end nobody will tell
        self.weight = 1.0  # of what the next backward passes contribute
        self._task: int | None = None  # autograd's number of the backward pass whose end will call ``end``
        self._total = 0.0
        self._copied = bytearray(len(self.parameters))
        small_runs = layout.runs(i for i, p in enumerate(self.parameters) if p.numel() < LARGE)
        self._small_flats = [[slots[b][start:end] for b, start, end in small_runs] for slots in slot_sets]
        self._hooked = bytearray(len(self.parameters))
        self.use(slot_sets[0])
        self._weights: list[torch.utils.hooks.RemovableHandle] = []
        self._backward_code = torch.autograd.backward.__code__
        self.hook_new()

    def use(self, slots: Sequence[torch.Tensor]) -> None:
        """Collect into ``slots``, one of the sets, from now on."""
        current = next(i for i, known in enumerate(self._slot_sets) if known is slots)
        self.views, self._flats = self._view_sets[current], self._small_flats[current]

    def begin(self) -> None:
        """Before a forward pass, or a context that accumulates: notice what was unfrozen, or thrown away."""
        if any(p.requires_grad for p in self._frozen_parameters):
            self.hook_new()
        if self.passes and all(p.grad is None for p in self.parameters):
            self.forget()

    def forget(self) -> None:
        """Gradients that were held back have been thrown away by ``zero_grad``."""
        self.passes, self.mean = 0, self.mean and self.held > 0

    def hook_new(self) -> None:
        """Hook every parameter that requires a gradient and has no hook yet."""
        for i, parameter in enumerate(self.parameters):
            if parameter.requires_grad and not self._hooked[i]:
                self._hooked[i] = 1
                make = self._large_hook if parameter.numel() >= LARGE else self._small_hook
                parameter.register_post_accumulate_grad_hook(make(i))
        trained = [i for i, hooked in enumerate(self._hooked) if hooked]
        self._small = [i for i in trained if self.parameters[i].numel() < LARGE]
        self._large = [i for i in trained if self.parameters[i].numel() >= LARGE]
        self.frozen = bytes(not hooked for hooked in self._hooked)
        self._frozen_parameters = [p for p, hooked in zip(self.parameters, self._hooked, strict=True) if not hooked]

    def weigh(self, weight: float) -> None:
        """Multiply what the next backward passes contribute; weight 0 drops it, so that a NaN does not count."""
        self.weight = weight
        for handle in self._weights:
            handle.remove()
        self._weights.clear()
        if weight != 1:
            for parameter in self.parameters:
                if parameter.requires_grad:
                    self._weights.append(parameter.register_hook(_scaler(weight)))

    def payload(self) -> int:
        """What the other ranks must know of this pass: gradients that are missing or not finite here."""
        missing = zlib.crc32(self.missing) if 1 in self.missing else 0
        if math.isfinite(self._total):
            return missing
        number = self._find_nonfinite()
        return missing if number is None else _NONFINITE | number << _NUMBER | missing

    def repeat_payload(self, payload: int) -> int:
        """An earlier payload, with what is missing now."""
        return payload >> _NUMBER << _NUMBER | (zlib.crc32(self.missing) if 1 in self.missing else 0)

    def _small_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            if self._task != _current_task():
                self.arm()

        return hook

    def _large_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            if self._task != _current_task():
                self.arm()
            if not self.held:
                self._copy(index, parameter)

        return hook

    def _copy(self, index: int, parameter: torch.Tensor) -> None:
        gradient, view, scale = parameter.grad, self.views[index], self._scale()
        assert gradient is not None
        with torch._C.DisableTorchFunctionSubclass():  # it may be a LocalGradient
            if gradient.layout != torch.strided:
                self._refuse_sparse(index)
            if self._copied[index]:  # a tied parameter in several reentrant checkpoints arrives in parts
                view.add_(gradient, alpha=scale)
            elif scale == 1:
                view.copy_(gradient)
            else:
                torch.mul(gradient, scale, out=view)
        parameter.grad = None
        self._copied[index] = 1
        if self._check_finite:
            self._total += _total(view)

    def _scale(self) -> float:
        return 1 / (self.passes + 1) if self.mean else 1.0

    def arm(self, *, by_output: bool = False) -> None:
        """Have ``end`` called when the outermost backward pass is over.

        A model's output gets its gradient in ``torch.autograd.grad``, too, which leaves ``p.grad`` alone; there is
        nothing to exchange then.
        """
        task, depth = _current_task(), self._depth()
        if task == self._task or (by_output and depth == 0):
            return
        if depth > 1:
            self.unfinished |= self._task is None  # until the outer pass is found, too
            return
        if self._task is not None:  # the last backward pass raised in the middle: begin anew
            self._total, self._copied = 0.0, bytearray(len(self.parameters))
            _armed.pop(self._task, None)
        self._task = task
        if task not in _armed:
            _armed[task] = []
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_end_all, task))
        _armed[task].append(self)

    def _depth(self) -> int:
        """How many calls of ``backward()`` this one is in; reentrant checkpointing makes inner ones."""
        frame, depth = sys._getframe(1), 0
        while frame is not None:
            depth += frame.f_code is self._backward_code
            frame = frame.f_back  # type: ignore[assignment]
        return depth

    def end(self) -> None:
        """The backward pass is over."""
        self._task, self.unfinished = None, False
        if self.held:
            self.passes += 1
            return
        self._collect_rest()
        self.passes, self.mean = 0, False
        self._on_end()
        self._total = 0.0
        self._copied = bytearray(len(self.parameters))

    def _collect_rest(self) -> None:
        if any(p.requires_grad for p in self._frozen_parameters):
            self.hook_new()
        late = self._small
        if self._copied.count(1) < len(self._large):
            late = late + [i for i in self._large if not self._copied[i]]
        gradients = [self.parameters[i].grad for i in late]
        missing = bytearray(self.frozen)
        absent = [i for i, gradient in zip(late, gradients, strict=True) if gradient is None]
        if absent:
            for i in absent:
                missing[i] = 1
                self.views[i].zero_()
            late = [i for i in late if not missing[i]]
            gradients = [gradient for gradient in gradients if gradient is not None]
        self.missing = bytes(missing)
        views = [self.views[i] for i in late]
        with torch._C.DisableTorchFunctionSubclass():  # they may be LocalGradients
            try:
                if views:
                    torch._foreach_copy_(views, gradients)  # type: ignore[arg-type]
            except RuntimeError:
                for i, gradient in zip(late, gradients, strict=True):
                    if gradient.layout != torch.strided:  # type: ignore[union-attr]
                        self._refuse_sparse(i)
                raise
        scale = self._scale()
        if scale != 1 and views:
            torch._foreach_mul_(views, scale)
        if self._check_finite:
            late_large = [view for view in views if view.numel() >= LARGE]
            self._total += sum(map(_total, self._flats)) + sum(map(_total, late_large))

    def _find_nonfinite(self) -> int | None:
        for i, view in enumerate(self.views):
            if not bool(torch.isfinite(view).all()):
                return i
        return None

    def _refuse_sparse(self, index: int) -> None:
        raise StrategyError(
            f"the gradient of {self.names[index]!r} is sparse, which this strategy cannot exchange: "
            "make the embedding with sparse=False"
        )


def read_payloads(payloads: Sequence[int]) -> tuple[dict[int, int], bool]:
    """From all ranks' payloads: the parameter that is not finite by rank, and whether the same ones are missing."""
    nonfinite = {r: (p & ~_NONFINITE) >> _NUMBER for r, p in enumerate(payloads) if p & _NONFINITE}
    return nonfinite, len({p & (1 << _NUMBER) - 1 for p in payloads}) == 1


_armed: dict[int, list[Collector]] = {}  # those that wait for the end of a backward pass
_numbers = itertools.count()


def _end_all(task: int) -> None:
    # Which of several models got a gradient first may differ between ranks; the order of exchanges must not.
    for collector in sorted(_armed.pop(task), key=lambda collector: collector.number):
        collector.end()


_current_task = torch._C._current_graph_task_id


def _total(tensor: torch.Tensor) -> float:
    """A number that is not finite if any element is not; by far the cheapest look at all of them."""
    if tensor.dtype == torch.float16:
        return float(tensor.sum(dtype=torch.float32))
    return float(tensor.sum())


def _scaler(weight: float) -> Callable[[torch.Tensor], torch.Tensor]:
    if weight == 0:
        return torch.zeros_like
    return lambda gradient: gradient * weight
