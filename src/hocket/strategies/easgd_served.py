"""``easgd`` with servers, which hold the centre: asynchronous, each worker pulls when it has done its batches.

A worker gets the centre c, computes e = α (x − c), takes it from its own parameters x, and has the servers add it to
the centre: a table with plain SGD of rate 1 gets −e as its gradient. However many others have done so in between, what
the worker loses is what the centre gains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

from hocket.errors import StrategyError
from hocket.server import rule
from hocket.server.copies import DenseCopy
from hocket.server.placement import Placement, place
from hocket.server.terms import Push, Terms
from hocket.specs import EASGD
from hocket.strategies.base import Context, Why
from hocket.strategies.elastic import ElasticTraining
from hocket.updates.update import Step


class ServedEASGDTraining(ElasticTraining):
    """Asynchronous ``easgd``: no worker waits for another, and others go on when a worker is lost.

    Attributes:
        placement: Which server holds which part of the centre.
    """

    def __init__(self, context: Context, spec: EASGD) -> None:
        _refuse_sparse(context.model)
        super().__init__(context, spec)
        assert context.client is not None
        self._client = client = context.client
        parameters = context.members.parameters
        self.placement: Placement = place(
            parameters, [0] * len(parameters), len(client.links), "partitioned", whole=False
        )
        addition = rule.describe(SGD([nn.Parameter(torch.zeros(1))], lr=1.0))
        self._copy = DenseCopy(client, self.placement, Terms(staleness=None, groups=0), addition)
        client.paced.append(self._copy.number)
        self._steps_out = self.placement.layout.views(self._copy.gradients)
        self._copies = self.placement.layout.views(self._copy.parameters)
        if client.is_starter:
            self._assign()
        client.gather("hocket.distribute()", b"")
        with torch.no_grad():
            torch._foreach_copy_([parameter.detach() for parameter in parameters], self._centre())
        client.gather("the end of hocket.distribute()", b"")  # nobody moves the centre before all have begun at it

    @property
    def holds(self) -> bool:
        return self._in_round > 0 or self.collector.passes > 0  # the centre does not know these batches yet

    def describe_placement(self) -> list[str]:
        """Which parameters of the centre are on which server, in lines for a reader."""
        return self.placement.describe(self._members.names)

    def settle(self, why: Why) -> None:
        super().settle(why)
        if why in (Why.LAST_BATCH, Why.IDLE) and self._in_round:  # the last round of a loop may be short
            self._end_round()
        if why is Why.REFRESH:
            self._heed_loading()
            self._show()

    def take(self, given: dict[str, Any]) -> None:
        """Begin a round where the giver is."""
        self._is_loaded, self._in_round = False, 0

    def _settle(self) -> None:
        """Show the centre when nobody moves it any more, and let nobody move it before all have it."""
        if self._in_round:
            self._end_round()
        self._client.gather("the end of training, with all pulls", b"")
        self._show()
        self._client.gather("the end of training, with the centre", b"")
        self._note_settled()

    def step(self, original: Step, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        result = super().step(original, closure, **options)
        self._note_learned()
        return result

    @torch.no_grad()
    def _pull(self) -> None:
        own = [parameter.detach() for parameter in self._members.parameters]
        centre = self._centre()
        for out, mine, theirs in zip(self._steps_out, own, centre, strict=True):
            gradient = theirs.sub_(mine).mul_(self.alpha)  # −e, in the worker's own copy of the centre
            mine.add_(gradient)
            out.copy_(gradient)
        self._copy.push(Push(self._batch.epoch, 1.0, None, None), pull=False)
        self.sent += sum(out.nbytes for out in self._steps_out)

    def _centre(self) -> list[torch.Tensor]:
        self._copy.pull()
        return self._shown()

    def _shown(self) -> list[torch.Tensor]:
        own = self._members.parameters
        return [copied.to(parameter.device) for copied, parameter in zip(self._copies, own, strict=True)]

    @torch.no_grad()
    def _merge(self) -> None:
        torch._foreach_copy_([parameter.detach() for parameter in self._members.parameters], self._centre())

    def _take_centre(self) -> None:
        if self._client.is_first():
            self._assign()

    def _take_written(self) -> None:
        """Take what was written as this worker's own parameters; only ``load_state_dict`` changes the centre."""

    @torch.no_grad()
    def _assign(self) -> None:
        for copied, parameter in zip(self._copies, self._members.parameters, strict=True):
            copied.copy_(parameter.detach())
        self._copy.assign()


def _refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise StrategyError(
                f"strategy 'easgd' with servers moves all parameters, and {name or 'the model'!r} has sparse "
                "gradients: make it with sparse=False, or use --strategy asynchronous"
            )
