"""Adasum: a sum of gradients that adds what differs and averages what is alike (Maleki et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def adasum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The Adasum of one tensor for each rank, of any number of them; pairs first, as in a tree.

    All ranks that are given the same parts get the same bits.
    """
    left = list(parts)
    while len(left) > 1:
        pairs = [_add(left[i], left[i + 1]) for i in range(0, len(left) - 1, 2)]
        left = pairs + left[2 * len(pairs) :]
    return left[0]


def _add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Each without half of its projection on the other: a + b if they are orthogonal, their mean if they are equal."""
    flat_a, flat_b = a.reshape(-1).double(), b.reshape(-1).double()
    dot, square_a, square_b = (float(x @ y) for x, y in ((flat_a, flat_b), (flat_a, flat_a), (flat_b, flat_b)))
    share_a = 1.0 - dot / (2.0 * square_a) if square_a else 1.0
    share_b = 1.0 - dot / (2.0 * square_b) if square_b else 1.0
    return (flat_a * share_a + flat_b * share_b).to(a.dtype).view(a.shape)
