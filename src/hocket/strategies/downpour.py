"""``downpour``: asynchronous SGD with Adagrad on the servers (Dean et al. 2012, algorithm 7.1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer

from hocket.errors import StrategyError
from hocket.server import rule
from hocket.server.terms import PushOutcome
from hocket.specs import Downpour
from hocket.strategies.base import Context
from hocket.strategies.served import ServedTraining


class DownpourTraining(ServedTraining):
    """Gradients are pushed every ``push`` steps, parameters fetched every ``fetch``; between fetches, local steps."""

    def __init__(self, context: Context, spec: Downpour) -> None:
        self._spec = spec
        assert context.optimizer is not None
        context.optimizer.state.clear()  # the state of the script's own rule means nothing to Adagrad
        super().__init__(context, spec)
        if spec.push > 1 and self._sparse:
            raise StrategyError(
                "downpour(push>1) does not add up the sparse gradients of embeddings: use push=1, or sparse=False"
            )
        self._accrued = [torch.zeros_like(flat) for flat in self._gradients] if spec.push > 1 else []
        self._accrued_present = bytes(len(self._members.parameters))
        self._waits = spec.warmup > 0 and self._client.rank > 0
        if self._waits:
            context.model.register_forward_pre_hook(self._await_warm_start)

    def _rule(self, optimizer: Optimizer) -> dict[str, Any]:
        return {**rule.describe(self._stand_in(optimizer)), "groups": self._translate(optimizer)}

    def _divides(self, optimizer: Optimizer) -> bool:
        return True

    def _groups(self) -> list[dict[str, Any]] | None:
        groups = self._translate(self._optimizer)
        if groups == self._told:
            return None
        self._told = groups
        return groups

    def _translate(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """The values of the script's groups that Adagrad (or SGD) has as well."""
        stand_in = rule.describe_groups(self._stand_in(optimizer))[0]
        translated = []
        for group in rule.describe_groups(optimizer):
            known = {key: group.get(key, value) for key, value in stand_in.items() if key in ("lr", "weight_decay")}
            if self._spec.rate is not None:
                known["lr"] = self._spec.rate
            translated.append({**stand_in, **known})
        return translated

    def _stand_in(self, optimizer: Optimizer) -> Optimizer:
        """The rule of the servers."""
        nothing = [nn.Parameter(torch.zeros(1))]
        return Adagrad(nothing) if self._spec.adagrad else SGD(nothing)

    def _exchange(self, weight: float, fault: int) -> PushOutcome:
        spec, outcome = self._spec, PushOutcome()
        pushes, fetches = (self.steps + 1) % spec.push == 0, (self.steps + 1) % spec.fetch == 0
        if not fetches and weight:
            self._step_here()
        present = self._collect() if weight else None
        if self._accrued:
            if weight:
                self._accrue(present)
            if pushes:
                weight, present = self._take_accrued()
        if pushes:
            outcome = self._push(weight, present, fault, pull=fetches)
        elif fetches:
            self._copy.pull()
        if fetches:
            self._take_over()
        return outcome

    @property
    def holds(self) -> bool:
        return super().holds or self.steps % self._spec.push != 0

    def _flush(self) -> None:
        """Push the gradients that were accrued in fewer than ``push`` steps."""
        if self.steps % self._spec.push and self._accrued:
            weight, present = self._take_accrued()
            self._push(weight, present, pull=True)
            self._take_over()
            self.steps += self._spec.push - self.steps % self._spec.push

    @torch.no_grad()
    def _step_here(self) -> None:
        """The worker's own copy follows its own gradient until the next fetch."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-float(group["lr"]))
        self._note_versions()

    def _accrue(self, present: bytes | None) -> None:
        """Add the gradients in the slots to those of the steps before."""
        for accrued, gradient in zip(self._accrued, self._gradients, strict=True):
            accrued.add_(gradient)
        count = len(self._members.parameters)
        self._accrued_present = bytes(map(max, self._accrued_present, present or b"\1" * count))

    def _take_accrued(self) -> tuple[float, bytes | None]:
        """Bring the accrued gradients to the slots; returns their weight, and which parameters have a gradient."""
        present, self._accrued_present = self._accrued_present, bytes(len(self._accrued_present))
        for accrued, gradient in zip(self._accrued, self._gradients, strict=True):
            gradient.copy_(accrued)
            accrued.zero_()
        return float(any(present)), present

    def _await_warm_start(self, _: nn.Module, __: object) -> None:
        """Before the first forward pass of a training: rank 0 goes ahead alone."""
        if self._waits and torch.is_grad_enabled():
            self._waits = False
            self._copy.await_version(self._spec.warmup)
            self._refresh()
