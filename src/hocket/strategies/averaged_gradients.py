"""What ``mirrored`` and ``central`` share: after ``backward()``, ``p.grad`` is the average over all ranks.

The averages are private to the worker, in one flat buffer of which every ``p.grad`` is a view.
"""

from __future__ import annotations

import operator
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from hocket import spans
from hocket.capture.bucket_order import Readiness
from hocket.capture.collector import Collector, read_payloads
from hocket.capture.members import Members
from hocket.capture.noise import Gauge
from hocket.comm.bucket_layout import Layout, limits_by_cost
from hocket.comm.communicator import Communicator
from hocket.comm.exchange import Exchange, Ticket
from hocket.errors import StrategyError, UsageError
from hocket.specs import CodecSpec
from hocket.strategies.averaging import average_once
from hocket.strategies.base import Strategy, Why
from hocket.strategies.nan_policy import NanPolicy


class AveragedGradients:
    """Averages the gradients of ``members`` over all ranks at the end of each backward pass.

    Args:
        communicator: The communicator of all ranks.
        members: The parameters whose gradients are averaged.
        layout: Where each gradient lies in the buckets.
        on_nan: What is done about gradients that are not finite.
        optimizer: The optimizer, whose learning rates must be equal on all ranks.
        private: Whether each worker has the averages for itself, or the workers of a host share them.
        follows: Whether the layout may change after the first exchange, to the order in which gradients became ready.
        codec: How gradients travel between hosts in fewer bytes.
    """

    def __init__(
        self,
        communicator: Communicator,
        members: Members,
        layout: Layout,
        on_nan: str,
        optimizer: Optimizer | None,
        *,
        private: bool = True,
        follows: bool = False,
        codec: CodecSpec | None = None,
    ) -> None:
        self.members = members
        self._follows, self._private, self._codec = follows, private, codec
        self.steps, self.seconds, self.sent = 0, 0.0, 0
        self.nan_policy = NanPolicy(members.names, on_nan)
        self._communicator = communicator
        self._use(communicator.exchange(layout, private=private, codec=codec))
        self.collector = Collector(
            members.names, members.parameters, layout, self._engine, self._exchange, check_finite=on_nan != "ignore"
        )
        self.gauge = Gauge(communicator.size, members.parameters)
        self.collector.on_complete = self.gauge.see
        self._number = zlib.crc32(repr(members.describe()).encode())
        self._optimizer = optimizer
        self._nbytes = self._find_nbytes()

    def _use(self, engine: Exchange) -> None:
        self._engine, self.results = engine, engine.results
        self._shown = engine.result_views

    def describe(self) -> str:
        rates, taken = say_rates(self._optimizer), self.collector.taken
        return f"backward(), the gradient exchange of step {self.steps + 1}{rates}, after {taken} optimizer steps"

    def show(self, gradients: list[torch.Tensor]) -> None:
        """Let ``p.grad`` be one of ``gradients`` after an exchange, and not the average itself."""
        self._shown = gradients

    def present(self) -> bytes:
        """One byte per parameter: whether it has a gradient; raises if that is not the one that was shown."""
        gradients = [parameter.grad for parameter in self.members.parameters]
        for name, gradient, shown in zip(self.members.names, gradients, self._shown, strict=True):
            if gradient is not None and gradient is not shown:
                raise StrategyError(
                    f"the gradient of {name!r} was replaced, which strategy 'central(fused=True)' cannot honour: use "
                    "--strategy central or mirrored"
                )
        return bytes(gradient is not None for gradient in gradients)

    def sync_results(self) -> bytes:
        """Before an update from ``results``: bring in what the user put in place of a gradient.

        Returns:
            One byte per parameter: whether it has a gradient.
        """
        gradients = [parameter.grad for parameter in self.members.parameters]
        if all(map(operator.is_, gradients, self._engine.result_views)):
            return b"\1" * len(gradients)
        present = bytearray(len(gradients))
        for i, (gradient, view) in enumerate(zip(gradients, self._engine.result_views, strict=True)):
            if gradient is not None:
                present[i] = 1
                if gradient is not view:
                    view.copy_(gradient)
        return bytes(present)

    def before_step(self, optimizer: Optimizer | None) -> bool:
        """Whether ``optimizer.step`` may go on; raises if gradients were never exchanged."""
        check_exchanged(self.collector)
        return self.nan_policy.allows_step(optimizer)

    def _exchange(self) -> None:
        self.members.check_homes()
        self._communicator.begin()
        if self.collector.has_news:  # it decides what travels, so ranks that differ must be found before
            self._communicator.meet(zlib.crc32(self.collector.trained), 0, self._describe_trained)
            self.collector.leave_out_idle()
            self._nbytes = self._find_nbytes()
        self.gauge.see_rest(self._engine.slots)
        payload, begin = self.collector.payload(), time.perf_counter()
        payloads = self._communicator.persist(lambda: self._take_part(payload))
        end = time.perf_counter()
        self.seconds += end - begin
        spans.add(spans.EXCHANGE, "exchange gradients", begin, end, number=self.steps)
        self.gauge.end_step(self.results, self.collector)
        self.steps += 1
        self.sent += self._nbytes
        nonfinite, same = read_payloads(payloads)
        self.nan_policy.record(nonfinite)
        missing = self.collector.missing if same else agree_on_missing(self._communicator, self.collector.missing)
        self.members.set_gradients(self._shown, missing)
        readiness = self.collector.readiness
        if readiness is not None and readiness.end() and self._follows:
            self._follow(readiness)

    def _take_part(self, payload: int) -> list[int]:
        number = self._number + number_rates(self._optimizer, self.collector.taken)
        self._engine.begin(Ticket(number, payload, self.describe))
        return self._engine.finish()

    def regroup(self, weight: float) -> None:
        """Go on with the workers that are left; what was collected and not exchanged counts ``weight`` times.

        If there are newcomers, nothing was collected, and buckets are laid out as at the beginning, since newcomers do
        not know in which order gradients became ready.
        """
        owed = self.owed()
        before, group = self._engine, self._communicator
        layout = group.lay_out(self.members.parameters) if group.has_newcomers else before.layout
        self._use(group.exchange(layout, private=self._private, codec=self._codec))
        self.owe(owed)
        if layout is before.layout:
            for value, slot in zip(before.slots, self._engine.slots, strict=True):
                torch.mul(value, weight, out=slot)
            self.collector.move(layout, self._engine)
        else:
            self.collector.adopt(layout, self._engine)
        before.close()
        self.gauge = Gauge(self._communicator.size, self.members.parameters)
        self.collector.on_complete = self.gauge.see

    @torch.no_grad()
    def owed(self) -> dict[str, torch.Tensor]:
        """What a codec has not sent so far of the averages, by parameter; collective. Nothing without a codec."""
        names, parameters = self.members.names, self.members.parameters
        if self._codec is None or not parameters:
            return {}
        mine = self._engine.owed() or [torch.zeros_like(parameter) for parameter in parameters]
        with self._communicator.aside():
            average_once(self._communicator, mine)
        return {name: tensor * self._communicator.size for name, tensor in zip(names, mine, strict=True)}

    def owe(self, owed: dict[str, torch.Tensor]) -> None:
        """Have the codec send what ``owed`` gave, too."""
        if owed and self._codec is not None:
            zeros = [torch.zeros_like(parameter) for parameter in self.members.parameters]
            values = [owed.get(name, zero) for name, zero in zip(self.members.names, zeros, strict=True)]
            self._engine.owe(values, self.steps)

    def _find_nbytes(self) -> int:
        """Find how many bytes are handed to each exchange."""
        parameters = zip(self.members.parameters, self.collector.trained, strict=True)
        return sum(parameter.nbytes for parameter, trained in parameters if trained)

    def _describe_trained(self) -> str:
        names = [name for name, trained in zip(self.members.names, self.collector.trained, strict=True) if not trained]
        return f"the first gradients after unfreezing, with {', '.join(names) or 'nothing'} still frozen"

    def _follow(self, readiness: Readiness) -> None:
        """Lay out the buckets in the order in which gradients became ready on rank 0; collective.

        Between GPUs their number follows from what a sum takes, and how long the pass took, both on rank 0.
        """
        parameters, nccl = self.members.parameters, self._communicator.nccl
        # Where workers may be lost, a measurement would wait for them for ever.
        cost = None if nccl is None or nccl.look is not None else [*nccl.measure(), readiness.seconds]
        order, measured = self._communicator.gather_data([readiness.order, cost])[0]
        limits = None if measured is None else lambda nbytes: limits_by_cost(nbytes, *measured)
        layout = self._communicator.lay_out(parameters, order, limits)
        if layout.places == self._engine.layout.places:
            return
        owed = self.owed()
        self._engine.close()
        self._use(self._communicator.exchange(layout, codec=self._codec))
        self.owe(owed)
        self.collector.adopt(layout, self._engine, early=readiness.is_early)


