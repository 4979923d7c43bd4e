"""What a server answers to each kind of message, whether it came over a wire or directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hocket.server import states
from hocket.server.dense import DenseShard
from hocket.server.rows import RowShard
from hocket.server.server_service import Service
from hocket.server.table import Table
from hocket.server.terms import Definition, Kind, Push
from hocket.transport.replies import Answer, Body
from hocket.transport.tensor_bytes import as_bytes
from hocket.transport.waiting import Note

_MOST_NUMBERS = 1 << 30  # bytes of the numbers of rows in one message


class AnswersToWorker:
    """Answers the messages of one worker.

    Args:
        service: The server.
        rank: The rank of the worker, of which one message is answered at a time.
    """

    def __init__(self, service: Service, rank: int) -> None:
        self._service, self._rank = service, rank
        self._note: Note = lambda *_: None
        self._known: dict[int, Callable[[dict[str, Any], Body], Answer]] = {
            Kind.DEFINE: self._define,
            Kind.ASSIGN: self._assign,
            Kind.PUSH: self._push,
            Kind.PULL: self._pull,
            Kind.PULL_ROWS: self._pull_rows,
            Kind.STATE: self._state,
            Kind.LOAD: self._load,
            Kind.LEAVE: self._leave,
            Kind.ENTER: self._enter,
            Kind.VERSION: self._version,
        }

    def answer(self, kind: int, head: dict[str, Any], body: Body, note: Note) -> Answer:
        """The answer to a message; blocks while its worker has to wait, which ``note`` is told now and then.

        Raises:
            KeyError, TypeError, ValueError: the message makes no sense.
            HocketError: the worker is to raise this error.
        """
        self._note = note
        return self._known[kind](head, body)

    def _define(self, head: dict[str, Any], body: Body) -> Answer:
        area = body.area() if head["shared"] else None
        try:
            self._service.define(self._rank, Definition.from_data(head["definition"]), area)
        finally:
            if area is not None:
                area.close_descriptor()
        return Answer({})

    def _assign(self, head: dict[str, Any], body: Body) -> Answer:
        """The worker's values become those of the server; its other copies are stale until they pull."""
        table = self._table(head)
        shard = table.shard
        if isinstance(shard, RowShard):
            first, last = self._rows(shard, head)
            values = torch.empty(last - first, shard.width, dtype=shard.table.dtype)
            _receive(body, [values.view(-1)])
            table.change(lambda: _copy([shard.table[first:last]], [values]))
            return Answer({})
        assert isinstance(shard, DenseShard)
        desk, flats = self._service.desk(head["table"], self._rank), shard.flats
        if not desk.is_shared:
            self._receive(body, desk.parameters)
        table.change(lambda: _copy(flats, desk.parameters))
        return Answer({})

    def _push(self, head: dict[str, Any], body: Body) -> Answer:
        table, service = self._table(head), self._service
        push = Push(
            epoch=int(head["epoch"]),
            weight=float(head["weight"]),
            present=bytes.fromhex(head["present"]) if head["present"] is not None else None,
            groups=head["groups"],
            batches=tuple((int(queue), int(epoch), int(number)) for queue, epoch, number in head["batches"]),
            fault=int(head["fault"]),
            done=None if head["done"] is None else (int(head["done"][0]), int(head["done"][1])),
        )

        def applied() -> None:  # before a worker that goes on after this update can ask which batches are not done
            service.batches.apply(push.batches)

        def accepted() -> None:
            service.batches.accept(push.batches)

        shard = table.shard
        if isinstance(shard, RowShard):
            gradient = self._receive_rows(shard, head, body)
            outcome = table.push(self._rank, push, gradient, self._note, None, applied, accepted)
            parts: list[memoryview] = []
        else:
            assert isinstance(shard, DenseShard)
            desk, flats = service.desk(head["table"], self._rank), shard.flats
            if push.present is not None and len(push.present) != len(shard.definition.slices):
                raise ValueError("a byte for every slice is needed")
            if not desk.is_shared and push.weight > 0:
                self._receive(body, desk.gradients)
            elif desk.is_shared:
                service.received += sum(each.nbytes for each in desk.gradients)
            wanted = bool(head["pull"])
            copy = (lambda: _copy(desk.parameters, flats)) if wanted else None
            outcome = table.push(self._rank, push, desk.gradients, self._note, copy, applied, accepted)
            parts = as_bytes(desk.parameters) if wanted and not desk.is_shared else []
            service.sent += sum(each.nbytes for each in desk.parameters) if wanted else 0
        head = {"accepted": outcome.accepted, "faults": outcome.faults, "version": table.version, "even": table.is_even}
        return Answer({**head, "lost": not outcome and table.is_lost(self._rank)}, parts)

    def _pull(self, head: dict[str, Any], _: Body) -> Answer:
        table = self._table(head)
        shard = table.shard
        assert isinstance(shard, DenseShard)
        desk, flats = self._service.desk(head["table"], self._rank), shard.flats
        table.pull(self._rank, lambda: _copy(desk.parameters, flats))
        self._service.sent += sum(each.nbytes for each in flats)
        return Answer({"version": table.version}, [] if desk.is_shared else as_bytes(desk.parameters))

    def _pull_rows(self, head: dict[str, Any], body: Body) -> Answer:
        table = self._table(head)
        shard = table.shard
        assert isinstance(shard, RowShard)
        values: list[torch.Tensor] = []
        if head["first"] is not None:
            first, last = self._rows(shard, head)
            table.change(lambda: values.append(shard.table[first:last].clone()))
        else:
            if body.length > _MOST_NUMBERS:
                raise ValueError(f"{body.length} bytes of row numbers")
            numbers = torch.empty(body.length // 8, dtype=torch.int64)
            _receive(body, [numbers])
            table.pull(self._rank, lambda: values.append(shard.rows(numbers)))
        found = values[0]
        self._service.sent += found.nbytes
        return Answer({}, as_bytes([found.view(-1)]))

    def _state(self, head: dict[str, Any], _: Body) -> Answer:
        found: list[states.Packed] = []
        table = self._table(head)
        table.change(lambda: found.append(states.pack(table.shard.state())))
        return Answer({"described": found[0].described}, as_bytes(found[0].tensors))

    def _load(self, head: dict[str, Any], body: Body) -> Answer:
        table = self._table(head)
        packed = states.allocate(head["described"], body.length)
        _receive(body, packed.tensors)
        table.change(lambda: table.shard.load_state(states.unpack(packed)))
        return Answer({})

    def _leave(self, head: dict[str, Any], _: Body) -> Answer:
        for number in head["tables"]:
            self._service.tables[int(number)].leave(self._rank, int(head["epoch"]))
        return Answer({})

    def _enter(self, head: dict[str, Any], _: Body) -> Answer:
        for number in head["tables"]:
            self._service.tables[int(number)].enter(self._rank, int(head["epoch"]))
        return Answer({})

    def _version(self, head: dict[str, Any], _: Body) -> Answer:
        self._table(head).await_version(int(head["version"]), self._note)
        return Answer({})

    def _table(self, head: dict[str, Any]) -> Table:
        return self._service.tables[int(head["table"])]

    @staticmethod
    def _rows(shard: RowShard, head: dict[str, Any]) -> tuple[int, int]:
        """Where the consecutive rows of a message begin and end in a shard."""
        first = int(head["first"]) - shard.first
        last = first + int(head["rows"])
        if not 0 <= first <= last <= shard.count:
            raise ValueError(f"rows {first} to {last} of {shard.count}")
        return first, last

    def _receive_rows(self, shard: RowShard, head: dict[str, Any], body: Body) -> list[torch.Tensor]:
        count = int(head["rows"])
        if count < 0 or count * (8 + shard.width * shard.table.element_size()) != body.length:
            raise ValueError(f"{body.length} bytes for {count} rows")
        numbers = torch.empty(count, dtype=torch.int64)
        values = torch.empty(count, shard.width, dtype=shard.table.dtype)
        self._receive(body, [numbers, values.view(-1)])
        return [numbers, values]

    def _receive(self, body: Body, tensors: list[torch.Tensor]) -> None:
        _receive(body, tensors)
        self._service.received += body.length


def _receive(body: Body, tensors: list[torch.Tensor]) -> None:
    parts = as_bytes(tensors)
    if sum(part.nbytes for part in parts) != body.length:
        raise ValueError(f"{body.length} bytes, and {sum(part.nbytes for part in parts)} are expected")
    body.into(parts)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
