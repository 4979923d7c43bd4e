"""Tensors of a GPU in collectives of the CPU: copied there, and the result back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Method = TypeVar("Method", bound=Callable[..., Any])


def through_cpu(method: Method) -> Method:
    """Let a collective that takes a tensor of the CPU, and changes it or returns another, take any."""

    @functools.wraps(method)
    def collective(self: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if tensor.device.type == "cpu":
            return method(self, tensor, *args, **options)
        staged = tensor.cpu()
        result = method(self, staged, *args, **options)
        if result is not None:
            return result.to(tensor.device)
        tensor.copy_(staged)
        return None

    return cast(Method, collective)
