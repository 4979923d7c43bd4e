"""Parameter servers by hand: ``push`` gradients and ``pull`` values by key, dense or by rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hocket import specs
from hocket.errors import StrategyError, UsageError
from hocket.job.worker import Worker, current
from hocket.server import rule
from hocket.server.copies import DenseCopy, RowCopy
from hocket.server.placement import place
from hocket.server.terms import Push, Terms
from hocket.specs import Served
from hocket.strategies.served import terms_of
from hocket.updates.kinds import divides_by_elements

Rows = torch.Tensor | Sequence[int]


class KeyValue:
    """Tensors on the servers of this job, by key; every rank must make it, with the same keys and shapes.

    The servers start with rank 0's values. Every push of a key is one step of the optimizer on it.

    Args:
        values: The tensors, on the CPU; they are not changed.
        optimizer: Makes the update rule for a list of parameters: ``lambda p: torch.optim.SGD(p, lr=0.1)``.
        rows: The keys of large tables (matrices) of which only rows are pushed and pulled.
        strategy: How pushes are paced, for each key by itself: ``asynchronous`` (default), ``ssp(staleness=3)``,
            ``bsp`` …
    """

    def __init__(
        self,
        values: Mapping[str, torch.Tensor],
        optimizer: Callable[[list[nn.Parameter]], Optimizer],
        *,
        rows: Iterable[str] = (),
        strategy: str | Served = "asynchronous",
    ) -> None:
        worker = current()
        client = worker.client
        if client is None:
            raise UsageError("hocket.KeyValue needs servers: start the script with hocket run --servers 1")
        choice = specs.parse(strategy) if isinstance(strategy, str) else strategy
        if not isinstance(choice, Served):
            raise StrategyError(f"KeyValue(strategy={strategy!r}): choose one with servers, such as 'asynchronous'")
        self._client = client
        self._dense: dict[str, DenseCopy] = {}
        self._rows: dict[str, RowCopy] = {}
        self._shapes = {key: tuple(value.shape) for key, value in values.items()}
        self._views: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._under_way: dict[str, Future[Any]] = {}
        self._pool = ThreadPoolExecutor(1, "hocket-kv")
        by_rows = set(rows)
        for key, value in values.items():
            if key in by_rows:
                self._add_rows(key, value, optimizer, terms_of(choice))
            else:
                self._add_dense(key, value, optimizer, choice)
        self._start(worker, values)

    def push(self, key: str, gradient: torch.Tensor, rows: Rows | None = None, weight: float = 1.0) -> None:
        """Send a gradient for ``key``; returns when it is copied, before the servers have applied it.

        Args:
            key: The key of the tensor.
            gradient: The gradient, as large as the tensor, or for a table as large as its ``rows``.
            rows: For a table, the numbers of the rows, in any order; the same row may be there twice.
            weight: How much the gradient counts where gradients are averaged (``bsp``, ``softsync``).
        """
        self._settle(key)
        push = Push(weight=weight)
        if key in self._rows:
            table = self._rows[key]
            numbers, values = _sum_rows(
                self._check_rows(key, rows), gradient.detach().reshape(-1, self._shapes[key][1])
            )
            self._under_way[key] = self._pool.submit(table.push, push, numbers, values)
            return
        if rows is not None:
            raise UsageError(f"push({key!r}, rows=…): it is not a table of rows: name it in KeyValue(rows=[{key!r}])")
        if tuple(gradient.shape) != self._shapes[key]:
            raise UsageError(f"push({key!r}): a gradient {list(gradient.shape)} for {list(self._shapes[key])}")
        self._views[key][0].copy_(gradient)
        self._under_way[key] = self._pool.submit(self._dense[key].push, push, None, pull=False)

    def pull(self, key: str, rows: Rows | None = None) -> torch.Tensor:
        """The values of ``key`` after this worker's pushes; blocks until they are here.

        A dense tensor is this worker's copy, which the next ``pull`` of the key changes. For a table, only ``rows`` (in
        their order) are fetched.
        """
        self._settle(key)
        if key in self._rows:
            numbers = self._check_rows(key, rows)
            unique, where = torch.unique(numbers, return_inverse=True)
            return self._rows[key].pull(unique)[where]
        self._dense[key].pull()
        return self._views[key][1]

    def wait(self) -> None:
        """Wait until the servers have applied all pushes of this worker; raises the error of a push that failed."""
        for key in list(self._under_way):
            self._settle(key)

    def state(self, key: str) -> list[Any]:
        """The optimizer's state for ``key`` on all servers, in parts, for a look at it."""
        self._settle(key)
        table = self._rows.get(key) or self._dense[key]
        return list(table.state())

    def close(self) -> None:
        """Wait for all pushes; nothing can be pushed afterwards."""
        self.wait()
        self._pool.shutdown()

    def _settle(self, key: str) -> None:
        if key not in self._shapes:
            raise UsageError(f"there is no key {key!r}: the keys are {', '.join(self._shapes)}")
        pending = self._under_way.pop(key, None)
        if pending is not None:
            pending.result()

    def _add_dense(
        self, key: str, value: torch.Tensor, optimizer: Callable[[list[nn.Parameter]], Optimizer], choice: Served
    ) -> None:
        parameter = nn.Parameter(value.detach().clone())
        made = optimizer([parameter])
        whole = not divides_by_elements(made, "KeyValue")
        placement = place([parameter], [0], len(self._client.links), choice.placement, whole=whole)
        copy = DenseCopy(self._client, placement, terms_of(choice), rule.describe(made))
        self._dense[key] = copy
        gradients, parameters = placement.layout.views(copy.gradients), placement.layout.views(copy.parameters)
        self._views[key] = gradients[0], parameters[0]

    def _add_rows(
        self, key: str, value: torch.Tensor, optimizer: Callable[[list[nn.Parameter]], Optimizer], terms: Terms
    ) -> None:
        if value.dim() != 2:
            raise UsageError(f"KeyValue(rows=[{key!r}]): a table has two dimensions, not {list(value.shape)}")
        made = optimizer([nn.Parameter(torch.zeros(1, value.shape[1], dtype=value.dtype))])
        rows, width = value.shape
        self._rows[key] = RowCopy(self._client, (rows, width), value.dtype, terms, rule.describe(made))

    def _start(self, worker: Worker, values: Mapping[str, torch.Tensor]) -> None:
        if self._client.is_starter:
            for key, copy in self._dense.items():
                self._views[key][1].copy_(values[key].detach())
                copy.assign()
            for key, table in self._rows.items():
                table.assign(values[key].detach().contiguous())
        worker.communicator.barrier("hocket.KeyValue()")
        for copy in self._dense.values():
            copy.pull()

    def _check_rows(self, key: str, rows: Rows | None) -> torch.Tensor:
        if rows is None:
            raise UsageError(f"{key!r} is a table of rows: say which, with rows=")
        return torch.as_tensor(rows).detach().reshape(-1).to("cpu", torch.int64)


def _sum_rows(rows: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row once, in order, with the sum of its gradients."""
    unique, where = torch.unique(rows, return_inverse=True)
    if unique.numel() == rows.numel():
        order = torch.argsort(rows)
        return unique, values[order].contiguous()
    return unique, torch.zeros(unique.numel(), values.shape[1], dtype=values.dtype).index_add_(0, where, values)
