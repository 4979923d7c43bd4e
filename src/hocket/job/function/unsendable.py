"""What is said of things that cannot be sent to workers: what they are, and what to do instead."""

from __future__ import annotations

import io
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import nn, optim
from torch.utils.data import DataLoader, Dataset

from hocket.errors import UsageError


def explain(value: Any, what: str, error: Exception | None = None) -> UsageError:
    """The error for ``value``; ``error`` is what the attempt to pack it as plain data has raised."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if isinstance(value, (FunctionType, type)):
        of = "class" if isinstance(value, type) else "lambda" if value.__name__ == "<lambda>" else "function"
        return UsageError(
            f"{what} is a {of} without source that can be found (made with exec, at a plain prompt, or changed "
            f"since): put the {of} into a module and import it"
        )
    if isinstance(value, MethodType):
        kind = f"bound method of a live {type(value.__self__).__qualname__}"
        remedy = "write a function that makes the object and calls the method"
    elif isinstance(value, nn.Module):
        kind, remedy = f"model ({kind})", "build the model inside the function, or pass its state_dict() as an argument"
    elif isinstance(value, optim.Optimizer):
        kind, remedy = f"optimizer ({kind})", "build it inside the function"
    elif isinstance(value, (DataLoader, Dataset)):
        remedy = "build it inside the function, or pass its tensors as arguments"
    elif isinstance(value, io.IOBase):
        kind, remedy = f"open file ({kind})", "open it inside the function, and pass its path as an argument"
    elif isinstance(value, Iterator):
        remedy = "make it a list, or build it inside the function"
    elif isinstance(value, (list, tuple, dict, set, frozenset)) and error is not None:
        text = f"{what} holds itself" if isinstance(error, RecursionError) else str(error)
        return UsageError(f"{text}; build the rest inside the function")
    else:
        remedy = "build it inside the function, or pass the plain data that it is made of as an argument"
    article = "an" if kind[0] in "aeiou" else "a"
    return UsageError(f"{what} is {article} {kind}, which cannot be sent to workers: {remedy}")
