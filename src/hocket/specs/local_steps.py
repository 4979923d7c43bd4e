"""The strategies in which every worker takes steps of its own on a replica of its own, as a user writes them."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

from hocket.specs.spec import Spec
from hocket.specs.switch import Switch
from hocket.specs.synchronous import Mirrored

TOPOLOGIES = ("ring", "torus", "exponential", "complete", "pairs")
ORDERS = ("adapt_then_combine", "adapt_while_combine")


def check_period(period: int) -> None:
    """Raise a ValueError if this is no number of batches."""
    if period < 1:
        raise ValueError(f"period={period}: must be 1 or more batches, for example period=16")


@dataclass(frozen=True)
class LocalSGD(Spec):
    """Every worker takes its own steps, and parameters are averaged every ``period`` batches (Stich 2019).

    Attributes:
        period: Batches between two averages.
        growth: By which the period is multiplied every ``every`` batches, up to ``most``.
        every: See ``growth``.
        most: See ``growth``; None is without bound.
        after: Average gradients in every step until then (post-local SGD, Lin et al. 2020): a number of batches,
            ``"epoch 3"`` (the third one is the first with local steps) or ``"decay"``, the first fall of a learning
            rate.
        optimizer_state: Average the optimizer's state (momenta), too.
        time: Seconds that a round lasts, instead of a number of batches; averages are weighted by samples.
    """

    name = "local_sgd"
    skips_alone = True

    period: int = 16
    growth: float = 1.0
    every: int = 1000
    most: int | None = None
    after: int | str | None = None
    optimizer_state: bool = False
    time: float | None = None

    @property
    def implementation(self) -> str:
        return f"hocket.strategies.local_sgd:{'LocalSGDTraining' if self.time is None else 'TimedLocalSGD'}"

    @property
    def is_uneven(self) -> bool:
        return self.time is not None

    @property
    def keeps_replicas(self) -> bool:
        return self.time is None

    @property
    def regroups(self) -> bool:
        return True

    def resolve(self, workers: int, servers: int) -> Spec:
        """Post-local SGD is a switch."""
        if self.after is None:
            return self
        plain = dataclasses.replace(self, after=None)
        at = f"step {self.after}" if isinstance(self.after, int) else self.after
        return Switch((Mirrored(), plain), (at,)) if self.after else plain

    def check(self) -> None:
        check_period(self.period)
        if not 1 <= self.growth < math.inf:
            raise ValueError(f"growth={self.growth}: must be 1 or more, for example growth=2.0")
        if self.every < 1:
            raise ValueError(f"every={self.every}: must be 1 or more batches, for example every=1000")
        if self.most is not None and self.most < self.period:
            raise ValueError(f"most={self.most}: must be at least the period, {self.period}")
        if isinstance(self.after, int) and self.after < 0:
            raise ValueError(f"after={self.after}: must be a number of batches, 0 or more")
        if isinstance(self.after, str) and self.after != "decay" and not re.fullmatch(r"epoch [1-9]\d*", self.after):
            raise ValueError(f"after={self.after!r}: write a number of batches, 'epoch 3' or 'decay'")
        if self.time is not None:
            if not 0 < self.time < math.inf:
                raise ValueError(f"time={self.time}: must be more than 0 seconds, for example time=2.0")
            if self.period != 16 or self.growth != 1 or self.after is not None:
                raise ValueError("time= says how long a round is: leave out period, growth and after")


@dataclass(frozen=True)
class DiLoCo(Spec):
    """Local steps, and an outer Nesterov optimizer on the averaged displacement (Douillard et al. 2023).

    Attributes:
        period: Batches between two outer steps.
        outer_lr: Learning rate of the outer optimizer.
        outer_momentum: Nesterov momentum of the outer optimizer.
        fragments: In how many parts the parameters are exchanged, each at its own time while local steps go on
            (streaming DiLoCo, Douillard et al. 2025).
        delay: Batches from the beginning of an exchange until it is taken over; 0 waits for it. None is 0 with one
            fragment, else half the time until the next one's, 1 or more.
    """

    name = "diloco"
    skips_alone = True
    implementation = "hocket.strategies.diloco:DiLoCoTraining"
    keeps_replicas = True

    period: int = 100
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    delay: int | None = None

    @property
    def batches_under_way(self) -> int:
        """The delay, whether it was given or not."""
        if self.delay is not None:
            return self.delay
        return 0 if self.fragments == 1 else max(1, self.period // (2 * self.fragments))

    @property
    def regroups(self) -> bool:
        return True

    @property
    def exchanges_under_way(self) -> int:
        return self.fragments if self.batches_under_way else 0

    @property
    def regroups_unasked(self) -> bool:
        return not self.batches_under_way  # averages would have to be made at once, and not while batches go on

    def check(self) -> None:
        check_period(self.period)
        if not 0 < self.outer_lr < math.inf:
            raise ValueError(f"outer_lr={self.outer_lr}: must be more than 0, for example outer_lr=0.7")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"outer_momentum={self.outer_momentum}: must be from 0 to below 1, for example 0.9")
        if not 1 <= self.fragments <= self.period:
            raise ValueError(f"fragments={self.fragments}: must be from 1 to the period, {self.period}")
        if self.delay is not None and not 0 <= self.delay <= self.period:
            raise ValueError(f"delay={self.delay}: must be from 0 to the period, {self.period}")


@dataclass(frozen=True)
class EASGD(Spec):
    """An elastic pull between every worker and a centre (Zhang et al. 2015); with ``--servers 1`` asynchronous.

    Attributes:
        period: Batches between two pulls.
        alpha: How much of the difference a pull takes away; None is 0.9 / workers, as in the paper.
        momentum: Nesterov momentum of the workers' own SGD (EAMSGD).
    """

    name = "easgd"
    skips_alone = True
    implementation = "hocket.strategies.easgd:EASGDTraining"
    servers = "optional"
    keeps_replicas = True

    period: int = 10
    alpha: float | None = None
    momentum: float = 0.0

    @property
    def regroups(self) -> bool:
        return True

    def check(self) -> None:
        check_period(self.period)
        if self.alpha is not None and not 0 <= self.alpha < 1:
            raise ValueError(f"alpha={self.alpha}: must be from 0 to below 1, for example alpha=0.1")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum}: must be from 0 to below 1, for example momentum=0.9")

    def resolve(self, workers: int, servers: int) -> Spec:
        return _ServedEASGD(**dataclasses.asdict(self)) if servers else self


@dataclass(frozen=True)
class _ServedEASGD(EASGD):
    """The centre is on servers, and nobody waits for anybody."""

    implementation = "hocket.strategies.easgd_served:ServedEASGDTraining"
    survives_loss = True
    takes_newcomers = True
    is_uneven = True
    keeps_replicas = False


@dataclass(frozen=True)
class Gossip(Spec):
    """Parameters are averaged with those of neighbours only.

    Attributes:
        topology: Who is a neighbour: ``ring``, ``torus``, ``exponential``, ``complete``, or ``pairs`` drawn anew in
            every round.
        order: ``adapt_then_combine`` mixes after the step; ``adapt_while_combine`` mixes the parameters from before it
            while gradients are computed (D-PSGD, Lian et al. 2017).
        push_sum: Send to successors in a directed graph that changes from round to round (Assran et al. 2019).
        asynchronous: Average with one neighbour at a time, drawn at random, and wait for nobody (AD-PSGD, Lian et al.
            2018).
        period: Batches between two exchanges.
        seed: The seed of the pairs that are drawn.
    """

    name = "gossip"
    skips_alone = True
    meets_at_coordinator = True
    survives_loss = True
    takes_newcomers = True
    is_uneven = True  # batches come from a queue, and workers may be lost
    way = "from worker to worker"

    topology: str = "ring"
    order: str = "adapt_then_combine"
    push_sum: bool = False
    asynchronous: bool = False
    period: int = 1
    seed: int = 0

    @property
    def implementation(self) -> str:
        if self.asynchronous:
            return "hocket.strategies.gossip_pairs:PairedTraining"
        return f"hocket.strategies.gossip_rounds:{'PushSumTraining' if self.push_sum else 'MixedTraining'}"

    def check(self) -> None:
        check_period(self.period)
        if self.topology not in TOPOLOGIES:
            raise ValueError(f"topology={self.topology!r}: the choices are {', '.join(TOPOLOGIES)}")
        if self.order not in ORDERS:
            raise ValueError(f"order={self.order!r}: the choices are {', '.join(ORDERS)}")
        if self.push_sum and self.asynchronous:
            raise ValueError("push_sum and asynchronous exclude each other: choose one")
        if self.order != ORDERS[0] and (self.push_sum or self.asynchronous):
            raise ValueError(f"order={self.order!r} is for synchronous gossip: leave it out")
        if self.push_sum and self.topology == "pairs":
            raise ValueError("push_sum needs a directed graph: use topology='exponential' or 'ring'")

    def check_workers(self, workers: int) -> None:
        if self.topology == "torus" and workers > 1 and rows_of_torus(workers) < 2:
            raise ValueError(
                f"topology='torus' needs a number of workers that is a product of two, such as 4, 6, 8 or 9, and the "
                f"job has {workers}: use topology='ring' or 'exponential'"
            )


def rows_of_torus(workers: int) -> int:
    """The sides of a torus are as alike as possible; this is the shorter one, 1 if there is none."""
    return max(rows for rows in range(1, math.isqrt(workers) + 1) if workers % rows == 0)


@dataclass(frozen=True)
class Hogwild(Spec):
    """Processes of one host update one copy of the parameters in shared memory, without locks (Niu et al. 2011).

    Attributes:
        locked: One update at a time, for comparison.
    """

    name = "hogwild"
    skips_alone = True
    implementation = "hocket.strategies.hogwild:HogwildTraining"
    meets_at_coordinator = True
    survives_loss = True
    takes_newcomers = True
    is_uneven = True
    leases = True
    shares_parameters = True

    locked: bool = False

    def averages_over(self, workers: int) -> int:
        return 1  # every gradient is applied as it is
