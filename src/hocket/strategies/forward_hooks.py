"""The two hooks on a model's forward pass that tell a collector when a backward pass begins."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hocket.strategies.collector import Collector


class ForwardHooks:
    """Hooks on ``model``; a copy of the model, or a pickled one, carries hooks that do nothing."""

    def __init__(self, model: nn.Module, collector: Collector) -> None:
        self._model, self._collector = model, collector
        model.register_forward_pre_hook(self.before)
        model.register_forward_hook(self.after)

    def before(self, module: nn.Module, _: object) -> None:
        if module is self._model and not torch.compiler.is_compiling():
            self._collector.begin()

    def after(self, module: nn.Module, _: object, output: object) -> None:
        # Under reentrant checkpointing all parameters may get their gradients in inner backward passes; the hook
        # on the output runs in the outer one.
        if module is self._model and not torch.compiler.is_compiling() and torch.is_grad_enabled():
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._arm)

    def _arm(self, _: torch.Tensor) -> None:
        self._collector.arm()

    def __deepcopy__(self, _: dict[int, Any]) -> _NoHooks:
        return _NoHooks()

    def __reduce__(self) -> tuple[type[_NoHooks], tuple[()]]:
        return _NoHooks, ()


class _NoHooks:
    def before(self, *_: object) -> None: ...

    def after(self, *_: object) -> None: ...


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
