"""The hooks on a model: its forward pass tells a collector when a backward pass begins; loading tells who cares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hocket.strategies.collector import Collector


class ModelHooks:
    """Hooks on ``model``; a copy of the model, or a pickled one, carries hooks that do nothing."""

    def __init__(self, model: nn.Module, collector: Collector, on_load: Callable[[], None] | None = None) -> None:
        self._model: nn.Module | None = model
        self._collector = collector
        model.register_forward_pre_hook(self.before)
        model.register_forward_hook(self.after)
        if on_load is not None:
            self._on_load = on_load
            model.register_load_state_dict_post_hook(self.loaded)

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

    def loaded(self, module: nn.Module, _: object) -> None:
        if module is self._model:
            self._on_load()

    def _arm(self, _: torch.Tensor) -> None:
        self._collector.arm()

    def __deepcopy__(self, _: dict[int, Any]) -> ModelHooks:
        return _idle_hooks()

    def __reduce__(self) -> tuple[Callable[[], ModelHooks], tuple[()]]:
        return _idle_hooks, ()


def _idle_hooks() -> ModelHooks:
    hooks = object.__new__(ModelHooks)
    hooks._model = None
    return hooks


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
