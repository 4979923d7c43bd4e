"""The strategies in which all workers take every step together, as a user writes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mirrored:
    """Gradients are averaged in every step, and every worker updates its own replica, all identical."""


@dataclass(frozen=True)
class Central:
    """One copy of parameters and optimizer state per host; each worker updates its own slice of it.

    Attributes:
        fused: Reduce gradients straight into the update. Faster, but ``p.grad`` is never the average, so
            clipping, GradScaler and gradient logging are refused.
    """

    fused: bool = False


@dataclass(frozen=True)
class Delayed:
    """The gradients of one step travel while those of the next are computed, so that each is applied one step late.

    Delayed SGD (Langford et al. 2009).
    """


@dataclass(frozen=True)
class FullBatch:
    """One exchange for each call of a closure that goes over all the data: for L-BFGS and other batch optimizers.

    Attributes:
        reduction: ``mean`` if the closure adds up losses that are means over batches, divided by ``len(loader)``, where
            each batch then counts by its samples; ``sum`` if it adds up losses of samples, divided by their number in
            all the data.
    """

    reduction: str = "mean"

    def check(self) -> None:
        """Raise a ValueError, with the remedy, if a value makes no sense."""
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction={self.reduction!r}: the choices are {', '.join(REDUCTIONS)}")


REDUCTIONS = ("mean", "sum")
