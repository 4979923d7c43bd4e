"""Catches gradients as autograd makes them, and says when a backward pass is over."""

from __future__ import annotations

import functools
import itertools
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from types import FrameType

import torch
from torch import nn

from hocket import spans
from hocket.capture.bucket_order import Readiness
from hocket.capture.own_gradients import OwnGradients
from hocket.capture.slots import Slots, is_large
from hocket.comm.bucket_layout import Layout
from hocket.comm.exchange import Exchange
from hocket.errors import StrategyError

_NONFINITE = 1 << 62  # flag of a payload; the lower bits hold the parameter's number and what is missing
_NUMBER = 32


class BackwardPasses:
    """Counts the backward passes of the models of one worker; a pass through several of them counts once."""

    def __init__(self) -> None:
        self.count = 0


class Collector:
    """Brings the gradients of ``parameters`` to slots, or leaves them where they are if there are none.

    ``on_end`` is called at the end of each outermost backward pass that is to be exchanged; gradients are then
    in ``views``, zero where there was none. An exchange that overlaps hears of complete buckets before that.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        layout: Layout | None,
        slots: Exchange | Sequence[torch.Tensor] | None,
        on_end: Callable[[], None],
        *,
        check_finite: bool,
    ) -> None:
        self.number = next(_numbers)
        self.backward = BackwardPasses()  # until the worker whose model this is gives its own
        self.names, self.parameters = list(names), list(parameters)
        self.held = 0  # depth of accumulate() contexts
        self.passes = 0  # backward passes since the last exchange that were held back
        self.mean = False  # whether passes that were held back are averaged
        self.rests = False  # another collector is at work on the same parameters
        self.meanwhile: Callable[[], None] | None = None  # called while gradients arrive, and a pass goes on
        self.on_forward: Callable[[object], None] | None = None  # a forward pass begins, with these inputs
        self.on_step: Callable[[], None] | None = None  # optimizer.step() has done its work, or has left it out
        self.on_backward: Callable[[Sequence[FrameType]], None] | None = None  # a pass begins, in this call
        self._on_end = on_end
        self._check_finite = check_finite
        self.unfinished = False  # gradients have arrived in a pass whose end nobody will tell
        self.weight = 1.0  # by which the gradients of the next backward passes are multiplied
        self.told = 1.0  # the weight as the loader has told it
        self.adds = 0  # by what gradients of losses that are sums are multiplied; 0 if losses are means
        self.beside: Sequence[nn.Parameter] = ()  # parameters that are weighed, and whose gradients are not collected
        self.samples = 0  # samples of all ranks in the batch at work; 0 if unknown
        self.taken = 0  # optimizer steps on these parameters, to find a rank that leaves one out
        self.collected = 1  # backward passes that the last exchange is made of
        self.on_complete: Callable[[int, torch.Tensor], None] | None = None  # a bucket, before it is sent off
        self._task: int | None = None  # autograd's number of the backward pass whose end will call ``end``
        self._handles: list[torch.utils.hooks.RemovableHandle] = []  # to remove the hooks
        self._hooked = bytearray(len(self.parameters))
        self._weights: list[torch.utils.hooks.RemovableHandle] = []
        self._backward_code = torch.autograd.backward.__code__
        # Autograd works for a GPU in a thread of its own, in which the script's call of backward() is not to be seen.
        self._outermost = 0 if parameters and parameters[0].is_cuda else 1
        self._exchange: Exchange | None = None
        self.readiness: Readiness | None = None
        self._slots: Slots | OwnGradients = OwnGradients(self.names, self.parameters, check_finite=check_finite)
        if layout is not None and slots is not None:
            self.adopt(layout, slots)
        self.hook_new()
        self.leave_out_idle()
        if self.readiness is not None:
            self.readiness.begin()

    def adopt(self, layout: Layout, slots: Exchange | Sequence[torch.Tensor], *, early: bool | None = None) -> None:
        """Collect into these slots from now on.

        Args:
            layout: How the slots are laid out.
            slots: One flat tensor per bucket, in an exchange or in memory of this worker.
            early: Whether buckets may be sent off before a pass is over; None if the first pass is to show that.
        """
        exchange = self._exchange = slots if isinstance(slots, Exchange) else None
        self._slots = Slots(
            self.names,
            self.parameters,
            layout,
            slots.slots if isinstance(slots, Exchange) else slots,
            claim=None if exchange is None else exchange.claim,
            check_finite=self._check_finite,
        )
        self._slots.set_trained(bytes(self._hooked))
        self.leave_out_idle()
        self.readiness = None
        if self._exchange is not None and self._exchange.overlaps:
            on_gpu = self.parameters[0].is_cuda
            self.readiness = Readiness(self._slots.bucket_of, self._slots.trained, early=early, on_gpu=on_gpu)

    def move(self, layout: Layout, slots: Exchange | Sequence[torch.Tensor]) -> None:
        """Collect into other slots, which have what was collected so far."""
        before = self._slots
        self.adopt(layout, slots)
        if isinstance(before, Slots) and isinstance(self._slots, Slots):
            self._slots.take_over(before)

    @property
    def views(self) -> list[torch.Tensor]:
        """Where gradients are collected, by parameter."""
        return self._slots.views

    @property
    def missing(self) -> bytes:
        """One byte per parameter without a gradient here, of the last pass."""
        return self._slots.missing

    @missing.setter
    def missing(self, missing: bytes) -> None:
        self._slots.missing = missing

    @property
    def nonfinite(self) -> int | None:
        """A parameter whose gradient is not finite here, of the pass that is being ended."""
        return self._slots.nonfinite

    def begin(self) -> None:
        """Before a forward pass, or a context that accumulates: notice what was unfrozen, or thrown away."""
        if self.rests:
            return
        if any(p.requires_grad for p in self._frozen_parameters):
            self.hook_new()
        if self.passes and all(p.grad is None for p in self.parameters):
            self.forget()

    def forget(self) -> None:
        """Gradients that were held back have been thrown away by ``zero_grad``."""
        self.passes, self.mean = 0, self.mean and self.held > 0

    def release(self) -> None:
        """Take the hooks away for good. Python does not see that a parameter and its hook hold only each other."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def hook_new(self) -> None:
        """Hook every parameter that requires a gradient and has no hook yet."""
        for i, parameter in enumerate(self.parameters):
            if parameter.requires_grad and not self._hooked[i]:
                self._hooked[i] = 1
                hook = self._make_hook(i, is_large(parameter))
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        if self.weight != 1:
            self._hook_weight()
        self._slots.set_trained(bytes(self._hooked))
        if self.readiness is not None:
            self.readiness.set_trained(self._slots.trained)
        self._frozen_parameters = [p for p, hooked in zip(self.parameters, self._hooked, strict=True) if not hooked]

    def leave_out_idle(self) -> None:
        """Let the exchange know which buckets get no gradients; all ranks must do so at the same time."""
        self._known = self.trained
        if self._exchange is not None:
            idle = [bucket for bucket, inside in enumerate(self._slots.trained) if not inside]
            self._exchange.idle = frozenset(idle)

    @property
    def has_news(self) -> bool:
        """Whether parameters were unfrozen since the exchange last heard which are trained."""
        return self._known != self.trained

    @property
    def trained(self) -> bytes:
        """One byte per parameter that may get gradients; must be equal on all ranks."""
        return bytes(self._hooked)

    def weigh(self, weight: float) -> None:
        """Multiply what the next backward passes contribute; weight 0 drops it, so that a NaN does not count.

        Where losses are sums over samples, each counts once, whatever the batches: the sum is as many times the mean as
        there are workers over which gradients are averaged.
        """
        self.told = weight
        self.weight = float(self.adds * (weight > 0)) if self.adds else weight
        self._hook_weight()

    def _hook_weight(self) -> None:
        weight = self.weight
        for handle in self._weights:
            handle.remove()
        self._weights.clear()
        if weight != 1:
            for parameter in (*self.parameters, *self.beside):
                if parameter.requires_grad:
                    self._weights.append(parameter.register_hook(_scaler(weight)))

    def payload(self) -> int:
        """What the other ranks must know of this pass: gradients that are missing or not finite here."""
        missing = zlib.crc32(self.missing) if 1 in self.missing else 0
        number = self._slots.nonfinite
        return missing if number is None else _NONFINITE | number << _NUMBER | missing

    def repeat_payload(self, payload: int) -> int:
        """An earlier payload, with what is missing now."""
        return payload >> _NUMBER << _NUMBER | (zlib.crc32(self.missing) if 1 in self.missing else 0)

    def _make_hook(self, index: int, large: bool) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            if self.rests:
                return
            task = _current_task()
            if self._task != task:
                self.arm()
            if self.meanwhile is not None:
                self.meanwhile()
            if not self.held:
                if large:
                    self._slots.copy(index, self._scale())
                if self.readiness is not None:
                    self._arrive(self.readiness, index, nested=self._task != task)

        return hook

    def _arrive(self, readiness: Readiness, index: int, *, nested: bool) -> None:
        assert self._exchange is not None
        bucket = readiness.arrive(index, nested=nested)
        if bucket is not None:
            self._slots.finish(bucket, self._scale())
            if self.on_complete is not None:
                self.on_complete(bucket, self._exchange.slots[bucket])
            self._exchange.ready(bucket)
        elif readiness.has_sent:
            self._exchange.progress()

    def _scale(self) -> float:
        return 1 / (self.passes + 1) if self.mean else 1.0

    def arm(self, *, by_output: bool = False) -> None:
        """Have ``end`` called when the outermost backward pass is over.

        A model's output gets its gradient in ``torch.autograd.grad``, too, which leaves ``p.grad`` alone; there is
        nothing to exchange then.
        """
        if self.rests:
            return
        task, calls = _current_task(), self._calls(sys._getframe(1))
        depth = len(calls)
        if task == self._task or (by_output and depth == 0 and not self._calls_elsewhere()):
            return
        if by_output and self._task is not None:
            return  # torch.autograd.grad inside of a backward pass
        if depth > self._outermost:
            self.unfinished |= self._task is None  # until the outer pass is found, too
            return
        if self._task is not None:  # the last backward pass raised in the middle: begin anew
            if self.readiness is not None:
                if self.readiness.has_sent:
                    raise StrategyError(
                        "the last backward pass raised when a part of its gradients had been sent to other hosts: do "
                        "not go on after an exception in backward(); end the script, and resume from a checkpoint"
                    )
                self.readiness.begin()
            self._slots.reset()
            _armed.pop(self._task, None)
            _begun.pop(self._task, None)
        self._task = task
        if any(p.requires_grad for p in self._frozen_parameters):
            self.hook_new()  # before anything of this pass is sent
        if task not in _armed:
            _armed[task], _begun[task] = [], time.perf_counter()
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_end_all, task))
        _armed[task].append(self)
        if self.on_backward is not None:
            self.on_backward(calls or self._calls_elsewhere())

    def _calls(self, frame: FrameType | None) -> list[FrameType]:
        """The calls of ``backward()`` that a frame is in; reentrant checkpointing makes inner ones."""
        calls = []
        while frame is not None:
            if frame.f_code is self._backward_code:
                calls.append(frame)
            frame = frame.f_back
        return calls

    def _calls_elsewhere(self) -> list[FrameType]:
        """The calls of ``backward()``, and not of ``grad()``, in which other threads wait for a GPU."""
        if self._outermost:
            return []
        return [call for frame in sys._current_frames().values() for call in self._calls(frame)]

    def end(self) -> None:
        """The backward pass is over."""
        self._task, self.unfinished = None, False
        if self.held:
            self.passes += 1
            return
        if any(p.requires_grad for p in self._frozen_parameters):
            self.hook_new()
        self._slots.finish_all(self._scale())
        self.collected, self.passes, self.mean = self.passes + 1, 0, False
        try:
            self._on_end()
        finally:
            self._slots.reset()
            if self.readiness is not None:
                self.readiness.begin()


