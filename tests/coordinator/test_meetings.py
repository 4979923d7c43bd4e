"""Meetings among those who live: what they give comes to all, and nothing is kept."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server.serving import together, until

from hocket.coordinator.ledger import Ledger
from hocket.coordinator.meetings import Meetings
from hocket.errors import DeadlineExceeded, JobError, MismatchError, ServerLost
from hocket.transport.wire import Closed


class Met:
    """Meetings of those who are in a ledger."""

    def __init__(self, workers: int, timeout: float = 5.0) -> None:
        self.ledger = Ledger(workers)
        self.meetings = Meetings(threading.Condition(), lambda: self.ledger.live, timeout)
        self.gather = self.meetings.gather

    def lose(self, rank: int) -> None:
        """As the coordinator does: the ledger first."""
        self.ledger.lose(rank, "was lost")
        self.meetings.lose(rank)

    def has_given(self, rank: int) -> bool:
        return any(rank in meeting.given for meeting in self.meetings._meetings.values())

    @property
    def is_empty(self) -> bool:
        return not self.meetings._meetings


def ignore(ranks: list[int], seconds: float) -> None:
    """Nobody is told."""


class Dead:
    """A worker that was killed while it waits."""

    def __call__(self, ranks: list[int], seconds: float) -> None: ...

    def look(self) -> None:
        raise Closed("it was killed")


@settings(max_examples=20)
@given(workers=st.integers(1, 4), rounds=st.integers(1, 5))
def test_all_get_what_all_give(workers: int, rounds: int) -> None:
    meetings = Met(workers)

    def work(rank: int) -> list[dict[int, bytes]]:
        return [meetings.gather(rank, n, "x", bytes([rank, n]), ignore) for n in range(1, rounds + 1)]

    for found in together(workers, work):
        assert found == [{r: bytes([r, n]) for r in range(workers)} for n in range(1, rounds + 1)]
    assert meetings.is_empty


def test_who_dies_is_not_waited_for_and_nothing_is_kept() -> None:
    meetings = Met(3)

    def work(rank: int) -> object:
        if rank == 2:
            until(lambda: not meetings.is_empty)
            return meetings.lose(2)
        return [meetings.gather(rank, n, "x", b"%d" % rank, ignore) for n in (1, 2)]

    assert together(3, work)[:2] == [[{0: b"0", 1: b"1"}] * 2] * 2
    assert meetings.is_empty


def test_who_dies_while_it_waits_has_given() -> None:
    meetings = Met(2)

    def work(rank: int) -> object:
        if rank == 0:
            return meetings.gather(0, 1, "x", b"mine", ignore)
        until(lambda: not meetings.is_empty)
        meetings.lose(0)  # its connection is gone; its thread still waits
        return meetings.gather(1, 1, "x", b"yours", ignore)

    assert together(2, work) == [{0: b"mine", 1: b"yours"}] * 2
    assert meetings.is_empty


def test_a_newcomer_gives_itself_what_a_dead_worker_had_given() -> None:
    meetings = Met(2)

    def work(rank: int) -> object:
        if rank == 0:
            with pytest.raises(Closed):
                meetings.gather(0, 1, "x", b"old", Dead())
            meetings.lose(0)
            meetings.meetings.admit(0)
            meetings.ledger.admit(0)
            until(lambda: meetings.has_given(1))  # and it waits
        return meetings.gather(rank, 1, "x", b"new", ignore)

    assert together(2, work) == [{0: b"new", 1: b"new"}] * 2
    assert meetings.is_empty


def test_different_collectives_are_told_to_all() -> None:
    meetings = Met(2)

    def work(rank: int) -> None:
        with pytest.raises(MismatchError, match=r"rank . is in (barrier|mean), rank . in (barrier|mean)"):
            meetings.gather(rank, 1, ("barrier", "mean")[rank], b"", ignore)

    together(2, work)
    assert meetings.is_empty


def test_a_deadline_names_who_is_missing() -> None:
    with pytest.raises(DeadlineExceeded, match=r"ranks 1, 2 did not come to barrier within 0.05 s"):
        Met(3, timeout=0.05).gather(0, 1, "barrier", b"", ignore)


def test_who_comes_back_too_late_is_told_at_once() -> None:
    """The others have met without it: it would wait for a meeting that nobody else comes to."""
    meetings = Met(2)
    meetings.lose(1)
    assert meetings.gather(0, 1, "barrier", b"", ignore) == {0: b""}
    with pytest.raises(JobError, match="rank 1 comes to barrier, and was taken for dead"):
        meetings.gather(1, 1, "barrier", b"", ignore)
    assert meetings.is_empty


def test_who_comes_back_in_time_takes_part() -> None:
    meetings = Met(2)
    assert together(2, lambda rank: meetings.gather(rank, 1, "x", b"", ignore)) == [{0: b"", 1: b""}] * 2
    meetings.lose(1)

    def work(rank: int) -> dict[int, bytes]:
        if rank == 1:
            meetings.ledger.welcome(1, {})
        else:
            until(lambda: 1 in meetings.ledger.live)
        return meetings.gather(rank, 2, "x", b"", ignore)

    assert together(2, work) == [{0: b"", 1: b""}] * 2


def test_a_failure_wakes_everybody_and_stays() -> None:
    meetings = Met(2)

    def work(rank: int) -> None:
        if rank == 1:
            until(lambda: not meetings.is_empty)
            meetings.meetings.fail("server 1 has ended: see its output")
        with pytest.raises(ServerLost, match="server 1 has ended"):
            meetings.gather(0, 1 + rank, "x", b"", ignore)

    together(2, work)


def test_who_settles_and_who_meets_wait_for_each_other_and_are_told() -> None:
    meetings = Met(3)

    def work(rank: int) -> object:
        with pytest.raises(MismatchError, match=r"rank 0 waits for the others to end .* rank 1, 2 is in load"):
            if rank == 0:
                meetings.meetings.settle(0, ignore, has_trained=True, stays=False)
            else:
                meetings.gather(rank, 1, "load_state_dict()", b"", ignore)
        return True

    assert together(3, work) == [True] * 3


def test_who_comes_to_a_meeting_that_has_failed_is_told_why() -> None:
    meetings = Met(2)
    meetings.meetings.idle.add(1)
    with pytest.raises(MismatchError, match="x is called in a training loop"):
        meetings.gather(0, 1, "x", b"", ignore)
    with pytest.raises(MismatchError, match="x is called in a training loop"):
        meetings.gather(1, 1, "y", b"", ignore)
