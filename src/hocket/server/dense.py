"""A shard of dense parameters: one flat piece of each of the workers' buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hocket.comm.bucket_layout import Layout, Place, align
from hocket.server import rule
from hocket.server.shard import Contribution, Gradient, Shard, Stored
from hocket.server.terms import Definition
from hocket.updates.slices import SlicedUpdate

_CHUNK = 1 << 16  # elements that stay in the cache while several gradients are added


class DenseShard(Shard):
    """Owns its parameters in plain memory; workers have copies.

    Attributes:
        flats: The parameters, flat, one tensor per range of the definition.
    """

    def __init__(self, definition: Definition) -> None:
        super().__init__(definition)
        slices = definition.slices
        dtypes = [getattr(torch, definition.buckets[each.bucket][0]) for each in slices]
        sketch = [torch.empty(s.count, dtype=d, device="meta") for s, d in zip(slices, dtypes, strict=True)]
        layout = Layout(sketch)
        self.flats = [torch.zeros(bucket.count, dtype=bucket.dtype) for bucket in layout.buckets]
        self._check_places(layout)
        by_elements = all(each.shape is None for each in slices)
        self._members = _Members(slices, self._views(layout))
        groups: list[list[nn.Parameter]] = [[] for _ in definition.rule["groups"]]
        for parameter, group in zip(self._members.parameters, self._members.groups, strict=True):
            if group >= 0:
                groups[group].append(parameter)
        self.optimizer = rule.build(definition.rule, groups)
        self._step = type(self.optimizer).step
        self._update = (
            SlicedUpdate(_Alone(), self.optimizer, self._members, layout, self.flats, self.flats)
            if by_elements
            else None
        )
        self._all = b"\1" * len(slices)
        self._mean: Gradient = []

    def combine(self, contributions: Sequence[Contribution]) -> tuple[Gradient, bytes | None]:
        presents = {each.present for each in contributions}
        present = None if None in presents else _union(presents)  # type: ignore[arg-type]
        if len(contributions) == 1:
            return contributions[0].gradient, present
        if not self._mean:
            self._mean = [torch.empty_like(flat) for flat in self.flats]
        factors = self.factors(contributions)
        for number, mean in enumerate(self._mean):
            for start in range(0, mean.numel(), _CHUNK):
                part = mean[start : start + _CHUNK]
                torch.mul(contributions[0].gradient[number][start : start + _CHUNK], factors[0], out=part)
                for each, factor in zip(contributions[1:], factors[1:], strict=True):
                    part.add_(each.gradient[number][start : start + _CHUNK], alpha=factor)
        return self._mean, present

    def scale(self, gradient: Gradient, factor: float) -> Gradient:
        for each in gradient:
            each.mul_(factor)
        return gradient

    def square(self, gradient: Gradient) -> float:
        return sum((float(torch.linalg.vector_norm(each, dtype=torch.float64)) ** 2 for each in gradient), 0.0)

    def apply(self, gradient: Gradient, present: bytes | None) -> None:
        if self._update is not None:
            self._update.read_from(gradient)
            self._update.prepare(present or self._all)
            self._update.step(self._call)
            if self._update.news():
                self._update.share()
            return
        pieces = zip(self._members.parameters, self.definition.slices, present or self._all, strict=True)
        offsets = {bucket: (number, start) for number, (bucket, start, _) in enumerate(self.definition.ranges)}
        for parameter, each, is_there in pieces:
            number, first = offsets[each.bucket]
            flat = gradient[number][each.start - first : each.end - first]
            parameter.grad = flat.as_strided(each.shape or (), each.stride or ()) if is_there else None
        self._call()

    def state(self) -> list[Stored]:
        if self._update is not None:
            self._update.show()
        return [
            Stored(each.index, each.start, key, value)
            for each, parameter in zip(self.definition.slices, self._members.parameters, strict=True)
            for key, value in self.optimizer.state.get(parameter, {}).items()
        ]

    def load_state(self, stored: Sequence[Stored]) -> None:
        found = {(each.index, each.start): i for i, each in enumerate(self.definition.slices)}
        fresh: dict[torch.Tensor, dict[str, Any]] = {}
        for each in stored:
            parameter = self._members.parameters[found[each.index, each.start]]
            fresh.setdefault(parameter, {})[each.key] = each.value
        state = type(self.optimizer.state)(dict)  # a new object, so that the next step notices the change
        state.update(fresh)
        self.optimizer.state = state

    def _call(self, *args: Any, **options: Any) -> Any:
        return self._step(self.optimizer, *args, **options)

    def _views(self, layout: Layout) -> list[torch.Tensor]:
        views = layout.views(self.flats)
        return [
            view if each.shape is None else view.as_strided(each.shape, each.stride or (), view.storage_offset())
            for each, view in zip(self.definition.slices, views, strict=True)
        ]

    def _check_places(self, layout: Layout) -> None:
        """The parts lie here as they do in the workers' buckets, so that a whole range moves at once."""
        offsets = {bucket: start for bucket, start, _ in self.definition.ranges}
        for each, place in zip(self.definition.slices, layout.places, strict=True):
            if each.start - offsets[each.bucket] != place.start:
                raise ValueError("the slices of a table have gaps")
        for (_, start, end), flat in zip(self.definition.ranges, self.flats, strict=True):
            if align(end - start, flat.dtype) != flat.numel():
                raise ValueError("the slices of a table have gaps")


class _Members:
    """The parameters of a shard, as an update wants to see them."""

    def __init__(self, slices: Sequence[Any], views: Sequence[torch.Tensor]) -> None:
        self.names = [str(each.index) for each in slices]
        self.parameters = [nn.Parameter(view) for view in views]
        self.groups = [each.group for each in slices]


class _Alone:
    """A group of one process, which updates the whole shard."""

    rank, size = 0, 1

    def one_copy(
        self, dtype: torch.dtype, count: int, places: Sequence[Place], purpose: str
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        flat = torch.zeros(count, dtype=dtype)
        return flat, [flat[p.start : p.end].as_strided(p.shape, p.stride, p.start) for p in places]

    def barrier(self, what: str = "") -> None:
        """Nothing to do: there is nobody to wait for."""


def _union(presents: set[bytes]) -> bytes:
    return bytes(map(max, *presents)) if len(presents) > 1 else next(iter(presents))
