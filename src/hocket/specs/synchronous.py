"""The strategies in which all workers take every step together, as a user writes them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hocket.specs.spec import Spec


@dataclass(frozen=True)
class Mirrored(Spec):
    """Gradients are averaged in every step, and every worker updates its own replica, all identical."""

    name = "mirrored"
    implementation = "hocket.strategies.mirrored:MirroredTraining"
    needs_optimizer = False
    serves_any_optimizer = True
    has_equal_replicas = True
    takes_codec = True
    keeps_replicas = True

    @property
    def regroups(self) -> bool:
        return True


@dataclass(frozen=True)
class Central(Spec):
    """One copy of parameters and optimizer state per host; each worker updates its own slice of it.

    Attributes:
        fused: Reduce gradients straight into the update. Faster, but ``p.grad`` is never the average, so
            clipping, GradScaler and gradient logging are refused.
    """

    name = "central"
    shares_parameters = True
    takes_codec = True

    fused: bool = False

    @property
    def implementation(self) -> str:
        return f"hocket.strategies.central:{'make_fused' if self.fused else 'CentralAveraged'}"

    @property
    def regroups(self) -> bool:
        return True

    @property
    def regroups_unasked(self) -> bool:
        return False  # each step copies what it changes, so that it can be undone


@dataclass(frozen=True)
class Delayed(Spec):
    """The gradients of one step travel while those of the next are computed, so that each is applied one step late.

    Delayed SGD (Langford et al. 2009).
    """

    name = "delayed"
    implementation = "hocket.strategies.delayed:DelayedTraining"
    has_equal_replicas = True
    keeps_replicas = True
    differs_alone = True

    @property
    def regroups(self) -> bool:
        return True

    @property
    def regroups_unasked(self) -> bool:
        return False  # averages would have to be made before the next batch, and not while it is computed

    @property
    def exchanges_under_way(self) -> int:
        return 1


@dataclass(frozen=True)
class DMB(Spec):
    """One of every ``extra + 1`` batches is trained on; the others are only predicted while its gradients travel.

    Distributed mini-batches (Dekel et al. 2012): gradients are never late, and the next one is that of the new model.

    Attributes:
        extra: How many batches of each worker are only predicted; must be given.
    """

    name = "dmb"
    implementation = "hocket.strategies.dmb:DMBTraining"
    has_equal_replicas = True
    keeps_replicas = True
    differs_alone = True

    extra: int | None = field(default=None, metadata={"example": 1})

    @property
    def regroups(self) -> bool:
        return True

    @property
    def regroups_unasked(self) -> bool:
        return False  # averages would have to be made before the next batch, and not while it is computed

    @property
    def exchanges_under_way(self) -> int:
        return 1

    def check(self) -> None:
        if self.extra is None:
            raise ValueError(
                "say how many batches are only predicted while gradients travel: dmb(extra=1); or use 'delayed', which "
                "trains on every batch and applies gradients one step late"
            )
        if self.extra < 0:
            raise ValueError(f"extra={self.extra} must be 0 (which is mirrored) or more")

    def resolve(self, workers: int, servers: int) -> Spec:
        return self if self.extra else Mirrored()


@dataclass(frozen=True)
class FullBatch(Spec):
    """One exchange for each call of a closure that goes over all the data: for L-BFGS and other batch optimizers.

    Attributes:
        reduction: ``mean`` if the closure adds up losses that are means over batches, divided by ``len(loader)``, where
            each batch then counts by its samples; ``sum`` if it adds up losses of samples, divided by their number in
            all the data.
    """

    name = "full_batch"
    implementation = "hocket.strategies.full_batch:FullBatchTraining"
    ends_after_any_batch = False
    has_reduction = True
    has_equal_replicas = True
    differs_alone = True
    differs_unlaunched = True

    reduction: str = "mean"

    @property
    def regroups(self) -> bool:
        return True

    @property
    def takes_newcomers(self) -> bool:
        return False  # others are in the middle of an optimizer's step whenever they ask for a batch

    def check(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction={self.reduction!r}: the choices are {', '.join(REDUCTIONS)}")


REDUCTIONS = ("mean", "sum")
