"""``hvd.DistributedOptimizer``: an optimizer whose steps use gradients that are averaged over all ranks."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hocket.horovod import context, operations
from hocket.horovod.common import split_list
from hocket.horovod.compression import Compression
from hocket.horovod.operations import Adasum, Average, Sum
from hocket.horovod.process_sets import ProcessSet, global_process_set

Parameter = torch.Tensor
Finish = Callable[[], None]
"""Waits for a gradient that travels, and puts the result in its place."""

_made: Counter[str] = Counter()  # how many optimizers there are over parameters of the same names and shapes


class Gradients:
    """The gradients of one optimizer, on their way to all ranks.

    Args:
        named: Each parameter, with the name by which ranks find each other's gradients of it.
        options: What ``DistributedOptimizer`` was given.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]], options: dict[str, Any]) -> None:
        self.compression, self.op, self.process_set = options["compression"], options["op"], options["process_set"]
        self.is_sparse_dense, self.after_backward = options["sparse_as_dense"], options["after_backward"]
        divide = options["gradient_predivide_factor"]
        self._factors = (1.0 / divide, divide) if self.op == Average else (1.0, 1.0)
        shapes = repr([(name, tuple(parameter.shape)) for name, parameter in named])
        tag = hashlib.blake2b(shapes.encode(), digest_size=4).hexdigest()
        self._prefix = f"gradients {tag}.{_made[tag]}: "
        _made[tag] += 1
        self.names = {parameter: name for name, parameter in named}
        self.groups: dict[Parameter, tuple[Parameter, ...]] = {}
        self.set_passes(options["backward_passes_per_step"])
        self.under_way: dict[Parameter, Finish | None] = {}  # None: accumulated, not sent
        self.is_synchronized, self.should_synchronize = False, True
        self._is_end_queued = False

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to exchange gradients with."""
        number = self.process_set.process_set_id
        ranks = context.current().ranks.get(-1 if number is None else number, ())
        return len(ranks) < 2 or context.current().worker.config.rank not in ranks

    def set_passes(self, passes: int) -> None:
        """A step follows so many backward passes."""
        self.passes = passes
        self.left = dict.fromkeys(self.names, passes)

    def divide(self, groups: Sequence[Sequence[Parameter]]) -> None:
        """The gradients of each group travel together."""
        known = {parameter for parameter in self.names if parameter.requires_grad}
        for group in groups:
            if len(members := tuple(each for each in group if each in known)) > 1:
                self.groups |= dict.fromkeys(members, members)

    def take(self, parameter: Parameter) -> None:
        """The gradient of a parameter is there; send it if a step follows."""
        if self.is_alone:
            return
        if self.left[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self.is_synchronized = False
        self.left[parameter] -= 1
        self.under_way[parameter] = None
        if self.left[parameter]:
            return
        group = self.groups.get(parameter)
        if group is None:
            self.under_way[parameter] = self._send((parameter,))
        elif not any(self.left[member] for member in group):
            finish = self._send(group)
            self.under_way.update({member: finish if member is parameter else _nothing for member in group})
        if self.after_backward and not self._is_end_queued:
            self._is_end_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def synchronize(self) -> None:
        """Wait until all gradients are those of all ranks; those that a rank has not computed are zeros there."""
        if self.is_alone:
            return
        for parameter in self.names:
            if self.under_way.get(parameter) is None and parameter.requires_grad:
                group = self.groups.get(parameter, (parameter,))
                for member in group:
                    if member.grad is None:
                        member.grad = torch.zeros_like(member)
                finish = self._send(group)
                self.under_way.update({member: finish if member is parameter else _nothing for member in group})
        try:
            for sent in self.under_way.values():
                assert sent is not None
                sent()
        finally:
            self.reset()
        self.is_synchronized = True

    def reset(self) -> None:
        """Nothing is under way any more."""
        self.under_way.clear()
        self.left = dict.fromkeys(self.names, self.passes)

    def _end_backward(self) -> None:
        self._is_end_queued = False
        self.synchronize()

    def _send(self, group: Sequence[Parameter]) -> Finish:
        name = self._prefix + self.names[group[0]]
        if len(group) == 1 and (gradient := group[0].grad) is not None and gradient.layout != torch.strided:
            if not self.is_sparse_dense:
                return self._send_sparse(group[0], gradient, name)
            group[0].grad = gradient.to_dense()
        packed = [self.compression.compress(_gradient(parameter)) for parameter in group]
        handle = operations.grouped_allreduce_async_(
            [tensor for tensor, _ in packed], None, name, self.op, self._factors[0], self._factors[1], self.process_set
        )

        def finish() -> None:
            found = operations.synchronize(handle)
            for parameter, (tensor, kept), result in zip(group, packed, found, strict=True):
                if tensor is not parameter.grad:
                    _gradient(parameter).copy_(self.compression.decompress(result, kept))

        return finish

    def _send_sparse(self, parameter: Parameter, gradient: torch.Tensor, name: str) -> Finish:
        op = Average if self.op == Average else Sum
        result = operations.sparse_allreduce_async(gradient, name, op, self.process_set)

        def finish() -> None:
            parameter.grad = result()

        return finish


def _nothing() -> None:
    """Another gradient of the group is waited for."""


def _gradient(parameter: Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


class DistributedSteps:
    """What ``DistributedOptimizer`` adds to the class of an optimizer; see there."""

    _gradients: Gradients

    def synchronize(self) -> None:
        """Wait until all gradients are averaged over all ranks, in order to change them before ``step``."""
        self._gradients.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step()`` inside this context takes gradients as they are, after ``synchronize()``."""
        self._gradients.should_synchronize = False
        try:
            yield
        finally:
            self._gradients.should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on a step follows so many backward passes."""
        self._gradients.set_passes(passes)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait until all gradients are averaged over all ranks, then make the optimizer's own step."""
        gradients = self._gradients
        if gradients.should_synchronize:
            if not gradients.is_synchronized:
                gradients.synchronize()
            elif not gradients.after_backward:
                warnings.warn(
                    "optimizer.step() after optimizer.synchronize(): write with optimizer.skip_synchronize(): around "
                    "step(); gradients are not averaged again",
                    stacklevel=2,
                )
        gradients.is_synchronized = False
        if gradients.op == Adasum and not gradients.is_alone:
            return self._step_by_adasum(closure)
        return super().step(closure)  # type: ignore[misc]

    def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's own, unless gradients are under way."""
        if self._gradients.under_way:
            if any(self._gradients.under_way.values()):
                raise AssertionError(
                    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                    "optimizer.synchronize(). This is prohibited as it can cause a race condition."
                )
            self._gradients.reset()
        return super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's own; what is under way is forgotten."""
        self._gradients.reset()
        return super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def _step_by_adasum(self, closure: Callable[[], Any] | None) -> Any:
        """Each rank makes its own step; parameters move by the Adasum of what the steps have changed."""
        gradients = self._gradients
        before = {parameter: parameter.detach().clone() for parameter in gradients.names if parameter.requires_grad}
        result = super().step(closure)  # type: ignore[misc]
        with torch.no_grad():
            moved = [parameter - start for parameter, start in before.items()]
            name = f"{gradients._prefix}steps"
            found = operations.grouped_allreduce_async_(moved, None, name, Adasum, process_set=gradients.process_set)
            for (parameter, start), step in zip(before.items(), operations.synchronize(found), strict=True):
                parameter.copy_(start + step)
        return result