class CountedByExchange(Strategy):
    """A strategy whose counts are those of its exchange, with what its codec owes."""

    _exchange: AveragedGradients
    _owed: dict[str, torch.Tensor] = {}

    @contextmanager
    def merged(self) -> Iterator[None]:
        self._owed = self._exchange.owed()
        with super().merged():
            yield
        self._owed = {}

    def settle(self, why: Why) -> None:
        super().settle(why)
        if why is Why.SWITCH_AWAY:
            self._owed = self._exchange.owed()

    def state(self) -> dict[str, Any]:
        return {**super().state(), "owed": self._owed}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._exchange.owe(state.get("owed", {}))

    @property
    def gauges(self) -> list[Gauge]:
        return [self._exchange.gauge]

    @property
    def steps(self) -> int:
        return self._exchange.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._exchange.steps = steps

    @property
    def skipped(self) -> int:
        return self._exchange.nan_policy.skipped

    @property
    def sent(self) -> int:
        return self._exchange.sent

    @sent.setter
    def sent(self, sent: int) -> None:
        self._exchange.sent = sent

    @property
    def exchanging(self) -> float:
        return self._exchange.seconds

    @exchanging.setter
    def exchanging(self, seconds: float) -> None:
        self._exchange.seconds = seconds


def agree_on_missing(communicator: Communicator, missing: bytes) -> bytes:
    """The parameters that have no gradient on any rank."""
    everyone = [int.from_bytes(part, "little") for part in communicator.gather_bytes(missing)]
    common = everyone[0]
    for part in everyone[1:]:
        common &= part
    return common.to_bytes(len(missing), "little")


