"""``mirrored``: every worker has a replica, gradients are averaged, all replicas take the same step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hocket.comm import gpu
from hocket.comm.communicator import Communicator
from hocket.comm.layout import Layout
from hocket.strategies.base import Strategy, wrap
from hocket.strategies.exchange import CountedByExchange, GradientExchange, average_loss
from hocket.strategies.members import Members
from hocket.strategies.model_hooks import ModelHooks
from hocket.updates.update import Step


class MirroredTraining(CountedByExchange, Strategy):
    """The user's optimizer runs as it is, on gradients that are the same everywhere."""

    serves_any_optimizer = True

    def __init__(
        self, communicator: Communicator, model: nn.Module, optimizer: Optimizer | None, members: Members, on_nan: str
    ) -> None:
        layout = Layout(members.parameters, limits=gpu.limits(communicator, members.parameters))
        self._exchange = GradientExchange(communicator, members, layout, on_nan, optimizer, follows=True)
        self.collector = self._exchange.collector
        self._communicator, self._optimizer, self._members = communicator, optimizer, members
        ModelHooks(model, self.collector)
        if optimizer is not None:
            wrap(optimizer, self._step, self.collector)

    def note_step(self) -> None:
        self._exchange.taken += 1

    def replica(self) -> dict[str, torch.Tensor] | None:
        return dict(zip(self._members.names, self._members.parameters, strict=True))

    def _step(self, original: Step, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        optimizer = self._optimizer
        assert optimizer is not None
        self._members.check_groups(optimizer)
        if closure is None:
            return original(**options) if self._exchange.before_step(optimizer) else None

        def judged() -> Any:
            loss = average_loss(self._communicator, self.collector, closure())
            if not self._exchange.before_step(optimizer):
                optimizer.zero_grad(set_to_none=True)
            return loss

        return original(judged, **options)
