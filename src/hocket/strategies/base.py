"""The contract of a strategy: it trains one model and its optimizer together with those of the other workers.

A strategy is made from a ``Context`` and its spec, and has changed model and optimizer in place when its constructor
returns. Then it is told what happens, in this order:

1. ``begin_loop``: a training loop over a loader begins.
2. ``begin_batch``: the loop gets a batch, for which the next backward passes are.
3. ``captured``: a backward pass is over, and its gradients are where the collector has brought them.
4. ``step``: the script has called ``optimizer.step()``.
5. ``end_batch``: the batch has been trained on: at the end of its first step, or when the script asks for the next one.
6. ``settle``: something happens between batches; ``Why`` says what, and what must be true then.

2 to 5 come again and again. A script without a loader has no 1 and 2, and its steps stand for batches. A checkpoint is
made of ``state`` while ``merged`` is entered, and loaded by ``load_state``. All workers get these calls at the same
places unless their strategy is uneven; which of them may wait for other workers is said where they are defined.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hocket.capture.collector import Collector
from hocket.capture.members import Members
from hocket.capture.model_hooks import ModelHooks
from hocket.capture.noise import Gauge
from hocket.comm.communicator import Communicator
from hocket.errors import StrategyError
from hocket.server.server_client import Client
from hocket.specs import CodecSpec, Spec
from hocket.updates.update import Step


@dataclass(eq=False)
class BatchAtWork:
    """A batch that a worker trains on: one object for all of the worker's strategies.

    The first strategy that learns from the batch tells the batch's name, if it has servers, and closes the batch.

    Attributes:
        everywhere: Samples of all workers in the batch; 0 if the loop is over, and later passes belong to no batch.
        mean: Samples of an average batch of this pass over the data, of all workers, if that is known.
        epoch: The number of the pass, as this worker counts passes over all of its loaders.
        weight: How much the gradient counts on servers, relative to others; ``hocket.weight()`` may change it.
        name: Queue, epoch and number at the dealer; None if the batch was not dealt, or is closed.
        in_step: Whether all workers train on their parts of one global batch at the same time.
    """

    everywhere: int = 0
    mean: float | None = None
    epoch: int = 0
    weight: float = 1.0
    name: tuple[int, int, int] | None = None
    in_step: bool = False

    def close(self) -> None:
        """A strategy has learned from the batch, or another worker will: no strategy tells of the batch from now on."""
        self.name = None


def read_rates(optimizer: Optimizer) -> list[float]:
    """The learning rates of an optimizer."""
    return [float(group.get("lr", 0.0)) for group in optimizer.param_groups]


@dataclass(frozen=True)
class Context:
    """All that a strategy works with; nothing is taken from globals.

    Attributes:
        model: The model of this worker; changed in place.
        optimizer: The optimizer that trains the model, changed in place; None if the script has not given one.
        members: The parameters that the strategy is for.
        communicator: The communicator of all workers.
        client: The connection to the servers of the job; None if there are none.
        on_nan: What is done about gradients that are not finite: ``raise``, ``skip`` or ``ignore``.
        batch: The batch at work when the strategy is made.
        rates: Gives the learning rates of an optimizer as its schedule has them, however large the global batch is.
        adds: Whether losses are sums over samples, and not means.
        rests: Whether another strategy is at work on the model first, and calls this one when it is its turn.
        codec: How gradients travel between hosts in fewer bytes; None if as they are.
    """

    model: nn.Module
    optimizer: Optimizer | None
    members: Members
    communicator: Communicator
    client: Client | None = None
    on_nan: str = "raise"
    batch: BatchAtWork = field(default_factory=BatchAtWork)
    rates: Callable[[Optimizer], list[float]] = read_rates
    adds: bool = False
    rests: bool = False
    codec: CodecSpec | None = None

    @property
    def checks_finite(self) -> bool:
        """Whether every gradient is looked at."""
        return self.on_nan != "ignore"


@dataclass(frozen=True)
class DoneBatch:
    """A batch that has been trained on.

    Attributes:
        epoch: The number of the training loop that the batch belongs to; 0 without any.
        samples: How many samples this worker had in the batch.
        weight: How much this worker's gradients of the batch count, relative to those of other workers.
        in_loop: Whether a training loop over a loader goes on; else a step stands for a batch.
        stepped: Whether the batch has ended in a step; else the script has asked for the next batch without a step.
    """

    epoch: int = 0
    samples: int = 1
    weight: float = 1.0
    in_loop: bool = True
    stepped: bool = True


class Why(Enum):
    """Why ``Strategy.settle`` is called, and what must be true when it returns."""

    END = auto()
    """No training loop goes on any more: every worker has the model that the strategy stands for, to be evaluated and
    saved; collective."""

    PAUSE = auto()
    """The script asks for the same as ``END`` in the middle of a training loop, which goes on; collective."""

    GLANCE = auto()
    """A training loop was left without any step: all is as it was before the loop."""

    LAST_BATCH = auto()
    """This worker has had its last batch of a training loop: no gradients are left that others do not know of."""

    IDLE = auto()
    """This worker has no batch, though others may hold some: as for ``LAST_BATCH``, and nobody waits for it."""

    REJOIN = auto()
    """This worker takes part again, after ``IDLE``; nobody has trained meanwhile."""

    REFRESH = auto()
    """The parameters are brought up to date with what other workers have done."""

    SWITCH_AWAY = auto()
    """Another strategy is to be at work on the same model: as for ``END``, and the optimizer's state is equal, too;
    collective."""

    SWITCH_TO = auto()
    """This strategy is to be at work, from where another one has left the model; collective."""

    @property
    def makes_equal(self) -> bool:
        """Whether every worker has the same model afterwards."""
        return self in (Why.END, Why.PAUSE, Why.SWITCH_AWAY)


class Strategy(ABC):
    """A strategy at work on one model."""

    collector: Collector
    """Where gradients arrive."""

    steps: int = 0
    """How many exchanges there have been."""

    batches: int = 0
    """How many batches there have been, as far as they are counted."""

    exchanging: float = 0.0
    """Seconds spent in exchanges so far, waiting for other ranks included."""

    sent: int = 0
    """Bytes of gradients or parameters that this worker has handed to exchanges so far."""

    def __init__(self, context: Context, spec: Spec) -> None:
        self.context, self.spec = context, spec
        self._batch, self._unlearned = context.batch, [context.batch]  # at work; all that are not closed

    def capture_in_place(self) -> ModelHooks:
        """Have gradients stay where autograd puts them, and ``captured`` called when a backward pass is over."""
        context, members = self.context, self.context.members
        self.collector = Collector(
            members.names, members.parameters, None, None, self.captured, check_finite=context.checks_finite
        )
        return ModelHooks(context.model, self.collector)

    def begin_loop(self, epoch: int) -> None:  # noqa: B027 - most have nothing to do
        """A training loop begins; not collective."""

    def begin_batch(self, batch: BatchAtWork) -> None:
        """A training loop gets a batch, for which the next backward passes are; not collective."""
        self._batch = batch
        self._unlearned = [each for each in (*self._unlearned, batch) if each.name is not None]
        if batch.everywhere:
            self.collector.samples = batch.everywhere

    def _note_learned(self) -> None:
        """This worker has learned from the batches so far, and no other worker is to learn from them."""
        for batch in self._unlearned:
            batch.close()

    def captured(self) -> None:  # noqa: B027 - an exchange may have been told already
        """A backward pass is over, outside of ``accumulate``: its gradients are where the collector brings them."""

    @abstractmethod
    def step(self, original: Step, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """The script has called ``optimizer.step(closure, …)``; returns what the script gets. May be collective.

        Args:
            original: The optimizer's own step.
            closure: The closure that the script has given.
            **options: Other arguments of the optimizer's step.
        """

    def end_batch(self, batch: DoneBatch) -> None:  # noqa: B027 - most exchange in every step
        """A batch has been trained on. Rounds are counted in batches; at the end of a round this may be collective."""

    def settle(self, why: Why) -> None:
        """Something happens between batches: see ``Why``, also for whether it is collective."""
        if why in (Why.SWITCH_AWAY, Why.SWITCH_TO):
            self.collector.rests = why is Why.SWITCH_AWAY

    def regroup(self, weight: float) -> None:
        """Go on with the workers that the communicator has now, a new generation of the job; they call this together.

        Args:
            weight: The factor for gradients that were collected and not exchanged, so that their mean over the workers
                that are left is the mean over the samples that are left.
        """
        raise StrategyError(f"strategy {self.spec.name!r} cannot go on with other workers than it has begun with")

    @property
    def exchanges(self) -> int:
        """How often this worker's training has become that of all: what came since is lost with the worker."""
        return self.steps

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Inside this context, model and optimizer are what a checkpoint keeps; then they are as before. Collective."""
        yield

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep beside model and optimizer, as plain data with tensors; the same on all ranks."""
        return {"steps": self.steps, "batches": self.batches}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what ``state`` gave; collective. Model and optimizer have been loaded before."""
        self.steps = state["steps"]
        self.batches = state.get("batches", self.steps)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside this context, model and optimizer are read for a newcomer, or written by one, and nobody else sees it.

        For strategies whose workers meet at the coordinator; not collective.
        """
        yield

    @property
    def can_give(self) -> bool:
        """Whether ``give`` may be called now."""
        return True

    def give(self) -> dict[str, Any]:
        """What a newcomer must know beside ``state``, as plain data: called on one worker, between two batches."""
        return {}

    def has_given(self) -> None:  # noqa: B027 - most have nothing to do
        """A newcomer has been let in, and has what ``give`` gave."""

    def take(self, given: dict[str, Any]) -> None:  # noqa: B027 - most have nothing to do
        """Begin as a newcomer, with what ``give`` gave: model, optimizer and state are loaded, and others train."""

    @property
    def holds(self) -> bool:
        """Whether there are gradients here of batches that others do not know of yet."""
        return self.collector.passes > 0  # in hocket.accumulate()

    @property
    def owes(self) -> str:
        """What the script does not see yet of the model that the strategy stands for; nothing if it sees all."""
        return ""

    @property
    def at_work(self) -> Strategy:
        """The strategy that trains now: this one, or, where several take turns, the one whose turn it is."""
        return self

    @property
    def skipped(self) -> int:
        """Steps that were left out because a gradient was not finite."""
        return 0

    @property
    def gauges(self) -> list[Gauge]:
        """What measures how much the workers' gradients differ, where that can be seen."""
        return []

    def take_measures(self) -> dict[str, float]:
        """What was measured since the last call, by name, for the record of the run."""
        return {}

    def take_facts(self) -> dict[str, Any]:
        """What is worth recording of the run, and has not been told yet."""
        return {}
