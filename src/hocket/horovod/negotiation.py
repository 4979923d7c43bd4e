"""Which operations every rank of a process set has submitted: each name is decided on when all have come with it.

It moves no data, and waits for nobody. In a cycle each rank gives one message with what its script has submitted since
the last one, and is given those of all ranks in return. So all ranks know the same after every cycle, and come to the
same decisions in the same order, whatever the order in which each script has submitted. What was said once is numbered,
alike on all ranks: from then on it is one bit of a message.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hocket.transport.waiting import ranks

_HEAD = struct.Struct("<HHI")  # bytes of the bits, how many pairs, bytes of the rest
_PAIR = struct.Struct("<IQ")
_CAPACITY = 8192  # requests that are numbered; with more of them, all are numbered anew

JOIN = "join"
"""The kind of the decision that all ranks have joined."""

_ROWS_DIFFER = ("allgather", "alltoall")
_WITHOUT_ALL = ("allreduce", "barrier")  # what goes on without the ranks that have joined
_WITH_ZEROS = ("sum", "mean", "adasum")


class Request(NamedTuple):
    """What a rank asks for: the same on all ranks, but for the rows of some tensors, and how they are split.

    Attributes:
        kind: What is to be done: ``allreduce``, ``allgather`` …
        name: The name that the operation has on all ranks.
        number: Of an operation without a name, which one of its kind it is; else -1.
        options: What all ranks must say alike: an operation, a root, factors.
        dtypes: The type of each tensor.
        shapes: The shape of each tensor.
        splits: How many rows each rank is to get.
    """

    kind: str
    name: str
    number: int = -1
    options: tuple[Any, ...] = ()
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    splits: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """What tells it from others that are under way at once."""
        return self.name if self.number < 0 else f"{self.name}.{self.number}"

    @property
    def common(self) -> tuple[Any, ...]:
        """What must be the same on all ranks."""
        shapes = self.shapes
        if self.kind in _ROWS_DIFFER:
            shapes = tuple((-1, *shape[1:]) if shape else () for shape in shapes)
        return self.kind, self.options, self.dtypes, shapes

    def describe(self) -> str:
        """The request in words."""
        tensors = ", ".join(f"{dtype}{list(s)}" for dtype, s in zip(self.dtypes, self.shapes, strict=True))
        options = ", ".join(map(str, self.options))
        return f"{self.kind}{f' of {tensors}' if tensors else ''}{f' ({options})' if options else ''}"

    @classmethod
    def read(cls, said: Sequence[Any]) -> Request:
        """A request from plain data."""
        kind, name, number, options, dtypes, shapes, splits = said
        return cls(kind, name, number, tuple(options), tuple(dtypes), tuple(map(tuple, shapes)), tuple(splits))


class Decision(NamedTuple):
    """What all ranks do now.

    Attributes:
        request: One rank's request, which says what is to be done.
        by_rank: The request of each rank; None for those that have joined, and give zeros.
        error: Why it is not possible; empty if it is.
        last: Of ``JOIN``, the last rank that has joined.
    """

    request: Request
    by_rank: tuple[Request | None, ...] = ()
    error: str = ""
    last: int = -1


class Unready(NamedTuple):
    """An operation for which some ranks wait, and some have not come."""

    request: Request
    ready: list[int]
    missing: list[int]

    def describe(self, numbers: Sequence[int]) -> str:
        """In words; ``numbers`` has the rank in the job of each rank."""
        here, missing = ([numbers[rank] for rank in each] for each in (self.ready, self.missing))
        return f"{self.request.key!r}, {self.request.describe()}: submitted by {ranks(here)}, not by {ranks(missing)}"


class Negotiation:
    """What one rank of a process set knows of what all have submitted.

    Args:
        rank: This rank in the process set.
        size: How many ranks it has.

    Attributes:
        unnamed: How many operations without a name there were of each kind; after a join the same on all ranks.
        ended: The first rank that has said that it ends; None if none has.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.unnamed: dict[str, int] = {}
        self.ended: int | None = None
        self._news: list[Request] = []
        self._rest: dict[str, Any] = {}
        self._numbered: list[Request] = []
        self._positions: dict[Request, int] = {}
        self._submitted: dict[str, dict[int, Request]] = {}
        self._joined: list[int] = []
        self._most: dict[str, int] = {}  # the highest number of an unnamed operation of each kind, of all ranks

    def submit(self, request: Request) -> None:
        """This rank asks for something; told with the next message."""
        self._news.append(request)

    def join(self) -> None:
        """This rank has no more data: it gives zeros until all have joined."""
        self._rest["joins"] = True

    def give_up(self, keys: Sequence[str]) -> None:
        """Have these operations fail on all ranks."""
        self._rest["given up"] = list(keys)

    def end(self) -> None:
        """This rank ends; no operation is possible any more."""
        self._rest["ends"] = True

    @property
    def has_news(self) -> bool:
        """Whether the next message says something."""
        return bool(self._news or self._rest)

    @property
    def has_joined(self) -> bool:
        """Whether this rank has joined, and the others know."""
        return self.rank in self._joined

    def unready(self) -> list[Unready]:
        """The operations for which some ranks wait."""
        found = []
        for by_rank in self._submitted.values():
            missing = [rank for rank in range(self.size) if rank not in by_rank and rank not in self._joined]
            found.append(Unready(next(iter(by_rank.values())), sorted(by_rank), missing))
        return found

    def message(self) -> bytes:
        """What this rank tells the others in this cycle."""
        bits, pairs, new = 0, [], []
        for request in self._news:
            content = request._replace(number=0) if request.number >= 0 else request
            position = self._positions.get(content)
            if position is None:
                new.append(request)
            elif request.number < 0:
                bits |= 1 << position
            else:
                pairs.append(_PAIR.pack(position, request.number))
        rest = {**self._rest, "new": new} if new else self._rest
        self._news, self._rest = [], {}
        if not (bits or pairs or rest):
            return b""
        packed = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
        text = json.dumps(rest).encode() if rest else b""
        return b"".join((_HEAD.pack(len(packed), len(pairs), len(text)), packed, *pairs, text))

    def hear(self, messages: Sequence[bytes]) -> list[Decision]:
        """What is to be done after a cycle in which the ranks have said this; in this order on all ranks."""
        touched: dict[str, None] = {}
        known: dict[bytes, tuple[list[Request], dict[str, Any]]] = {}
        given_up: list[str] = []
        joined_before = len(self._joined)
        for rank, message in enumerate(messages):
            if not message:
                continue
            if message not in known:
                known[message] = self._read(message)
            requests, rest = known[message]
            for request in requests:
                key = request.key
                self._submitted.setdefault(key, {})[rank] = request
                touched[key] = None
                if request.number >= 0:
                    self._most[request.name] = max(self._most.get(request.name, -1), request.number)
            if rest.get("joins"):
                self._joined.append(rank)
            if rest.get("ends") and self.ended is None:
                self.ended = rank
            given_up += rest.get("given up", ())
        if len(self._numbered) > _CAPACITY:
            self._numbered, self._positions = [], {}
        keys = list(self._submitted) if len(self._joined) > joined_before else touched
        found = [decision for key in keys if (decision := self._decide(key)) is not None]
        for unready in self.unready() if given_up else ():
            if unready.request.key in given_up:
                del self._submitted[unready.request.key]
                found.append(Decision(unready.request, error=f"given up: {unready.describe(range(self.size))}"))
        if len(self._joined) == self.size:
            found.append(Decision(Request(JOIN, JOIN), last=self._joined[-1]))
            self.unnamed = {name: most + 1 for name, most in self._most.items()}
            self._joined = []
        return found

    def _read(self, message: bytes) -> tuple[list[Request], dict[str, Any]]:
        """What a rank has said; what is new is numbered."""
        length, pairs, more = _HEAD.unpack_from(message)
        start = _HEAD.size + length
        bits = int.from_bytes(message[_HEAD.size : start], "little")
        requests = [self._numbered[position] for position in _ones(bits)]
        for at in range(start, start + pairs * _PAIR.size, _PAIR.size):
            position, number = _PAIR.unpack_from(message, at)
            requests.append(self._numbered[position]._replace(number=number))
        rest: dict[str, Any] = json.loads(message[-more:]) if more else {}
        for said in rest.get("new", ()):
            request = Request.read(said)
            requests.append(request)
            content = request._replace(number=0) if request.number >= 0 else request
            if content not in self._positions:
                self._positions[content] = len(self._numbered)
                self._numbered.append(content)
        return requests, rest

    def _decide(self, key: str) -> Decision | None:
        """What to do about an operation; None if some ranks have not come with it."""
        by_rank = self._submitted[key]
        if len(by_rank) + len(self._joined) < self.size:
            return None
        if any(rank not in by_rank and rank not in self._joined for rank in range(self.size)):
            return None
        del self._submitted[key]
        request = next(iter(by_rank.values()))
        each = tuple(by_rank.get(rank) for rank in range(self.size))
        return Decision(request, each, self._find_fault(key, by_rank))

    def _find_fault(self, key: str, by_rank: Mapping[int, Request]) -> str:
        request = next(iter(by_rank.values()))
        common = request.common
        if any(other is not request and other.common != common for other in by_rank.values()):
            said: dict[str, list[int]] = {}
            for rank, each in sorted(by_rank.items()):
                said.setdefault(each.describe(), []).append(rank)
            differ = "; ".join(f"{ranks(who)}: {text}" for text, who in said.items())
            return f"the ranks do not mean the same by {key!r}: {differ}; give different operations different names"
        if len(by_rank) < self.size:
            missing = ranks([rank for rank in range(self.size) if rank not in by_rank])
            if request.kind not in _WITHOUT_ALL:
                return f"{key!r}: {request.kind} is not possible after join(), which {missing} called"
            if request.options and request.options[0] not in _WITH_ZEROS:
                return f"{key!r}: {request.options[0]} is not possible after join(), which {missing} called"
        return ""


def _ones(bits: int) -> Iterator[int]:
    """The positions of the bits that are set."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
