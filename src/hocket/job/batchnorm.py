"""Batch norm whose statistics are those of the batches of all workers together.

PyTorch's own ``SyncBatchNorm`` works on GPUs only. In training there is one collective in the forward pass and one in
the backward pass; in evaluation there is none.
"""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from hocket.errors import StrategyError, UsageError
from hocket.job.worker import current

Module = TypeVar("Module", bound=nn.Module)

_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


class SyncBatchNorm(_BatchNorm):
    """Batch norm over the batches of all workers, for inputs (samples, channels, …) of 2 to 5 dimensions.

    Arguments and ``state_dict`` are those of ``torch.nn.BatchNorm1d``, 2d and 3d. In training every rank must call it
    together. A rank whose batch has weight 0 adds nothing to the statistics and is normalised by those of the others.
    """

    synchronised = True
    adds = False
    """Whether losses are sums over samples (``distribute(…, reduction="sum")``)."""
    converted_from: type[_BatchNorm] | None = None
    """The class that ``sync_batchnorm`` found, which is pickled to files; copies in this process stay synchronised."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        twin = memo[id(self)] = type(self).__new__(type(self))
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.converted_from is None:
            return super().__reduce_ex__(protocol)
        state = {name: value for name, value in vars(self).items() if name != "converted_from"}
        return copyreg._reconstructor, (self.converted_from, object, None), state  # type: ignore[attr-defined]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or self.ranks == 1:
            return super().forward(input)
        self._check_input_dim(input)
        return self._normalise(input)

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return current().config.size

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """What all ranks have, stacked; every rank must call it."""
        return current().communicator.allgather(part)

    def add_up(self, sums: torch.Tensor) -> None:
        """Replace ``sums`` by their sum over all ranks; every rank must call it."""
        current().communicator.allreduce(sums, "sum")

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if not 2 <= input.dim() <= 5:
            raise ValueError(f"SyncBatchNorm takes inputs of 2 to 5 dimensions, not {input.dim()}: {list(input.shape)}")

    @_disable_dynamo  # like torch.compiler.disable, but does not load the compiler before the first call
    def _normalise(self, input: torch.Tensor) -> torch.Tensor:
        worker = current()
        if worker.client is not None:
            raise StrategyError(
                "SyncBatchNorm needs all workers in every step, which with parameter servers they need not be: use "
                "BatchNorm, or --strategy mirrored"
            )
        weight = worker.training.weights.now
        share = float(weight > 0) if self.adds else weight / self.ranks
        with torch.no_grad():
            count, mean, squares = _combine(self.gather(_describe(input.detach(), share != 0)))
            if count < 2:
                raise ValueError(
                    f"SyncBatchNorm needs more than 1 value per channel in training, and all ranks together have "
                    f"{count:.0f} (input {list(input.shape)} here): use larger batches, or drop_last=True"
                )
            self._track(mean, squares / (count - 1))
        output: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean, squares / count, self.eps, count, share, self.add_up
        )
        return output

    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Move the running statistics towards those of this batch; all ranks get the same."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:  # a plain average of all batches
                factor = 1 / float(self.num_batches_tracked)
        for running, value in ((self.running_mean, mean), (self.running_var, variance)):
            running.lerp_(value.to(running.dtype), factor or 0.0)


def sync_batchnorm(model: Module) -> Module:
    """Turn every batch norm of ``model``, in place, into a ``SyncBatchNorm``; call it before ``distribute``.

    Modules, parameters and buffers stay the same objects, so hooks, and an optimizer that was built before, stay right.

    Returns:
        The model itself.
    """
    distributed = {id(module) for known in current().training.models for module in known.modules()}
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, _BatchNorm)]
    found = [(name, m) for name, m in found if not isinstance(m, SyncBatchNorm)]
    for name, module in found:  # all of them before the first one is changed
        _check(name, module, id(module) in distributed)
    for _, module in found:
        vars(module)["converted_from"] = type(module)
        module.__class__ = SyncBatchNorm
    return model


def _check(name: str, module: nn.Module, distributed: bool) -> None:
    what = f"{name!r} ({type(module).__name__})" if name else type(module).__name__
    if distributed:
        raise UsageError(
            f"batch norm {what} is already distributed: call hocket.sync_batchnorm(model) before hocket.distribute()"
        )
    if isinstance(module, LazyModuleMixin):
        raise UsageError(f"batch norm {what} has no shape yet: run the model once before hocket.sync_batchnorm()")
    if type(module).forward not in _FORWARDS or parametrize.is_parametrized(module):
        raise UsageError(
            f"batch norm {what} has a forward pass or a parametrization of its own, which would be lost: derive it "
            "from hocket.SyncBatchNorm instead"
        )


def _describe(input: torch.Tensor, counts: bool) -> torch.Tensor:
    """This rank's part of the statistics: (values per channel, means, sums of squared differences from the mean).

    The numbers are float64, in which large counts are exact; they are too few for that to cost anything.
    """
    channels = input.shape[1]
    if not counts or not input.numel():
        # Repeated samples are not even multiplied by 0, so that a NaN in them does not count.
        return torch.zeros(1 + 2 * channels, dtype=torch.float64, device=input.device)
    wide = input if input.dtype == torch.float64 else input.float()
    mean, variance = torch.batch_norm_update_stats(wide, None, None, 0.0)
    count = input.numel() // channels
    return torch.cat(
        [torch.tensor([count], dtype=torch.float64, device=mean.device), mean.double(), variance.double() * count]
    )


def _combine(parts: torch.Tensor) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Count, means and sums of squared differences over all ranks, without cancellation (Chan et al. 1979)."""
    channels = parts.shape[1] // 2
    counts, means, squares = parts.split([1, channels, channels], dim=1)
    count = float(counts.sum())
    mean = (counts * means).sum(0) / count
    return count, mean, (squares + counts * (means - mean) ** 2).sum(0)


