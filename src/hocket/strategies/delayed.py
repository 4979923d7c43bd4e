"""``delayed``: the gradients of one step travel while those of the next are computed, and are applied one step late."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.optim import LBFGS

from hocket import spans
from hocket.capture.noise import Gauge, Made
from hocket.comm.exchange import Exchange, Ticket
from hocket.errors import StrategyError
from hocket.specs import Spec
from hocket.strategies.averaged_gradients import (
    agree_on_missing,
    average_loss,
    check_exchanged,
    number_rates,
    say_rates,
)
from hocket.strategies.base import Context, DoneBatch, Strategy, Why
from hocket.strategies.nan_policy import NanPolicy, find_fault, read_faults
from hocket.strategies.optimizer_step import SUPPORTS_SCALING, step_with_closure, without_scaler
from hocket.updates.update import Step

_FAULT = 32  # bits of a payload that say what is missing; above them is the fault of the gradient


@dataclass(frozen=True)
class Late:
    """An average to be applied with the next step: its gradients, which are missing, and whether it can be used."""

    gradients: list[torch.Tensor]
    missing: bytes
    nonfinite: dict[int, int]
    dropped: bool


class DelayedTraining(Strategy):
    """Replicas that are always equal: ``optimizer.step()`` sends off ``p.grad`` and applies the average of last time.

    After ``backward()``, ``p.grad`` is this worker's own gradient. What the script does to it (clipping, GradScaler) is
    done before it is averaged, so that the last one can be applied at the end of a loop without the script.

    Where workers may be lost, an average is made at once, and applied as late as always: all of them have sent off the
    same gradients then, and gradients of a lost worker count with all others or with none.
    """

    name: ClassVar[str] = "delayed"
    turns: ClassVar[int] = 2  # how many sets of buffers there are

    def __init__(self, context: Context, spec: Spec) -> None:
        super().__init__(context, spec)
        communicator, optimizer, members = context.communicator, context.optimizer, context.members
        assert optimizer is not None
        if isinstance(optimizer, LBFGS):
            raise StrategyError(
                f"strategy {self.name!r} applies gradients in a later step than it computes them, and LBFGS needs "
                "those of where it is: use full_batch"
            )
        self._communicator, self._optimizer, self._members = communicator, optimizer, members
        self.steps = 0
        self._layout = communicator.lay_out(members.parameters)
        self._engine = self._make_engine()
        self._gauge = Gauge(communicator.size, members.parameters)
        self._nbytes = sum(parameter.nbytes for parameter in members.parameters)
        self._number = zlib.crc32(repr(members.describe()).encode())
        self._late: Late | None = None
        self._made, self._ticket = Made(1.0, 0, 1), Ticket(0, 0, "")
        self._filled: list[torch.Tensor] | None = None  # the slots that are being exchanged where workers may be lost
        self._factor = 1.0  # of this worker's gradients that are not exchanged, since workers were lost
        self._weight = 1.0  # of the gradients in the slots
        self._sent = b""  # this worker's missing gradients in the exchange that is under way
        self._nan_policy, self._nonfinite = NanPolicy(members.names, context.on_nan), None  # type: NanPolicy, int | None
        self.capture_in_place()
        self.collector.meanwhile = self._engine.progress
        self._leave_out_idle()
        self._original: Step = optimizer.step
        self._supports_scaling = getattr(optimizer, SUPPORTS_SCALING, False)

    def _make_engine(self) -> Exchange:
        waits = self._communicator.changes
        return self._communicator.exchange(self._layout, background=not waits, turns=self.turns)

    def regroup(self, weight: float) -> None:
        self._factor *= weight
        before, self._engine = self._engine, self._make_engine()
        if self._filled is not None:
            for value, slot in zip(self._filled, self._engine.slots, strict=True):
                torch.mul(value, self._factor, out=slot)
            self._weight *= self._factor
            self._filled, self._factor = self._engine.slots, 1.0
        before.close()
        self.collector.meanwhile = self._engine.progress
        self._leave_out_idle()
        self._gauge = Gauge(self._communicator.size, self._members.parameters)

    @property
    def skipped(self) -> int:
        return self._nan_policy.skipped

    @property
    def gauges(self) -> list[Gauge]:
        return [self._gauge]

    @property
    def holds(self) -> bool:
        return self._late is not None or self._engine.is_under_way

    def state(self) -> dict[str, Any]:
        """The state, with the last gradients, averaged: none is lost, and none is applied early, by a checkpoint."""
        self._fetch()
        late = self._late
        if late is None:
            return super().state()
        named = zip(self._members.names, late.gradients, late.missing, strict=True)
        return {
            **super().state(),
            "late": {
                "gradients": {name: gradient for name, gradient, missing in named if not missing},
                "nonfinite": [list(pair) for pair in late.nonfinite.items()],
                "dropped": late.dropped,
            },
        }

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._fetch()
        self._late = None
        saved = state.get("late")
        if saved is not None:
            gradients = self._layout.views(self._layout.allocate())
            for name, gradient in zip(self._members.names, gradients, strict=True):
                if name in saved["gradients"]:
                    gradient.copy_(saved["gradients"][name])
            missing = bytes(name not in saved["gradients"] for name in self._members.names)
            self._late = Late(gradients, missing, dict(saved["nonfinite"]), saved["dropped"])

    def end_batch(self, batch: DoneBatch) -> None:
        self.batches += 1

    def settle(self, why: Why) -> None:
        if why.makes_equal:
            self._flush()
        if why is Why.SWITCH_AWAY:
            self._take_every_step(False)
        super().settle(why)

    @property
    def owes(self) -> str:
        return "the last gradient is not applied yet" if self.holds else ""

    def captured(self) -> None:
        self._members.check_homes()
        self._communicator.begin()
        self._nonfinite, self._factor = self.collector.nonfinite, 1.0
        self._take_every_step(True)

    def _take_every_step(self, always: bool) -> None:
        """Have GradScaler call ``step`` also on a rank on which it finds a gradient that is not finite."""
        setattr(self._optimizer, SUPPORTS_SCALING, always or self._supports_scaling)

    def step(self, original: Step, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        self._members.check_groups(self._optimizer)
        if closure is not None:
            return self._step_with_closure(original, closure, options)
        check_exchanged(self.collector)
        self._take_every_step(False)
        return self._apply(self._next(), lambda: original(**options))

    def _step_with_closure(self, original: Step, closure: Callable[[], Any], options: dict[str, Any]) -> Any:
        own: list[torch.Tensor | None] = []

        def averaged() -> Any:
            return average_loss(self._communicator, self.collector, closure())

        def put() -> bool:
            check_exchanged(self.collector)
            late = self._next()
            is_usable = late is not None and self._allows(late)
            own[:] = self._put(late if is_usable else None)
            return is_usable

        try:
            return step_with_closure(original, self._optimizer, averaged, put, **options)
        finally:
            if own:
                self._put_back(own)

    def _next(self) -> Late | None:
        """The script takes a step with ``p.grad``; returns the average that is applied instead."""
        late = self._take()
        self._exchange()
        return late

    def _flush(self) -> None:
        """Apply the average that has not been applied yet."""
        self._apply(self._take(), self._original)

    def _take(self) -> Late | None:
        """The average of the gradients that were sent before; each average is returned once."""
        self._fetch()
        late, self._late = self._late, None
        return late

    def _apply(self, late: Late | None, step: Callable[[], Any]) -> Any:
        """Take a step with an average from before, if there is one; ``p.grad`` is then what it was."""
        if late is None or not self._allows(late):
            return None
        own = self._put(late)
        try:
            with without_scaler(self._optimizer):
                return step()
        finally:
            self._put_back(own)

    def _allows(self, late: Late) -> bool:
        self._nan_policy.record({} if late.dropped else late.nonfinite)
        with without_scaler(self._optimizer):
            return self._nan_policy.allows_step(self._optimizer) and not late.dropped

    def _put(self, late: Late | None) -> list[torch.Tensor | None]:
        """Set ``p.grad`` to the gradients of ``late``, or None; returns the old gradients."""
        own = [parameter.grad for parameter in self._members.parameters]
        self._put_back([None] * len(own))
        if late is not None:
            self._members.set_gradients(late.gradients, late.missing)
        return own

    def _put_back(self, gradients: list[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._members.parameters, gradients, strict=True):
            parameter.grad = gradient

    @torch.no_grad()
    def _exchange(self) -> None:
        """Send off ``p.grad``."""
        begin = time.perf_counter()
        if self.collector.has_news:  # it decides what travels, so ranks that differ must be found before
            trained = zlib.crc32(self.collector.trained)
            self._communicator.meet(trained, 0, "the first gradients after unfreezing")
            self._leave_out_idle()
        fault = self._fill()
        self._gauge.see_rest(self._engine.slots)
        self._made = Made(self.collector.weight, self.collector.samples, self.collector.collected)
        rates = say_rates(self._optimizer)
        what = f"the gradient exchange of step {self.steps + 1}{rates}, after {self.batches} batches"
        payload = fault << _FAULT | (zlib.crc32(self._sent) if 1 in self._sent else 0)
        number = self._number + number_rates(self._optimizer) + zlib.crc32(b"%d" % self.batches)
        self._ticket = Ticket(number, payload, what)  # a rank that has left out a step is at another batch
        if self._communicator.changes:
            self._filled = self._engine.slots
            payloads = self._communicator.persist(self._take_part)
            self._filled = None
            self.steps += 1
            self._receive(payloads)
        else:
            self._engine.begin(self._ticket)
            self.steps += 1
        self.sent += self._nbytes
        self._note_exchange(begin)

    def _take_part(self) -> list[int]:
        self._engine.begin(self._ticket)
        return self._engine.finish()

    def _note_exchange(self, begin: float) -> None:
        end = time.perf_counter()
        self.exchanging += end - begin
        spans.add(spans.EXCHANGE, "exchange gradients", begin, end, number=self.steps)

    def _fill(self) -> int:
        """Copy this worker's gradients to the slots; returns their fault."""
        gradients = [parameter.grad for parameter in self._members.parameters]
        self._sent = bytes(gradient is None for gradient in gradients)
        for name, gradient in zip(self._members.names, gradients, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise StrategyError(
                    f"the gradient of {name!r} is sparse, which this strategy cannot exchange: make the embedding with "
                    "sparse=False"
                )
        grad_scale = getattr(self._optimizer, "grad_scale", None)
        self._engine.put(gradients, self._factor if grad_scale is None else self._factor / float(grad_scale))
        self._weight, self._factor = self.collector.weight, 1.0
        nonfinite, self._nonfinite = self._nonfinite, None
        return find_fault(self._optimizer, nonfinite)

    def _fetch(self) -> None:
        """Wait for the exchange that is under way, if there is one."""
        if not self._engine.is_under_way:
            return
        begin = time.perf_counter()
        self._receive(self._engine.finish())
        self._note_exchange(begin)

    def _receive(self, payloads: list[int]) -> None:
        """An exchange is over: its average is to be applied."""
        self._gauge.end_step(self._engine.results, self._made)
        same = len({payload & (1 << _FAULT) - 1 for payload in payloads}) == 1
        missing = self._sent if same else agree_on_missing(self._communicator, self._sent)
        nonfinite, dropped = read_faults({rank: payload >> _FAULT for rank, payload in enumerate(payloads)})
        self._late = Late(self._engine.result_views, missing, nonfinite, dropped)

    def _leave_out_idle(self) -> None:
        """Buckets without any gradient do not travel; all ranks at the same time."""
        self.collector.leave_out_idle()
        trained, places = self.collector.trained, self._layout.places
        busy = {place.bucket for place, byte in zip(places, trained, strict=True) if byte}
        self._engine.idle = frozenset(range(len(self._layout.buckets))) - busy
