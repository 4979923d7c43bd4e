"""``distribute``: a model, its optimizer and a loader become part of the job."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hocket import config as configuration
from hocket.comm.communicator import Communicator
from hocket.comm.shared import SharedCommunicator
from hocket.errors import MismatchError, StrategyError, UsageError
from hocket.job.learning_rate import scale_lr as apply_scale
from hocket.job.loader import distribute_loader
from hocket.job.runtime import Runtime, current
from hocket.strategies import choices
from hocket.strategies.base import Strategy
from hocket.strategies.central import CentralAveraged, CentralFused
from hocket.strategies.choices import Central, Choice
from hocket.strategies.members import Members
from hocket.strategies.mirrored import MirroredTraining


def distribute(
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    loader: DataLoader[Any] | None = None,
    *,
    strategy: str | Choice | None = None,
    scale_lr: str | None = None,
    warmup: int = 0,
    on_nan: str | None = None,
) -> Any:
    """Have ``model`` train together with its copies on the other workers; every rank must call it.

    Model and optimizer are changed in place: all ranks start from rank 0's parameters and buffers. The loader is a
    new one over the same data set, with this rank's part of every global batch.

    Args:
        model: The model to train; may be left out to distribute only a loader.
        optimizer: The optimizer that trains it.
        loader: A loader whose batch size is that of one worker.
        strategy: ``"mirrored"``, ``"central"``, ``hocket.Central(fused=True)`` …; ``--strategy`` goes before it.
        scale_lr: ``"linear"`` or ``"sqrt"``: see ``hocket.scale_lr``; with ``warmup`` steps.
        warmup: See ``scale_lr``.
        on_nan: ``"raise"`` (default), ``"skip"`` or ``"ignore"``; ``--on-nan`` goes before it.

    Returns:
        What was given, in the same order; a single thing by itself.
    """
    runtime = current()
    if optimizer is not None and model is None:
        raise UsageError("distribute() got an optimizer without a model: pass the model that it trains, too")
    if warmup and scale_lr is None:
        raise UsageError(f"distribute(warmup={warmup}) without scale_lr: add scale_lr='linear' or 'sqrt'")
    given: list[Any] = []
    if model is not None:
        _train_together(runtime, model, optimizer, strategy, on_nan)
        given.append(model)
    if optimizer is not None:
        if scale_lr is not None:
            apply_scale(optimizer, scale_lr, warmup=warmup)
        given.append(optimizer)
    if loader is not None:
        given.append(distribute_loader(runtime, loader))
    if not given:
        raise UsageError("distribute() without anything: pass a model, an optimizer, a loader")
    return given[0] if len(given) == 1 else tuple(given)


def _train_together(
    runtime: Runtime, model: nn.Module, optimizer: Optimizer | None, strategy: str | Choice | None, on_nan: str | None
) -> None:
    config = runtime.config
    chosen = config.strategy or strategy or configuration.SETTINGS["strategy"].default
    choice = choices.parse(chosen) if isinstance(chosen, str) else chosen
    if not isinstance(choice, tuple(choices.TABLE.values())):
        raise StrategyError(f"strategy={chosen!r}: pass a text such as 'mirrored', or hocket.Mirrored()")
    told = config.on_nan or (configuration.choice("on-nan", on_nan) if on_nan else None)
    if model in runtime.models:
        raise UsageError("this model has already been distributed: call hocket.distribute() once for each model")
    runtime.models.append(model)
    if config.size == 1 and told is None:
        # Nothing to exchange: the script runs as it is, unless it asks for an averaged accumulation.
        runtime.idle.append(
            lambda: MirroredTraining(runtime.communicator, model, optimizer, Members(model, optimizer), "ignore")
        )
        return
    members = Members(model, optimizer)
    _check_same(runtime.communicator, members)
    if optimizer is not None:
        _check_same_optimizer(runtime.communicator, optimizer)
    _start_equal(runtime.communicator, model, members)
    runtime.strategies.append(
        _build(
            choice, runtime.communicator, model, optimizer, members, told or configuration.SETTINGS["on-nan"].default
        )
    )


def _build(
    choice: Choice,
    communicator: Communicator,
    model: nn.Module,
    optimizer: Optimizer | None,
    members: Members,
    on_nan: str,
) -> Strategy:
    if not isinstance(choice, Central) or communicator.size == 1:
        return MirroredTraining(communicator, model, optimizer, members, on_nan)
    if optimizer is None:
        raise StrategyError("strategy 'central' needs the optimizer: hocket.distribute(model, optimizer, …)")
    if not isinstance(communicator, SharedCommunicator):
        raise StrategyError("strategy 'central' needs shared memory, and this job uses Gloo: use --strategy mirrored")
    kind = CentralFused if choice.fused else CentralAveraged
    return kind(communicator, model, optimizer, members, on_nan)


def _check_same(communicator: Communicator, members: Members) -> None:
    """Raise on all ranks, naming the first difference, if the models are not the same."""
    described = [json.loads(part) for part in communicator.gather_bytes(json.dumps(members.describe()).encode())]
    for rank, other in enumerate(described[1:], start=1):
        for mine, theirs in zip(described[0], other, strict=False):
            if mine != theirs:
                raise MismatchError(
                    f"the models differ: rank 0 has {_write(mine)}, rank {rank} has {_write(theirs)}; "
                    "build the same model on every rank"
                )
        if len(other) != len(described[0]):
            raise MismatchError(
                f"the models differ: rank 0 has {len(described[0])} parameters, rank {rank} has {len(other)}; "
                "build the same model on every rank"
            )


def _write(description: list[Any]) -> str:
    name, shape, dtype, trained = description
    return f"{name} {dtype}{shape}{'' if trained else ' (frozen)'}"


def _check_same_optimizer(communicator: Communicator, optimizer: Optimizer) -> None:
    """Raise on all ranks if options or state of the optimizers differ: equal parameters would not stay equal."""
    groups = [{key: repr(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    state = {
        f"state of parameter {index}": {key: _fingerprint(value) for key, value in values.items()}
        for index, values in optimizer.state_dict()["state"].items()
    }
    mine = {**{f"group {i}": group for i, group in enumerate(groups)}, **state}
    described = [json.loads(part) for part in communicator.gather_bytes(json.dumps(mine).encode())]
    for rank, other in enumerate(described[1:], start=1):
        for where in sorted({*described[0], *other}):
            left, right = described[0].get(where, {}), other.get(where, {})
            for key in sorted({*left, *right}):
                if left.get(key) != right.get(key):
                    raise MismatchError(
                        f"the optimizers differ: in {where}, {key} is {left.get(key, 'absent')} on rank 0 and "
                        f"{right.get(key, 'absent')} on rank {rank}; build it alike and load its state on every rank"
                    )


def _fingerprint(value: Any) -> str:
    """A text that differs, almost surely, between two values of an optimizer's state."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    wide = value.detach().double()
    return f"a tensor {list(value.shape)} with sum {float(wide.sum())!r} and norm {float(wide.norm())!r}"


@torch.no_grad()
def _start_equal(communicator: Communicator, model: nn.Module, members: Members) -> None:
    """Give every rank rank 0's parameters and buffers."""
    for name, tensor in [*zip(members.names, members.parameters, strict=True), *model.named_buffers()]:
        dense = tensor.detach().contiguous()
        communicator.broadcast(dense, 0)
        if dense.data_ptr() != tensor.data_ptr() and not torch.equal(tensor, dense):
            try:
                tensor.copy_(dense)
            except RuntimeError as error:
                raise UsageError(f"{name!r} cannot take rank 0's values: make it contiguous ({error})") from None
