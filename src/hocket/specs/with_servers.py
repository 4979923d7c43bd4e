"""The strategies with parameter servers, as a user writes them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hocket.specs.spec import Spec

PLACEMENTS = ("partitioned", "greedy", "round_robin")


@dataclass(frozen=True, kw_only=True)
class Served(Spec):
    """What all strategies with parameter servers have in common.

    Attributes:
        clip: The largest norm of a gradient: of the averaged one where gradients are averaged before an update, of each
            worker's where each is applied by itself.
        placement: How parameters are placed on servers: ``partitioned``, ``greedy`` or ``round_robin``.
        staleness_aware: Divide the rate by the measured staleness, if that is more than 1 (Zhang et al. 2016).
        patience: Seconds after which a worker that holds back others is not waited for until it comes; None is
            ``--timeout``, after which the job ends.
    """

    implementation = "hocket.strategies.served:ServedTraining"
    servers = "needed"
    holds_parameters_on_servers = True
    survives_loss = True
    takes_newcomers = True

    clip: float | None = None
    placement: str = "partitioned"
    staleness_aware: bool = False
    patience: float | None = None

    @property
    def bound(self) -> int | None:
        """How many clocks a worker may be ahead of the slowest; None is without bound."""
        return 0

    @property
    def groups(self) -> int:
        """Updates for as many gradients as there are workers; 0 is an update for every gradient."""
        return 1

    @property
    def in_step(self) -> bool:
        return self.bound == 0 and self.groups == 1

    @property
    def is_uneven(self) -> bool:
        return not self.in_step

    def averages_over(self, workers: int) -> int:
        return 1  # servers are told whether to average or to add up

    def scale_for(self, workers: int, *, adds: bool = False) -> float:
        """The factor of a worker's gradients where each is applied by itself: 1 / workers, or 1 if losses are sums."""
        return 1 / workers if self.groups == 0 and not adds else 1.0

    def check(self) -> None:
        if self.placement not in PLACEMENTS:
            raise ValueError(f"placement={self.placement!r}: the choices are {', '.join(PLACEMENTS)}")
        for name in ("clip", "patience"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r}: must be more than 0, for example {name}=1.0")


@dataclass(frozen=True)
class PS(Served):
    """Gradients are pushed to parameter servers, which update and give back the parameters.

    Attributes:
        staleness: How many clocks a worker may be ahead of the slowest: 0 is bulk-synchronous, None without bound.
        scale: By which gradients are multiplied if each is applied on arrival; None is 1 / workers, and 1 for losses
            that are sums.
    """

    name = "ps"

    staleness: int | None = 0
    scale: float | None = None

    @property
    def bound(self) -> int | None:
        return self.staleness

    @property
    def groups(self) -> int:
        return int(self.staleness == 0)

    def scale_for(self, workers: int, *, adds: bool = False) -> float:
        return super().scale_for(workers, adds=adds) if self.scale is None or self.groups else self.scale

    def check(self) -> None:
        super().check()
        if self.staleness is not None and self.staleness < 0:
            raise ValueError(f"staleness={self.staleness}: must be 0 or more, or None for no bound")


@dataclass(frozen=True)
class BSP(Served):
    """Bulk-synchronous: one averaged update per round; ``ps(staleness=0)``."""

    name = "bsp"


@dataclass(frozen=True)
class SSP(PS):
    """Stale-synchronous (Ho et al. 2013): a worker is at most so many clocks ahead of the slowest."""

    name = "ssp"

    staleness: int | None = 3


@dataclass(frozen=True)
class Asynchronous(Served):
    """Every gradient is applied on arrival, and nobody waits; ``ps(staleness=None)``."""

    name = "asynchronous"
    bound = None
    groups = 0

    scale: float | None = None

    def scale_for(self, workers: int, *, adds: bool = False) -> float:
        return super().scale_for(workers, adds=adds) if self.scale is None else self.scale


@dataclass(frozen=True)
class Softsync(Served):
    """An update for every workers / n gradients (Zhang et al. 2016); n=1 is bulk-synchronous."""

    name = "softsync"

    n: int = 1

    @property
    def bound(self) -> int | None:
        return 0 if self.n == 1 else None

    @property
    def groups(self) -> int:
        return self.n

    def check(self) -> None:
        super().check()
        if self.n < 1:
            raise ValueError(f"n={self.n}: must be 1 or more, at most the number of workers")


@dataclass(frozen=True)
class Downpour(Served):
    """Asynchronous, with Adagrad on the servers whatever the script's optimizer is (Dean et al. 2012).

    Attributes:
        fetch: Steps between two pulls; between them the worker takes steps of its own.
        push: Steps whose gradients are added up for one push.
        rate: The learning rate of Adagrad; None is the script's learning rate.
        adagrad: False for plain SGD on the servers.
        warmup: Updates that rank 0 makes alone before the others begin.
        scale: The factor by which gradients are multiplied.
    """

    name = "downpour"
    implementation = "hocket.strategies.downpour:DownpourTraining"
    bound = None
    groups = 0

    fetch: int = 1
    push: int = 1
    rate: float | None = None
    adagrad: bool = True
    warmup: int = 0
    scale: float | None = 1.0

    def scale_for(self, workers: int, *, adds: bool = False) -> float:
        return self.scale or 1.0

    def check(self) -> None:
        super().check()
        if self.fetch < 1 or self.push < 1 or self.warmup < 0:
            raise ValueError(f"fetch={self.fetch}, push={self.push}, warmup={self.warmup}: must be 1, 1 and 0 or more")
