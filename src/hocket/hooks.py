"""Monitored training: what TensorFlow's MonitoredTrainingSession gives, around a loop that stays the script's own.

with hooks.Monitored(model=model, optimizer=optimizer, loader=loader, epochs=10, hooks=[hooks.StopAtStep(5000)]) as run:
    for x, y in run:
        ...
        run.tell(loss=loss)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from hocket.errors import NonFiniteError, UsageError
from hocket.job.checkpoint.save_load_resume import Position, resume
from hocket.job.metrics import maximum, read_number, report
from hocket.job.worker import Worker, current, meeting, settle


class Hook:
    """Something that is done beside the training; every method may be left out."""

    def begin(self, run: Monitored) -> None:
        """The training is restored, and no batch was taken yet; on all ranks together."""

    def before_step(self, run: Monitored) -> None:
        """The script gets a batch."""

    def after_step(self, run: Monitored) -> None:
        """The script is done with its batch; not where it has raised, or has left the loop before its step."""

    def end(self, run: Monitored) -> None:
        """The training has ended, not by an exception; the model is settled and saved; on all ranks together."""

    def accepts(self, error: BaseException) -> bool:
        """Whether the training is to end in order with an exception that all ranks have raised."""
        return False


class StopAtStep(Hook):
    """Ends the training after a step of the optimizer, counted from the beginning of the training.

    Args:
        last: The number of the last step, which a training that goes on from a checkpoint may have taken before.
    """

    def __init__(self, last: int) -> None:
        self._last = last

    def begin(self, run: Monitored) -> None:
        self.after_step(run)

    def after_step(self, run: Monitored) -> None:
        if run.step >= self._last:
            run.stop(everywhere=True)


class Summaries(Hook):
    """Reports what the script tells, as ``hocket.report`` does, after every so many steps."""

    def __init__(self, every: int = 100) -> None:
        self._every, self._last = every, 0

    def begin(self, run: Monitored) -> None:
        self._last = run.step

    def after_step(self, run: Monitored) -> None:
        if run.values and run.step // self._every > self._last // self._every:
            self._last = run.step
            report(**run.values)


class StopOnNaN(Hook):
    """Ends the training when the loss that the script tells, or a gradient, is NaN or infinite.

    Args:
        name: The name by which the script tells its loss.
        fails: Whether the job fails then. Otherwise the training ends in order, with the parameters before that step.
    """

    def __init__(self, name: str = "loss", *, fails: bool = True) -> None:
        self._name, self._fails = name, fails

    def after_step(self, run: Monitored) -> None:
        value = run.values.get(self._name)
        if value is None or math.isfinite(value):
            return
        if self._fails:
            raise NonFiniteError(
                f"{self._name} is {value} at step {run.step}: lower the learning rate, clip gradients, or end in order "
                "by StopOnNaN(fails=False)"
            )
        run.stop()

    def accepts(self, error: BaseException) -> bool:
        # A worker that takes its steps alone has raised alone, and the others would wait for it.
        equal = all(strategy.spec.has_equal_replicas for strategy in current().training.strategies)
        return not self._fails and equal and isinstance(error, NonFiniteError)


class Monitored:
    """A training with hooks, which is restored, saved and summed up; every rank must make it, after ``distribute``.

    It is a context, and in it the batches of all epochs. Without a ``loader`` it counts steps until a hook, or the
    script, stops it. With ``--checkpoint DIR`` it goes on where the training was, and saves at the end, too.

    Args:
        hooks: What is done beside the training, in this order.
        epochs: Passes over the loader in all, those before a restart included.
        agree_every: After how many steps workers that are in step ask each other whether one of them wants to stop.
        model: See ``hocket.resume``; the same for ``optimizer``, ``scheduler``, ``extra`` and ``others``.
        loader: The loader that ``distribute`` returned.

    Attributes:
        epochs: Passes over the loader in all.
        epoch: The pass that goes on, from 0.
        position: Where the training went on when it was begun.
        values: What the script has told of its batch.
    """

    def __init__(
        self,
        hooks: Sequence[Hook] = (),
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        loader: Any = None,
        epochs: int = 1,
        agree_every: int = 1,
        extra: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        if agree_every < 1:
            raise UsageError(f"Monitored(agree_every={agree_every}): must be a number of steps from 1")
        self._hooks, self._loader, self._agree_every = list(hooks), loader, agree_every
        self._subjects = {
            "model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "extra": extra, **others
        }  # fmt: skip
        self.epochs, self.epoch, self.position = epochs, 0, Position()
        self.values: dict[str, float] = {}
        self._wants_end = self._is_over = False
        self._open_at: int | None = None  # the step before the batch that the script has
        self._first = 0

    @property
    def step(self) -> int:
        """Steps of the training so far, the same on all ranks; those of this worker where they are not in step."""
        return current().training.counts.common_step

    def tell(self, **values: Any) -> None:
        """Tell hooks of this batch: ``tell(loss=loss)``."""
        self.values |= {name: read_number(value, name) for name, value in values.items()}

    def stop(self, *, everywhere: bool = False) -> None:
        """End the training after this batch: on all workers that are in step, or on this one where they are not.

        Args:
            everywhere: Whether all ranks call this after the same step, so that they need not ask each other.
        """
        worker = current()
        if not (everywhere or worker.client is not None or worker.config.size == 1 or _are_in_step(worker)):
            raise UsageError(
                "stop() on one rank in a round of local_sgd(time=…), where workers are at different batches: end by "
                "hooks.StopAtStep, or by stop(everywhere=True) on all ranks after the same step"
            )
        self._wants_end, self._is_over = True, self._is_over or everywhere

    def __enter__(self) -> Monitored:
        self.position, self._first = resume(**self._subjects), self.step
        self.epoch = self.position.epoch
        for hook in self._hooks:
            hook.begin(self)
        return self

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches():
            self.values, self._open_at = {}, self.step
            for hook in self._hooks:
                hook.before_step(self)
            yield batch
            self._end_batch()
            self._is_over = self._is_over or self._agree()
            if self._loader is None:
                self.position.done()
            if self._is_over:
                break

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> bool:
        if error is not None and not any(hook.accepts(error) for hook in self._hooks):
            return False
        if error is None and self._open_at is not None and self.step > self._open_at:
            self._end_batch()  # the script has left the loop after its step
        if self._loader is None or error is not None:
            settle()
        else:  # the loops have settled; where workers are not in step, this one waits here for those that train on
            meeting("")
        if self.step > self._first:
            current().training.save_at_end()
        for hook in self._hooks:
            hook.end(self)
        return True

    def _batches(self) -> Iterator[Any]:
        """The batches of all epochs that are left, or without a loader the numbers of steps."""
        while self._loader is None and not self._is_over:
            yield self.step
        for epoch in range(self.position.epoch, self.epochs if self._loader is not None else 0):
            self.epoch = epoch
            if self._is_over:
                break
            yield from self._loader

    def _end_batch(self) -> None:
        self._open_at = None
        for hook in self._hooks:
            hook.after_step(self)

    def _agree(self) -> bool:
        """Whether this worker is to leave the loop now; collective where workers are in step."""
        worker = current()
        if worker.config.size == 1 or not _are_in_step(worker):
            return self._wants_end
        return self.step % self._agree_every == 0 and maximum(float(self._wants_end)) > 0


def _are_in_step(worker: Worker) -> bool:
    specs = [strategy.spec for strategy in worker.training.strategies]
    return all(spec.in_step if worker.client is not None else not spec.is_uneven for spec in specs)
