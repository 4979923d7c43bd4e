"""The parameters that train together: those of the model and those only the optimizer knows."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Sequence, Set
from typing import NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from hocket.capture.slots import LARGE
from hocket.errors import SharedCopyError, UsageError

_SUPPORTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Members:
    """Each parameter once (tied ones too), by optimizer group and type.

    Inside a group, small parameters come before large ones, or those first that most likely get gradients first.

    Attributes:
        names: The model's names for its parameters; ``optimizer[i]`` for the ``i``-th that only the optimizer knows.
        groups: The number of each parameter's group in the optimizer, or -1.
        foreign: Whether the optimizer also trains parameters that are ``elsewhere``.

    Args:
        model: The model that has the parameters.
        optimizer: The optimizer that trains them.
        elsewhere: The ids of parameters that another strategy takes care of, or will.
        by_readiness: Whether parameters that get their gradients first come first.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        elsewhere: Set[int] = frozenset(),
        *,
        by_readiness: bool = False,
    ) -> None:
        named = {id(p): (name, p) for name, p in model.named_parameters() if id(p) not in elsewhere}
        group_of: dict[int, int] = {}
        extra = 0
        self.foreign = False
        self._optimized = 0
        for number, group in enumerate(optimizer.param_groups if optimizer else ()):
            for parameter in group["params"]:
                self._optimized += 1
                if id(parameter) in elsewhere:
                    self.foreign = True
                    continue
                group_of[id(parameter)] = number
                if id(parameter) not in named:
                    named[id(parameter)] = (f"optimizer[{extra}]", parameter)
                    extra += 1
        self._check_supported(named.values())
        last = len(named)
        ordered = sorted(
            reversed(named.values()) if by_readiness else named.values(),
            key=lambda np: (
                group_of.get(id(np[1]), last),
                str(np[1].dtype),
                by_readiness and np[1].requires_grad,  # what never arrives need not be last
                np[1].numel() >= LARGE and not by_readiness,
            ),
        )
        self.names = [name for name, _ in ordered]
        self.parameters = [parameter for _, parameter in ordered]
        self.groups = [group_of.get(id(parameter), -1) for parameter in self.parameters]
        self.index = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        homes = {
            id(p): (module._parameters, name)
            for module in model.modules()
            for name, p in module._parameters.items()
            if p is not None
        }
        self._housed = [p for p in self.parameters if id(p) in homes]
        self._homes = [homes[id(p)][0] for p in self._housed]
        self._home_names = [homes[id(p)][1] for p in self._housed]

    def without(self, left_out: Iterable[nn.Parameter]) -> Members:
        """These members without some of the parameters."""
        ids = {id(parameter) for parameter in left_out}
        if not ids:
            return self
        kept = [i for i, parameter in enumerate(self.parameters) if id(parameter) not in ids]
        rest = copy.copy(self)
        rest.names = [self.names[i] for i in kept]
        rest.parameters = [self.parameters[i] for i in kept]
        rest.groups = [self.groups[i] for i in kept]
        rest.index = {id(parameter): i for i, parameter in enumerate(rest.parameters)}
        return rest

    def describe(self) -> list[tuple[str, list[int], str, bool]]:
        """What must be equal on all ranks: names, shapes, types, and which ones are trained."""
        return [
            (name, list(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad)
            for name, p in zip(self.names, self.parameters, strict=True)
        ]

    def check_homes(self) -> None:
        """Raise if a module no longer holds the parameter that is exchanged."""
        if not all(map(operator.is_, map(dict.get, self._homes, self._home_names), self._housed)):
            strangers = zip(self._homes, self._home_names, self._housed, strict=True)
            self._raise_replaced(next(p for home, name, p in strangers if home.get(name) is not p))

    def set_gradients(self, gradients: Sequence[torch.Tensor], missing: bytes) -> None:
        """Let every parameter that is not ``missing`` (one byte each) have its gradient."""
        try:
            if 1 in missing:
                for parameter, gradient, absent in zip(self.parameters, gradients, missing, strict=True):
                    if not absent:
                        parameter.grad = gradient
            else:
                for parameter, gradient in zip(self.parameters, gradients, strict=True):
                    parameter.grad = gradient
        except RuntimeError:  # a gradient must have the type of its parameter
            self._raise_replaced(parameter)

    def _raise_replaced(self, parameter: nn.Parameter) -> NoReturn:
        """The error for a parameter that is no longer what it was when it was distributed."""
        raise SharedCopyError(
            f"parameter {self.names[self.index[id(parameter)]]!r} was replaced or changed its type after "
            "hocket.distribute(): call model.to(…) and load_state_dict(assign=True) before it, and leave out "
            "fully_shard(), which exchanges gradients by itself"
        )

    def check_groups(self, optimizer: Optimizer) -> None:
        """Raise if the optimizer has got parameters since ``distribute``."""
        if sum(len(group["params"]) for group in optimizer.param_groups) != self._optimized:
            raise UsageError(
                "the optimizer's parameter groups have changed since hocket.distribute(): add all groups before it "
                "(frozen parameters may be unfrozen later)"
            )

    @staticmethod
    def _check_supported(named: Iterable[tuple[str, nn.Parameter]]) -> None:
        for name, parameter in named:
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise UsageError(
                    f"parameter {name!r} is lazy and has no shape yet: run the model once before hocket.distribute()"
                )
            if parameter.dtype not in _SUPPORTED:
                raise UsageError(
                    f"parameter {name!r} has type {parameter.dtype}: the types that can be averaged are "
                    + ", ".join(str(d).removeprefix("torch.") for d in _SUPPORTED)
                )
