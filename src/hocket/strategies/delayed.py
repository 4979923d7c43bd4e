"""``delayed``: the gradients of one step travel while those of the next are computed, and are applied one step late."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from hocket import spans
from hocket.comm import gpu
from hocket.comm.communicator import Communicator
from hocket.comm.delayed import DelayedAverager
from hocket.comm.layout import Layout
from hocket.errors import StrategyError
from hocket.strategies.base import SUPPORTS_SCALING, Strategy, without_scaler, wrap
from hocket.strategies.collector import Collector
from hocket.strategies.exchange import (
    Judgement,
    agree_on_missing,
    average_loss,
    check_exchanged,
    number_rates,
    say_rates,
)
from hocket.strategies.members import Members
from hocket.strategies.model_hooks import ModelHooks
from hocket.strategies.noise import Gauge, Made
from hocket.updates.update import Step

_CODE = 32  # bits of a payload that say what is missing; above: 0, or why a gradient cannot be used
_DROPPED, _FIRST = 1, 2  # GradScaler wants it skipped; from here on a parameter that is not finite


@dataclass(frozen=True)
class Late:
    """An average that is to be applied with the next step: gradients, which are missing, and whether it can be used."""

    gradients: list[torch.Tensor]
    missing: bytes
    nonfinite: dict[int, int]
    dropped: bool


class DelayedTraining(Strategy):
    """Replicas that are always equal: ``optimizer.step()`` sends off ``p.grad`` and applies the average of before.

    After ``backward()``, ``p.grad`` is this worker's own gradient. What the script does to it (clipping, GradScaler) is
    done before it is averaged, so that the last one can be applied at the end of a loop without the script.
    """

    name: ClassVar[str] = "delayed"
    turns: ClassVar[int] = 2  # sets of buffers

    def __init__(
        self, communicator: Communicator, model: nn.Module, optimizer: Optimizer, members: Members, on_nan: str
    ) -> None:
        if isinstance(optimizer, LBFGS):
            raise StrategyError(
                f"strategy {self.name!r} applies gradients in a later step than it computes them, and LBFGS needs "
                "those of where it is: use full_batch"
            )
        self._communicator, self._optimizer, self._members = communicator, optimizer, members
        self.steps = 0
        self._layout = Layout(members.parameters, limits=gpu.limits(communicator, members.parameters))
        self._averager = DelayedAverager(communicator, self._layout, turns=self.turns)
        self._slots = {id(slots): self._layout.views(slots) for slots in self._averager.all_slots}
        self._results = {id(results): self._layout.views(results) for results in self._averager.all_results}
        self._gauge = Gauge(communicator.size, members.parameters)
        self._nbytes = sum(parameter.nbytes for parameter in members.parameters)
        self._number = zlib.crc32(repr(members.describe()).encode())
        self._late: Late | None = None
        self._made = Made(1.0, 0, 1)
        self._sent = b""  # what was missing here in the exchange that is under way
        self._judgement, self._nonfinite = Judgement(members.names, on_nan), None  # type: Judgement, int | None
        self.collector = Collector(
            members.names, members.parameters, None, None, self._end_pass, check_finite=on_nan != "ignore"
        )
        self.collector.meanwhile = self._averager.progress
        self._leave_out_idle()
        ModelHooks(model, self.collector)
        self._original: Step = optimizer.step
        self._supports_scaling = getattr(optimizer, SUPPORTS_SCALING, False)
        wrap(optimizer, self._step, self.collector)

    @property
    def skipped(self) -> int:
        return self._judgement.skipped

    @property
    def gauges(self) -> list[Gauge]:
        return [self._gauge]

    @property
    def holds(self) -> bool:
        return self._late is not None or self._averager.is_under_way

    def replica(self) -> dict[str, torch.Tensor] | None:
        return dict(zip(self._members.names, self._members.parameters, strict=True))

    def state(self) -> dict[str, Any]:
        """The last gradients are in it, averaged: nothing is lost, and nothing is applied earlier than without."""
        self._fetch()
        late = self._late
        if late is None:
            return {"steps": self.steps}
        named = zip(self._members.names, late.gradients, late.missing, strict=True)
        return {
            "steps": self.steps,
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

    def end_batch(self, samples: int = 1, *, stepped: bool = True) -> None:
        self.batches += 1

    def settle(self) -> None:
        self._flush()

    @property
    def owes(self) -> str:
        return "the last gradient is not applied yet" if self.holds else ""

    def rest(self) -> None:
        self._flush()
        self._take_every_step(False)
        self.collector.rests = True

    def _end_pass(self) -> None:
        self._members.check_homes()
        self._nonfinite = self.collector.nonfinite
        self._take_every_step(True)

    def _take_every_step(self, always: bool) -> None:
        """Have GradScaler call ``step`` also on a rank on which it finds a gradient that is not finite."""
        setattr(self._optimizer, SUPPORTS_SCALING, always or self._supports_scaling)

    def _step(self, original: Step, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        self._members.check_groups(self._optimizer)
        if closure is not None:
            return self._step_with_closure(original, closure, options)
        check_exchanged(self.collector)
        self._take_every_step(False)
        return self._apply(self._next(), lambda: original(**options))

    def _step_with_closure(self, original: Step, closure: Callable[[], Any], options: dict[str, Any]) -> Any:
        own: list[torch.Tensor | None] = []

        def delayed() -> Any:
            loss = average_loss(self._communicator, self.collector, closure())
            check_exchanged(self.collector)
            late = self._next()
            own[:] = self._put(late if late is not None and self._allows(late) else None)
            return loss

        try:
            return original(delayed, **options)
        finally:
            if own:
                self._put_back(own)

    def _next(self) -> Late | None:
        """The script takes a step with ``p.grad``: what is applied instead."""
        late = self._take()
        self._exchange()
        return late

    def _flush(self) -> None:
        """Apply what has not been applied yet."""
        self._apply(self._take(), self._original)

    def _take(self) -> Late | None:
        """The average of what was sent before, once."""
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
        self._judgement.record({} if late.dropped else late.nonfinite)
        with without_scaler(self._optimizer):
            return self._judgement.allows_step(self._optimizer) and not late.dropped

    def _put(self, late: Late | None) -> list[torch.Tensor | None]:
        """Let ``p.grad`` be ``late``, or nothing; what it was."""
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
        if self.collector.has_news:  # what travels depends on it, so ranks that differ must be found before
            trained = zlib.crc32(self.collector.trained)
            self._communicator.meet(trained, 0, "the first gradients after unfreezing")
            self._leave_out_idle()
        code = self._fill(self._slots[id(self._averager.slots)])
        self._gauge.see_rest(self._averager.slots)
        self._made = Made(self.collector.weight, self.collector.samples, self.collector.collected)
        what = f"the gradient exchange of step {self.steps + 1}{say_rates(self._optimizer)}"
        payload = code << _CODE | (zlib.crc32(self._sent) if 1 in self._sent else 0)
        number = self._number + number_rates(self._optimizer) + zlib.crc32(b"%d" % self.batches)
        self._averager.begin(number, payload, what)  # a rank that has left out a step is at another batch
        self.steps += 1
        self.sent += self._nbytes
        self._note_exchange(begin)

    def _note_exchange(self, begin: float) -> None:
        end = time.perf_counter()
        self.exchanging += end - begin
        spans.add(spans.EXCHANGE, "exchange gradients", begin, end, number=self.steps)

    def _fill(self, views: list[torch.Tensor]) -> int:
        """Copy this worker's gradients to the slots; 0, or why they cannot be used."""
        gradients = [parameter.grad for parameter in self._members.parameters]
        self._sent = bytes(gradient is None for gradient in gradients)
        for name, gradient in zip(self._members.names, gradients, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise StrategyError(
                    f"the gradient of {name!r} is sparse, which this strategy cannot exchange: make the embedding with "
                    "sparse=False"
                )
        scale = self._averager.scale
        grad_scale = getattr(self._optimizer, "grad_scale", None)
        if grad_scale is not None:
            scale /= float(grad_scale)
        present = [(view, gradient) for view, gradient in zip(views, gradients, strict=True) if gradient is not None]
        if present:
            targets = [view for view, _ in present]
            torch._foreach_copy_(targets, [gradient for _, gradient in present])
            if scale != 1:
                torch._foreach_mul_(targets, scale)
        for view, missing in zip(views, self._sent, strict=True):
            if missing:
                view.zero_()
        found_inf = getattr(self._optimizer, "found_inf", None)
        nonfinite, self._nonfinite = self._nonfinite, None
        if found_inf is not None:
            return _DROPPED if float(found_inf) else 0
        return 0 if nonfinite is None else _FIRST + nonfinite

    def _fetch(self) -> None:
        """Wait for the exchange that is under way, if there is one."""
        if not self._averager.is_under_way:
            return
        begin = time.perf_counter()
        payloads = self._averager.finish()
        self._gauge.end_step(self._averager.results, self._made, self._averager.scale)
        codes = {rank: payload >> _CODE for rank, payload in enumerate(payloads)}
        same = len({payload & (1 << _CODE) - 1 for payload in payloads}) == 1
        missing = self._sent if same else agree_on_missing(self._communicator, self._sent)
        nonfinite = {rank: code - _FIRST for rank, code in codes.items() if code >= _FIRST}
        gradients = self._results[id(self._averager.results)]
        self._late = Late(gradients, missing, nonfinite, _DROPPED in codes.values())
        self._note_exchange(begin)

    def _leave_out_idle(self) -> None:
        """Buckets without any gradient do not travel; all ranks at the same time."""
        self.collector.leave_out_idle()
        trained, places = self.collector.trained, self._layout.places
        busy = {place.bucket for place, byte in zip(places, trained, strict=True) if byte}
        self._averager.idle = frozenset(range(len(self._layout.buckets))) - busy