def _rates(optimizer: Optimizer | None) -> list[float]:
    return [] if optimizer is None else [float(group.get("lr", 0.0)) for group in optimizer.param_groups]


def number_rates(optimizer: Optimizer | None, taken: int = 0) -> int:
    """A part of a signature: ranks whose learning rates differ, or the steps taken so far, do not do the same."""
    return zlib.crc32(repr((_rates(optimizer), taken)).encode()) << 1


def say_rates(optimizer: Optimizer | None) -> str:
    """The learning rates, in words."""
    rates = _rates(optimizer)
    return f" with learning rate{'s' if len(rates) > 1 else ''} {', '.join(map(str, rates))}" if rates else ""


def check_exchanged(collector: Collector) -> None:
    """Raise if there are gradients that were not exchanged."""
    if collector.passes:
        raise UsageError(
            f"optimizer.step() after {collector.passes} backward passes inside hocket.accumulate(), none of them "
            "exchanged: run the last backward pass before a step outside of it"
        )
    if collector.unfinished:
        raise UsageError(
            "all gradients were made inside reentrant checkpoints, and the model's output did not show when the "
            "backward pass was over: use checkpoint(…, use_reentrant=False), or call the model itself and have it "
            "return tensors"
        )


def average_loss(communicator: Communicator, collector: Collector, loss: Any) -> Any:
    """The loss of a closure over all ranks' samples, equal on all ranks for optimizers that compare losses."""
    if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
        return loss
    mean = loss.detach().clone(memory_format=torch.contiguous_format).mul_(collector.weight)
    communicator.allreduce(mean, "mean")
    return mean
