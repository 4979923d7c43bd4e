"""What every spec has: a strategy as a user writes it, its traits, and where its implementation is.

A spec is a frozen dataclass: its fields are the options that a user may write. All that the rest of Hocket must know
before, or without, the strategy at work is a trait here, so that nobody has to ask which strategy it is. Specs import
no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from hocket.errors import StrategyError


@dataclass(frozen=True)
class Spec:
    """A strategy as a user writes it. Traits are class attributes, or properties where the options decide."""

    name: ClassVar[str]
    """The name that a user gives for the strategy."""

    @property
    def implementation(self) -> str:
        """Where the strategy is: ``package.module:Class``, which is called with a ``Context`` and the spec."""
        raise NotImplementedError

    servers: ClassVar[Literal["none", "optional", "needed"]] = "none"
    """Whether the strategy uses parameter servers."""

    holds_parameters_on_servers: ClassVar[bool] = False
    """Whether workers begin with the parameters that the servers have, and not with those of rank 0."""

    meets_at_coordinator: ClassVar[bool] = False
    """Whether workers meet at the coordinator, which deals out their batches, and go on without those who are lost."""

    needs_optimizer: ClassVar[bool] = True
    """Whether ``hocket.distribute`` must be given the optimizer."""

    has_reduction: ClassVar[bool] = False
    """Whether the strategy adds up losses by itself, as its option ``reduction`` says."""

    serves_any_optimizer: ClassVar[bool] = False
    """Whether an optimizer that was not distributed may train the parameters, too: ``p.grad`` is the average."""

    has_equal_replicas: ClassVar[bool] = False
    """Whether every worker has a copy of the parameters that must be equal to the others' after every step."""

    shares_parameters: ClassVar[bool] = False
    """Whether workers train one copy of the parameters, so that loading a state is a call of all workers."""

    leases: ClassVar[bool] = False
    """Whether a worker may take several batches of the shared queue at once: nobody waits for their gradients."""

    ends_after_any_batch: ClassVar[bool] = True
    """Whether a job can be saved and end after any batch: no batch is a part of an optimizer's step."""

    takes_codec: ClassVar[bool] = False
    """Whether what workers exchange are gradients, which can travel by a codec."""

    way: ClassVar[str | None] = None
    """How parameters travel, in words; None if as all collectives of the job do."""

    @property
    def exchanges_under_way(self) -> int:
        """How many exchanges may have begun, and not be over, between two batches, where nobody can be lost."""
        return 0

    @property
    def survives_loss(self) -> bool:
        """Whether the others go on when a worker is lost; if not, the job ends."""
        return False

    @property
    def regroups(self) -> bool:
        """Whether the others can go on when a worker is lost, if the user asks for it (``--on-loss continue``)."""
        return False

    @property
    def regroups_unasked(self) -> bool:
        """Whether the others go on also if the user asks for nothing, because it costs nothing while nobody is lost."""
        return self.regroups

    @property
    def takes_newcomers(self) -> bool:
        """Whether new workers can join while the training goes on (``--on-loss replace``)."""
        return self.regroups

    @property
    def is_uneven(self) -> bool:
        """Whether workers may be at different batches."""
        return False

    @property
    def in_step(self) -> bool:
        """Whether, in a job with servers, all workers take the same steps, and are dealt batches as with mirrored."""
        return False

    @property
    def skips_alone(self) -> bool:
        """Whether a worker may leave out a step that others take, so that workers are compared by their batches."""
        return False

    @property
    def keeps_replicas(self) -> bool:
        """Whether workers have replicas and the same batches, so that a run can switch to and from the strategy."""
        return False

    @property
    def differs_alone(self) -> bool:
        """Whether a job of one worker trains in another way than the plain script."""
        return False

    @property
    def differs_unlaunched(self) -> bool:
        """Whether a script that nothing launched trains in another way than without Hocket."""
        return False

    def averages_over(self, workers: int) -> int:
        """The number of workers over which the strategy averages, by which gradients of sums are multiplied."""
        return workers

    def check(self) -> None:
        """Raise a ValueError, with the remedy, if a value makes no sense."""

    def check_workers(self, workers: int) -> None:
        """Raise a ValueError, with the remedy, if the strategy cannot have so many workers."""

    def resolve(self, workers: int, servers: int) -> Spec:
        """What the spec stands for in a job of so many workers and servers; the spec itself, as a rule."""
        return self

    def check_fit(self, workers: int, servers: int) -> None:
        """Raise if the strategy needs servers and the job has none or the other way round, or for the workers."""
        name = self.name
        if self.servers == "needed" and not servers:
            raise StrategyError(f"--servers 0, but strategy {name!r} needs at least one: add --servers 1")
        if servers and self.servers == "none":
            raise StrategyError(
                f"strategy {name!r} uses no servers: leave out --servers {servers}, or use --strategy ps"
            )
        try:
            self.check_workers(workers)
        except ValueError as error:
            raise StrategyError(f"strategy {name!r}: {error}") from None
