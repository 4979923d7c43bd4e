"""A worker's copies of what is on the servers: parameters and gradients, pushed and pulled as a whole or by rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hocket import spans
from hocket.errors import UsageError
from hocket.server import desk, states
from hocket.server.placement import Placement
from hocket.server.server_client import Client
from hocket.server.shard import Stored
from hocket.server.terms import Definition, Kind, Push, PushOutcome, Rows, Terms
from hocket.transport.area import Area
from hocket.transport.requests import Link
from hocket.transport.tensor_bytes import as_bytes

_AT_ONCE = 1 << 26  # bytes of a table of rows in one message


class DenseCopy:
    """A worker's place at a dense table: flat gradients and parameters, one per bucket of the layout.

    Workers have the initial values; one of them calls ``assign`` before any other pulls.

    Args:
        client: The connection to all servers.
        placement: Which server holds which parameters.
        terms: How updates are paced.
        rule: The optimizer (see ``rule.describe``).
    """

    def __init__(self, client: Client, placement: Placement, terms: Terms, rule: dict[str, Any]) -> None:
        self._client, self.placement = client, placement
        self.number, client.tables = client.tables, client.tables + 1
        buckets = tuple((str(b.dtype).removeprefix("torch."), b.count) for b in placement.layout.buckets)
        self.definitions = [
            Definition(self.number, client.workers, terms, rule, buckets, tuple(part)) for part in placement.slices
        ]
        self._area: Area | None = None
        if any(link.is_local for link in client.links) and buckets:
            self._area = Area.create(desk.needed(buckets), "parameters")
            self.gradients, self.parameters = desk.buffers(buckets, self._area)
        else:
            self.gradients, self.parameters = placement.layout.allocate_here(), placement.layout.allocate_here()
        picked = [(desk.pick(d, self.gradients), desk.pick(d, self.parameters)) for d in self.definitions]
        self._out = [[] if link.is_local else as_bytes(g) for link, (g, _) in zip(client.links, picked, strict=True)]
        self._in = [[] if link.is_local else as_bytes(p) for link, (_, p) in zip(client.links, picked, strict=True)]
        self._client.each(self._define)
        if self._area is not None:
            self._area.close_descriptor()

    def assign(self) -> None:
        """The servers take over this worker's parameters."""
        self._ask(Kind.ASSIGN, lambda number: ({}, self._in[number]), pulls=False)

    def pull(self) -> int:
        """Get the parameters as they are now; returns the version of server 0."""
        heads = self._ask(Kind.PULL, lambda _: ({}, []), pulls=True)
        return int(heads[0]["version"])

    def push(self, push: Push, presents: Sequence[bytes | None] | None = None, *, pull: bool = True) -> PushOutcome:
        """Push the gradients, wait until this worker may go on, and get the parameters.

        Args:
            push: What is said of the gradients; its ``present`` has a byte for each parameter of the layout.
            presents: The ``present`` bytes for each server, if the caller knows them already.
            pull: Whether the parameters are wanted.

        Returns:
            What the servers say; false if the push came too late for one of them, which has not applied it.
        """
        if presents is None:
            presents = self.presents(push.present)
        head = {
            "epoch": push.epoch,
            "weight": push.weight,
            "fault": push.fault,
            "done": push.done,
            "groups": push.groups,
            "pull": pull,
        }

        def write(number: int) -> tuple[dict[str, Any], list[memoryview]]:
            present = presents[number]
            told = {
                **head,
                "present": present.hex() if present is not None else None,
                "batches": push.batches if number == 0 else (),
            }
            return told, self._out[number] if push.weight > 0 else []

        heads = self._ask(Kind.PUSH, write, pulls=pull)
        return _judge(self._client, self.number, push, heads)

    def presents(self, present: bytes | None) -> list[bytes | None]:
        """Which slices of each server have a gradient, from which parameters have one."""
        if present is None or 0 not in present:
            return [None] * len(self.definitions)
        return [bytes(present[each.index] for each in d.slices) for d in self.definitions]

    def state(self) -> list[Stored]:
        """The optimizer's state on all servers, separately for each part of a parameter."""
        return _fetch_states(self._client, self.number)

    def load_state(self, stored: Sequence[Sequence[Stored]]) -> None:
        """Have the servers go on with this state, given for each server."""
        _send_states(self._client, self.number, stored)

    def await_version(self, version: int) -> None:
        """Wait until server 0 has made ``version`` updates."""
        self._client.first.request(Kind.VERSION, {"table": self.number, "version": version})

    def _define(self, number: int, link: Link) -> Callable[[], Any]:
        area = self._area if link.is_local else None
        head = {"definition": self.definitions[number].as_data(), "shared": area is not None}
        link.begin(Kind.DEFINE, head, area=area)
        return link.finish

    def _ask(
        self, kind: int, write: Callable[[int], tuple[dict[str, Any], list[memoryview]]], *, pulls: bool
    ) -> list[dict[str, Any]]:
        def ask(number: int, link: Link) -> Callable[[], dict[str, Any]]:
            begin = time.perf_counter()
            head, parts = write(number)
            link.begin(kind, {"table": self.number, **head}, parts)

            def finish() -> dict[str, Any]:
                answer = link.finish(self._in[number] if pulls else [])[0]
                name = "assign" if kind == Kind.ASSIGN else " and ".join(_did(kind == Kind.PUSH, pulls))
                spans.add(spans.EXCHANGE, name, begin, time.perf_counter(), track=f"server {number}")
                return answer

            return finish

        return self._client.each(ask)


