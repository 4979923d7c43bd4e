"""Checks which optimizers train distributed models, and that no wrapper such as DDP has such a model inside.

The guard looks at every step of every optimizer, and at every module that is put into another.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hocket.errors import StrategyError, UsageError
from hocket.job.owner import Owner
from hocket.strategies.base import Strategy
from hocket.strategies.optimizer_step import like


class Guard:
    """Knows which optimizers of one worker are part of the job, and which parameters belong to which strategy."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.optimizers: dict[nn.Module, list[Optimizer]] = {}
        self._known: dict[Optimizer, Strategy] = {}
        self._replaced: set[Optimizer] = set()
        self._strategies: dict[int, Strategy] = {}  # the strategy of each parameter, by its id
        self._models: dict[Strategy, nn.Module] = {}
        self._modules: set[int] = set()  # the ids of all modules in distributed models

    def take(
        self, model: nn.Module, optimizer: Optimizer | None, strategy: Strategy, parameters: Iterable[nn.Parameter]
    ) -> None:
        """``strategy`` has these parameters of ``model`` from now on, and the steps of ``optimizer``."""
        self._models[strategy] = model
        self._modules |= {id(module) for module in model.modules()}
        self._strategies |= {id(parameter): strategy for parameter in parameters}
        if optimizer is not None:
            self._known[optimizer] = strategy
            self._watch(optimizer)

    def look_at_child(self, parent: nn.Module, child: nn.Module | None) -> None:
        """A module is put into another; a distributed one must not get into a wrapper that exchanges gradients."""
        if child is not None and is_wrapper(parent) and any(id(each) in self._modules for each in child.modules()):
            refuse(parent)

    def _watch(self, optimizer: Optimizer) -> None:
        """Check, before a step exchanges anything, that the right thread takes it."""
        original = optimizer.step

        @like(original)
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._owner.check("optimizer.step()")
            return original(*args, **kwargs)

        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    def release(self, model: nn.Module) -> tuple[list[Strategy], set[int]]:
        """The strategies of ``model`` and the ids of their parameters; its optimizers are not to be used any more."""
        strategies = [strategy for strategy, home in self._models.items() if home is model]
        freed = {each for each, strategy in self._strategies.items() if strategy in strategies}
        for strategy in strategies:
            del self._models[strategy]
        for each in freed:
            del self._strategies[each]
        for optimizer in self.optimizers.pop(model, []):
            self._known.pop(optimizer, None)
            self._replaced.add(optimizer)
        return strategies, freed

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer, of the job or not, is about to take a step."""
        strategy = self._known.get(optimizer)
        if strategy is not None:
            self._owner.check("optimizer.step()")
            strategy.collector.taken += 1
            return
        if optimizer in self._replaced:
            raise UsageError(
                f"this {type(optimizer).__name__} was replaced when hocket.distribute() was given another optimizer "
                "for its model: call step() of that one"
            )
        ids = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        for each in {self._strategies[each] for each in ids if each in self._strategies}:
            if not each.at_work.spec.serves_any_optimizer:
                raise StrategyError(
                    f"this {type(optimizer).__name__} trains parameters of a distributed model and was not given to "
                    "hocket.distribute(), so its steps would be this worker's alone: call hocket.distribute(model, "
                    "optimizer) again with the new optimizer before its first step, or use --strategy mirrored"
                )
            each.collector.taken += 1


def is_wrapper(module: nn.Module) -> bool:
    """Whether this is DistributedDataParallel, FullyShardedDataParallel, or has been through ``fully_shard``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # only a script that has imported it can use it
    names = ("FullyShardedDataParallel", "FSDPModule")
    kinds = tuple(kind for name in names if isinstance(kind := getattr(fsdp, name, None), type))
    return isinstance(module, (DistributedDataParallel, *kinds))


def refuse_inside(model: nn.Module) -> None:
    """Raise if ``model`` is a wrapper that exchanges gradients, or has one in it."""
    for module in model.modules():
        if is_wrapper(module):
            refuse(module)


def refuse(wrapper: nn.Module) -> None:
    """Raise the error for a wrapper that exchanges gradients."""
    kind = type(wrapper).__name__
    raise UsageError(
        f"Hocket and a wrapper ({kind}) would both exchange the gradients of this model, whatever the strategy: leave "
        "the wrapper out; for accelerate, the Trainer of Hugging Face or Lightning, which wrap models of several "
        "processes by themselves, add --hide-torch-env to hocket run, and they see one"
    )