class _Normalise(torch.autograd.Function):
    """Normalises by given statistics, and differentiates through them: they are functions of all ranks' inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        eps: float,
        count: float,
        share: float,
        add_up: Callable[[torch.Tensor], None],
    ) -> torch.Tensor:
        dtype = torch.promote_types(input.dtype, torch.float32)
        mean, variance = mean.to(dtype), variance.to(dtype)
        ctx.save_for_backward(input, weight, mean, variance)
        ctx.eps, ctx.count, ctx.share, ctx.add_up = eps, count, share, add_up
        scale, shift = (None if t is None else t.to(dtype) for t in (weight, bias))
        return F.batch_norm(input, mean, variance, scale, shift, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, variance = ctx.saved_tensors  # once only, for the sake of checkpointing
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        inverse = torch.rsqrt(variance + ctx.eps)
        # Sums over this rank's samples, of the gradient times the normalised input and of the gradient.
        _, for_weight, for_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, input, torch.ones_like(mean), mean, variance, mean, inverse, False, ctx.eps, [False, True, True]
        )
        for_input = None
        if needs_input:
            sums = _sum_over_ranks(torch.stack([for_weight, for_bias]), ctx.share, ctx.add_up)
            if ctx.share:
                along, shift = (sums / (ctx.share * ctx.count)).to(mean.dtype)
                scale = inverse if weight is None else inverse * weight
                for_input = _for_input(gradient, input, mean, scale, inverse * along, shift)
            else:
                for_input = torch.zeros_like(input)
        return (
            for_input,
            for_weight.to(weight.dtype) if needs_weight else None,
            for_bias.to(weight.dtype) if needs_bias else None,
            *[None] * 6,
        )


def _sum_over_ranks(sums: torch.Tensor, share: float, add_up: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """``sums`` of all ranks, in float64; every rank must call it.

    Gradients inside the network are those of a rank's own loss; Hocket multiplies them by ``share`` (weight / size)
    only at the parameters. So the sums are weighted by ``share`` here, and results are to be divided by it.
    """
    weighted = sums.double() * share if share else torch.zeros_like(sums, dtype=torch.float64)
    add_up(weighted)
    return weighted


def _for_input(
    gradient: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    along: torch.Tensor,
    shift: torch.Tensor,
) -> torch.Tensor:
    """``scale * (gradient - shift - along * (input - mean))``, with one value of each factor per channel."""
    shape = (1, -1, *[1] * (input.dim() - 2))
    result: torch.Tensor = input - mean.view(shape)
    result.mul_((-scale * along).view(shape)).addcmul_(gradient, scale.view(shape))
    result.sub_((scale * shift).view(shape))
    return result.to(input.dtype)
