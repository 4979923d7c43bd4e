"""Notices a loss that is a sum over the batch, from the graph of the first backward passes.

The nodes of torch's losses know their reduction. What stands above them in the graph says whether the loss is that sum,
plus or minus other terms, or may have been divided by the number of samples. In doubt it is no sum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import Node

if TYPE_CHECKING:
    from hocket.capture.collector import Collector

_PASSES = 2  # backward passes that are looked at
_MOST = 30  # nodes of one graph that are looked at
_NONE, _MEAN, _SUM = 0, 1, 2  # the numbers of reductions in torch
_THROUGH = {"Add", "Sub", "Rsub", "Neg", "Mul", "ToCopy"}


def watch(collector: Collector, tell: Callable[[str], None]) -> None:
    """Call ``tell``, once, if one of the first backward passes of ``collector`` begins at a sum over the batch.

    ``tell`` is called within the backward pass, with the name of the loss.
    """
    left = _PASSES

    def look(calls: Sequence[FrameType]) -> None:
        nonlocal left
        left -= 1
        found = None
        with contextlib.suppress(Exception):  # a graph may have any nodes, and this is only a hint
            found = find_sum(_roots(calls))
        if found is not None or not left:
            collector.on_backward = None
        if found is not None:
            tell(found)

    collector.on_backward = look


def find_sum(roots: Sequence[Node]) -> str | None:
    """The name of a loss that is a sum, among the terms that are added up at ``roots``.

    None if no term is one for certain, or if any term is a mean or a quotient.
    """
    found = None
    ahead = [(root, True) for root in roots]
    for _ in range(_MOST):
        if not ahead:
            return found
        node, certain = ahead.pop()
        kind, reduction = _kind(node), getattr(node, "_saved_reduction", None)
        inputs = [each for each, _ in node.next_functions]
        present = [each for each in inputs if each is not None]
        if kind in ("Mean", "Div") or reduction == _MEAN:
            return None
        if kind == "Sum" and present and getattr(present[0], "_saved_reduction", None) == _NONE:
            kind, reduction = _kind(present[0]), _SUM
        if reduction == _SUM:
            found = kind if certain else found
        elif kind in _THROUGH:
            # A factor without a gradient, whose value is not to be seen any more, may be 1 / samples.
            certain &= kind != "Mul" or len(present) == 2
            ahead += [(each, certain) for each in present]
    return None


def _kind(node: Node) -> str:
    return node.name().partition("Backward")[0]


def _roots(calls: Sequence[FrameType]) -> list[Node]:
    """The nodes at which a call of ``torch.autograd.backward`` begins; none if gradients were given to it."""
    if len(calls) != 1 or (known := calls[0].f_locals).get("grad_tensors") is not None:
        return []
    tensors = known["tensors"]
    losses = (tensors,) if isinstance(tensors, torch.Tensor) else tensors
    return [loss.grad_fn for loss in losses if loss.grad_fn is not None]
