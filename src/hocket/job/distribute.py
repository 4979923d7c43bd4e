"""``distribute``: a model, its optimizer and a loader become part of the job."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hocket import config as configuration
from hocket import spans, specs
from hocket.capture.members import Members
from hocket.comm.communicator import Communicator
from hocket.errors import MismatchError, StrategyError, UsageError
from hocket.events import Facts
from hocket.job import devices, randomness, regrouping, rendezvous, replica_check
from hocket.job.batchnorm import SyncBatchNorm
from hocket.job.choices import check_fit, choose_codec, choose_strategy
from hocket.job.guard import refuse_inside
from hocket.job.learning_rate import scale, scheduled_rates
from hocket.job.loader.loader import Loader
from hocket.job.plain_copies import copy_plainly
from hocket.job.worker import Worker, current, meeting, together
from hocket.specs import CodecSpec, Mirrored, Spec
from hocket.strategies.base import Context, Strategy, Why
from hocket.strategies.building import build
from hocket.strategies.easgd_served import ServedEASGDTraining
from hocket.strategies.phases import hand_over
from hocket.strategies.served import ServedTraining


@together("hocket.distribute()")
def distribute(
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    loader: DataLoader[Any] | None = None,
    *,
    strategy: str | Spec | None = None,
    scale_lr: str | None = None,
    warmup: int = 0,
    on_nan: str | None = None,
    codec: str | CodecSpec | None = None,
    reduction: str = "mean",
    data: str = "global",
    training: bool | None = None,
) -> Any:
    """Have ``model`` train together with its copies on the other workers; every rank must call it.

    Model and optimizer are changed in place: all ranks start from rank 0's parameters and buffers, and from then on
    have random numbers of their own. The loader is a new one over the same data set, with this rank's part of every
    global batch. Call it again for further models and loaders; parameters may be shared between models. A model that
    is given again, with a new optimizer for the same parameters, is trained by that one from then on.

    Args:
        model: The model to train; may be left out to distribute only a loader.
        optimizer: The optimizer that trains it, or a list of several.
        loader: A loader whose batch size is that of one worker.
        strategy: ``"mirrored"``, ``"central"``, ``hocket.Central(fused=True)`` …; ``--strategy`` goes before it.
        scale_lr: ``"linear"`` or ``"sqrt"``: see ``hocket.scale_lr``; with ``warmup`` steps.
        warmup: See ``scale_lr``.
        on_nan: ``"raise"`` (default), ``"skip"`` or ``"ignore"``; ``--on-nan`` goes before it.
        codec: How gradients travel between hosts in fewer bytes, ``"topk(0.01)"`` …; ``--codec`` goes before it.
        reduction: ``"sum"`` if losses are sums over the samples of a batch: a step is then that of the sum over all
            workers' samples, and not 1/P of it. ``"mean"`` if they are means.
        data: ``"local"`` if the loader's data is this rank's own already; ranks may then have different amounts of it.
        training: False for a loader of an evaluation, which yields every sample once and never repeats one to keep
            ranks in step. By default that is so in loops under ``torch.no_grad()``.

    Returns:
        What was given, in the same order; a single thing by itself.
    """
    _check_given(model, optimizer)
    worker = current() if model is None else meeting()
    if optimizer is not None and model is None:
        raise UsageError("distribute() got an optimizer without a model: pass the model that it trains, too")
    if warmup and scale_lr is None:
        raise UsageError(f"distribute(warmup={warmup}) without scale_lr: add scale_lr='linear' or 'sqrt'")
    if data not in ("global", "local"):
        raise UsageError(f"distribute(data={data!r}): the choices are 'global' (divide it) and 'local' (it is divided)")
    if reduction not in ("mean", "sum"):
        raise UsageError(f"distribute(reduction={reduction!r}): the choices are 'mean' and 'sum', as losses are")
    given: list[Any] = []
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    if model is not None:
        _train_together(worker, model, optimizers, strategy, on_nan, reduction, codec)
        given.append(model)
    if optimizer is not None:
        given.append(optimizer)
    known = len(worker.training.global_batches)
    if loader is not None:
        given.append(Loader(worker, loader, local=data == "local", training=training))
    for each in optimizers if scale_lr is not None else ():
        scale(each, scale_lr or "", warmup, next(iter(worker.training.global_batches[known:]), None))
    if not given:
        raise UsageError("distribute() without anything: pass a model, an optimizer, a loader")
    return given[0] if len(given) == 1 else tuple(given)


def _train_together(
    worker: Worker,
    model: nn.Module,
    optimizers: list[Optimizer],
    strategy: str | Spec | None,
    on_nan: str | None,
    reduction: str,
    codec: str | CodecSpec | None,
) -> None:
    config, training, communicator = worker.config, worker.training, worker.communicator
    spec = choose_strategy(config.prefer("strategy", strategy), reduction)
    chosen = choose_codec(config.prefer("codec", codec), spec, model, communicator)
    told = config.prefer("on_nan", configuration.SETTINGS["on-nan"].read(on_nan) if on_nan else None)
    step, former = training.counts.step, _make_room(worker, model, optimizers) if model in training.models else []
    if not training.models:
        randomness.diversify(communicator)
        facts = _describe(communicator, spec, model)
        worker.sink.put(Facts({**facts, "optimizer": ", ".join(type(each).__name__ for each in optimizers)}))
    if model not in training.models:
        regrouping.tell_survival(worker, spec)
        training.models.append(model)
    copy_plainly(model, optimizers)
    training.guard.optimizers[model] = optimizers
    for each in optimizers:
        training.counts.watch(each, step if former else 0)
    groups = _divide(model, optimizers, set(training.parameters))
    training.parameters |= {id(p): p for p in model.parameters()}
    training.parameters |= {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
    if config.launched:
        check_fit(worker, spec)
    differs = spec.differs_alone if config.launched else spec.differs_unlaunched
    if config.size == 1 and told is None and worker.client is None and not differs:
        # Nothing to exchange: the script runs as it is, unless it asks for an averaged accumulation.
        training.idle += [
            functools.partial(_alone, communicator, model, optimizer, elsewhere) for optimizer, elsewhere in groups
        ]
        if spans.are_kept():
            training.wake()
        return
    successors = list(former) if len(former) == len(groups) else []
    for optimizer, elsewhere in groups:
        spread = communicator.spreads or any(p.is_cuda for p in model.parameters())
        members = Members(model, optimizer, elsewhere, by_readiness=spread)
        devices.connect(config, communicator, members.parameters, rendezvous.gpu_connector)
        _check_same(communicator, members)
        if optimizer is not None:
            _check_same_optimizer(communicator, optimizer)
        _start_equal(worker, model, None if spec.holds_parameters_on_servers else members)
        if members.parameters:
            # On a GPU, looking at every gradient means waiting for it in every step: only if that is asked for.
            on_gpu = members.parameters[0].is_cuda
            on_nan = told or ("ignore" if on_gpu else configuration.SETTINGS["on-nan"].default)
            adds = reduction == "sum" and not spec.has_reduction
            context = Context(
                model, optimizer, members, communicator, worker.client, on_nan, training.batch, scheduled_rates, adds,
                codec=chosen,
            )  # fmt: skip
            built = build(context, spec)
            training.add(built)
            training.guard.take(model, optimizer, built, members.parameters)
            if successors:
                _go_on(successors.pop(0), built)
            _take_losses(worker, model, built, spec.averages_over(config.size) if adds else 0)
            if config.verbose and config.rank == 0 and isinstance(built, ServedTraining | ServedEASGDTraining):
                print("\n".join(built.describe_placement()), file=sys.stderr, flush=True)
            if config.size > 1 and optimizer is not None:
                replica_check.watch(worker, model, optimizer, built)


def _make_room(worker: Worker, model: nn.Module, optimizers: list[Optimizer]) -> list[Strategy]:
    """Have the strategies of ``model`` rest for good, as other optimizers are to train it; collective."""
    training = worker.training
    before = training.guard.optimizers[model]
    trained = [
        {id(p) for o in each for group in o.param_groups for p in group["params"]} for each in (before, optimizers)
    ]
    if not optimizers or set(before) & set(optimizers) or not trained[0] <= trained[1]:
        raise UsageError(
            "this model has already been distributed: call hocket.distribute() once for each model, with all of its "
            "optimizers in a list if there are several; called again, it takes new optimizers for all that the former "
            "ones trained"
        )
    if worker.client is not None:
        name = training.strategies[0].spec.name
        raise StrategyError(
            f"strategy {name!r} keeps the optimizer that a model was distributed with: change the options in its "
            "param_groups, or use --strategy mirrored, central or local_sgd"
        )
    former, freed = training.guard.release(model)
    for strategy in former:
        strategy.settle(Why.SWITCH_AWAY)
        strategy.collector.release()
        training.strategies.remove(strategy)
        training.checks.pop(strategy, None)
    training.settling.watched = [each for each in training.settling.watched if each.strategy not in former]
    training.idle = [each for each in training.idle if each.args[1] is not model]
    training.counts.counters = [counter for counter in training.counts.counters if counter.optimizer not in before]
    for each in freed:
        training.parameters.pop(each, None)
    return former


def _check_given(model: Any, optimizer: Any) -> None:
    """Raise if an argument is not of the kind that belongs in its place."""
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    several = isinstance(optimizers, Sequence) and all(isinstance(each, Optimizer) for each in optimizers)
    for name, value, is_right, right in (
        ("model", model, isinstance(model, nn.Module), "an nn.Module"),
        ("optimizer", optimizer, several, "an optimizer or a list of them"),
    ):
        if value is not None and not is_right:
            raise UsageError(
                f"distribute(model, optimizer, loader): the {name} is a {type(value).__name__}, not {right}; give them "
                "in this order, or by name"
            )
    if model is not None and current().config.size > 1:
        refuse_inside(model)
    if model is None or not optimizers:
        return
    own = {id(parameter) for parameter in model.parameters()}
    trained = (id(parameter) for each in optimizers for group in each.param_groups for parameter in group["params"])
    if own and own.isdisjoint(trained):
        raise UsageError(
            f"the optimizer trains other parameters than those of this {type(model).__name__}, which would never "
            "change: build the optimizer from model.parameters(), after the model was copied or replaced"
        )


def _take_losses(worker: Worker, model: nn.Module, strategy: Strategy, adds: int) -> None:
    """Take losses as means, or as sums over samples whose gradients are multiplied by ``adds``."""
    collector = strategy.collector
    if collector.adds != adds:
        collector.adds = adds
        collector.weigh(collector.told)
        for module in model.modules():
            if isinstance(module, SyncBatchNorm):
                module.adds = adds > 0
    if not adds:
        worker.forgotten.watch_losses(strategy)


def _go_on(former: Strategy, strategy: Strategy) -> None:
    """Have ``strategy`` go on where ``former`` was; collective."""
    strategy.load_state(former.state())
    hand_over(former.collector, strategy.collector)


def _divide(
    model: nn.Module, optimizers: list[Optimizer], taken: set[int]
) -> list[tuple[Optimizer | None, frozenset[int]]]:
    """For each optimizer, the parameters that others train; the first one has all that no optimizer trains."""
    trained = [{id(p) for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
    divided: list[tuple[Optimizer | None, frozenset[int]]] = []
    elsewhere = set(taken)
    for number, optimizer in enumerate(optimizers or [None]):
        later = set().union(*trained[number + 1 :]) - (trained[number] if optimizer else set())
        divided.append((optimizer, frozenset(elsewhere | later)))
        elsewhere |= trained[number] if optimizer else set()
        elsewhere |= {id(p) for p in model.parameters()} - later
    return divided


def _alone(
    communicator: Communicator, model: nn.Module, optimizer: Optimizer | None, elsewhere: frozenset[int]
) -> Strategy:
    members = Members(model, optimizer, elsewhere)
    return build(Context(model, optimizer, members, communicator, on_nan="ignore"), Mirrored())


def _describe(communicator: Communicator, spec: Spec, model: nn.Module) -> dict[str, Any]:
    return {
        "strategy": specs.write(spec),
        "model": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters() if not isinstance(p, nn.UninitializedParameter)),
        "device": next((p.device.type for p in model.parameters()), "cpu"),
        "threads": torch.get_num_threads(),
        "communication": spec.way or communicator.way,
    }


def _check_same(communicator: Communicator, members: Members) -> None:
    """Raise on all ranks, naming the first difference, if the models are not the same."""
    described = communicator.gather_data(members.describe())
    for rank, other in _others(described):
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


def _others(described: list[Any]) -> list[tuple[int, Any]]:
    """Ranks that do not say the same as rank 0, and what they say."""
    return [(rank, other) for rank, other in enumerate(described) if other is not described[0]]


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
    kinds = [part.decode() for part in communicator.gather_bytes(type(optimizer).__name__.encode())]
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise MismatchError(
                f"the optimizers differ: {kinds[0]} on rank 0 and {kind} on rank {rank}; build it alike on every rank"
            )
    mine = {**{f"group {i}": group for i, group in enumerate(groups)}, **state}
    described = communicator.gather_data(mine)
    for rank, other in _others(described):
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
def _start_equal(worker: Worker, model: nn.Module, members: Members | None) -> None:
    """Give every rank rank 0's parameters (unless they come from servers) and buffers, many at a time.

    A newcomer gets them when it joins the others.
    """
    if worker.config.newcomer:
        return
    named: list[tuple[str, torch.Tensor]] = list(model.named_buffers())
    if members is not None:
        named += zip(members.names, members.parameters, strict=True)
    groups: dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in named:
        groups.setdefault((tensor.dtype, tensor.device), []).append((name, tensor))
    for group in groups.values():
        while group:
            nbytes = itertools.accumulate(tensor.nbytes for _, tensor in group)
            count = max(1, sum(total <= _AT_ONCE for total in nbytes))
            with worker.communicator.aside():
                _take_values(worker.communicator, group[:count])
            del group[:count]


def _take_values(communicator: Communicator, named: Sequence[tuple[str, torch.Tensor]]) -> None:
    flat = torch.cat([tensor.detach().reshape(-1) for _, tensor in named])
    communicator.broadcast(flat, 0)
    for (name, tensor), values in zip(named, flat.split([tensor.numel() for _, tensor in named]), strict=True):
        fresh = values.view(tensor.shape)
        if not torch.equal(tensor, fresh):
            try:
                tensor.copy_(fresh)
            except RuntimeError as error:
                raise UsageError(f"{name!r} cannot take rank 0's values: make it contiguous ({error})") from None


_AT_ONCE = 64 << 20  # bytes that are sent at once
