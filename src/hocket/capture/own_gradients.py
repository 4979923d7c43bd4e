"""Gradients that stay with this worker: where autograd has put them, looked at and scaled when a pass is over."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn


class OwnGradients:
    """Takes the place of slots where no gradients are sent; gradients may be sparse.

    Attributes:
        views: Always None: gradients are in no slots.
        missing: One byte per parameter without a gradient, of the last pass.
        nonfinite: A parameter whose gradient is not finite, of this pass.
    """

    views: list[torch.Tensor] = []
    bucket_of: list[int] = []
    trained: list[list[int]] = []

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter], *, check_finite: bool) -> None:
        self._names, self._parameters, self._check_finite = names, parameters, check_finite
        self.missing = bytes(len(parameters))
        self.nonfinite: int | None = None

    def set_trained(self, trained: bytes) -> None:
        """Nothing to do: any parameter may get a gradient."""

    def copy(self, index: int, scale: float) -> None:
        """The gradient stays where it is."""

    def finish(self, bucket: int, scale: float) -> None:
        """The gradients of a bucket stay where they are."""

    def reset(self) -> None:
        """Begin a new pass, with nothing looked at."""
        self.nonfinite = None

    def finish_all(self, scale: float) -> None:
        """All gradients of a pass are there."""
        gradients = [parameter.grad for parameter in self._parameters]
        self.missing = bytes(gradient is None for gradient in gradients)
        present = [gradient for gradient in gradients if gradient is not None]
        if scale != 1 and present:
            torch._foreach_mul_(present, scale)
        if self._check_finite and not math.isfinite(sum(float(_values(each).sum()) for each in present)):
            self.nonfinite = next(
                (i for i, g in enumerate(gradients) if g is not None and not bool(torch.isfinite(_values(g)).all())),
                None,
            )


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout == torch.strided else gradient._values()
