"""Brings gradients to this rank's slots, bucket by bucket, and looks whether they are finite.

Large gradients are copied the moment they exist, while they are in the cache, and ``p.grad`` is set to None so that
the next layer can use the same memory. Small ones of a bucket follow together in one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from hocket.comm.bucket_layout import Layout
from hocket.errors import StrategyError

LARGE = 1 << 14  # elements from which a gradient is copied at once


def is_large(parameter: torch.Tensor) -> bool:
    """Whether a gradient is copied at once. On a GPU every copy costs a launch, and one launch copies many."""
    return parameter.numel() >= LARGE and not parameter.is_cuda


class Slots:
    """The slots of ``parameters``, laid out as ``layout``.

    Attributes:
        views: The slot of each parameter.
        missing: One byte per parameter without a gradient here, of the last pass.
        nonfinite: A parameter whose gradient is not finite here, of this pass.

    Args:
        names: The names of the parameters.
        parameters: The parameters whose gradients are collected.
        layout: Where each gradient lies.
        slots: One flat tensor per bucket.
        claim: Waits until the slots may be written; called before the first write of each pass.
        check_finite: Whether gradients are looked at.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        slots: Sequence[torch.Tensor],
        *,
        claim: Callable[[], None] | None = None,
        check_finite: bool,
    ) -> None:
        self._names, self._parameters = names, parameters
        self._on_gpu = bool(parameters) and parameters[0].is_cuda
        self._check_finite, self._claim = check_finite, claim
        self.views = layout.views(slots)
        self.bucket_of = [place.bucket for place in layout.places]
        members = [layout.members(bucket) for bucket in range(len(layout.buckets))]
        runs = [layout.runs(i for i in inside if not is_large(parameters[i])) for inside in members]
        self._flats = [[slots[b][start:end] for b, start, end in run] for run in runs]
        self._members = members
        self._frozen = bytes(len(parameters))
        self.missing = bytes(len(parameters))
        self.nonfinite: int | None = None
        self.set_trained(bytes(len(parameters)))
        self.reset()

    def set_trained(self, trained: bytes) -> None:
        """Which parameters may get gradients, one byte each."""
        self._frozen = bytes(not byte for byte in trained)
        self._absent = bytearray(self._frozen)
        self.trained = [[i for i in inside if trained[i]] for inside in self._members]
        self._small = [[i for i in inside if not is_large(self._parameters[i])] for inside in self.trained]
        self._large = [[i for i in inside if is_large(self._parameters[i])] for inside in self.trained]

    def reset(self) -> None:
        """Begin anew, with nothing collected; ``missing`` stays as it is until the pass is over."""
        self.nonfinite = None
        self._absent = bytearray(self._frozen)
        self._copied = bytearray(len(self._parameters))
        self._finished = bytearray(len(self._members))
        self._totals: list[Total] = [0.0] * len(self._members)
        self._is_claimed = self._claim is None

    def take_over(self, other: Slots) -> None:
        """Go on where ``other``, of the same parameters and layout, is in the middle of a pass."""
        self.missing, self.nonfinite = other.missing, other.nonfinite
        self._absent, self._copied, self._finished = other._absent, other._copied, other._finished
        self._totals, self._is_claimed = other._totals, other._is_claimed

    def copy(self, index: int, scale: float) -> None:
        """Take the gradient of a large parameter, which is there now."""
        parameter, view = self._parameters[index], self.views[index]
        gradient = parameter.grad
        assert gradient is not None
        self._open()
        with torch._C.DisableTorchFunctionSubclass():  # it may be a LocalGradient
            if gradient.layout != torch.strided:
                self._refuse_sparse(index)
            if self._copied[index]:  # a tied parameter in several reentrant checkpoints arrives in parts
                view.add_(gradient, alpha=scale)
            elif scale == 1:
                view.copy_(gradient)
            else:
                torch.mul(gradient, scale, out=view)
        parameter.grad = None
        self._copied[index] = 1
        if self._check_finite:
            self._totals[self.bucket_of[index]] += _total(view)

    def finish_all(self, scale: float) -> None:
        """Take all gradients that are not there yet; those that do not exist are zero, and ``missing``."""
        for bucket, finished in enumerate(self._finished):
            if not finished:
                self.finish(bucket, scale)
        self.missing = bytes(self._absent)
        if self._on_gpu:
            self._look_at_all()

    def finish(self, bucket: int, scale: float) -> None:
        """Take all gradients of ``bucket`` that are not there yet."""
        self._open()
        self._finished[bucket] = 1
        late = self._small[bucket]
        if not all(self._copied[i] for i in self._large[bucket]):
            late = late + [i for i in self._large[bucket] if not self._copied[i]]
        gradients = [self._parameters[i].grad for i in late]
        absent = [i for i, gradient in zip(late, gradients, strict=True) if gradient is None]
        if absent:
            for i in absent:
                self._absent[i] = 1
                self.views[i].zero_()
            late = [i for i in late if not self._absent[i]]
            gradients = [gradient for gradient in gradients if gradient is not None]
        views = [self.views[i] for i in late]
        with torch._C.DisableTorchFunctionSubclass():  # they may be LocalGradients
            try:
                if views:
                    torch._foreach_copy_(views, gradients)  # type: ignore[arg-type]
            except RuntimeError:
                for i, gradient in zip(late, gradients, strict=True):
                    if gradient.layout != torch.strided:  # type: ignore[union-attr]
                        self._refuse_sparse(i)
                raise
        flats = self._flats[bucket] + [self.views[i] for i in late if is_large(self._parameters[i])]
        if scale != 1 and flats:
            torch._foreach_mul_(flats, scale)
        if self._check_finite:
            total = self._totals[bucket] = self._totals[bucket] + sum(map(_total, flats))
            if not self._on_gpu and not math.isfinite(total) and self.nonfinite is None:
                self.nonfinite = self._find_nonfinite(bucket)

    def _look_at_all(self) -> None:
        """Wait once for a GPU, at the end of the pass: a wait for each bucket would leave it without work.

        What has been sent off may be averages by now. A value that is not finite here is not finite in these, either.
        """
        totals = {bucket: total for bucket, total in enumerate(self._totals) if isinstance(total, torch.Tensor)}
        if totals and not math.isfinite(float(sum(total.double() for total in totals.values()))):
            found = (self._find_nonfinite(bucket) for bucket, total in totals.items() if not math.isfinite(total))
            self.nonfinite = next((index for index in found if index is not None), None)

    def _open(self) -> None:
        """Before the first write of a pass: wait until nobody reads the slots."""
        if not self._is_claimed and self._claim is not None:
            self._is_claimed = True
            self._claim()

    def _find_nonfinite(self, bucket: int) -> int | None:
        for i in self._members[bucket]:
            if not bool(torch.isfinite(self.views[i]).all()):
                return i
        return None

    def _refuse_sparse(self, index: int) -> None:
        raise StrategyError(
            f"the gradient of {self._names[index]!r} is sparse, which this strategy cannot exchange: "
            "make the embedding with sparse=False"
        )


Total = float | torch.Tensor


def _total(tensor: torch.Tensor) -> Total:
    """A number that is not finite if any element is not; by far the cheapest look at all of them.

    The total of a tensor on a GPU stays there, so that nobody waits.
    """
    total = tensor.sum(dtype=torch.float32 if tensor.dtype == torch.float16 else None)
    return total if tensor.is_cuda else float(total)
