"""Notices a ``load_state_dict`` on some ranks only, where replicas may differ and comparing them would say nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from hocket.comm.communicator import Communicator
from hocket.errors import MismatchError
from hocket.job.buffers import fingerprint
from hocket.strategies.base import Strategy


class Loads:
    """Remembers whether a worker has loaded a state since the last comparison, and trained on from it.

    Parameters that are put back to what they were, as after an evaluation of averages, do not count.

    Args:
        model: The model, whose loads are watched from now on.
        optimizer: The optimizer that trains it.
        strategy: The strategy that trains it.
        newcomer: Whether other workers train already, and may have loaded something before.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy, *, newcomer: bool) -> None:
        self.strategy, self._model = strategy, model
        self._modules = {id(module) for module in model.modules()}
        self._before: int | None = None  # of the parameters, before the first load since the last step
        self._has_loaded, self._has_changed, self._is_new = False, False, newcomer
        for module in model.modules():
            if module._parameters:
                module.register_load_state_dict_pre_hook(self._look)
        optimizer.register_step_pre_hook(self.go_on)

    def _look(self, module: nn.Module, *_: object) -> None:
        if self._before is None and id(module) in self._modules:
            self._before = fingerprint(self._model.parameters())

    def go_on(self, *_: object) -> None:
        """A training loop begins, perhaps without a batch for this worker, or an optimizer is about to take a step."""
        if self._before is not None:
            self._has_loaded = True
            self._has_changed |= fingerprint(self._model.parameters()) != self._before
            self._before = None

    def take(self) -> list[int]:
        """What is compared; forgets it."""
        told = [1, 0] if self._is_new else [int(self._has_loaded), int(self._has_changed)]
        self._has_loaded = self._has_changed = self._is_new = False
        return told


def compare(communicator: Communicator, watched: Sequence[Loads]) -> None:
    """Raise on all ranks if some have trained on from loaded parameters, and others have loaded none; collective."""
    specs = [loads.strategy.at_work.spec for loads in watched]
    kinds = [not (spec.has_equal_replicas or spec.shares_parameters) for spec in specs]
    found = [loads.take() for loads, matters in zip(watched, kinds, strict=True) if matters]
    if not found or communicator.size == 1 or communicator.changes:
        return  # after a loss, one worker may have left the loop while another has batches of the lost one yet
    rows = communicator.allgather(torch.tensor([found]))
    for loaded, changed in rows.view(-1, len(found), 2).permute(1, 2, 0).tolist():
        if any(changed) and not all(loaded):
            ranks = [str(rank) for rank, has in zip(communicator.members, loaded, strict=True) if has]
            raise MismatchError(
                f"only rank {', '.join(ranks)} has called load_state_dict() and then trained on from what was loaded: "
                "load the same on every rank, or put back what was there before training goes on"
            )
