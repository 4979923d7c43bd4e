"""A step of an optimizer that needs whole tensors (Muon, Adafactor), divided among workers by parameters."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.optim import Optimizer

from hocket.comm.bucket_layout import Layout, Place, align
from hocket.comm.shared import SharedCommunicator
from hocket.errors import StrategyError
from hocket.updates.update import Range, Step, Trained, Update

_Description = tuple[int, str, list[int], str]  # parameter, key, shape, dtype


class WholeUpdate(Update):
    """Runs the user's optimizer on the parameters that this worker owns; the state becomes one shared copy."""

    def __init__(
        self,
        communicator: SharedCommunicator,
        optimizer: Optimizer,
        members: Trained,
        layout: Layout,
        gradients: list[torch.Tensor],
    ) -> None:
        self._communicator, self._optimizer, self._members, self._layout = communicator, optimizer, members, layout
        self._views = layout.views(gradients)
        self._mine = _assign(layout, communicator.size)[communicator.rank]
        self._active: list[int] = []
        self._shared: dict[tuple[int, str], torch.Tensor] = {}
        self._shown: object = None if optimizer.state else optimizer.state

    def prepare(self, present: bytes) -> list[Range]:
        state = self._optimizer.state
        if state is not self._shown or any(self._members.parameters[i] not in state for i, _ in self._shared):
            self._shown = state
            self._shared.clear()
            self._adopt([self._describe(i, key) for i, key in self._keys(range(len(present)))], from_rank_0=True)
        self._active = [i for i in self._mine if present[i] and self._members.groups[i] >= 0]
        places = self._layout.places
        return [(places[i].bucket, places[i].start, places[i].end) for i in self._active]

    def step(self, original: Step, **options: Any) -> Any:
        parameters, groups = self._members.parameters, self._members.groups
        shown = [group["params"] for group in self._optimizer.param_groups]
        gradients = [parameters[i].grad for i in self._active]
        try:
            for i in self._active:
                parameters[i].grad = self._views[i]
            for number, group in enumerate(self._optimizer.param_groups):
                group["params"] = [parameters[i] for i in self._active if groups[i] == number]
            return original(**options)
        finally:
            for group, params in zip(self._optimizer.param_groups, shown, strict=True):
                group["params"] = params
            for i, gradient in zip(self._active, gradients, strict=True):
                parameters[i].grad = gradient

    def news(self) -> bool:
        state, parameters = self._optimizer.state, self._members.parameters
        return any(self._shared.get((i, key)) is not state[parameters[i]][key] for i, key in self._keys(self._active))

    def share(self) -> None:
        state, parameters = self._optimizer.state, self._members.parameters
        fresh = [
            self._describe(i, key)
            for i, key in self._keys(self._active)
            if self._shared.get((i, key)) is not state[parameters[i]][key]
        ]
        everyone = self._communicator.gather_bytes(json.dumps(fresh).encode())
        self._adopt([(i, key, shape, dtype) for part in everyone for i, key, shape, dtype in json.loads(part)])

    def end(self) -> None:
        """Nothing to do: no step is undone."""

    def regroup(self, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        raise StrategyError(refuse_changes(self._optimizer))

    def _adopt(self, described: list[_Description], *, from_rank_0: bool = False) -> None:
        """Move the described tensors to one new shared area; the owner (or rank 0) has their values."""
        state, parameters = self._optimizer.state, self._members.parameters
        for dtype_name in sorted({dtype for *_, dtype in described}):
            dtype = getattr(torch, dtype_name)
            tensors = [(i, key, torch.Size(shape)) for i, key, shape, name in described if name == dtype_name]
            places, end = [], 0
            for _, _, shape in tensors:
                places.append(Place(0, end, shape.numel(), shape, torch.empty(shape, device="meta").stride()))
                end = align(places[-1].end, dtype)
            _, views = self._communicator.one_copy(dtype, end, places, "optimizer state")
            for (i, key, _), view in zip(tensors, views, strict=True):
                if self._communicator.rank == 0 if from_rank_0 else i in self._active:
                    view.copy_(state[parameters[i]][key])
                state[parameters[i]][key] = self._shared[i, key] = view
        self._communicator.barrier("sharing the optimizer's state")

    def _keys(self, indices: Any) -> list[tuple[int, str]]:
        state, parameters = self._optimizer.state, self._members.parameters
        return [(i, key) for i in indices if parameters[i] in state for key in state[parameters[i]]]

    def _describe(self, index: int, key: str) -> _Description:
        value = self._optimizer.state[self._members.parameters[index]][key]
        if not isinstance(value, torch.Tensor):
            raise StrategyError(
                f"{type(self._optimizer).__name__} keeps {key!r} of {self._members.names[index]!r} as a Python "
                f"{type(value).__name__}, which strategy 'central' cannot share: use --strategy mirrored"
            )
        return index, key, list(value.shape), str(value.dtype).removeprefix("torch.")


def refuse_changes(optimizer: Optimizer) -> str:
    """Why the owners of whole tensors cannot change, in words."""
    return (
        f"strategy 'central' cannot undo a step of {type(optimizer).__name__}, which works on whole tensors, when a "
        "worker is lost: use --strategy mirrored"
    )


def _assign(layout: Layout, size: int) -> list[list[int]]:
    """Parameters for each rank, the largest first to whoever has the least."""
    loads, owned = [0] * size, [[] for _ in range(size)]  # type: list[int], list[list[int]]
    for i in sorted(range(len(layout.places)), key=lambda i: -layout.places[i].count):
        rank = loads.index(min(loads))
        loads[rank] += layout.places[i].count
        owned[rank].append(i)
    return [sorted(part) for part in owned]
