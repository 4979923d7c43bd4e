"""Builds the strategy that a spec asks for."""

from __future__ import annotations

from importlib import import_module

from hocket.errors import StrategyError
from hocket.specs import Mirrored, Spec
from hocket.strategies.base import Context, Strategy
from hocket.strategies.optimizer_step import wrap


def build(context: Context, spec: Spec) -> Strategy:
    """The strategy that ``spec`` asks for, at work on the model of ``context``; collective."""
    size, servers = context.communicator.size, 0 if context.client is None else len(context.client.links)
    if size == 1 and context.client is None and not spec.differs_alone:
        spec = Mirrored()
    meant = spec.resolve(size, servers)
    if meant.needs_optimizer and context.optimizer is None:
        raise StrategyError(f"strategy {spec.name!r} needs the optimizer: hocket.distribute(model, optimizer, …)")
    module, _, name = meant.implementation.partition(":")
    strategy = getattr(import_module(module), name)(context, meant)
    assert isinstance(strategy, Strategy), f"{meant.implementation} is no strategy, but {strategy!r}"
    if context.optimizer is not None and not context.rests:
        wrap(context.optimizer, strategy)
    return strategy
