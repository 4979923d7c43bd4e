"""Layer 1: a script becomes processes. The package itself can be called: ``hocket.launch(fn, *args, n=4)``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from hocket.specs import Spec


class _Launch(ModuleType):
    """A module that runs functions; ``import hocket.launch.cli`` finds the same one."""

    def __call__(
        self,
        fn: Callable[..., Any],
        *args: Any,
        n: int | Literal["auto"] = "auto",
        strategy: str | Spec | None = None,
        **options: Any,
    ) -> Any:
        """Run ``fn`` on ``n`` fresh workers and return rank 0's result; see ``hocket.launch.function.launch``."""
        from hocket.launch.function import launch

        return launch(fn, *args, n=n, strategy=strategy, **options)


sys.modules[__name__].__class__ = _Launch
