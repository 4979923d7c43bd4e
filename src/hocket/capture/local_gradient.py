"""What ``p.grad`` is in ``central(fused=True)``: this worker's part of a gradient that is never averaged as such.

Reading ``p.grad`` would give a wrong number, so it refuses to be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hocket.errors import StrategyError

_ALLOWED_CALLS = {
    "zero_", "_foreach_zero_", "detach_", "requires_grad_", "__repr__", "__format__",
    "dim", "size", "stride", "numel", "is_floating_point", "is_complex", "data_ptr",
}  # fmt: skip
_ALLOWED_ATTRIBUTES = {
    "shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "names", "grad", "grad_fn", "requires_grad",
    "is_leaf", "is_sparse", "is_sparse_csr", "is_nested", "is_cpu", "is_cuda", "is_meta", "is_quantized", "_version",
    "_backward_hooks", "_base", "is_mkldnn", "is_mps", "is_xpu", "retains_grad", "output_nr",
}  # fmt: skip


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
        name, allowed = func.__name__, _ALLOWED_CALLS
        if name in ("__get__", "__set__"):
            name, allowed = getattr(func.__self__, "__name__", name), _ALLOWED_ATTRIBUTES  # type: ignore[attr-defined]
        if name not in allowed:
            raise StrategyError(
                f"{name} needs the averaged gradient, which strategy 'central(fused=True)' never makes "
                "(no clipping, GradScaler or gradient logging there): use --strategy central or mirrored"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LocalGradient(shape={tuple(self.shape)}, dtype={self.dtype})"
