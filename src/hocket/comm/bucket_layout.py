"""Where each tensor lies when many are fused into one flat buffer per dtype (a bucket)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

_LINE = 64  # bytes; every tensor starts at a multiple, so that slices keep the alignment that kernels see

_ONE_BUCKET = 1 << 20  # bytes of gradients up to which there is one bucket
_MOST_BUCKETS = 32
_WORTH = 0.02  # the share of a backward pass that further buckets must win


@dataclass(frozen=True)
class Bucket:
    """A flat buffer of ``count`` elements of one dtype."""

    dtype: torch.dtype
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Place:
    """Where one tensor lies: elements ``start`` to ``start + count`` of a bucket, with its own shape and strides."""

    bucket: int
    start: int
    count: int
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class Limits:
    """How many bytes a bucket may have.

    Attributes:
        first: The most bytes of the first bucket.
        most: The most bytes of the other buckets.
        last: Bytes at the end that get buckets of their own: the exchange of what comes last cannot be hidden.
        least: The fewest bytes of a bucket; a smaller one takes the next tensor too, even if it gets too large.
    """

    first: int
    most: int
    last: int = 0
    least: int = 0


def bucket_limits(total: int) -> Limits:
    """How large buckets are for gradients of ``total`` bytes: a small first one, then four or more of at most 25 MB.

    Little data goes in one bucket: every further message of a few hundred kilobytes costs more than it can hide.
    """
    if total <= _ONE_BUCKET:
        return Limits(_ONE_BUCKET * 2, _ONE_BUCKET * 2)
    most = min(25 << 20, max(total // 4, 1 << 20))
    return Limits(1 << 20, most, min(1 << 20, total // 2), 1 << 18)


def limits_by_cost(total: int, start: float, per_byte: float, computing: float) -> Limits:
    """How large buckets are where it is known what an exchange of one takes: the time that cannot be hidden is least.

    Args:
        total: The bytes of all gradients.
        start: Seconds that the exchange of any bucket takes.
        per_byte: Seconds more for each byte.
        computing: Seconds of a backward pass, in which buckets become complete one after the other.
    """
    whole = total * per_byte

    def exposed(count: int) -> float:
        # The last bucket is complete when the pass is over; before, exchanges may have to wait for each other.
        return max(start + whole / count, count * start + whole - computing * (count - 1) / count)

    counts = range(1, max(1, min(_MOST_BUCKETS, total // _ONE_BUCKET)) + 1)
    least = min(map(exposed, counts))
    count = next(count for count in counts if exposed(count) <= least + _WORTH * computing)
    size = -(-total // count)
    return Limits(size, size)


class Layout:
    """Places for ``tensors``, grouped by dtype.

    Attributes:
        device: Where the tensors are.
        places: The place of each tensor.
        buckets: The buckets, in the order in which they fill up.

    Args:
        tensors: What is to be placed.
        order: The order in which the tensors lie in the buckets; by default that of ``tensors``.
        limits: Limits on the size of buckets; without them there is one bucket for each dtype.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], *, order: Sequence[int] | None = None, limits: Limits | None = None
    ) -> None:
        ends: list[int] = []
        dtypes: list[torch.dtype] = []
        current: dict[object, int] = {}
        places: dict[int, Place] = {}
        left, last_bytes = sum(tensor.nbytes for tensor in tensors), 0  # bytes to come, and bytes of the last tensor
        for i in range(len(tensors)) if order is None else order:
            tensor, dtype = tensors[i], tensors[i].dtype
            kind = (dtype, tensor.requires_grad) if limits else dtype  # frozen tensors need not travel
            bucket = current.get(kind)
            if bucket is not None and limits is not None and ends[bucket]:
                full = (ends[bucket] + tensor.numel()) * dtype.itemsize > (limits.most if bucket else limits.first)
                worth_it = ends[bucket] * dtype.itemsize >= limits.least
                if (full and worth_it) or left <= limits.last < left + last_bytes:
                    bucket = None
            left -= tensor.nbytes
            last_bytes = tensor.nbytes
            if bucket is None:
                bucket = current[kind] = len(ends)
                ends.append(0)
                dtypes.append(dtype)
            places[i] = Place(bucket, ends[bucket], tensor.numel(), tensor.shape, _dense_stride(tensor))
            ends[bucket] = align(places[i].end, dtype)
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self.places = [places[i] for i in range(len(tensors))]
        self.buckets = [Bucket(dtype, end) for dtype, end in zip(dtypes, ends, strict=True)]

    @property
    def bucket_names(self) -> list[str]:
        """``bucket 2 of 3 (1.4 MB)``, for people."""
        sizes = [f"{b.nbytes / 1e6:,.1f} MB" if b.nbytes >= 1e6 else f"{b.nbytes / 1e3:,.1f} kB" for b in self.buckets]
        return [f"bucket {i + 1} of {len(sizes)} ({size})" for i, size in enumerate(sizes)]

    def views(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Every tensor as a view of the flat buffers, one per bucket."""
        return [
            flats[p.bucket][p.start : p.end].as_strided(p.shape, p.stride, flats[p.bucket].storage_offset() + p.start)
            for p in self.places
        ]

    def runs(self, indices: Iterable[int]) -> list[tuple[int, int, int]]:
        """The tensors ``indices`` as few contiguous ranges (bucket, start, end), padding included."""
        found: list[tuple[int, int, int]] = []
        for place in sorted((self.places[i] for i in indices), key=lambda p: (p.bucket, p.start)):
            end = align(place.end, self.buckets[place.bucket].dtype)
            if found and found[-1][0] == place.bucket and found[-1][2] == place.start:
                found[-1] = (place.bucket, found[-1][1], end)
            else:
                found.append((place.bucket, place.start, end))
        return found

    def members(self, bucket: int) -> list[int]:
        """The tensors that lie in ``bucket``, in their order there."""
        inside = [i for i, place in enumerate(self.places) if place.bucket == bucket]
        return sorted(inside, key=lambda i: self.places[i].start)

    def on_cpu(self) -> Layout:
        """The same layout for buffers of the CPU."""
        twin = copy.copy(self)
        twin.device = torch.device("cpu")
        return twin

    def allocate_here(self) -> list[torch.Tensor]:
        """Private flat buffers of the CPU, one per bucket, all zero."""
        return self.on_cpu().allocate()

    def allocate(self) -> list[torch.Tensor]:
        """Private flat buffers, one per bucket, all zero."""
        return [torch.zeros(b.count, dtype=b.dtype, device=self.device) for b in self.buckets]


def align(count: int, dtype: torch.dtype) -> int:
    """``count`` elements rounded up to whole cache lines."""
    per_line = _LINE // dtype.itemsize
    return -(-count // per_line) * per_line


def cut(count: int, dtype: torch.dtype, parts: int) -> list[tuple[int, int]]:
    """Divide ``count`` elements among ``parts``, at whole cache lines; the last ones may be empty."""
    step = align(-(-count // parts), dtype)
    return [(min(i * step, count), min((i + 1) * step, count)) for i in range(parts)]


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own strides where they fill its memory without gaps (channels_last), else the plain ones."""
    expected = 1
    sizes = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)
    for stride, size in sizes:
        if stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()