def _judge(client: Client, table: int, push: Push, heads: Sequence[dict[str, Any]]) -> PushOutcome:
    """What all servers together say of a push; notes what server 0 says of the push's round and batches."""
    if table in client.paced:
        client.is_even &= heads[0]["even"]
    if not heads[0]["accepted"]:
        client.refuse(push.batches)
    if any(head["lost"] for head in heads):
        client.live()  # so that the coordinator sees this worker, and has the servers take its pushes again
    faults = {int(rank): int(fault) for head in heads for rank, fault in head["faults"].items()}
    return PushOutcome(all(head["accepted"] for head in heads), faults)


def _did(pushed: bool, pulled: bool) -> list[str]:
    return ["push"] * pushed + ["pull"] * pulled


class RowCopy:
    """A worker's view of a table of which only rows travel.

    Args:
        client: The connection to all servers, among which the rows are divided.
        shape: The shape of the table.
        dtype: The type of the table's elements.
        terms: How updates are paced.
        rule: The optimizer.
    """

    def __init__(
        self, client: Client, shape: tuple[int, int], dtype: torch.dtype, terms: Terms, rule: dict[str, Any]
    ) -> None:
        self._client, self._dtype = client, dtype
        self.number, client.tables = client.tables, client.tables + 1
        servers = len(client.links)
        self._firsts = torch.tensor([shape[0] * server // servers for server in range(servers + 1)])
        self._width = shape[1]
        name = str(dtype).removeprefix("torch.")
        self._definitions = [
            Definition(self.number, client.workers, terms, rule, rows=Rows(*bounds, shape[1], name))
            for bounds in zip(self._firsts[:-1].tolist(), self._firsts[1:].tolist(), strict=True)
        ]

        def define(number: int, link: Link) -> Callable[[], Any]:
            link.begin(Kind.DEFINE, {"definition": self._definitions[number].as_data(), "shared": False})
            return link.finish

        client.each(define)

    def assign(self, table: torch.Tensor) -> None:
        """The servers take over these values."""
        self._walk(table, writes=True)

    def pull_all(self, table: torch.Tensor) -> None:
        """Get all rows, straight into ``table`` (contiguous)."""
        self._walk(table, writes=False)

    def pull(self, rows: torch.Tensor) -> torch.Tensor:
        """The values of rows (sorted, each once), in their order."""
        self._check(rows)
        found = torch.empty(rows.numel(), self._width, dtype=self._dtype)
        bounds = torch.searchsorted(rows, self._firsts).tolist()

        def ask(number: int, link: Link) -> Callable[[], Any]:
            first, last = bounds[number], bounds[number + 1]
            if first == last:
                return lambda: None
            head = {"table": self.number, "first": None, "rows": last - first}
            link.begin(Kind.PULL_ROWS, head, as_bytes([rows[first:last]]))
            return lambda: link.finish(as_bytes([found[first:last].view(-1)]))

        self._client.each(ask)
        return found

    def push(self, push: Push, rows: torch.Tensor, values: torch.Tensor) -> PushOutcome:
        """Push gradients of rows (sorted), and wait until this worker may go on; see ``DenseCopy.push``."""
        self._check(rows)
        bounds = torch.searchsorted(rows, self._firsts).tolist()

        def ask(number: int, link: Link) -> Callable[[], Any]:
            first, last = bounds[number], bounds[number + 1]
            head = {
                "table": self.number,
                "epoch": push.epoch,
                "weight": push.weight,
                "fault": push.fault,
                "done": push.done,
                "present": None,
                "groups": push.groups,
                "batches": push.batches if number == 0 else (),
                "pull": False,
                "rows": last - first,
            }
            link.begin(Kind.PUSH, head, as_bytes([rows[first:last], values[first:last].reshape(-1)]))
            return lambda: link.finish([])[0]

        return _judge(self._client, self.number, push, self._client.each(ask))

    def state(self) -> list[Stored]:
        """The optimizer's state on all servers; ``start`` is the first row of each part."""
        return _fetch_states(self._client, self.number)

    def load_state(self, stored: Sequence[Stored]) -> None:
        """Have the servers go on with this state, given for the whole table."""
        parts = []
        for first, last in zip(self._firsts[:-1].tolist(), self._firsts[1:].tolist(), strict=True):
            rows = int(self._firsts[-1])
            parts.append([Stored(0, first, s.key, _rows_of(s.value, rows, first, last)) for s in stored])
        _send_states(self._client, self.number, parts)

    def _check(self, rows: torch.Tensor) -> None:
        count = int(self._firsts[-1])
        if rows.numel() and not (int(rows[0]) >= 0 and int(rows[-1]) < count):
            wrong = int(rows[0]) if int(rows[0]) < 0 else int(rows[-1])
            raise UsageError(f"row {wrong} is not in the table, which has rows 0 to {count - 1}")

    def _walk(self, table: torch.Tensor, *, writes: bool) -> None:
        """All rows between ``table`` and the servers, a part at a time."""
        step = max(1, _AT_ONCE // max(1, self._width * self._dtype.itemsize))

        def ask(number: int, link: Link) -> Callable[[], Any]:
            def walk() -> None:
                first, last = int(self._firsts[number]), int(self._firsts[number + 1])
                for start in range(first, last, step):
                    part = table[start : min(start + step, last)]
                    head = {"table": self.number, "first": start, "rows": part.shape[0]}
                    data = as_bytes([part.reshape(-1)])
                    if writes:
                        link.request(Kind.ASSIGN, head, data)
                    else:
                        link.request(Kind.PULL_ROWS, head, into=data)

            return walk

        self._client.each(ask)


def _rows_of(value: Any, rows: int, first: int, last: int) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == rows:
        return value[first:last]
    return value


def _fetch_states(client: Client, table: int) -> list[Stored]:
    found: list[Stored] = []
    for link in client.links:
        head, data = link.request(Kind.STATE, {"table": table})
        packed = states.allocate(head["described"], len(data))
        at = 0
        for tensor in packed.tensors:
            if tensor.numel():
                raw = bytearray(data[at : at + tensor.nbytes])
                tensor.copy_(torch.frombuffer(raw, dtype=tensor.dtype))
            at += tensor.nbytes
        found += states.unpack(packed)
    return found


def _send_states(client: Client, table: int, stored: Sequence[Sequence[Stored]]) -> None:
    for link, part in zip(client.links, stored, strict=True):
        packed = states.pack(part)
        link.request(Kind.LOAD, {"table": table, "described": packed.described}, as_bytes(packed.tensors))
