"""The hooks on a model: its forward pass tells a collector when a backward pass begins; loading tells a strategy."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch
from torch import nn

from hocket import spans
from hocket.capture.collector import Collector

_DEEPEST = 100


class ModelHooks:
    """Hooks on ``model``. Copies of the model do not have them: see ``job/plain_copies.py``."""

    before_forward: Callable[[], None] | None = None
    """Called before a forward pass."""

    def __init__(self, model: nn.Module, collector: Collector) -> None:
        self._hooked = {id(module) for module in model.modules()}
        self._collector = collector
        self._began: list[float] = []  # forward passes, of which a model may have several within each other
        model.register_forward_pre_hook(self.before, with_kwargs=True)
        model.register_forward_hook(self.after)

    def watch_loading(
        self,
        model: nn.Module,
        before: Callable[[], None],
        after: Callable[[], None],
        after_all: Callable[[], None] = lambda: None,
    ) -> None:
        """Call ``before`` and ``after`` when ``load_state_dict`` writes to ``model`` or a part of it.

        ``after_all`` is called when all of the model has been loaded.
        """
        self._before_load, self._after_load, self._after_all = before, after, after_all
        self._root = id(model)
        for module in model.modules():
            if module._parameters or module is model:
                module.register_load_state_dict_pre_hook(self.load)
                module.register_load_state_dict_post_hook(self.loaded)

    def before(self, module: nn.Module, args: object, kwargs: object) -> None:
        if id(module) in self._hooked and not torch.compiler.is_compiling():
            collector = self._collector
            if collector.on_forward is not None and torch.is_grad_enabled():
                collector.on_forward((args, kwargs))
            collector.begin()
            if self.before_forward is not None:
                self.before_forward()
            if len(self._began) > _DEEPEST:  # of passes that raised
                self._began.clear()
            self._began.append(time.perf_counter())

    def after(self, module: nn.Module, _: object, output: object) -> None:
        # Under reentrant checkpointing all parameters may get their gradients in inner backward passes; the hook
        # on the output runs in the outer one.
        if id(module) not in self._hooked or torch.compiler.is_compiling():
            return
        if self._began:
            name = "forward" if module.training else "evaluate"
            spans.add(spans.COMPUTE, name, self._began.pop(), time.perf_counter())
        if torch.is_grad_enabled():
            for tensor in tensors(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._arm)

    def load(self, module: nn.Module, *_: object) -> None:
        if id(module) in self._hooked:
            self._before_load()

    def loaded(self, module: nn.Module, _: object) -> None:
        if id(module) in self._hooked:
            self._after_load()
            if id(module) == self._root:
                self._after_all()

    def _arm(self, _: torch.Tensor) -> None:
        self._collector.arm(by_output=True)


def tensors(value: object) -> list[torch.Tensor]:
    """All tensors in what a model is given or returns: tuples, lists, dicts and dataclasses of them included."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = list(vars(value).values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors(item)]
    return []
