"""``topk``, ``randomk`` and ``threshold``: a few of the values, and where they are."""

from __future__ import annotations

import torch

from hocket.comm.codecs.codec import Gathered
from hocket.messages import WireError

_SAMPLED = 1 << 16  # values from which on the bound on the largest ones is taken from a sample
_SAMPLE = 1 << 13
_CHUNK = 1 << 18  # values; what is done with so many stays in the cache


class LargestValues(Gathered):
    """The largest values, by their size.

    Args:
        density: The share of the values that is sent.
        warmup: Rounds until ``density`` is reached: the share falls from a quarter, by the same factor in each round
            (Lin et al. 2018).
    """

    def __init__(self, density: float, warmup: int = 0) -> None:
        super().__init__()
        self._density, self._warmup = density, warmup

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        places = largest(values, self._count(values))
        where = places.to(_type_of_places(values)).view(torch.uint8)
        return torch.cat([values[places].view(torch.uint8), where])

    def add(self, message: torch.Tensor, to: torch.Tensor, factor: float = 1.0) -> None:
        count, split = self._count(to), self._count(to) * to.dtype.itemsize
        if message.numel() != split + count * _type_of_places(to).itemsize:
            raise WireError(f"{message.numel()} bytes are no {count} values with their places")
        places = message[split:].clone().view(_type_of_places(to)).long()
        _check(places, to)
        to.index_add_(0, places, message[:split].view(to.dtype), alpha=factor)

    def _count(self, values: torch.Tensor) -> int:
        """How many of the values are sent in this round."""
        return min(values.numel(), max(1, round(self._share() * values.numel())))

    def _share(self) -> float:
        if self.rounds >= self._warmup:
            return self._density
        first = max(self._density, 0.25)
        return float(first * (self._density / first) ** (self.rounds / self._warmup))


class RandomPlaces(Gathered):
    """Values at random places, the same on all members, so that only the values travel.

    Args:
        density: The share of the values that is sent.
        seed: The same on all members.
    """

    def __init__(self, density: float, seed: int) -> None:
        super().__init__()
        self._density, self._seed = density, seed
        self._random = torch.Generator()

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return values[self._places(values.numel())].view(torch.uint8)

    def add(self, message: torch.Tensor, to: torch.Tensor, factor: float = 1.0) -> None:
        places = self._places(to.numel())
        if message.numel() != places.numel() * to.dtype.itemsize:
            raise WireError(f"{message.numel()} bytes are no {places.numel()} values")
        to.index_add_(0, places, message.view(to.dtype), alpha=factor)

    def _places(self, count: int) -> torch.Tensor:
        self._random.manual_seed((self._seed << 32) + self.rounds)
        kept = max(1, round(self._density * count))
        if kept == count:
            return torch.arange(count)
        drawn = torch.randint(count, (kept,), generator=self._random)
        places: torch.Tensor = drawn.unique()  # a few fewer, where a place was drawn twice
        return places


class PassedThreshold(Gathered):
    """Of each value whose size is ``tau`` or more, ``tau`` and its sign (Strom 2015).

    Args:
        tau: What is sent of a value in a round.
    """

    def __init__(self, tau: float) -> None:
        super().__init__()
        self._tau = tau

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        places = at_least(values, self._tau)
        places = torch.where(values[places] < 0, -places - 1, places)  # the sign of a place is that of its value
        count = torch.tensor([places.numel()])
        return torch.cat([count.view(torch.uint8), places.to(_type_of_places(values)).view(torch.uint8)])

    def add(self, message: torch.Tensor, to: torch.Tensor, factor: float = 1.0) -> None:
        dtype = _type_of_places(to)
        count = int(message[:8].view(torch.int64)) if message.numel() >= 8 else -1
        if message.numel() != 8 + count * dtype.itemsize:
            raise WireError(f"{message.numel()} bytes are no {count} places of values")
        said = message[8:].view(dtype).long()
        places = torch.where(said < 0, -said - 1, said)
        _check(places, to)
        values = torch.where(said < 0, -self._tau, self._tau).to(to)
        to.index_add_(0, places, values, alpha=factor)


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """The places of ``count`` values that are the largest by their size, in order.

    Among many, they are taken from those above a bound which a sample has told; so a few may be others.
    """
    if count >= values.numel():
        return torch.arange(values.numel())
    if values.numel() > _SAMPLED:
        sample = values[:: values.numel() // _SAMPLE].abs()
        bound = sample.kthvalue(max(1, round(sample.numel() * (1 - 1.5 * count / values.numel())))).values
        places = at_least(values, float(bound))
        if count <= places.numel() <= 4 * count:
            return places[values[places].abs().topk(count, sorted=False).indices].sort().values
    return values.abs().topk(count, sorted=False).indices.sort().values


def at_least(values: torch.Tensor, bound: float) -> torch.Tensor:
    """The places of the values whose size is ``bound`` or more, in order."""
    parts = values.split(_CHUNK)
    return torch.cat([(part.abs() >= bound).nonzero().view(-1) + i * _CHUNK for i, part in enumerate(parts)])


def _type_of_places(values: torch.Tensor) -> torch.dtype:
    return torch.int32 if values.numel() < 1 << 31 else torch.int64


def _check(places: torch.Tensor, to: torch.Tensor) -> None:
    """Raise unless each place is there, and at most once."""
    if not places.numel():
        return
    is_there = bool(places[0] >= 0) and bool(places[-1] < to.numel())
    if not (is_there and bool((places[1:] > places[:-1]).all())):
        raise WireError(f"these are no places of {to.numel()} values, in order")
