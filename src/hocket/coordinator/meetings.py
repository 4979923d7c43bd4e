"""Collectives among the workers that are alive: each gives some bytes, and gets those of all."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from hocket.errors import MismatchError, ServerLost, TakenForDead
from hocket.transport.waiting import Condition, Note, Wait

_STUCK = 2.0  # seconds with all others idle after which nobody will come


@dataclass
class _Meeting:
    """One meeting, to which every worker comes."""

    what: str = ""
    first: int = 0
    given: dict[int, bytes] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)  # ranks that have taken the result
    result: dict[int, bytes] | None = None
    error: str = ""


class Meetings:
    """Meetings, held one after the other; a worker that dies is not waited for.

    Args:
        condition: Guards everything here.
        live: The ranks that are in the job now.
        timeout: Seconds that a worker may wait for others.
        clock: Tells the time.
    """

    def __init__(
        self,
        condition: Condition,
        live: Callable[[], Collection[int]],
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._condition, self._timeout, self._clock = condition, timeout, clock
        self._find_live = live
        self._meetings: dict[int, _Meeting] = {}
        self._latest = 0  # the last meeting that has been held
        self._failure = ""
        self._errors: dict[int, str] = {}  # what was wrong in meetings that ended so, by their numbers
        self._settling: dict[int, tuple[bool, bool]] = {}  # ranks that wait until nobody trains, and what each said
        self._settled: dict[int, tuple[bool, bool]] = {}  # what these ranks are told
        self._refused: dict[int, str] = {}  # or why they cannot settle
        self.idle: set[int] = set()
        """Workers that wait for batches which others hold, and will come to no meeting before they get one."""

    @property
    def _live(self) -> set[int]:
        return set(self._find_live())

    def gather(self, rank: int, number: int, what: str, data: bytes, note: Note) -> dict[int, bytes]:
        """What all live workers give to meeting ``number``, by rank; blocks until all are there.

        Raises:
            MismatchError: another worker has come to do something else.
            DeadlineExceeded: another worker is alive but did not come.
            TakenForDead: the others have met without this worker.
        """
        with self._condition:
            known = self._meetings.get(number)
            was_held = known.result is not None if known is not None else number <= self._latest
            if was_held and (error := self._errors.get(number)):
                raise MismatchError(error)
            if was_held and (known is None or rank not in known.given):
                raise TakenForDead(
                    f"rank {rank} comes to {what}, and was taken for dead: its connection was broken for too long, and "
                    "the others have gone on without it"
                )
            meeting = self._meetings.setdefault(number, _Meeting(what, rank))
            if what != meeting.what and not meeting.error:
                meeting.error = (
                    f"the workers do not do the same: rank {meeting.first} is in {meeting.what}, rank {rank} in "
                    f"{what}; call collectives on all ranks in the same order"
                )
            meeting.given[rank] = data
            self._close(number, meeting)
            self._look()
            self._wait(number, meeting, note)
            meeting.left.add(rank)
            self._forget(number, meeting)
            if meeting.error:
                raise MismatchError(meeting.error)
            assert meeting.result is not None
            return meeting.result

    def settle(self, rank: int, note: Note, *, has_trained: bool, stays: bool) -> tuple[bool, bool]:
        """Wait until no worker trains, and all that have trained are here.

        A worker that comes to the end of its loop may begin another one. One that ``stays`` comes to a meeting, and
        settles again and again with workers that train, until all stay.

        Returns:
            Whether there is something to settle, with all together, and whether all stay.

        Raises:
            DeadlineExceeded: another worker is alive and trains too long.
        """
        with self._condition:
            self._settled.pop(rank, None)
            self._settling[rank] = has_trained, stays
            self._look()
            wait = Wait(self._condition, self._timeout, self._clock, note, "end a training loop")
            stuck: float | None = None  # since when all others have been idle
            while rank not in self._settled:
                if self._failure:
                    raise ServerLost(self._failure)
                if error := self._refused.pop(rank, ""):
                    raise MismatchError(error)
                missing = sorted(self._live - set(self._settling))
                stuck = (stuck if stuck is not None else wait.seconds) if self.idle.issuperset(missing) else None
                if stuck is not None and wait.seconds - stuck >= _STUCK:
                    self._settling.pop(rank)
                    raise MismatchError(_say_idle("hocket.settle()", missing))
                wait.sleep(missing, wait.seconds + _STUCK / 2)
            return self._settled.pop(rank)

    def _look(self) -> None:
        """Let the workers that wait in ``settle`` go on, if no worker trains."""
        here = set(self._settling)
        meeting = {rank for each in self._meetings.values() if each.result is None for rank in each.given}
        over = all(stays for _, stays in self._settling.values())
        if here and not over and self._live - here and self._live <= here | meeting:
            self._disagree(here)
        elif here and (self._live <= here or (over and self._live <= here | meeting)):
            works = self._live <= here and any(has_trained for has_trained, _ in self._settling.values())
            self._settled |= dict.fromkeys(here, (works, over))
            self._settling.clear()
            self._condition.notify_all()

    def _disagree(self, here: set[int]) -> None:
        """Some ranks wait until nobody trains, and all others wait in a meeting for these ranks: nobody can go on."""
        settling = f"rank {', '.join(map(str, sorted(here)))} waits for the others to end their training loops"
        for number, meeting in list(self._meetings.items()):
            if meeting.result is None:
                ranks = ", ".join(map(str, sorted(meeting.given)))
                meeting.error = f"the workers do not do the same: {settling}, rank {ranks} is in {meeting.what}"
                meeting.error += "; call collectives on all ranks in the same order"
                self._refused |= dict.fromkeys(here, meeting.error)
                self._close(number, meeting)
        self._settling.clear()

    def lose(self, rank: int) -> None:
        """A worker has died, or said goodbye, as the ledger knows already; what it has given to a meeting counts."""
        with self._condition:
            self._settling.pop(rank, None)
            self._look()
            for number, meeting in list(self._meetings.items()):
                self._close(number, meeting)
                self._forget(number, meeting)
            self._condition.notify_all()

    def admit(self, rank: int) -> None:
        """A newcomer is about to be in the ledger: it comes to all open meetings, also where one of its rank died."""
        with self._condition:
            for meeting in self._meetings.values():
                if meeting.result is None:
                    meeting.given.pop(rank, None)

    def fail(self, why: str) -> None:
        """There can be no more meetings: whoever waits for one, or comes to one, gets ServerLost."""
        with self._condition:
            self._failure = why
            self._condition.notify_all()

    def _close(self, number: int, meeting: _Meeting) -> None:
        if meeting.result is None and (meeting.error or self._live <= set(meeting.given)):
            self._latest = max(self._latest, number)
            if meeting.error:
                self._errors[number] = meeting.error
            meeting.result = dict(sorted(meeting.given.items()))
            self._condition.notify_all()

    def _forget(self, number: int, meeting: _Meeting) -> None:
        """Forget a meeting whose result nobody will ask for any more."""
        if meeting.result is not None and meeting.left >= set(meeting.given) & self._live:
            self._meetings.pop(number, None)

    def _wait(self, number: int, meeting: _Meeting, note: Note) -> None:
        wait = Wait(self._condition, self._timeout, self._clock, note, f"come to {meeting.what}")
        stuck: float | None = None  # since when all others have been idle
        while meeting.result is None:
            if self._failure:
                raise ServerLost(self._failure)
            missing = sorted(self._live - set(meeting.given))
            stuck = (stuck if stuck is not None else wait.seconds) if self.idle.issuperset(missing) else None
            if stuck is not None and wait.seconds - stuck >= _STUCK:
                meeting.error = _say_idle(meeting.what, missing)
                self._close(number, meeting)
            else:
                wait.sleep(missing, wait.seconds + _STUCK / 2)


def _say_idle(what: str, missing: list[int]) -> str:
    return (
        f"{what} is called in a training loop, and rank {', '.join(map(str, missing))} has no more batches and waits "
        "for those of others: with parameter servers workers take different numbers of batches; call collectives after "
        "the loop"
    )
