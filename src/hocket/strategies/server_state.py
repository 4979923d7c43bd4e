"""The optimizer's state, which is on the servers: ``state_dict()`` gets it, ``load_state_dict()`` brings it there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from hocket.capture.members import Members
from hocket.server.copies import DenseCopy
from hocket.server.shard import Stored
from hocket.strategies.sparse import SparseTables

_SCALARS = frozenset(("step", "eta", "mu", "mu_product"))


class ServerState:
    """Hooks on an optimizer; the state that it already has goes to the servers now.

    Args:
        optimizer: The optimizer of the script.
        members: The optimizer's dense parameters.
        copy: The worker's copy of the dense parameters.
        sparse: The optimizer's sparse parameters.
        is_writer: Says whether this worker is the one that brings state to the servers; all have the same state.

    Attributes:
        rests: Whether the state stays where it is, and ``state_dict()`` has none.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        members: Members,
        copy: DenseCopy,
        sparse: SparseTables,
        is_writer: Callable[[], bool],
    ) -> None:
        self._optimizer, self._members, self._copy, self._sparse = optimizer, members, copy, sparse
        self._is_writer, self.rests = is_writer, False
        self._send()
        optimizer.register_state_dict_pre_hook(self._fetch)
        optimizer.register_state_dict_post_hook(self._forget)
        optimizer.register_load_state_dict_post_hook(lambda _: self._send())

    def _fetch(self, _: Optimizer) -> None:
        """Before ``state_dict()``: get the state from the servers."""
        if self.rests:
            return
        state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        for stored in self._copy.state():
            parameter = self._members.parameters[stored.index]
            known, value = state[parameter], stored.value
            place = self._copy.placement.layout.places[stored.index]
            if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.numel() > place.count:
                known.setdefault(stored.key, value)
                continue
            if self._is_whole(stored.index):
                known[stored.key] = value
                continue
            if stored.key not in known:
                flat = torch.zeros(place.count, dtype=value.dtype)
                known[stored.key] = flat.as_strided(place.shape, place.stride)
            whole = known[stored.key]
            flat = whole.as_strided((place.count,), (1,))
            first = stored.start - place.start
            flat[first : first + value.numel()] = value
        self._sparse.fetch_state(state)
        ordered = (p for group in self._optimizer.param_groups for p in group["params"] if p in state)
        self._optimizer.state = defaultdict(dict, {p: state[p] for p in ordered})

    def _forget(self, _: Optimizer, __: dict[str, Any]) -> None:
        self._optimizer.state = defaultdict(dict)

    def _send(self) -> None:
        """Send the optimizer's state to the servers, and drop it here, so that it is not kept twice."""
        state = self._optimizer.state
        if state and not self.rests and self._is_writer():
            parts: list[list[Stored]] = []
            for definition in self._copy.definitions:
                parts.append([])
                for each in definition.slices:
                    values = state.get(self._members.parameters[each.index], {})
                    for key, value in values.items():
                        parts[-1].append(Stored(each.index, each.start, key, self._cut(each, key, value)))
            self._copy.load_state(parts)
            self._sparse.send_state(state)
        self._optimizer.state = defaultdict(dict)

    def _cut(self, each: Any, key: str, value: Any) -> Any:
        """The part of an entry of the state that belongs to a slice."""
        place = self._copy.placement.layout.places[each.index]
        if (
            not isinstance(value, torch.Tensor)
            or key in _SCALARS
            or value.shape != place.shape
            or each.shape is not None
        ):
            return value.cpu() if isinstance(value, torch.Tensor) else value
        flat = torch.empty(place.count, dtype=value.dtype)
        flat.as_strided(place.shape, place.stride).copy_(value)
        return flat[each.start - place.start : each.end - place.start]

    def _is_whole(self, index: int) -> bool:
        return any(each.index == index and each.shape is not None for d in self._copy.definitions for each in d.slices)
