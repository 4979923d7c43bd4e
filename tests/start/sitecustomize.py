"""Every Python that tests start imports this first: torch's compiler is loaded only where something is compiled.

The first optimizer of a process imports ``torch._dynamo``, which takes as long as torch itself, only to tell the
compiler to leave the optimizer's methods alone. As long as there is no compiler in a process there is nothing to tell.
"""

import functools
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _is_there() -> bool:
    return "torch._dynamo" in sys.modules


def change_compile(module: ModuleType) -> None:
    """Of ``torch._compile``: the decorator that has the compiler leave a function alone."""
    disable = module._disable_dynamo  # type: ignore[attr-defined]

    def decorate(function: Any = None, recursive: bool = True) -> Any:
        if function is None:
            return functools.partial(decorate, recursive=recursive)
        disabled = disable(function, recursive)

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            return (disabled if _is_there() else function)(*args, **options)

        return call

    module._disable_dynamo = decorate  # type: ignore[attr-defined]


def change_optimizer(module: ModuleType) -> None:
    """Of ``torch.optim.optimizer``: the decorator of steps, which are differentiated only where that is asked for."""
    decorate_for_compiler = module._use_grad_for_differentiable  # type: ignore[attr-defined]

    def decorate(function: Any) -> Any:
        compiled = decorate_for_compiler(function)

        @functools.wraps(function)
        def step(self: Any, *args: Any, **options: Any) -> Any:
            if _is_there():
                return compiled(self, *args, **options)
            with module.torch.set_grad_enabled(self.defaults["differentiable"]):  # type: ignore[attr-defined]
                return function(self, *args, **options)

        return step

    module._use_grad_for_differentiable = decorate  # type: ignore[attr-defined]


class Finder(MetaPathFinder):
    """Changes modules when they are imported, each once."""

    changes = {"torch._compile": change_compile, "torch.optim.optimizer": change_optimizer}

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        change = self.changes.pop(name, None)
        spec = importlib.util.find_spec(name) if change is not None else None
        if change is not None and spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
