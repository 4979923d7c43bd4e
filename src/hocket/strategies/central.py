"""``central``: one copy of parameters and optimizer state per host; each worker updates its own part of it."""

from __future__ import annotations

import operator
import time
import zlib
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from hocket import spans
from hocket.capture.collector import Collector, read_payloads
from hocket.capture.local_gradient import LocalGradient
from hocket.capture.members import Members
from hocket.capture.model_hooks import ModelHooks
from hocket.capture.noise import Gauge
from hocket.comm.bucket_layout import Layout
from hocket.comm.kernels import average_into
from hocket.comm.shared import SharedCommunicator
from hocket.errors import SharedCopyError, StrategyError
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
from hocket.updates.kinds import divides_by_elements
from hocket.updates.slices import SlicedUpdate
from hocket.updates.update import Range, Step, Update
from hocket.updates.whole_tensors import WholeUpdate


class CentralTraining(Strategy):
    """What all forms of ``central`` have in common: shared parameters, and a step between two meetings."""

    collector: Collector

    def __init__(self, context: Context, spec: Spec) -> None:
        super().__init__(context, spec)
        communicator, optimizer, members = context.communicator, context.optimizer, context.members
        assert optimizer is not None
        if any(parameter.device.type != "cpu" for parameter in members.parameters):
            raise StrategyError(
                "strategy 'central' shares memory of the CPU, and this model is on a GPU: use --strategy mirrored"
            )
        host = communicator.on_host
        if not isinstance(host, SharedCommunicator):
            raise StrategyError(
                "strategy 'central' needs shared memory, and this job uses Gloo: use --strategy mirrored"
            )
        by_elements = divides_by_elements(optimizer, "central")
        if members.foreign:
            raise StrategyError(
                "strategy 'central' cannot share parameters that two optimizers train: give each parameter to one "
                "optimizer, or use --strategy mirrored"
            )
        self._communicator, self._host, self._optimizer, self._members = communicator, host, optimizer, members
        self._layout = communicator.lay_out(members.parameters)
        self._shared = SharedParameters(host, members, self._layout)
        gradients = self._prepare_gradients(context.on_nan)
        self._update: Update = (
            SlicedUpdate(host, optimizer, members, self._layout, self._shared.flats, gradients)
            if by_elements
            else WholeUpdate(host, optimizer, members, self._layout, gradients)
        )
        hooks = ModelHooks(context.model, self.collector)
        hooks.watch_loading(context.model, self._before_load, self._shared.accept_writes)

    @abstractmethod
    def _prepare_gradients(self, on_nan: str) -> list[torch.Tensor]:
        """Make the collector, and the flat buffers from which updates take their gradients."""

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
            begin = time.perf_counter()
            present = self._agree()
            self._fetch(self._update.prepare(present))
            self.exchanging += time.perf_counter() - begin
            self._update.step(original, **options)
            begin = time.perf_counter()
            news = self._host.transport.meet(_PUBLISH, self._update.news(), self._describe)
            if any(news):
                self._update.share()
            self.exchanging += time.perf_counter() - begin
        self._shared.mark_updated()
        return loss

    def _before_load(self) -> None:
        # Another rank may still compute with the old values.
        self._host.barrier("load_state_dict() of a central model, which every rank must call")

    def _describe(self) -> str:
        return f"optimizer.step(), the update of step {self.steps}{say_rates(self._optimizer)}"


class CentralAveraged(CountedByExchange, CentralTraining):
    """``central``: after ``backward()`` every worker has the averaged gradient, as with ``mirrored``."""

    def _prepare_gradients(self, on_nan: str) -> list[torch.Tensor]:
        self._exchange = AveragedGradients(self._communicator, self._members, self._layout, on_nan, self._optimizer)
        self.collector = self._exchange.collector
        return self._exchange.results

    def _judge(self) -> bool:
        return self._exchange.before_step(self._optimizer)

    def _agree(self) -> bytes:
        present = self._exchange.sync_results()
        # Others may still read parameters or gradients until they come here.
        self._host.transport.meet(zlib.crc32(present), 0, self._describe)
        return present


class CentralSealed(CentralAveraged):
    """``central(fused=True)`` over several hosts: the workers of a host share one average, which none can read."""

    def _prepare_gradients(self, on_nan: str) -> list[torch.Tensor]:
        exchange = AveragedGradients(
            self._communicator, self._members, self._layout, on_nan, self._optimizer, private=False
        )
        exchange.show([LocalGradient.seal(view) for view in exchange.collector.views])
        self._exchange, self.collector = exchange, exchange.collector
        return exchange.results

    def _agree(self) -> bytes:
        present = self._exchange.present()
        self._host.transport.meet(zlib.crc32(present), 0, self._describe)
        return present


