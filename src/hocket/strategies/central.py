"""``central``: one copy of parameters and optimizer state per host; each worker updates its own part of it."""

from __future__ import annotations

import operator
import time
import zlib
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from hocket import spans
from hocket.capture.collector import Collector, read_payloads
from hocket.capture.local_gradient import LocalGradient
from hocket.capture.model_hooks import ModelHooks
from hocket.capture.noise import Gauge
from hocket.comm.changing_group import RegroupingCommunicator
from hocket.comm.communicator import Communicator
from hocket.comm.kernels import average_into
from hocket.comm.shared import SharedCommunicator
from hocket.errors import StrategyError
from hocket.specs import Spec
from hocket.strategies.averaged_gradients import (
    AveragedGradients,
    CountedByExchange,
    agree_on_missing,
    average_loss,
    check_exchanged,
    number_rates,
    say_rates,
)
from hocket.strategies.base import Context, Strategy
from hocket.strategies.nan_policy import NanPolicy
from hocket.strategies.optimizer_step import hooks_outside
from hocket.strategies.shared_copy import HostMemory, SharedParameters, stands_apart
from hocket.transport.waiting import Description
from hocket.updates.kinds import divides_by_elements
from hocket.updates.slices import SlicedUpdate
from hocket.updates.undo_log import UndoLog
from hocket.updates.update import Range, Step, Update
from hocket.updates.whole_tensors import WholeUpdate, refuse_changes


