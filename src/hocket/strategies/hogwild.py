"""``hogwild``: processes of one host update one copy of the parameters in shared memory, without locks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hocket import spans
from hocket.comm.communicator import Communicator
from hocket.errors import StrategyError
from hocket.server.client import Client
from hocket.strategies.choices import Hogwild
from hocket.strategies.local import LocalTraining
from hocket.strategies.members import Members
from hocket.strategies.shared_model import SharedModel
from hocket.transport import futex
from hocket.transport.area import LINE
from hocket.transport.lock import SharedLock
from hocket.transport.rota import Rota
from hocket.updates.update import Step


class HogwildTraining(LocalTraining):
    """The script's optimizer writes straight to the shared parameters, whatever others do to them meanwhile.

    Its state (momenta) is each worker's own. A step looks at nothing but gradients and the addresses of parameters,
    so that with sparse gradients only the rows that a batch touches are read and written.
    """

    survives_loss = True
    leases = True
    is_uneven = True

    def __init__(
        self,
        client: Client,
        communicator: Communicator,
        model: nn.Module,
        optimizer: Optimizer,
        members: Members,
        choice: Hogwild,
        on_nan: str,
    ) -> None:
        if (choice.locked or choice.round_robin) and not futex.supported():
            raise StrategyError("hogwild(locked=…) and hogwild(round_robin=…) need x86-64 Linux: use plain hogwild")
        super().__init__(communicator, model, optimizer, members, on_nan)
        self._client = client
        self._shared = SharedModel(client, communicator, members, max(LINE, Rota.nbytes(client.workers)))
        self._guard: AbstractContextManager[Any] = contextlib.nullcontext()
        self._turns: _Turns | None = None
        timeout = client.first.timeout
        if choice.locked:
            self._guard = SharedLock(self._shared.area, 0, client.rank, timeout)
        elif choice.round_robin:
            rota = Rota(self._shared.area, 0, client.rank, client.workers, timeout)
            self._guard = self._turns = _Turns(self._shared, rota, range(client.workers))
        else:
            self._shared.area.close_descriptor()
        self._shared.fill()
        self._shared.show(self._shared.homes)
        if self._turns is not None:
            self._turns.refresh()
        self._hooks.watch_loading(model, self._before_load, self._after_load)

    @property
    def holds(self) -> bool:
        return self.collector.passes > 0  # in hocket.accumulate()

    @contextmanager
    def merged(self) -> Iterator[None]:
        """The shared parameters as they are now, and this worker's optimizer state; not collective."""
        if self._turns is not None:
            with self._turns.shown():
                yield
        else:
            with self._guard:  # so that nobody writes meanwhile, if there is a lock
                yield

    def rest(self) -> None:
        raise StrategyError("strategy 'hogwild' cannot be changed for another one during a run")

    def settle(self) -> None:
        """Wait until nobody trains any more; collective."""
        self._count()
        begin = time.perf_counter()
        found = self._client.gather("the end of a training loop", b"")
        if self._turns is not None:
            self._turns.begin(sorted(found))
            self._client.gather("the end of a training loop, with turns", b"")
        self._note_settled()
        self._note_exchange(begin)

    def flush(self) -> None:
        if self._turns is not None:
            self._turns.leave()

    def rejoin(self) -> None:
        if self._turns is not None:
            self._turns.begin(self._client.live())

    def _exchange(self, batches: int, samples: int) -> None:
        """There is nothing to exchange."""

    @property
    def owes(self) -> str:
        return "" if self._is_settled else "others may still train it"

    def _make_equal(self) -> None:
        """There is only one."""

    def _step(self, original: Step, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        self._shared.check()

        def guarded(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            with self._guard:
                end = time.perf_counter()
                self.exchanging += end - begin
                spans.add(spans.WAIT, "wait for the lock", begin, end)
                return original(*args, **kwargs)

        result = super()._step(guarded, closure, **options)
        self._client.turn.batches = []  # they are done, and not for others
        return result

    def _before_load(self) -> None:
        # Another worker may still train.
        self._client.gather("load_state_dict() of a hogwild model, which every rank must call", b"")
        if self._turns is not None and self._client.is_first():
            self._shared.show(self._shared.homes)  # its own copy is older than those, where nothing is loaded

    def _after_load(self) -> None:
        self._client.gather("load_state_dict() of a hogwild model, when it is done", b"")
        if self._turns is not None:
            self._turns.refresh()


class _Turns:
    """Updates in turns: a gradient is computed from a copy of the parameters that this worker takes in its turn.

    Langford, Smola and Zinkevich (2009): with P workers every gradient is P - 1 updates late.
    """

    def __init__(self, shared: SharedModel, rota: Rota, ranks: range) -> None:
        self._shared, self._rota = shared, rota
        self._own = [torch.empty_like(home) for home in shared.homes]
        rota.begin(ranks)

    def begin(self, ranks: list[int]) -> None:
        """With the parameters as they are; see ``Rota.begin``."""
        self.refresh()
        self._rota.begin(ranks)

    def refresh(self) -> None:
        """Take a copy of the shared parameters."""
        torch._foreach_copy_(self._own, self._shared.homes)
        self._shared.show(self._own)

    def leave(self) -> None:
        """Nobody is to wait for this worker."""
        self._rota.leave()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Within, the model's parameters are the shared ones."""
        self._shared.show(self._shared.homes)
        try:
            yield
        finally:
            self._shared.show(self._own)

    def __enter__(self) -> None:
        self._rota.wait()
        self._shared.show(self._shared.homes)

    def __exit__(self, *_: object) -> None:
        self.refresh()
        self._rota.pass_on()
