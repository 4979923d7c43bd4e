"""``mirrored``: every worker has a replica, gradients are averaged, all replicas take the same step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hocket.capture.model_hooks import ModelHooks
from hocket.errors import StrategyError
from hocket.specs import Spec
from hocket.strategies.averaged_gradients import AveragedGradients, CountedByExchange, average_loss
from hocket.strategies.base import Context, Strategy
from hocket.strategies.optimizer_step import step_with_closure
from hocket.updates.update import Step


class MirroredTraining(CountedByExchange):
    """The user's optimizer runs as it is, on gradients that are the same everywhere."""

    def __init__(self, context: Context, spec: Spec) -> None:
        if type(self).captured is not Strategy.captured:
            raise StrategyError(
                f"{type(self).__name__}.captured would never be called: mirrored exchanges gradients before that; "
                "derive from hocket.strategies.base.Strategy and call self.capture_in_place() to exchange them there"
            )
        super().__init__(context, spec)
        communicator, optimizer, members = context.communicator, context.optimizer, context.members
        layout = communicator.lay_out(members.parameters)
        self._exchange = AveragedGradients(
            communicator, members, layout, context.on_nan, optimizer, follows=True, codec=context.codec
        )
        self.collector = self._exchange.collector
        self._communicator, self._optimizer, self._members = communicator, optimizer, members
        ModelHooks(context.model, self.collector)

    def regroup(self, weight: float) -> None:
        self._exchange.regroup(weight)

    def step(self, original: Step, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        optimizer = self._optimizer
        assert optimizer is not None
        self._members.check_groups(optimizer)
        if closure is None:
            return original(**options) if self._exchange.before_step(optimizer) else None

        def averaged() -> Any:
            return average_loss(self._communicator, self.collector, closure())

        return step_with_closure(
            original, optimizer, averaged, lambda: self._exchange.before_step(optimizer), **options
        )