def read_payloads(payloads: Sequence[int]) -> tuple[dict[int, int], bool]:
    """From all ranks' payloads: the parameter that is not finite by rank, and whether the same ones are missing."""
    nonfinite = {r: (p & ~_NONFINITE) >> _NUMBER for r, p in enumerate(payloads) if p & _NONFINITE}
    return nonfinite, len({p & (1 << _NUMBER) - 1 for p in payloads}) == 1


_armed: dict[int, list[Collector]] = {}  # collectors that wait for the end of each backward pass
_begun: dict[int, float] = {}  # when the first gradient of each backward pass was seen
_numbers = itertools.count()


def _end_all(task: int) -> None:
    spans.add(spans.COMPUTE, "backward", _begun.pop(task), time.perf_counter())
    # Which of several models got a gradient first may differ between ranks; the order of exchanges must not.
    armed = sorted(_armed.pop(task), key=lambda collector: collector.number)
    for passes in {id(collector.backward): collector.backward for collector in armed}.values():
        passes.count += 1
    for collector in armed:
        collector.end()


_current_task = torch._C._current_graph_task_id


def _scaler(weight: float) -> Callable[[torch.Tensor], torch.Tensor]:
    if weight == 0:
        return torch.zeros_like
    return lambda gradient: gradient * weight
