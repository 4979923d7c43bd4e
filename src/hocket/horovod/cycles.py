"""One process set at work: a thread negotiates with those of the other ranks, and carries out what all have submitted.

Whoever waits for a result does the thread's work meanwhile, so that nobody waits for a thread to wake up. A rank comes
to a cycle when its script has submitted something, or waits for others; else now and then, so that nobody waits for it
in vain, and hears who is missing. Cycles and collectives are on a communicator of the process set's own.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hocket.comm.communicator import Communicator
from hocket.errors import HocketError
from hocket.horovod.exceptions import HorovodInternalError, OperationError
from hocket.horovod.execution import FUSION, Execution, Pair
from hocket.horovod.negotiation import JOIN, Decision, Negotiation, Request
from hocket.horovod.operation import Operation

_IDLE = 0.1  # seconds between two cycles of a rank that has nothing to say
_CLOSE = 2.0  # seconds that the end of an engine may take
_CHECK = 1.0  # seconds between two looks at what stalls


@dataclass(frozen=True)
class Pace:
    """When things are done.

    Attributes:
        cycle: Seconds that a rank waits for more to be submitted before it tells the others.
        threshold: The most bytes that travel as one.
        stall: Seconds after which an operation that some ranks have not submitted is reported; 0 is never.
        give_up: Seconds after which it fails.
    """

    cycle: float = 0.001
    threshold: int = FUSION
    stall: float = 60.0
    give_up: float = 1800.0


class Cycles:
    """The operations of one process set on one rank.

    Args:
        communicator: Its ranks; nobody else uses it.
        numbers: The rank in the job of each rank.
        pace: When things are done.
        name: What the process set is called, for the thread.
    """

    def __init__(self, communicator: Communicator, numbers: Sequence[int], pace: Pace, name: str) -> None:
        self._communicator, self.numbers, self._pace = communicator, list(numbers), pace
        self.rank, self.size = communicator.rank, communicator.size
        self._negotiation = Negotiation(self.rank, self.size)
        self._execution = Execution(communicator, pace.threshold)
        self._changed = threading.Condition()  # guards what follows
        self._under_way: dict[str, Operation] = {}
        self._join: Operation | None = None
        self._waiters = 0
        self._is_closing = False
        self._failure: Exception | None = None
        self._turn = threading.Lock()  # held by who carries out cycles
        self._told, self._next_check = time.monotonic(), time.monotonic() + _CHECK
        self._reported: dict[str, float] = {}
        self.on_cycle: Callable[[float, Sequence[Pair]], None] = lambda *_: None
        self._thread = threading.Thread(target=self._serve, name=f"hocket horovod {name}", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> Exception | None:
        """Why no operation is possible any more; None if operations are."""
        return self._failure

    def number(self, kind: str) -> int:
        """The number of the next operation of this kind that has no name."""
        with self._changed:
            number = self._negotiation.unnamed.get(kind, 0)
            self._negotiation.unnamed[kind] = number + 1
            return number

    def submit(self, operation: Operation) -> None:
        """Do this as soon as all ranks have submitted it.

        Raises:
            ValueError: something of the same name is under way.
            HorovodInternalError: nothing is possible any more.
        """
        key = operation.request.key
        with self._changed:
            self._raise_failure()
            if key in self._under_way:
                raise ValueError(
                    f"{key!r} is under way already: wait for it with synchronize() before it is submitted again, or "
                    "give this operation another name"
                )
            self._under_way[key] = operation
            self._negotiation.submit(operation.request)
            if len(self._under_way) == 1:
                self._changed.notify_all()

    def join(self) -> int:
        """Give zeros until all ranks have called this; returns the last one that has."""
        operation = Operation(Request(JOIN, JOIN))
        with self._changed:
            self._raise_failure()
            self._join = operation
            self._negotiation.join()
            self._changed.notify_all()
        self.wait(operation)
        return operation.last

    def wait(self, operation: Operation) -> None:
        """Wait until an operation is over; raises what it has failed with."""
        if not operation.is_over:
            with self._changed:
                self._waiters += 1
            try:
                while not operation.is_over:
                    if self._turn.acquire(blocking=False):
                        try:
                            self._work(lambda: operation.is_over)
                        finally:
                            self._turn.release()
                            with self._changed:
                                self._changed.notify_all()
                    else:
                        with self._changed:
                            self._changed.wait_for(lambda: operation.is_over or not self._turn.locked(), _IDLE)
            finally:
                with self._changed:
                    self._waiters -= 1
                    self._changed.notify_all()
        if operation.error is not None:
            raise operation.error

    def close(self) -> None:
        """End; the others are told, and nothing is possible any more."""
        with self._changed:
            self._is_closing = True
            self._negotiation.end()
            self._changed.notify_all()
        self._thread.join(_CLOSE)
        self._fail(HorovodInternalError("Horovod has been shut down: call hvd.init()"))
        self._communicator.leave(failed=False)

    def _serve(self) -> None:
        """Carry out cycles whenever nobody who waits does so."""
        while self._failure is None:
            with self._changed:
                self._changed.wait_for(lambda: self._has_work, _IDLE)
            if self._under_way and not self._is_closing:
                time.sleep(self._pace.cycle)  # the script may submit more, or wait
            if self._waiters and not self._is_closing:
                with self._changed:
                    self._changed.wait_for(lambda: not self._waiters, _IDLE)
                continue
            with self._turn:
                self._work(lambda: True)
            with self._changed:
                self._changed.notify_all()

    @property
    def _has_work(self) -> bool:
        return bool(self._under_way) or self._is_closing or self._failure is not None

    def _work(self, is_done: Callable[[], bool]) -> None:
        """Carry out cycles until this is so; at least one."""
        pause = 0.0
        while self._failure is None:
            moved = self._cycle()
            if is_done() or self._failure is not None:
                return
            if moved:
                pause = 0.0
                continue
            pause = min(pause + self._pace.cycle / 4, 0.01)
            with self._changed:
                self._changed.wait_for(lambda: self._negotiation.has_news, pause)

    def _cycle(self) -> bool:
        """Tell the others what is new, hear what they say, and do what is to be done; returns whether there was any."""
        begin = time.monotonic()
        with self._changed:
            message = self._negotiation.message()
        try:
            heard = self._communicator.gather_bytes(message)
            with self._changed:
                decisions = self._negotiation.hear(heard)
                pairs = [self._pair(decision) for decision in decisions]
            for _, operation in pairs:
                if operation is not None:
                    operation.await_tensors()
            self._execution.carry_out([pair for pair in pairs if not pair[0].error and pair[0].request.kind != JOIN])
        except (HocketError, OSError) as error:
            self._fail(_lost(error))
            return True
        except Exception as error:
            self._fail(error)
            raise
        if pairs:
            self.on_cycle(begin, pairs)
            with self._changed:
                for decision, operation in pairs:
                    self._settle(decision, operation)
                self._changed.notify_all()
        if self._negotiation.ended is not None:
            who = self.numbers[self._negotiation.ended]
            self._fail(HorovodInternalError(f"rank {who} has called hvd.shutdown(), or has ended its script"))
        if begin > self._next_check:
            self._next_check = begin + _CHECK
            self._look_for_stalls(begin)
        return any(heard)

    def _pair(self, decision: Decision) -> Pair:
        if decision.request.kind == JOIN:
            return decision, self._join
        return decision, self._under_way.get(decision.request.key)

    def _settle(self, decision: Decision, operation: Operation | None) -> None:
        if operation is None:
            return
        if decision.request.kind == JOIN:
            operation.last, self._join = self.numbers[decision.last], None
        else:
            del self._under_way[decision.request.key]
        if decision.error:
            operation.error = OperationError(decision.error)
        operation.is_over = True

    def _look_for_stalls(self, now: float) -> None:
        """Report what some ranks have submitted and others have not; after long, have it fail."""
        with self._changed:
            unready = self._negotiation.unready()
            since = self._reported
            self._reported = {each.request.key: since.get(each.request.key, now) for each in unready}
        if self.rank != 0:
            return
        late = [each for each in unready if now - self._reported[each.request.key] >= self._pace.give_up]
        if late:
            with self._changed:
                self._negotiation.give_up([each.request.key for each in late])
        if self._pace.stall and now - self._told >= self._pace.stall:
            stalled = [each for each in unready if now - self._reported[each.request.key] >= self._pace.stall]
            if stalled:
                self._told = now
                lines = "; ".join(each.describe(self.numbers) for each in stalled[:10])
                more = f"; and {len(stalled) - 10} more" if len(stalled) > 10 else ""
                print(
                    f"hocket: operations have waited {self._pace.stall:g} s or more for some ranks: {lines}{more}",
                    file=sys.stderr,
                    flush=True,
                )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: Exception) -> None:
        """Nothing is possible any more."""
        with self._changed:
            self._failure = self._failure or error
            for operation in [*self._under_way.values(), *([self._join] if self._join else [])]:
                operation.error, operation.is_over = self._failure, True
            self._under_way.clear()
            self._join = None
            self._changed.notify_all()
        self._execution.close()


def _lost(error: Exception) -> HorovodInternalError:
    found = HorovodInternalError(str(error))
    found.__cause__ = error
    return found
