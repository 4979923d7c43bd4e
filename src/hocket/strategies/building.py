"""From a choice to a strategy at work."""

from __future__ import annotations

import dataclasses

from torch import nn
from torch.optim import LBFGS, Optimizer

from hocket.comm.communicator import Communicator
from hocket.errors import StrategyError
from hocket.server.client import Client
from hocket.strategies import choices
from hocket.strategies.base import Strategy
from hocket.strategies.central import CentralAveraged, CentralFused, CentralSealed, CentralTraining
from hocket.strategies.choices import (
    DMB,
    EASGD,
    Central,
    Choice,
    Delayed,
    DiLoCo,
    Downpour,
    FullBatch,
    Gossip,
    Hogwild,
    LocalSGD,
    Mirrored,
    Served,
    Switch,
)
from hocket.strategies.delayed import DelayedTraining
from hocket.strategies.diloco import DiLoCoTraining
from hocket.strategies.dmb import DMBTraining
from hocket.strategies.downpour import DownpourTraining
from hocket.strategies.easgd import EASGDTraining
from hocket.strategies.easgd_served import ServedEASGDTraining
from hocket.strategies.full_batch import FullBatchTraining
from hocket.strategies.gossip_pairs import PairedTraining
from hocket.strategies.gossip_rounds import MixedTraining, PushSumTraining
from hocket.strategies.hogwild import HogwildTraining
from hocket.strategies.local_sgd import LocalSGDTraining
from hocket.strategies.members import Members
from hocket.strategies.mirrored import MirroredTraining
from hocket.strategies.phases import PhasedTraining
from hocket.strategies.served import ServedTraining, scale_of, terms_of
from hocket.strategies.timed import TimedLocalSGD


def build(
    choice: Choice,
    communicator: Communicator,
    client: Client | None,
    model: nn.Module,
    optimizer: Optimizer | None,
    members: Members,
    on_nan: str,
    *,
    rests: bool = False,
) -> Strategy:
    """The strategy that ``choice`` asks for, at work on ``model``, or one that ``rests`` at first; collective."""
    alone = communicator.size == 1 and client is None and not choices.differs_alone(choice)
    if isinstance(choice, Mirrored) or choice == DMB(extra=0) or alone:
        return MirroredTraining(communicator, model, optimizer, members, on_nan)
    if optimizer is None:
        name = choices.write(choice).partition("(")[0]
        raise StrategyError(f"strategy {name!r} needs the optimizer: hocket.distribute(model, optimizer, …)")
    if isinstance(choice, LocalSGD) and choice.after is not None:
        choice = _post_local(choice, choice.after)
    if isinstance(choice, Switch):
        built = [
            build(each, communicator, client, model, optimizer, members, on_nan, rests=True)
            for each in choice.strategies
        ]
        return PhasedTraining(communicator, optimizer, built, choice)
    if isinstance(choice, Central):
        return _central(choice, communicator)(communicator, model, optimizer, members, on_nan)
    if isinstance(choice, LocalSGD) and choice.time is not None:
        return TimedLocalSGD(communicator, model, optimizer, members, choice, on_nan)
    if isinstance(choice, LocalSGD):
        return LocalSGDTraining(communicator, model, optimizer, members, choice, on_nan)
    if isinstance(choice, DiLoCo):
        return DiLoCoTraining(communicator, model, optimizer, members, choice, on_nan)
    if isinstance(choice, EASGD):
        if client is not None:
            return ServedEASGDTraining(communicator, client, model, optimizer, members, choice, on_nan)
        return EASGDTraining(communicator, model, optimizer, members, choice, on_nan, rests=rests)
    if isinstance(choice, Hogwild):
        assert client is not None
        if isinstance(optimizer, LBFGS):
            raise StrategyError(
                "strategy 'hogwild' changes parameters while others use them, and LBFGS searches along a line from "
                "where it is: use --strategy full_batch"
            )
        return HogwildTraining(client, communicator, model, optimizer, members, choice, on_nan)
    if isinstance(choice, Delayed):
        return DelayedTraining(communicator, model, optimizer, members, on_nan)
    if isinstance(choice, DMB):
        return DMBTraining(communicator, model, optimizer, members, choice, on_nan)
    if isinstance(choice, FullBatch):
        return FullBatchTraining(communicator, model, optimizer, members, choice, on_nan)
    if isinstance(choice, Gossip):
        assert client is not None
        gossip = PairedTraining if choice.asynchronous else PushSumTraining if choice.push_sum else MixedTraining
        return gossip(communicator, client, model, optimizer, members, choice, on_nan)
    if isinstance(choice, Served):
        assert client is not None
        return _served(choice, client, model, optimizer, members, on_nan)
    raise StrategyError(f"strategy {choices.write(choice)!r} is not there yet")


def _post_local(choice: LocalSGD, after: int | str) -> Choice:
    """Post-local SGD as a switch."""
    plain = dataclasses.replace(choice, after=None)
    return Switch((Mirrored(), plain), (f"step {after}" if isinstance(after, int) else after,)) if after else plain


def _central(choice: Central, communicator: Communicator) -> type[CentralTraining]:
    if not choice.fused:
        return CentralAveraged
    return CentralFused if communicator.on_host is communicator else CentralSealed


def _served(
    choice: Served, client: Client, model: nn.Module, optimizer: Optimizer, members: Members, on_nan: str
) -> ServedTraining:
    terms = terms_of(choice)
    if isinstance(choice, Downpour):
        return DownpourTraining(client, model, optimizer, members, choice, terms, on_nan)
    scale = scale_of(choice, client.workers)
    return ServedTraining(client, model, optimizer, members, choice, terms, scale, on_nan)