class CentralFused(CentralTraining):
    """``central(fused=True)``: slots are reduced slice by slice, straight into the update."""

    def _prepare_gradients(self, on_nan: str) -> list[torch.Tensor]:
        members, layout = self._members, self._layout
        self.steps = 0
        self._slots = self._host.buffer(layout.buckets, "gradients", result=False)
        self.collector = Collector(
            members.names, members.parameters, layout, self._slots.mine, self._seal, check_finite=on_nan != "ignore"
        )
        self._nan_policy, self._gauge = NanPolicy(members.names, on_nan), Gauge(self._host.size, members.parameters)
        self._local = [LocalGradient.seal(view) for view in layout.views(self._slots.mine)]
        self._payload, self._same_missing = 0, True
        self._counted = b"", 0
        self._number = zlib.crc32(repr(members.describe()).encode())
        # Only this worker's slices are ever touched, and memory that is not touched is not taken.
        self._averages = [torch.empty(bucket.count, dtype=bucket.dtype) for bucket in layout.buckets]
        return self._averages

    @property
    def skipped(self) -> int:
        return self._nan_policy.skipped

    @property
    def gauges(self) -> list[Gauge]:
        return [self._gauge]

    def _seal(self) -> None:
        self._members.check_homes()
        self._payload = self.collector.payload()
        self._members.set_gradients(self._local, self.collector.missing)

    def _judge(self) -> bool:
        check_exchanged(self.collector)
        gradients = [parameter.grad for parameter in self._members.parameters]
        if 1 in self.collector.missing or not all(map(operator.is_, gradients, self._local)):
            self._note_changes(gradients)
        self.steps += 1
        self.sent += self._nbytes()
        payload = self.collector.repeat_payload(self._payload)
        nonfinite, same = read_payloads(
            self._host.transport.meet(self._number + number_rates(self._optimizer), payload, self._describe)
        )
        self._nan_policy.record(nonfinite)
        self._same_missing = same
        return self._nan_policy.allows_step(self._optimizer)

    def _nbytes(self) -> int:
        """Bytes that a step hands to the others, counted as with plain ``central``."""
        trained = bytes(self.collector.trained)
        if trained != self._counted[0]:
            parameters = zip(self._members.parameters, trained, strict=True)
            self._counted = trained, sum(parameter.nbytes for parameter, is_trained in parameters if is_trained)
        return self._counted[1]

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
            average_into(self._averages[bucket][start:end], [slot[bucket][start:end] for slot in self._slots.slots])
        spans.add(spans.EXCHANGE, "reduce this rank's slice of all buckets", begin, time.perf_counter())
        slices = (slot[bucket][start:end] for slot in self._slots.slots for bucket, start, end in ranges)
        averages = (self._averages[bucket][start:end] for bucket, start, end in ranges)
        self._gauge.end_sliced_step(slices, averages, self.collector)


def make_fused(context: Context, spec: Spec) -> CentralTraining:
    """``central(fused=True)`` on one host, or on several."""
    communicator = context.communicator
    return (CentralFused if communicator.on_host is communicator else CentralSealed)(context, spec)


_PUBLISH = zlib.crc32(b"publish")
_NOT = bytes((1, 0)) + bytes(254)


class SharedParameters:
    """Moves the parameters of ``members`` to shared memory, in place, with rank 0's values.

    Attributes:
        flats: All parameters as flat tensors, one per bucket of the layout.
    """

    def __init__(self, communicator: SharedCommunicator, members: Members, layout: Layout) -> None:
        self._members = members
        self.flats = []
        homes: list[torch.Tensor] = []
        for number, bucket in enumerate(layout.buckets):
            places = [place for place in layout.places if place.bucket == number]
            flat, views = communicator.one_copy(bucket.dtype, bucket.count, places, "parameters")
            self.flats.append(flat)
            homes += views
        # Buckets are filled in the order of the parameters; bring the views back to that order.
        by_bucket = sorted(range(len(layout.places)), key=lambda i: layout.places[i].bucket)
        homes = [home for _, home in sorted(zip(by_bucket, homes, strict=True), key=lambda pair: pair[0])]
        if communicator.rank == 0:
            for home, parameter in zip(homes, members.parameters, strict=True):
                home.copy_(parameter.detach())
        communicator.barrier("hocket.distribute()")
        for home, parameter in zip(homes, members.parameters, strict=True):
            parameter.data = home
        self._turn = 0
        self._pointers = [parameter.data_ptr() for parameter in members.parameters]
        self.accept_writes()

    def accept_writes(self) -> None:
        """Take the parameters as they are now: every rank has written the same to them, as in load_state_dict."""
        self._versions = list(map(_version, self._members.parameters))
        self._sample = self._take_sample()

    def mark_updated(self) -> None:
        """Tell autograd that the values have changed, so that a graph from before is not used again."""
        torch.autograd.graph.increment_version(self._members.parameters)
        self._turn += 1
        self.accept_writes()

    def check(self) -> None:
        """Raise if a parameter has left the shared copy or was written to by the script."""
        members = self._members
        if list(map(torch.Tensor.data_ptr, members.parameters)) != self._pointers:
            self._raise_left()
        if list(map(_version, members.parameters)) != self._versions:
            self._raise_written()
        # Writing to p.data leaves no trace in the versions, so one parameter's values are looked at, each time another.
        if self._take_sample() != self._sample:
            self._raise_written(self._turn % len(members.parameters))

    def _raise_left(self) -> NoReturn:
        members = zip(self._members.names, self._members.parameters, self._pointers, strict=True)
        name = next(name for name, parameter, pointer in members if parameter.data_ptr() != pointer)
        raise SharedCopyError(
            f"parameter {name!r} has left the copy that strategy 'central' shares: do not call model.to(…), "
            "share_memory() or load_state_dict(assign=True), nor set p.data, after hocket.distribute()"
        )

    def _take_sample(self) -> str:
        parameter = self._members.parameters[self._turn % len(self._members.parameters)]
        return repr(float(parameter.detach().view(-1)[:_SAMPLE].sum())) if parameter.is_contiguous() else ""

    def _raise_written(self, index: int | None = None) -> NoReturn:
        members = zip(self._members.names, self._members.parameters, self._versions, strict=True)
        name = (
            next(name for name, parameter, version in members if parameter._version != version)
            if index is None
            else self._members.names[index]
        )
        raise SharedCopyError(
            f"parameter {name!r} was written to in place by the script, which with strategy 'central' every worker "
            "does to the same copy: write before hocket.distribute(), in load_state_dict(), or use --strategy mirrored"
        )


_SAMPLE = 1 << 14  # elements of a parameter that are looked at
_version = operator.attrgetter("_version")
