"""The spec of several strategies, one after the other in one run, as a user writes it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hocket.errors import StrategyError
from hocket.specs.spec import Spec


@dataclass(frozen=True)
class Switch(Spec):
    """Strategies that keep replicas, one after the other in one run; parameters and optimizer state are kept.

    ``Switch((Mirrored(), LocalSGD(period=16)), ("epoch 3",))`` is ``mirrored -> local_sgd(period=16) @ epoch 3``.

    Attributes:
        strategies: In the order in which they are at work.
        at: When each but the first begins: ``"epoch 3"`` (the third one is the first with it), ``"step 1000"`` (after
            so many batches) or ``"decay"`` (when a learning rate has first fallen since the switch before).
    """

    name = "switch"
    implementation = "hocket.strategies.phases:PhasedTraining"

    strategies: tuple[Spec, ...]
    at: tuple[str, ...]

    @property
    def differs_alone(self) -> bool:
        return any(each.differs_alone for each in self.strategies)

    @property
    def skips_alone(self) -> bool:
        return any(each.skips_alone for each in self.strategies)

    @property
    def exchanges_under_way(self) -> int:
        return max(each.exchanges_under_way for each in self.strategies)

    @property
    def regroups(self) -> bool:
        return all(each.regroups for each in self.strategies)

    @property
    def regroups_unasked(self) -> bool:
        return all(each.regroups_unasked for each in self.strategies)

    @property
    def takes_newcomers(self) -> bool:
        return all(each.takes_newcomers for each in self.strategies)

    def check_fit(self, workers: int, servers: int) -> None:
        if servers:
            raise StrategyError(f"a switch of strategies uses no servers: leave out --servers {servers}")

    def check(self) -> None:
        if len(self.strategies) < 2 or len(self.at) != len(self.strategies) - 1:
            raise ValueError(
                f"{len(self.strategies)} strategies and {len(self.at)} times: every strategy but the first needs one, "
                "for example 'epoch 3'"
            )
        latest: dict[str, int] = {}
        for at in self.at:
            found = re.fullmatch(r"(epoch|step) (\d+)|decay", at)
            if not found:
                raise ValueError(f"'@ {at}': write '@ epoch 3', '@ step 1000' or '@ decay'")
            if found[1]:
                kind, number = found[1], int(found[2])
                least = latest.get(kind, int(kind == "epoch")) + 1
                if number < least:
                    raise ValueError(f"'@ {at}': must be {kind} {least} or later, or the one before is never at work")
                latest[kind] = number