class CentralTraining(Strategy):
    """What all forms of ``central`` have in common: shared parameters, and a step between two meetings."""

    collector: Collector

    def __init__(self, context: Context, spec: Spec) -> None:
        super().__init__(context, spec)
        communicator, optimizer, members = context.communicator, context.optimizer, context.members
        assert optimizer is not None
        if communicator.on_host is not communicator:
            communicator.stay("strategy 'central' goes on without a worker only where all are on one host")
        on_host = _group_of(communicator.on_host)
        if not isinstance(on_host, SharedCommunicator) and not communicator.changes:
            raise StrategyError(
                "strategy 'central' needs shared memory, which this job has not: use --strategy mirrored"
            )
        by_elements = divides_by_elements(optimizer, "central")
        if members.foreign:
            raise StrategyError(
                "strategy 'central' cannot share parameters that two optimizers train: give each parameter to one "
                "optimizer, or use --strategy mirrored"
            )
        if communicator.changes and not by_elements:
            communicator.stay(refuse_changes(optimizer))
        self._communicator, self._optimizer, self._members = communicator, optimizer, members
        self._host = host = HostMemory(communicator)
        self._layout = layout = communicator.lay_out(members.parameters)
        if stands_apart(layout) and not by_elements:
            raise StrategyError(
                f"strategy 'central' updates its copy in the CPU's memory by slices, and {type(optimizer).__name__} "
                "works on whole tensors: with a model on a GPU, use --strategy mirrored"
            )
        self._shared = communicator.persist(lambda: SharedParameters(host, members, layout))
        gradients = self._prepare_gradients(context.on_nan)
        self._update: Update
        if by_elements:
            log = UndoLog(host) if communicator.changes else None
            self._update = SlicedUpdate(host, optimizer, members, layout, self._shared.flats, gradients, log)
        else:
            assert isinstance(on_host, SharedCommunicator)
            self._update = WholeUpdate(on_host, optimizer, members, layout, gradients)
        hooks = ModelHooks(context.model, self.collector)
        hooks.watch_loading(context.model, self._before_load, self._shared.accept_writes)

    @abstractmethod
    def _prepare_gradients(self, on_nan: str) -> list[torch.Tensor]:
        """Make the collector, and the flat buffers from which updates take their gradients."""

    @abstractmethod
    def _regroup_gradients(self, weight: float) -> list[torch.Tensor]:
        """Collect gradients among the workers that there are now; returns where updates take them from."""

    @abstractmethod
    def _judge(self) -> bool:
        """Whether the step may be taken."""

    @abstractmethod
    def _agree(self) -> bytes:
        """Meet before the update; returns which parameters have gradients."""

    def _fetch(self, ranges: list[Range]) -> None:
        """Have the averaged gradients of ``ranges`` in the flat buffers."""

    def step(self, original: Step, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = average_loss(self._communicator, self.collector, closure())
        self._members.check_groups(self._optimizer)
        self._shared.check()
        begin = time.perf_counter()
        allowed = self._judge()
        self.exchanging += time.perf_counter() - begin
        if not allowed:
            return loss
        with hooks_outside(self._optimizer, options):
            self._communicator.persist(lambda: self._take_step(original, options))
        self._shared.mark_updated()
        return loss

    def _take_step(self, original: Step, options: dict[str, Any]) -> None:
        begin = time.perf_counter()
        present = self._agree()
        self._fetch(self._update.prepare(present))
        self.exchanging += time.perf_counter() - begin
        self._update.step(original, **options)
        begin = time.perf_counter()
        news = self._host.meet(_PUBLISH, self._update.news(), self._describe)
        if any(news):
            self._update.share()
        self._update.end()
        self.exchanging += time.perf_counter() - begin

    def regroup(self, weight: float) -> None:
        gradients = self._regroup_gradients(weight)
        parameters = self._shared.offer()
        self._update.regroup(parameters, gradients)
        self._shared.move()

    def _before_load(self) -> None:
        # Another rank may still compute with the old values.
        what = "load_state_dict() of a central model, which every rank must call"
        self._communicator.persist(lambda: self._host.barrier(what))

    def _describe(self) -> str:
        return f"optimizer.step(), the update of step {self.steps}{say_rates(self._optimizer)}"


class CentralAveraged(CountedByExchange, CentralTraining):
    """``central``: after ``backward()`` every worker has the averaged gradient, as with ``mirrored``."""

    def _prepare_gradients(self, on_nan: str) -> list[torch.Tensor]:
        self._exchange = AveragedGradients(
            self._communicator, self._members, self._layout, on_nan, self._optimizer, codec=self.context.codec
        )
        self.collector = self._exchange.collector
        return self._averages()

    def _averages(self) -> list[torch.Tensor]:
        """Where updates find the averages: what this worker has of them on a GPU is brought there."""
        self._brought = self._layout.allocate_here() if stands_apart(self._layout) else None
        return self._brought or self._exchange.results

    def _regroup_gradients(self, weight: float) -> list[torch.Tensor]:
        self._exchange.regroup(weight)  # the last averages are still in p.grad
        return self._averages()

    def _judge(self) -> bool:
        return self._exchange.before_step(self._optimizer)

    def _agree(self) -> bytes:
        present = self._exchange.sync_results()
        # Others may still read parameters or gradients until they come here.
        self._host.meet(zlib.crc32(present), 0, self._describe)
        return present

    def _fetch(self, ranges: list[Range]) -> None:
        if self._brought is not None:
            for bucket, start, end in _joined(ranges):
                self._brought[bucket][start:end].copy_(self._exchange.results[bucket][start:end])


class CentralSealed(CentralAveraged):
    """``central(fused=True)`` over several hosts: the workers of a host share one average, which none can read."""

    def _prepare_gradients(self, on_nan: str) -> list[torch.Tensor]:
        exchange = AveragedGradients(
            self._communicator, self._members, self._layout, on_nan, self._optimizer, private=False,
            codec=self.context.codec,
        )  # fmt: skip
        exchange.show([LocalGradient.seal(view) for view in exchange.collector.views])
        self._exchange, self.collector = exchange, exchange.collector
        return self._averages()

    def _agree(self) -> bytes:
        present = self._exchange.present()
        self._host.meet(zlib.crc32(present), 0, self._describe)
        return present


class CentralFused(CentralTraining):
    """``central(fused=True)``: slots are reduced slice by slice, straight into the update."""

    def _prepare_gradients(self, on_nan: str) -> list[torch.Tensor]:
        members, layout = self._members, self._layout
        self.steps = 0
        self._slots = self._communicator.persist(self._make_slots)
        self._counted = self._slots  # those of the workers whose gradients the step is made of
        self._weight = 1.0  # of what is collected, since workers were lost
        mine = self._slots[self._host.rank]
        self._collected = None  # on a GPU, whose gradients are brought to the slot when all are there
        if stands_apart(layout):
            self._collected = mine = layout.allocate()
        self.collector = Collector(
            members.names, members.parameters, layout, mine, self._seal, check_finite=on_nan != "ignore"
        )
        self._nan_policy, self._gauge = NanPolicy(members.names, on_nan), Gauge(self._host.size, members.parameters)
        self._local = [LocalGradient.seal(view) for view in layout.views(mine)]
        self._payload, self._same_missing = 0, True
        self._trained = b"", 0
        self._number = zlib.crc32(repr(members.describe()).encode())
        # Only this worker's slices are ever touched, and memory that is not touched is not taken.
        self._averages = [torch.empty(bucket.count, dtype=bucket.dtype) for bucket in layout.buckets]
        return self._averages

    def _make_slots(self) -> list[list[torch.Tensor]]:
        return self._host.slots(self._layout, "gradients")

    def _regroup_gradients(self, weight: float) -> list[torch.Tensor]:
        if self._collected is not None:
            self._slots = self._make_slots()
            torch._foreach_mul_(self._collected, weight)
            self._gauge = Gauge(self._host.size, self._members.parameters)
            return self._averages
        self._weight *= weight
        before, slots = self.collector.views, self._make_slots()
        self._slots, mine = slots, slots[self._host.rank]
        local = [LocalGradient.seal(view) for view in self._layout.views(mine)]
        self.collector.move(self._layout, mine)
        for value, view in zip(before, self.collector.views, strict=True):
            torch.mul(value, self._weight, out=view)
        self._weight = 1.0
        for parameter, old, new in zip(self._members.parameters, self._local, local, strict=True):
            if parameter.grad is old:
                parameter.grad = new
        self._local = local
        self._gauge = Gauge(self._host.size, self._members.parameters)
        return self._averages

    @property
    def skipped(self) -> int:
        return self._nan_policy.skipped

    @property
    def gauges(self) -> list[Gauge]:
        return [self._gauge]

    def _seal(self) -> None:
        self._members.check_homes()
        self._communicator.begin()
        self._payload = self.collector.payload()
        self._members.set_gradients(self._local, self.collector.missing)

    def _judge(self) -> bool:
        check_exchanged(self.collector)
        gradients = [parameter.grad for parameter in self._members.parameters]
        if 1 in self.collector.missing or not all(map(operator.is_, gradients, self._local)):
            self._note_changes(gradients)
        payload = self.collector.repeat_payload(self._payload)
        number = self._number + number_rates(self._optimizer)
        what = self._describe_next
        nonfinite, same = read_payloads(self._communicator.persist(lambda: self._offer(number, payload, what)))
        self._counted = self._slots
        self.steps += 1
        self.sent += self._nbytes()
        self._nan_policy.record(nonfinite)
        self._same_missing = same
        return self._nan_policy.allows_step(self._optimizer)

    def _offer(self, number: int, payload: int, what: Description) -> list[int]:
        """Have this worker's gradients in its slot, and meet the others; the payloads of all."""
        for slot, collected in zip(self._slots[self._host.rank], self._collected or (), strict=False):
            slot.copy_(collected)
        return self._host.meet(number, payload, what)

    def _describe_next(self) -> str:
        return f"optimizer.step(), the update of step {self.steps + 1}{say_rates(self._optimizer)}"

    def _nbytes(self) -> int:
        """Bytes that a step hands to the others, counted as with plain ``central``."""
        trained = bytes(self.collector.trained)
        if trained != self._trained[0]:
            parameters = zip(self._members.parameters, trained, strict=True)
            self._trained = trained, sum(parameter.nbytes for parameter, is_trained in parameters if is_trained)
        return self._trained[1]

    def _agree(self) -> bytes:
        missing = self.collector.missing
        if not self._same_missing:
            missing = agree_on_missing(self._communicator, missing)
        return missing.translate(_NOT)

    def _note_changes(self, gradients: list[torch.Tensor | None]) -> None:
        """Follow a script that set gradients to None after ``backward()``; it can do nothing else with them."""
        missing = bytearray(self.collector.missing)
        for i, (gradient, local) in enumerate(zip(gradients, self._local, strict=True)):
            if gradient is None:
                if not missing[i]:
                    missing[i] = 1
                    self.collector.views[i].zero_()
            elif gradient is not local:
                raise StrategyError(
                    f"the gradient of {self._members.names[i]!r} was replaced, which strategy 'central(fused=True)' "
                    "cannot honour: use --strategy central or mirrored"
                )
        self.collector.missing = bytes(missing)

    def _fetch(self, ranges: list[Range]) -> None:
        begin = time.perf_counter()
        for bucket, start, end in ranges:
            average, parts = self._averages[bucket][start:end], [slot[bucket][start:end] for slot in self._counted]
            if len(parts) > 1:
                average_into(average, parts)
            else:
                average.copy_(parts[0])
        spans.add(spans.EXCHANGE, "reduce this rank's slice of all buckets", begin, time.perf_counter())
        slices = (slot[bucket][start:end] for slot in self._counted for bucket, start, end in ranges)
        averages = (self._averages[bucket][start:end] for bucket, start, end in ranges)
        self._gauge.end_sliced_step(slices, averages, self.collector)


def _group_of(communicator: Communicator) -> Communicator:
    return communicator.group if isinstance(communicator, RegroupingCommunicator) else communicator


def _joined(ranges: list[Range]) -> list[Range]:
    """The same elements, in as few ranges as there can be."""
    found: list[Range] = []
    for bucket, start, end in ranges:
        if found and found[-1][0] == bucket and found[-1][2] == start:
            found[-1] = (bucket, found[-1][1], end)
        else:
            found.append((bucket, start, end))
    return found


def make_fused(context: Context, spec: Spec) -> CentralTraining:
    """``central(fused=True)`` on one host, or on several."""
    communicator = context.communicator
    return (CentralFused if communicator.on_host is communicator else CentralSealed)(context, spec)


_PUBLISH = zlib.crc32(b"publish")
_NOT = bytes((1, 0)) + bytes(254)
