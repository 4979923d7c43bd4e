"""The contract of a strategy at work: one model and its optimizer, training with those of the other ranks."""

from __future__ import annotations

import functools
import time
import types
from abc import ABC
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from hocket import spans
from hocket.strategies.collector import Collector
from hocket.strategies.noise import Gauge
from hocket.updates.update import Step

SUPPORTS_SCALING = "_step_supports_amp_scaling"  # to GradScaler: this optimizer does what it asks for by itself


class Strategy(ABC):
    """A strategy at work on one model. It has changed model and optimizer in place when its constructor returns."""

    survives_loss: ClassVar[bool] = False
    """Whether the others go on when a worker is lost; if not, the job ends."""

    leases: ClassVar[bool] = False
    """Whether a worker may take several batches of the shared queue at once: nobody waits for their gradients."""

    collector: Collector
    """Where gradients arrive."""

    steps: int
    """How many exchanges there have been."""

    exchanging: float = 0.0
    """Seconds spent in exchanges so far, waiting for other ranks included."""

    sent: int = 0
    """Bytes of gradients or parameters that this worker has handed to exchanges so far."""

    @property
    def skipped(self) -> int:
        """Steps that were left out because a gradient was not finite."""
        return 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep beside model and optimizer, as plain data with tensors; the same on all ranks."""
        return {"steps": self.steps}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what ``state`` gave; collective. Model and optimizer have been loaded before."""
        self.steps = state["steps"]

    is_uneven: bool = False
    """Whether workers may be at different batches."""

    serves_any_optimizer: bool = False
    """Whether an optimizer that was not distributed may train the parameters, too: ``p.grad`` is the average."""

    in_step: bool = False
    """Whether, in a job with servers, all workers take the same steps, and are dealt batches as ``mirrored`` does."""

    skips_alone: bool = False
    """Whether a step may be left out on one worker only, so that workers are to be compared by ``batches``."""

    batches: int = 0
    """How many there have been, as far as they are counted."""

    counts_steps: bool = True
    """Whether the script has no training loop over a loader of ours, so that its steps stand for batches."""

    def begin_epoch(self, epoch: int) -> None:  # noqa: B027 - most have nothing to do
        """A training loop begins; not collective, but at the same place on all ranks."""

    def note_step(self) -> None:  # noqa: B027 - most meet in every step
        """An optimizer takes a step on these parameters; not collective."""

    def glance(self) -> None:  # noqa: B027 - likewise
        """A training loop that has begun was left without any step; not collective."""

    def begin_batch(self, samples: int, mean: float | None = None) -> None:
        """A training loop gets a batch, for which the next backward passes are; not collective.

        Args:
            samples: Of all ranks; 0 if the loop has come to its end, and they are for no batch.
            mean: Samples of an average batch of this pass over the data, of all ranks, if that is known.
        """
        if samples:
            self.collector.samples = samples

    def end_batch(self, samples: int = 1, *, stepped: bool = True) -> None:  # noqa: B027 - likewise
        """A batch has been trained on. Rounds are counted in these, and end in a step.

        Args:
            samples: How many of them this worker had in it.
            stepped: Whether this is called at the end of the batch's first step; else the script has asked for the next
                batch, or has left the loop, without any.
        """

    def look(self) -> None:  # noqa: B027 - most have nothing to do
        """The script asks for another batch, or has left the loop: what was done since the last step is done."""

    def settle(self) -> None:  # noqa: B027 - replicas that are always equal need not
        """Let every worker have the model that the strategy stands for, to be evaluated and saved; collective.

        A training loop is over, or was left, or the script asks for it.
        """

    @property
    def owes(self) -> str:
        """What the script does not see yet of the model that the strategy stands for; nothing if it sees all."""
        return ""

    @property
    def collectors(self) -> list[Collector]:
        """All that there are; several where strategies take turns."""
        return [self.collector]

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Within, model and optimizer are what a checkpoint keeps; collective. Afterwards they are this worker's."""
        yield

    def rest(self) -> None:
        """Let another strategy be at work on the same model; collective. Replicas are equal then."""
        self.settle()
        self.collector.rests = True

    def rise(self) -> None:
        """Be at work, from where the other one has left the model; collective."""
        self.collector.rests = False

    def flush(self) -> None:  # noqa: B027 - likewise
        """A training loop has come to its end: exchange what was still to be exchanged; not collective."""

    def idle(self) -> None:  # noqa: B027 - likewise
        """There is no batch for this worker, though others may hold some: nobody is to wait for it; not collective."""

    def rejoin(self) -> None:  # noqa: B027 - likewise
        """Take part again, after ``idle``: nobody has trained meanwhile; not collective."""

    @property
    def holds(self) -> bool:
        """Whether there are gradients here of batches that others do not know of yet."""
        return False

    def refresh(self) -> None:  # noqa: B027 - most have nothing to do
        """Have the parameters as others have made them by now; not collective."""

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

    def replica(self) -> dict[str, torch.Tensor] | None:
        """The parameters, by name, of which every rank has a copy that must be equal; None if they share one."""
        return None


def wrap(optimizer: Optimizer, around_step: Callable[..., Any], collector: Collector) -> None:
    """Have ``optimizer.step(…)`` call ``around_step(original_step, …)``, and the collector hear of ``zero_grad``.

    LR schedulers find what they look for.
    """
    original: Step = optimizer.step
    original_zero = optimizer.zero_grad

    @like(original)
    def step(this: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if collector.rests:
            return original(*args, **kwargs)
        this._opt_called = True  # type: ignore[attr-defined]  # schedulers ask for it, also where no step is taken
        begin = time.perf_counter()
        result = around_step(original, *args, **kwargs)
        spans.add(spans.COMPUTE, "update", begin, time.perf_counter())
        if collector.on_step is not None:
            collector.on_step()
        return result

    @like(original_zero)
    def zero_grad(_: Optimizer, *args: Any, **kwargs: Any) -> None:
        collector.forget()
        original_zero(*args, **kwargs)

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]


def like(method: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Have a function that becomes a method look like the one that it replaces: GradScaler reads its signature.

    Wrapped as it is, a bound method would lose one more argument each time.
    """
    return functools.wraps(getattr(method, "__func__", method))


@contextmanager
def hooks_outside(optimizer: Optimizer, options: dict[str, Any]) -> Iterator[None]:
    """Run the hooks on ``optimizer.step`` while the optimizer looks as the script knows it, not divided."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    for hook in before.values():
        hook(optimizer, (), options)
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, after
    for hook in after.values():
        hook(optimizer, (), options)


@contextmanager
def without_scaler(optimizer: Optimizer) -> Iterator[None]:
    """Within, nothing is left of what GradScaler asks of a step: it has been done already."""
    names = [name for name in ("grad_scale", "found_inf") if hasattr(optimizer, name)]
    asked = {name: getattr(optimizer, name) for name in names}
    for name in names:
        setattr(optimizer, name, None)
    try:
        yield
    finally:
        for name, value in asked.items():
            setattr(optimizer, name, value)
