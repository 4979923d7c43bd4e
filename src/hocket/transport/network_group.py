"""The contract of a group of ranks on several hosts, whatever carries the bytes between them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hocket.transport.gate import Outlook
from hocket.transport.point_to_point import PointToPoint
from hocket.transport.store import AskedStore, Store
from hocket.transport.waiting import Description, Patience

START = "the start of a group of workers"
"""What members wait in until all are connected."""

_NAP = 0.005

Wait = Callable[[Callable[[float], bool]], None]
"""Waits until a function is true that waits itself, for as many seconds as it is told; raises if that cannot happen."""


class Watcher(Outlook, Protocol):
    """What is known of ranks on other hosts, for the exchanges with them."""

    on_loss: Callable[[], None]
    """Called, in another thread, when a rank is lost."""

    def enter(self, lane: str) -> None:
        """Begin the next collective of ``lane``, of which every rank has the same number in the same order."""

    def wait(self, done: Callable[[float], bool], what: Description) -> None:
        """Wait until ``done(seconds)``, which itself waits for that long, is true; raises if that cannot happen."""

    def leave(self, failed: bool) -> None:
        """Say how this rank ended."""


class Overview(Watcher, Protocol):
    """What is known of all ranks; in a wait for some of them, these are told apart."""

    def look(self, what: Description, patience: Patience, members: Sequence[int] = ()) -> None:
        """See ``Outlook``; ``members`` are the ranks that take part, this one included, if these are not all."""

    def wait(self, done: Callable[[float], bool], what: Description, members: Sequence[int] = ()) -> None:
        """See ``Watcher``."""


class Among:
    """The watch over the members of one of several groups: who waits in it hears of no others. See ``Watcher``."""

    def __init__(self, watch: Overview, members: Sequence[int]) -> None:
        self.on_loss: Callable[[], None] = lambda: None
        self._watch, self._members = watch, tuple(members)
        self.enter, self.rest, self.explain, self.leave = watch.enter, watch.rest, watch.explain, watch.leave

    def look(self, what: Description, patience: Patience) -> None:
        self._watch.look(what, patience, self._members)

    def wait(self, done: Callable[[float], bool], what: Description) -> None:
        self._watch.wait(done, what, self._members)


class Work(Protocol):
    """A collective that is under way."""

    def is_completed(self) -> bool:
        """Whether it has ended, well or not; does not wait."""
        ...


class Way(Protocol):
    """A way to make a sum over the members of a group.

    Attributes:
        name: What it is called in reports.
        nbytes: How many bytes this member has given to the wire so far.
    """

    name: str

    @property
    def nbytes(self) -> int: ...

    def add_up(self, links: PointToPoint, data: torch.Tensor) -> None:
        """Replace ``data`` by the sum; all members get the same bits."""


class NetworkGroup(Protocol):
    """Some ranks of the job on several hosts; all members call each method together, in the same order.

    Tensors are contiguous, on the CPU, and of the same size on all members. All members get the same bits.

    Attributes:
        rank: The rank of this member in the group.
        size: How many members the group has.
    """

    rank: int
    size: int

    def start_sum(
        self, tensor: torch.Tensor, note: Callable[[], None] | None = None, way: Way | None = None
    ) -> Work:
        """Begin to replace ``tensor`` by the sum over the group; pass what this returns to ``wait``.

        ``note`` is called, by any thread, when somebody really begins with it: that may be who waits. ``way`` is a way
        of the caller's own to make the sum.
        """
        ...

    def wait(self, work: Work, what: Description) -> None:
        """Wait until ``work`` is done; raises if that cannot happen."""

    def allreduce(self, tensor: torch.Tensor, operation: str, what: Description) -> None:
        """Replace ``tensor`` by the sum, maximum, minimum or product over the group."""

    def allgather(self, tensor: torch.Tensor, what: Description) -> list[torch.Tensor]:
        """The tensors of all members."""
        ...

    def gather(self, tensor: torch.Tensor, root: int, what: Description) -> list[torch.Tensor]:
        """The tensors of all members, on ``root``; nothing on the others."""
        ...

    def broadcast(self, tensor: torch.Tensor, root: int, what: Description) -> None:
        """Replace ``tensor`` by that of ``root``."""

    def close(self) -> None:
        """Give back what the group has taken; not collective."""


def introduce(store: Store, rank: int, size: int, said: dict[str, Any], wait: Wait) -> list[dict[str, Any]]:
    """Tell the other members of a group, whose store this is, where this one is; returns what each has said, by rank.

    Waits until all have come.
    """
    keys = [f"member {number}" for number in range(size)]
    store.set(keys[rank], json.dumps(said))
    wait(lambda seconds: _are_there(store, keys, seconds))
    return [json.loads(bytes(store.get(key))) for key in keys]


def _are_there(store: Store, keys: list[str], seconds: float) -> bool:
    """Whether all ``keys`` have been set; waits for them up to ``seconds``."""
    if not isinstance(store, AskedStore):  # torch's own warns of each wait that was in vain
        deadline = time.monotonic() + seconds
        while not (found := store.check(keys)) and time.monotonic() < deadline:
            time.sleep(_NAP)
        return found
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except dist.DistStoreError:
        return False
    return True
