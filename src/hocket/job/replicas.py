"""Replicas that should be equal are compared now and then (``--check-replicas``)."""

from __future__ import annotations

import torch

from hocket.comm.communicator import Communicator
from hocket.errors import ReplicaError
from hocket.job.buffers import fingerprint
from hocket.strategies.base import Strategy


class ReplicaCheck:
    """Compares the parameters of all ranks after every ``every``-th step of an optimizer."""

    def __init__(self, communicator: Communicator, strategy: Strategy, every: int) -> None:
        self._communicator, self._strategy, self._every = communicator, strategy, every
        self._steps = 0

    def after_step(self, *_: object) -> None:
        """Count a step; collective if one is due."""
        self._steps += 1
        replica = self._strategy.replica()
        if replica is None or self._steps % self._every:
            return
        mine = [fingerprint([parameter]) for parameter in replica.values()]
        everyone = self._communicator.allgather(torch.tensor(mine)).tolist()
        if all(other == everyone[0] for other in everyone):
            return
        raise ReplicaError(
            f"after {self._steps} steps the replicas are not equal any more: {_say(list(replica), everyone)}; "
            "something changes parameters on some ranks only: look for code under `if hocket.rank() == …`, or for "
            "random numbers in the optimizer"
        )


def _say(names: list[str], everyone: list[list[int]]) -> str:
    """Which parameters differ, and on which ranks; those of most ranks are taken as right."""
    differing = [i for i in range(len(names)) if len({other[i] for other in everyone}) > 1]
    said = []
    for i in differing[:3]:
        values = [other[i] for other in everyone]
        usual = max(values, key=lambda value: (values.count(value), value == values[0]))
        ranks = [rank for rank, value in enumerate(values) if value != usual]
        said.append(f"{names[i]!r} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}")
    more = f", and {len(differing) - 3} more parameters" if len(differing) > 3 else ""
    return ", ".join(said) + more
