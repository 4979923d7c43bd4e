"""``hogwild``: processes of one host update one copy of the parameters in shared memory, without locks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.optim import LBFGS

from hocket import spans
from hocket.capture.members import Members
from hocket.comm.bucket_layout import Layout
from hocket.comm.communicator import Communicator
from hocket.coordinator.shared_areas import PURPOSE, LearnedBatches
from hocket.errors import SharedCopyError, StrategyError
from hocket.server.server_client import Client
from hocket.specs import Hogwild
from hocket.strategies.base import Context, Why
from hocket.strategies.local_training import LocalTraining
from hocket.transport import futex
from hocket.transport.area import LINE, aligned
from hocket.transport.lock import SharedLock
from hocket.updates.update import Step


class HogwildTraining(LocalTraining):
    """The script's optimizer writes straight to the shared parameters, whatever others do to them meanwhile.

    The optimizer's state (momenta) is each worker's own. A step looks at nothing but gradients and the addresses of
    parameters, so that with sparse gradients only the rows that a batch touches are read and written.
    """

    def __init__(self, context: Context, spec: Hogwild) -> None:
        if spec.locked and not futex.supported():
            raise StrategyError("hogwild(locked=True) needs x86-64 Linux: use plain hogwild")
        if isinstance(context.optimizer, LBFGS):
            raise StrategyError(
                "strategy 'hogwild' changes parameters while others use them, and LBFGS searches along a line from "
                "where it is: use --strategy full_batch"
            )
        super().__init__(context, spec)
        assert context.client is not None
        self._client = client = context.client
        self._shared = SharedModel(client, context.communicator, context.members)
        self._guard: AbstractContextManager[Any] = contextlib.nullcontext()
        if spec.locked:
            self._guard = SharedLock(self._shared.area, 0, client.rank, client.link.timeout)
        else:
            self._shared.area.close_descriptor()
        # With the parameters in shared memory, what was learned outlives the worker, and so does this note of it.
        noted = client.share(LearnedBatches.nbytes, PURPOSE)
        self._learned = LearnedBatches(noted)
        noted.close_descriptor()
        if client.is_in:
            self._shared.fill()
        self._shared.show()
        self._hooks.watch_loading(context.model, self._before_load, self._after_load)

    @contextmanager
    def merged(self) -> Iterator[None]:
        """The shared parameters as they are now, and this worker's optimizer state; not collective."""
        with self._guard:  # so that nobody writes meanwhile, if there is a lock
            yield

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A newcomer, which finds the parameters where they are shared, writes what it is given beside them."""
        if self._client.is_in:
            yield
            return
        for parameter in self._members.parameters:
            parameter.data = parameter.detach().clone()
        try:
            yield
        finally:
            self._shared.show()

    def settle(self, why: Why) -> None:
        if why is Why.SWITCH_AWAY:
            raise StrategyError("strategy 'hogwild' cannot be changed for another one during a run")
        super().settle(why)

    def _settle(self) -> None:
        """Wait until nobody trains any more; collective."""
        begin = time.perf_counter()
        self._client.gather("the end of a training loop", b"")
        self._note_settled()
        self._note_exchange(begin)

    def _exchange(self, batches: int, samples: int) -> None:
        """Nothing to do: the parameters are shared."""

    @property
    def owes(self) -> str:
        return "" if self._is_settled else "others may still train it"

    def _make_equal(self) -> None:
        """Nothing to do: there is only one model."""

    def step(self, original: Step, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        self._shared.check()

        def guarded(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            with self._guard:
                end = time.perf_counter()
                self.exchanging += end - begin
                spans.add(spans.WAIT, "wait for the lock", begin, end)
                return original(*args, **kwargs)

        result = super().step(guarded, closure, **options)
        self._learned.note(self._client.rank, (each.name for each in self._unlearned if each.name is not None))
        self._note_learned()
        return result

    def _before_load(self) -> None:
        # Another worker may still train.
        self._client.gather("load_state_dict() of a hogwild model, which every rank must call", b"")

    def _after_load(self) -> None:
        self._client.gather("load_state_dict() of a hogwild model, when it is done", b"")


class SharedModel:
    """The one copy of the parameters of ``members`` that all processes of a host update, with rank 0's values.

    Attributes:
        area: The memory, which the job's coordinator keeps; its first line is for a lock.
        homes: Each parameter in the area, with a storage of its own.
    """

    def __init__(self, client: Client, communicator: Communicator, members: Members) -> None:
        _check(client, communicator, members)
        self._client, self._members = client, members
        layout = Layout(members.parameters)
        offsets, nbytes = [], LINE
        for bucket in layout.buckets:
            offsets.append(nbytes)
            nbytes += aligned(bucket.nbytes)
        self.area = client.share(nbytes, "parameters")
        self.homes = []
        for place in layout.places:
            dtype = layout.buckets[place.bucket].dtype
            flat = self.area.tensor(offsets[place.bucket] + place.start * dtype.itemsize, place.count, dtype)
            self.homes.append(flat.as_strided(place.shape, place.stride))

    def fill(self) -> None:
        """Set the shared parameters to those of rank 0 (or the first rank that is left); collective."""
        writer: int | None = None
        found: list[int] = [0]
        while writer not in found:  # the writer may have died before it was done
            writer = min(found)
            if self._client.rank == writer:
                self.write()
            found = list(self._client.gather("hocket.distribute()", b""))

    @torch.no_grad()
    def write(self) -> None:
        """Write this worker's parameters to the shared ones."""
        for home, parameter in zip(self.homes, self._members.parameters, strict=True):
            if home.data_ptr() != parameter.data_ptr():
                home.copy_(parameter)

    def show(self) -> None:
        """Have the model use the shared parameters."""
        for home, parameter in zip(self.homes, self._members.parameters, strict=True):
            parameter.data = home
        self._pointers = [parameter.data_ptr() for parameter in self._members.parameters]

    def check(self) -> None:
        """Raise if a parameter is no longer in the shared memory; looks at no values."""
        if list(map(torch.Tensor.data_ptr, self._members.parameters)) != self._pointers:
            members = zip(self._members.names, self._members.parameters, self._pointers, strict=True)
            name = next(name for name, parameter, pointer in members if parameter.data_ptr() != pointer)
            raise SharedCopyError(
                f"parameter {name!r} has left the copy that strategy 'hogwild' shares: do not call model.to(…), "
                "share_memory() or load_state_dict(assign=True), nor set p.data, after hocket.distribute()"
            )


def _check(client: Client, communicator: Communicator, members: Members) -> None:
    hosts = len(communicator.topology.hosts)
    if hosts > 1:
        raise StrategyError(
            f"strategy 'hogwild' shares memory, and the workers are on {hosts} hosts: have all of them on one, or use "
            "--servers 1 --strategy asynchronous"
        )
    if not client.link.is_local:
        raise StrategyError(
            "strategy 'hogwild' needs shared memory, and this job uses TCP: leave out --transport gloo, or use "
            "--servers 1 --strategy asynchronous"
        )
    if any(parameter.device.type != "cpu" for parameter in members.parameters):
        raise StrategyError(
            "strategy 'hogwild' shares memory of the CPU, and this model is on a GPU: use --strategy mirrored, or "
            "--servers 1 --strategy asynchronous"
        )
