"""Replicas that should be equal are compared: in the first steps, then as often as is cheap (``--check-replicas``)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from hocket.comm.communicator import Communicator
from hocket.errors import ReplicaError
from hocket.events import Replicas
from hocket.job.buffers import fingerprint
from hocket.job.loads import Loads
from hocket.strategies.base import Strategy
from hocket.transport.gate import signature

if TYPE_CHECKING:
    from hocket.job.worker import Worker

SHARE = 0.005
"""The share of the time of steps that goes into comparisons."""

_BITS = 31  # of a payload: after how many steps a rank would compare again
_NUMBER = signature("comparison of replicas")


class ReplicaCheck:
    """Compares the parameters of all ranks after some steps of an optimizer.

    Args:
        communicator: The communicator of all ranks.
        strategy: The strategy whose replicas are compared.
        every: Steps between two comparisons; None to compare after the first two steps, and then so often that it
            takes ``SHARE`` of the measured time on the rank where comparisons cost most.
    """

    def __init__(self, communicator: Communicator, strategy: Strategy, every: int | None) -> None:
        self._communicator, self._strategy, self._every = communicator, strategy, every
        self.steps = 0
        self._next = every or 1
        self._since = 0, 0.0  # the last comparison: steps and the time then
        self._witness: torch.Tensor | None = None  # a parameter, and its version after the last step
        self._version = 0

    def begin_anew(self) -> None:
        """Workers have come or gone, all at the same step: compare as at the beginning."""
        self.steps, self._next, self._since = 0, self._every or 1, (0, 0.0)

    def after_step(self, *_: object) -> None:
        """Count a step; collective if a comparison is due."""
        self.steps += 1
        if self.steps >= self._next:
            self.compare()
        if self._witness is not None:
            self._version = self._witness._version

    def compare(self) -> None:
        """Raise on all ranks if their replicas differ; collective."""
        replica = self._replica()
        if replica is None:
            self._next = self.steps + (self._every or 1)
            return
        begin, waited = time.perf_counter(), self._communicator.waited
        self._witness = next(iter(replica.values()), None)
        mine, wish = fingerprint(replica.values()), self._wish(begin)
        payloads = self._communicator.meet(_NUMBER, mine << _BITS | wish, self._describe)
        if len({payload >> _BITS for payload in payloads}) > 1:
            self._complain(replica)
        if self._every:
            self._next = self.steps + self._every
        else:
            self._next = self.steps + (max(payload & (1 << _BITS) - 1 for payload in payloads) if self.steps > 1 else 1)
        end = time.perf_counter()
        self._cost = max(0.0, end - begin - (self._communicator.waited - waited))
        self._since = self.steps, end

    _cost = 0.0

    def _wish(self, now: float) -> int:
        """After how many steps this rank would compare again, from what the last comparison and steps took."""
        steps, then = self._since
        if self.steps == steps or now <= then:
            return 1
        per_step = (now - then) / (self.steps - steps)
        return min(max(1, math.ceil(self._cost / (SHARE * per_step))), (1 << _BITS) - 1)

    def at_end(self) -> dict[str, int]:
        """What is to be compared when the run is over; nothing if the script has written to parameters since the
        last step, as one that evaluates its best model on one rank does."""
        replica = self._replica()
        if replica is None or self._witness is None or self._witness._version != self._version:
            return {}
        return {name: fingerprint([parameter]) for name, parameter in replica.items()}

    def _replica(self) -> dict[str, torch.Tensor] | None:
        """The parameters by name, if every rank has a copy that must be equal."""
        members = self._strategy.context.members
        if not self._strategy.at_work.spec.has_equal_replicas:
            return None
        return dict(zip(members.names, members.parameters, strict=True))

    def _describe(self) -> str:
        return f"optimizer.step(), the comparison of replicas after {self.steps} optimizer steps"

    def _complain(self, replica: dict[str, torch.Tensor]) -> None:
        mine = torch.tensor([fingerprint([parameter]) for parameter in replica.values()])
        everyone = [dict(zip(replica, row, strict=True)) for row in self._communicator.allgather(mine).tolist()]
        raise ReplicaError(
            f"after {self.steps} steps the replicas are not equal any more: {Replicas.differences(everyone)}; "
            f"{Replicas.REMEDY}"
        )


def watch(worker: Worker, model: nn.Module, optimizer: Optimizer, strategy: Strategy) -> None:
    """Compare, from now on, what all ranks train with ``strategy``."""
    config, training = worker.config, worker.training
    training.settling.watched.append(Loads(model, optimizer, strategy, newcomer=config.newcomer))
    if config.check_replicas != 0:
        check = training.checks[strategy] = ReplicaCheck(worker.communicator, strategy, config.check_replicas)
        optimizer.register_step_post_hook(check.after_step)


def describe_last(checks: Iterable[ReplicaCheck]) -> Replicas | None:
    """What a launcher is told of the parameters after the last step; None if there is nothing to compare."""
    known = list(checks)
    values = {
        f"{name} of model {number}" if len(known) > 1 else name: value
        for number, check in enumerate(known)
        for name, value in check.at_end().items()
    }
    names = list(values)
    if len(names) > _MOST_NAMES:
        rest = [values.pop(name) for name in names[_MOST_NAMES:]]
        values[f"{len(rest)} others"] = signature(repr(rest))
    return Replicas(values) if values else None


_MOST_NAMES = 500  # most names of parameters in a record
