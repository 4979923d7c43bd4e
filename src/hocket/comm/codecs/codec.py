"""The contract of codecs: how the values of a flat tensor travel between the members of a group, in fewer bytes.

There are two families. What is ``Gathered`` is sent to all other members, and each adds up what has come. What is
``Scattered`` is cut into slices: each member adds up one slice, encodes the sum once more, and gives it to the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from hocket.messages import WireError
from hocket.transport.point_to_point import PointToPoint

_MOST = 1 << 40  # bytes of a message


class Codec(ABC):
    """How one flat tensor of floating-point numbers travels, round after round.

    An object serves one tensor of one member. In each round what was not sent so far is added to the values (error
    feedback): what all members have sent, and what they still owe, is together the sum of all values so far. Where what
    is sent is right on the average (``is_unbiased``), nothing is owed.

    Attributes:
        rounds: How many rounds have counted.
        nbytes: How many bytes this member has given to the wire so far.
    """

    is_unbiased = False

    def __init__(self) -> None:
        self.rounds = self.nbytes = 0
        self._owed: torch.Tensor | None = None  # nothing, if None
        self._rest: torch.Tensor | None = None  # what is owed if the round that goes on counts

    @abstractmethod
    def add_up(self, links: PointToPoint, data: torch.Tensor) -> None:
        """Replace ``data`` by the sum over all members of what they send; all get the same bits.

        Raises:
            WireError: another member's message makes no sense.
        """

    def end_round(self, *, counts: bool) -> None:
        """The round is over on all members. If it does not count, what is owed is what it was before."""
        if counts:
            self.rounds += 1
            self._owed = self._rest
        self._rest = None

    def owed(self, data: torch.Tensor) -> torch.Tensor:
        """What this member owes, for values like ``data``."""
        return torch.zeros_like(data) if self._owed is None else self._owed

    def owe(self, values: torch.Tensor, rounds: int) -> None:
        """Owe ``values`` from now on, and nothing else, after so many rounds."""
        self._owed, self.rounds = values.clone(), rounds

    def _with_owed(self, data: torch.Tensor) -> torch.Tensor:
        """The values that are to be sent, in 32 bits at least, in memory of their own."""
        values = data.to(torch.promote_types(data.dtype, torch.float32), copy=True)
        return values if self._owed is None else values.add_(self._owed)

    def _keep(self, rest: torch.Tensor) -> None:
        self._rest = None if self.is_unbiased else rest

    def _send(self, links: PointToPoint, to: int, *parts: torch.Tensor) -> None:
        links.send(to, *parts)
        self.nbytes += sum(part.nbytes for part in parts)


class Gathered(Codec):
    """Each member sends all that it has to all others, and adds up what has come in the order of the ranks."""

    @abstractmethod
    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """The message for ``values``, as bytes."""

    @abstractmethod
    def add(self, message: torch.Tensor, to: torch.Tensor, factor: float = 1.0) -> None:
        """Add what ``message`` says, times ``factor``, to values.

        Raises:
            WireError: the message was not made by ``encode`` for as many values.
        """

    def add_up(self, links: PointToPoint, data: torch.Tensor) -> None:
        values = self._with_owed(data)
        mine = self.encode(values)
        messages = self._exchange(links, mine)
        total = torch.zeros_like(values)
        for message in messages:
            self.add(message, total)
        data.copy_(total)
        self.add(mine, values, -1.0)
        self._keep(values)

    def _exchange(self, links: PointToPoint, mine: torch.Tensor) -> list[torch.Tensor]:
        """The messages of all members, by rank."""
        length = torch.tensor([mine.numel()])
        others = [(links.rank + distance) % links.size for distance in range(1, links.size)]
        for other in others:
            self._send(links, other, length)
            self._send(links, other, mine)
        found = {links.rank: mine}
        for other in reversed(others):
            found[other] = _receive(links, other)
        links.flush()
        return [found[rank] for rank in range(links.size)]


class Scattered(Codec):
    """Each member adds up one slice of the values."""

    unit = 1
    """A slice begins at a multiple of so many elements."""

    @abstractmethod
    def size(self, count: int) -> int:
        """How many bytes the message for ``count`` values has."""

    @abstractmethod
    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """The message for ``values``, as bytes."""

    @abstractmethod
    def decode(self, message: torch.Tensor, into: torch.Tensor) -> None:
        """Replace ``into`` by the values of a message.

        Raises:
            WireError: the message was not made by ``encode``.
        """

    def add_up(self, links: PointToPoint, data: torch.Tensor) -> None:
        values = self._with_owed(data)
        bounds = self._cut(values, links.size)
        came = values.new_empty(max(end - start for start, end in bounds))
        for distance in range(1, links.size):
            to = (links.rank + distance) % links.size
            self._give(links, to, values[slice(*bounds[to])], came)
        mine = values[slice(*bounds[links.rank])]
        total, came = mine.clone(), came[: mine.numel()]
        message = torch.empty(self.size(mine.numel()), dtype=torch.uint8)
        for source in range(links.size):
            if source != links.rank and mine.numel():
                links.receive(source, message)
                self.decode(message, came)
                total += came
        if mine.numel():
            message = self.encode(total)
            self.decode(message, came)
            torch.sub(total, came, out=mine)  # what is lost in the sum, this member owes
            data[slice(*bounds[links.rank])] = came
        self._spread(links, data, bounds, message)
        self._keep(values)

    def _give(self, links: PointToPoint, to: int, part: torch.Tensor, room: torch.Tensor) -> None:
        """Send ``part`` to another member; what is left of it is what was lost."""
        if not part.numel():
            return
        message = self.encode(part)
        self._send(links, to, message)
        self.decode(message, room[: part.numel()])
        part -= room[: part.numel()]

    def _spread(
        self, links: PointToPoint, data: torch.Tensor, bounds: list[tuple[int, int]], mine: torch.Tensor
    ) -> None:
        """Give the sum of this member's slice to the others, and get theirs."""
        for distance in range(1, links.size):
            if mine.numel():
                self._send(links, (links.rank + distance) % links.size, mine)
        for distance in range(1, links.size):
            source = (links.rank - distance) % links.size
            part = data[slice(*bounds[source])]
            if part.numel():
                message = torch.empty(self.size(part.numel()), dtype=torch.uint8)
                links.receive(source, message)
                room = part.to(torch.promote_types(part.dtype, torch.float32))
                self.decode(message, room)
                part.copy_(room)
        links.flush()

    def _cut(self, values: torch.Tensor, size: int) -> list[tuple[int, int]]:
        count, unit = values.numel(), self.unit
        step = -(-count // (unit * size)) * unit
        return [(min(rank * step, count), min((rank + 1) * step, count)) for rank in range(size)]


def _receive(links: PointToPoint, source: int) -> torch.Tensor:
    length = torch.empty(1, dtype=torch.int64)
    links.receive(source, length)
    count = int(length)
    if not 0 <= count <= _MOST:
        raise WireError(f"rank {source} of the group announces {count} bytes")
    message = torch.empty(count, dtype=torch.uint8)
    links.receive(source, message)
    return message
