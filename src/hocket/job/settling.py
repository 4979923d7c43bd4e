"""The end of a training loop: every worker gets the model that its strategies stand for, to be evaluated and saved.

A loop that was left on purpose is settled at once. One that was left in doubt may have been left by an exception, so
nothing is collective there: it is settled with the next call that all ranks make.
"""

from __future__ import annotations

import _thread
import sys
from collections.abc import Callable, Sequence

from torch import nn

from hocket.comm.communicator import Communicator
from hocket.job import buffers, loads
from hocket.server.server_client import Client
from hocket.strategies.base import Strategy, Why


class Settling:
    """Brings one worker to the end of its training loops.

    Attributes:
        was_left: Whether the last loop was left before its end, while other workers may have trained on.
        watched: What counts the loads of each model.
    """

    def __init__(
        self,
        communicator: Communicator,
        strategies: Sequence[Strategy],
        models: Sequence[nn.Module],
        client: Client | None,
    ) -> None:
        self._communicator, self._strategies, self._models, self._client = communicator, strategies, models, client
        self.was_left = False
        self.watched: list[loads.Loads] = []
        self._due: list[Callable[[], None]] = []

    @property
    def owed(self) -> str:
        """What the script does not see of its model, if there is something."""
        return next((strategy.owes for strategy in self._strategies if strategy.owes), "")

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to settle when a loop was left."""
        buffered = any(next(model.buffers(), None) is not None for model in self._models)
        return buffered or any(type(each).settle is not Strategy.settle for each in self._strategies)

    def settle(self, *, pauses: bool, stays: bool = False) -> None:
        """Give every worker the model that its strategies stand for, together with all other workers; collective.

        Args:
            pauses: Whether a training loop goes on afterwards.
            stays: Whether this worker does not train before all others have come to its meeting.
        """
        client = self._client if self._strategies else None
        if client is None and stays:
            return  # all are at the same place
        while True:
            works, over = True, True
            if client is not None:
                for strategy in self._strategies:  # nobody is to wait for this worker
                    strategy.settle(Why.IDLE)
                works, over = client.settle(has_trained=not stays or bool(self.owed), stays=stays)
            if works:
                for strategy in self._strategies:
                    strategy.settle(Why.PAUSE if pauses else Why.END)
                loads.compare(self._communicator, self.watched)  # all are at the same place of the script now
                self.average_buffers()
            if over or not stays:
                break
        if not works:
            for strategy in self._strategies:
                strategy.settle(Why.REJOIN)

    def begin_loop(self) -> None:
        """A training loop begins."""
        self.was_left = False
        for each in self.watched:
            each.go_on()

    def average_buffers(self) -> None:
        """Give every rank the mean of the buffers; collective."""
        for model in self._models:
            buffers.average(self._communicator, model)

    def settle_left(self, work: Callable[[], None], *, at_once: bool) -> None:
        """A loop was left: ``work``, which is collective, settles it, at once or with the next call of all ranks."""
        if not at_once:
            self._due.append(work)
            return
        try:
            work()
        except BaseException as error:  # Python would print and forget it, where a generator is being closed
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Have an error raised by the script's next call."""

        def fail() -> None:
            raise error

        self._due.insert(0, fail)
        if isinstance(error, KeyboardInterrupt):
            _thread.interrupt_main()

    def catch_up(self, call: str) -> None:
        """Settle the loops that were left in doubt; collective.

        Args:
            call: The call that the script makes, for the message that this is late; empty if it is not.
        """
        while self._due:
            owed = self.owed
            self._due.pop(0)()
            if owed and call and self._communicator.rank == 0:
                print(
                    f"hocket: a training loop was left by an exception, or in a way that cannot be seen ({owed}): the "
                    f"model was settled only now, in {call}; call hocket.settle() before you save or evaluate it",
                    file=sys.stderr,
                    flush=True,
                )

    def say_what_is_owed(self) -> None:
        """The script ends: warn if it has never seen the model that its strategies stand for."""
        if self.owed and self._communicator.rank == 0 and self._communicator.size > 1:
            print(
                f"hocket: the script ended without the end of its training loop, {self.owed}: call "
                "hocket.settle() on all ranks before the model is saved or evaluated",
                file=sys.stderr,
                flush=True,
            )
