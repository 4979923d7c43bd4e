"""The contract of messages between some workers, over which they carry out one call after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from hocket.comm.algorithm_choice import Choice
from hocket.errors import DeadlineExceeded, JobError
from hocket.transport.point_to_point import PointToPoint
from hocket.transport.waiting import Description

Carry = Callable[[PointToPoint], None]
"""Sends and receives; its messages fit those that the other members send and receive in the same call."""


class Begun(Protocol):
    """A call that was begun; it may be over."""

    def is_completed(self) -> bool:
        """Whether it is over, well or not; does not wait."""
        ...

    def wait(self, seconds: float) -> bool:
        """Wait until it is over, up to ``seconds``; returns whether it is."""
        ...


class Channel(Protocol):
    """One worker's end of the messages between some workers, who all make the same calls in the same order.

    The members connect in the first call, in whichever thread that is. A call that fails is the end of the channel.

    Attributes:
        choice: Picks algorithms for collectives between the members.
    """

    choice: Choice

    def run(self, call: Carry, nbytes: int, what: Description) -> None:
        """Carry out ``call``, which sends about ``nbytes``, after all that was begun; blocks until it is over.

        Raises:
            WorkerLost: a member is gone.
            DeadlineExceeded: a member is alive and did not come in time.
        """

    def start(self, call: Carry) -> Begun:
        """Begin to carry out ``call`` while the script computes, after all that was begun; pass the result to wait."""
        ...

    def wait(self, work: Begun, what: Description) -> None:
        """Wait until what was begun is over; raises as ``run`` does."""

    def close(self) -> None:
        """End the channel: what is under way fails, and touches no tensor after this."""


Channels = Callable[[str, Sequence[int]], Channel]
"""Makes one end of the messages between some ranks, by a name of its own; waits for nobody."""


class Explained:
    """A channel whose failures mean something else.

    Args:
        channel: The channel itself.
        explain: What the failure of a call means; called by the thread that waits.
    """

    def __init__(self, channel: Channel, explain: Callable[[Exception], Exception]) -> None:
        self._channel, self._explain = channel, explain
        self.start, self.close, self.choice = channel.start, channel.close, channel.choice

    def run(self, call: Carry, nbytes: int, what: Description) -> None:
        self._try(lambda: self._channel.run(call, nbytes, what))

    def wait(self, work: Begun, what: Description) -> None:
        self._try(lambda: self._channel.wait(work, what))

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except DeadlineExceeded:
            raise
        except (JobError, OSError) as error:
            raise self._explain(error) from error


class AloneChannel:
    """The channel of a group of one worker: nothing is ever sent."""

    rank, size = 0, 1
    choice = Choice("auto", 1)

    def run(self, call: Carry, nbytes: int, what: Description) -> None:
        call(self)

    def start(self, call: Carry) -> Begun:
        call(self)
        return _Over()

    def wait(self, work: Begun, what: Description) -> None:
        """Nothing to do: what was begun is over."""

    def close(self) -> None:
        """Nothing to do: nothing is under way."""

    def send(self, to: int, *parts: torch.Tensor) -> None:
        raise AssertionError("a worker alone sends nothing")

    def receive(self, source: int, *into: torch.Tensor) -> None:
        raise AssertionError("a worker alone receives nothing")

    def flush(self) -> None:
        """Nothing to do: nothing was sent."""


class _Over:
    def is_completed(self) -> bool:
        return True

    def wait(self, seconds: float) -> bool:
        return True
