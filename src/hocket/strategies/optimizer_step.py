"""Wraps ``optimizer.step``: calls the strategy, runs the script's hooks, and does what GradScaler asks of a step."""

from __future__ import annotations

import functools
import sys
import time
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from hocket import spans
from hocket.updates.update import Step

if TYPE_CHECKING:
    from hocket.strategies.base import Strategy

SUPPORTS_SCALING = "_step_supports_amp_scaling"  # tells GradScaler that this optimizer unscales and skips by itself


def wrap(optimizer: Optimizer, strategy: Strategy) -> None:
    """Have ``optimizer.step(…)`` call ``strategy.step(original_step, …)``, and its collector hear of ``zero_grad``.

    The wrapper has the attributes that LR schedulers look for.
    """
    original: Step = optimizer.step
    original_zero = optimizer.zero_grad

    @like(original)
    def step(this: Optimizer, *args: Any, **kwargs: Any) -> Any:
        collector = strategy.collector
        if collector.rests:
            return original(*args, **kwargs)
        this._opt_called = True  # type: ignore[attr-defined]  # schedulers ask for it, also where no step is taken
        begin = time.perf_counter()
        result = strategy.step(original, *args, **kwargs)
        spans.add(spans.COMPUTE, "update", begin, time.perf_counter())
        if collector.on_step is not None:
            collector.on_step()
        return result

    @like(original_zero)
    def zero_grad(_: Optimizer, *args: Any, **kwargs: Any) -> None:
        strategy.collector.forget()
        original_zero(*args, **kwargs)

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]


def like(method: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Have a function that becomes a method look like the one that it replaces: GradScaler reads its signature.

    A bound method that is wrapped without this would lose one more argument each time.
    """
    return functools.wraps(getattr(method, "__func__", method))


class _LeftOutError(Exception):
    """A step ends before it has changed anything; ``loss`` is what the closure has returned."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


def step_with_closure(
    original: Step, optimizer: Optimizer, closure: Callable[[], Any], prepare: Callable[[], bool], **options: Any
) -> Any:
    """Take a step with a closure, and call ``prepare`` after each call of it.

    If the gradients cannot be used, which ``prepare`` says by False, there are none for the optimizer. If that is so
    after the first call, the step is left out as without a closure: no hook hears of it, and no count.
    """
    has_begun = False

    def judged() -> Any:
        nonlocal has_begun
        loss = closure()
        if prepare():
            has_begun = True
        elif has_begun:
            optimizer.zero_grad(set_to_none=True)
        else:
            raise _LeftOutError(loss)
        return loss

    try:
        return original(judged, **options)
    except _LeftOutError as left_out:
        return left_out.loss


@contextmanager
def hooks_outside(optimizer: Optimizer, options: dict[str, Any]) -> Iterator[None]:
    """Run the hooks on ``optimizer.step`` while the optimizer looks as the script knows it, not divided."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    call_hooks(before, optimizer, options)
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, after
    call_hooks(after, optimizer, options)


def call_hooks(hooks: Mapping[int, Callable[..., Any]], optimizer: Optimizer, options: dict[str, Any]) -> None:
    """Call the hooks on ``optimizer.step``, those before the step or those after it."""
    for hook in hooks.values():
        hook(optimizer, (), options)


@contextmanager
def without_scaler(optimizer: Optimizer) -> Iterator[None]:
    """Inside this context, the step sees no GradScaler, whose work has been done already."""
    names = [name for name in ("grad_scale", "found_inf") if hasattr(optimizer, name)]
    asked = {name: getattr(optimizer, name) for name in names}
    for name in names:
        setattr(optimizer, name, None)
    try:
        yield
    finally:
        for name, value in asked.items():
            setattr(optimizer, name, value)


def tell_scaler(optimizer: Optimizer, *, skipped: bool) -> None:
    """In a step that GradScaler has called: have it go on as if it had found an infinite gradient itself, or none.

    A scaler gives the optimizer a copy of what it has found, and keeps to itself what its ``update()`` reads. So the
    scaler is looked for among the callers.
    """
    if bool(optimizer.found_inf) == skipped:  # type: ignore[attr-defined]
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler):
            for found in caller._found_inf_per_device(optimizer).values():
                found.fill_(float(skipped))
            return
        frame = frame.f_back
