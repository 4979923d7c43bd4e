"""Averages the state of optimizers that take steps of their own, or makes it equal, where all ranks have it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hocket.comm.communicator import Communicator
from hocket.strategies.averaging import average_once, copy_to

_PLAIN = (bool, int, float)


class CommonState:
    """What all ranks have in an optimizer's state; a rank whose steps were all left out has none. Collective.

    Attributes:
        means: Tensors that have a mean, in the same order on all ranks.
        lonely: Parameters whose state is not of the same kind on all ranks.
    """

    def __init__(self, communicator: Communicator, optimizer: Optimizer | None) -> None:
        self._communicator = communicator
        self._state: Any = {} if optimizer is None else optimizer.state
        parameters = [p for group in (optimizer.param_groups if optimizer is not None else ()) for p in group["params"]]
        described = [_describe(self._state.get(parameter, {})) for parameter in parameters]
        common = _find_common(communicator, described)
        self.lonely: list[nn.Parameter] = [p for p, same in zip(parameters, common, strict=True) if not same]
        self.means: list[torch.Tensor] = []
        self._others: list[tuple[dict[Any, Any], Any]] = []  # entries without a mean
        for parameter, same in zip(parameters, common, strict=True):
            state = self._state.get(parameter, {}) if same else {}
            for key in sorted(state, key=str):
                value = state[key]
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    self.means.append(value)
                elif isinstance(value, (torch.Tensor, *_PLAIN)):
                    self._others.append((state, key))

    @torch.no_grad()
    def make_equal(self) -> None:
        """Average the state; take rank 0's entries without a mean, and drop what not all ranks have; collective."""
        average_once(self._communicator, self.means)
        plain = [(state, key) for state, key in self._others if not isinstance(state[key], torch.Tensor)]
        if plain:
            mine = json.dumps([state[key] for state, key in plain]).encode()
            for (state, key), value in zip(plain, json.loads(self._communicator.gather_bytes(mine)[0]), strict=True):
                state[key] = value
        for state, key in self._others:
            if isinstance(state[key], torch.Tensor):
                value = state[key].contiguous()
                self._communicator.broadcast(value, 0)
                state[key].copy_(value)
        for parameter in self.lonely:
            self._state.pop(parameter, None)


@contextmanager
def merged_state(communicator: Communicator, optimizer: Optimizer | None) -> Iterator[None]:
    """Inside this context, an optimizer's state is the average over all ranks; then it is as before. Collective."""
    common = CommonState(communicator, optimizer)
    own = [tensor.detach().clone() for tensor in common.means]
    before = {} if optimizer is None else dict(optimizer.state)
    average_once(communicator, common.means)
    try:
        for parameter in common.lonely:
            common._state.pop(parameter, None)
        yield
    finally:
        if common.lonely and optimizer is not None:
            optimizer.state.clear()
            optimizer.state.update(before)
        copy_to(common.means, own)


def _describe(state: dict[Any, Any]) -> str:
    """The kinds of one parameter's entries."""
    kinds = []
    for key in sorted(state, key=str):
        value = state[key]
        kind = f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        kinds.append(f"{key} {kind}")
    return ", ".join(kinds)


def _find_common(communicator: Communicator, described: list[str]) -> list[bool]:
    """For each description whether it is the same on all ranks."""
    number = torch.tensor([zlib.crc32(repr(described).encode())])
    if len(set(communicator.allgather(number).view(-1).tolist())) == 1:
        return [True] * len(described)
    everyone = [json.loads(part) for part in communicator.gather_bytes(json.dumps(described).encode())]
    return [len(set(texts)) == 1 for texts in zip(*everyone, strict=True)]
