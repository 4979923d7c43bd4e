"""The strategies in which all workers take every step together, as a user writes them."""

from __future__ import annotations

from dataclasses import dataclass, field


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
class DMB:
    """Of every ``extra + 1`` batches one is trained on; the others are only predicted while its gradients travel.

    Distributed mini-batches (Dekel et al. 2012): gradients are never late, and the next one is that of the new model.

    Attributes:
        extra: How many batches of each worker are only predicted; must be given.
    """

    extra: int | None = field(default=None, metadata={"example": 1})

    def check(self) -> None:
        """Raise a ValueError, with the remedy, if a value makes no sense."""
        if self.extra is None:
            raise ValueError(
                "say how many batches are only predicted while gradients travel: dmb(extra=1); or use 'delayed', which "
                "trains on every batch and applies gradients one step late"
            )
        if self.extra < 0:
            raise ValueError(f"extra={self.extra} must be 0 (which is mirrored) or more")


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