class _OwnGradients(Gradients):
    """With Adasum gradients stay with their rank: the steps travel."""

    def take(self, parameter: Parameter) -> None:
        """Nothing is sent."""

    def synchronize(self) -> None:
        """Nothing is under way."""


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    after_backward: bool = False,
) -> Any:
    """The optimizer, of a class derived from its own, whose steps use the gradients of all ranks.

    Args:
        optimizer: Its state, and its groups of parameters, are those of the result.
        named_parameters: All its parameters with their names, as ``model.named_parameters()`` gives them.
        compression: What gradients are turned into before they travel.
        backward_passes_per_step: How many backward passes add up before gradients travel.
        op: ``Average``, ``Sum``, or ``Adasum`` of what each rank's own step changes.
        gradient_predivide_factor: Divides gradients before they are added up, and multiplies their average.
        num_groups: In how many groups gradients travel.
        groups: As ``num_groups``, or the parameters of each group.
        sparse_as_dense: Whether sparse gradients are made dense.
        process_set: The ranks that take part.
        after_backward: Not in Horovod: whether gradients are those of all ranks when ``backward()`` returns, so that
            clipping and a GradScaler need no ``synchronize()``.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"DistributedOptimizer(op={op!r}): use hvd.Average, Sum or Adasum")
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step}: must be 1 or more")
    named = _name(optimizer, named_parameters)
    kind = type(optimizer)
    options = {
        "compression": compression, "op": op, "process_set": process_set, "sparse_as_dense": sparse_as_dense,
        "after_backward": after_backward, "gradient_predivide_factor": gradient_predivide_factor,
        "backward_passes_per_step": backward_passes_per_step,
    }  # fmt: skip
    made: Any = object.__new__(type(kind.__name__, (DistributedSteps, kind), {"__module__": kind.__module__}))
    kept = {name: value for name, value in vars(optimizer).items() if name not in ("step", "zero_grad")}
    vars(made).update(kept, _gradients=(_OwnGradients if op == Adasum else Gradients)(named, options))
    made._gradients.divide(_groups(groups, made))
    for _, parameter in named:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(made._gradients.take)
    return made


context.on_start.append(_made.clear)  # workers that join later count from there, too


def _name(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Parameter]] | None
) -> list[tuple[str, Parameter]]:
    """A name for each parameter of the optimizer, after a look at those that were given."""
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named is None:
        return [(f"allreduce.noname.{number}", parameter) for number, parameter in enumerate(own)]
    found = list(named)
    if any(not isinstance(each, tuple) for each in found):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    counts = Counter(name for name, _ in found)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    known = {id(parameter) for _, parameter in found}
    if missing := [list(parameter.shape) for parameter in own if id(parameter) not in known]:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: parameters of shapes "
            f"{', '.join(map(str, missing[:5]))}"
        )
    wanted = {id(parameter) for parameter in own}
    return [(name, parameter) for name, parameter in sorted(found, key=lambda each: each[0]) if id(parameter) in wanted]


def _groups(
    groups: int | Sequence[Sequence[Parameter]] | None, optimizer: torch.optim.Optimizer
) -> Sequence[Sequence[Parameter]]:
    if groups is None or groups == 0:
        return []
    if not isinstance(groups, int):
        if any(not isinstance(group, (list, tuple)) for group in groups):
            raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
        return groups
    if groups < 0:
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    own = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    return split_list(own, groups)
