"""Makes copies and pickles of distributed models and optimizers plain: without hooks, usable without Hocket."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import _WrappedHook
from torch.optim import Optimizer

_OURS = __name__.partition(".")[0]
_COMPANIONS = ("_with_kwargs", "_always_called")  # how hooks are called, by the same numbers
_ADDED = ("__reduce_ex__", "__deepcopy__")


def copy_plainly(model: nn.Module, optimizers: list[Optimizer]) -> None:
    """Let ``torch.save``, ``pickle`` and ``copy.deepcopy`` see the model and its optimizers as the script made them.

    Both ask the object itself, before its class, how it is to be copied.
    """
    for module in model.modules():
        vars(module)["__reduce_ex__"] = functools.partial(_reduce_module, module)
        if hasattr(type(module), "__deepcopy__"):  # parametrized modules and graphs of torch.fx copy all they have
            vars(module)["__deepcopy__"] = functools.partial(_copy_module, module)
    for optimizer in optimizers:
        vars(optimizer)["__reduce_ex__"] = functools.partial(_reduce_optimizer, optimizer)


def _reduce_module(module: nn.Module, protocol: int) -> Any:
    with _as_made(module):
        return module.__reduce_ex__(protocol)


def _copy_module(module: nn.Module, memo: dict[int, Any]) -> Any:
    with _as_made(module):
        return copy.deepcopy(module, memo)


@contextmanager
def _as_made(module: nn.Module) -> Iterator[None]:
    """Inside this context, ``module`` has nothing of Hocket; its submodules still have."""
    for hook in _find(module._state_dict_pre_hooks):  # these hooks bring parameters that are elsewhere
        hook(module, "", False)
    own = vars(module)
    plain = {name: value for name, value in own.items() if name not in _ADDED}
    for name, hooks in own.items():
        if name.endswith("_hooks") and isinstance(hooks, dict):
            ours = {number for number, hook in hooks.items() if _is_ours(hook)}
            for each in (name, *(name + companion for companion in _COMPANIONS)):
                if ours and each in own:
                    plain[each] = type(own[each])((n, value) for n, value in own[each].items() if n not in ours)
    object.__setattr__(module, "__dict__", plain)
    try:
        yield
    finally:
        object.__setattr__(module, "__dict__", own)


def _reduce_optimizer(optimizer: Optimizer, protocol: int) -> Any:
    """Pickle an optimizer as its class does, with the state that ``state_dict()`` would have."""
    for hook in _find(optimizer._optimizer_state_dict_pre_hooks):
        hook(optimizer)
    reduced = type(optimizer).__reduce_ex__(optimizer, protocol)
    state = reduced[2]
    for hook in _find(optimizer._optimizer_state_dict_post_hooks):
        state = hook(optimizer, state) or state
    if isinstance(state, dict) and "state" in state:
        state = {**state, "state": defaultdict(dict, state["state"])}
    return (*reduced[:2], state, *reduced[3:])


def _find(hooks: dict[int, Any]) -> list[Callable[..., Any]]:
    return [hook for hook in hooks.values() if _is_ours(hook)]


def _is_ours(hook: Any) -> bool:
    """Whether a hook was registered by Hocket: torch may have wrapped it."""
    hook = hook.hook if isinstance(hook, _WrappedHook) else hook
    home = getattr(hook, "__module__", None) or ""
    return home.partition(".")[0] == _OURS
