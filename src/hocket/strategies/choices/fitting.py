"""Whether a strategy fits the job: its number of workers and of servers."""

from __future__ import annotations

from hocket.errors import StrategyError
from hocket.strategies.choices.replicas import EASGD, Gossip, Hogwild
from hocket.strategies.choices.served import Served
from hocket.strategies.choices.switching import Switch
from hocket.strategies.choices.synchronous import DMB, Delayed, FullBatch
from hocket.strategies.choices.text import Choice, write


def servers_of(choice: Choice, servers: int) -> int:
    """How many servers a job has that was asked for ``servers``: some strategies need one that holds no parameters.

    It deals out the batches and knows who is alive, where workers advance unevenly or survive each other.
    """
    return max(servers, int(isinstance(choice, Gossip | Hogwild)))


def differs_alone(choice: Choice) -> bool:
    """Whether one worker trains in another way than the plain script.

    Gradients are late, or left out, for it, too; or its batches count by their samples.
    """
    each = choice.strategies if isinstance(choice, Switch) else (choice,)
    return any(isinstance(one, Delayed | DMB | FullBatch) for one in each)


def survives_loss(choice: Choice, servers: int) -> bool:
    """Whether the others go on when a worker is lost."""
    return isinstance(choice, Served | Gossip | Hogwild) or (isinstance(choice, EASGD) and servers > 0)


def check_fit(choice: Choice, workers: int, servers: int) -> None:
    """Raise if a strategy needs servers and the job has none or the other way round, or does not fit the workers."""
    if isinstance(choice, Switch) and servers:
        raise StrategyError(f"a switch of strategies uses no servers: leave out --servers {servers}")
    if isinstance(choice, Switch):
        return
    name = write(choice).partition("(")[0]
    if isinstance(choice, Served) and not servers:
        raise StrategyError(f"--servers 0, but strategy {name!r} needs at least one: add --servers 1")
    if isinstance(choice, Gossip | Hogwild) and servers != 1:
        raise StrategyError(
            f"strategy {name!r} must be known when the job starts: say --strategy {name} to hocket run"
            if not servers
            else f"strategy {name!r} uses no parameter servers: leave out --servers {servers}"
        )
    if servers and not isinstance(choice, Served | Gossip | Hogwild | EASGD):
        raise StrategyError(f"strategy {name!r} uses no servers: leave out --servers {servers}, or use --strategy ps")
    if isinstance(choice, Gossip):
        try:
            choice.check_workers(workers)
        except ValueError as error:
            raise StrategyError(f"strategy {name!r}: {error}") from None
