"""What ``p.grad`` is in ``central(fused=True)``: this worker's part of a gradient that is never averaged as such.

Reading it would give a wrong number, so it refuses to be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hocket.errors import StrategyError

_ALLOWED = {
    "zero_",
    "_foreach_zero_",
    "detach_",
    "requires_grad_",
    "__get__",
    "__set__",
    "__repr__",
    "__format__",
    "dim",
    "size",
    "stride",
    "numel",
    "is_floating_point",
    "is_complex",
    "data_ptr",
}


class LocalGradient(torch.Tensor):
    """A gradient in this worker's slot; only ``zero_grad`` and looking at its shape and type are possible."""

    @staticmethod
    def seal(view: torch.Tensor) -> LocalGradient:
        """``view`` as a gradient that cannot be read."""
        return view.as_subclass(LocalGradient)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.__name__ not in _ALLOWED:
            raise StrategyError(
                f"{func.__name__}() needs the averaged gradient, which strategy 'central(fused=True)' never makes "
                "(no clipping, GradScaler or gradient logging there): use --strategy central or mirrored"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LocalGradient(shape={tuple(self.shape)}, dtype={self.dtype})"
