"""The bound on staleness, without time, locks or tensors: whatever workers do, in whatever order."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hocket.server.pace import Pace
from hocket.server.terms import Terms


def ssp(bound: int | None) -> Terms:
    return Terms(staleness=bound, groups=0)


class Workers(RuleBasedStateMachine):
    """Workers that push when they may, and leave, are lost, or stop for longer than others have patience."""

    @initialize(count=st.integers(1, 5), bound=st.integers(1, 3) | st.none())
    def start(self, count: int, bound: int | None) -> None:
        self.pace, self.count, self.bound = Pace(count, ssp(bound)), count, bound
        self.epoch = dict.fromkeys(range(count), 1)
        self.clock = dict.fromkeys(range(count), 0)  # pushes that count, in the epoch
        self.away: set[int] = set()  # lost
        self.left: set[int] = set()
        self.stopped: set[int] = set()  # excused

    def _may(self, rank: int) -> bool:
        return rank not in self.away and rank not in self.left and not self.pace.missing(rank)

    @rule(rank=st.integers(0, 4))
    def push(self, rank: int) -> None:
        rank %= self.count
        if not self._may(rank):
            return
        version = self.pace.version
        staleness = self.pace.arrive(rank, self.epoch[rank])
        if staleness is None:
            assert rank in self.stopped
            assert self.bound is not None
            self.clock[rank] = self.pace._clock(rank, self.epoch[rank])
        else:
            assert 0 <= staleness <= version
            self.clock[rank] += 1
            self.pace.version += 1
        self.stopped.discard(rank)
        self.pace.pull(rank)

    @rule(rank=st.integers(0, 4))
    def lose(self, rank: int) -> None:
        rank %= self.count
        self.pace.lose(rank)
        self.away.add(rank)

    @rule(rank=st.integers(0, 4), early=st.integers(0, 2))
    def come_back(self, rank: int, early: int) -> None:
        """One push of one that was taken for dead does not count, nor any before its welcome; others are its start."""
        rank %= self.count
        if rank in self.away:
            for _ in range(early):
                assert self.pace.arrive(rank, self.epoch[rank]) is None
                assert rank not in self.pace.live, "only a welcome brings it back"
            self.pace.welcome(rank)
            assert rank in self.pace.live
            if not early:
                assert self.pace.arrive(rank, self.epoch[rank]) is None
            self.away.discard(rank)
            self.stopped.discard(rank)
            self.left.discard(rank)
            self.pace.pull(rank)
            self.clock[rank] = self.pace._clock(rank, self.epoch[rank])

    @precondition(lambda self: self.bound is not None)
    @rule(rank=st.integers(0, 4))
    def lose_patience(self, rank: int) -> None:
        rank %= self.count
        for missing in self.pace.missing(rank):
            self.pace.excuse(missing)
            self.stopped.add(missing)
        assert not self.pace.missing(rank)

    @rule(rank=st.integers(0, 4))
    def leave(self, rank: int) -> None:
        rank %= self.count
        if rank not in self.away:
            self.pace.leave(rank, self.epoch[rank])
            if self.epoch[rank] < max(self.epoch.values()):  # it was away while the others began the next one
                self.epoch[rank] += 1
                self.clock[rank] = 0
            else:
                self.left.add(rank)

    @rule(rank=st.integers(0, 4))
    def enter(self, rank: int) -> None:
        rank %= self.count
        if rank in self.left and rank not in self.away:
            self.pace.enter(rank, self.epoch[rank])
            self.left.discard(rank)
            self.clock[rank] = self.pace._clock(rank, self.epoch[rank])

    @precondition(lambda self: len(self.left | self.away) == self.count)
    @rule()
    def next_epoch(self) -> None:
        for rank in range(self.count):
            if rank not in self.away:
                self.epoch[rank] += 1
                self.clock[rank] = 0
        self.left.clear()

    def _active(self, rank: int) -> list[int]:
        gone = self.away | self.left | self.stopped | {rank}
        return [each for each in range(self.count) if each not in gone and self.epoch[each] == self.epoch[rank]]

    @invariant()
    def nobody_is_further_ahead_than_one_push_beyond_the_bound(self) -> None:
        if not hasattr(self, "pace") or self.bound is None:
            return
        for rank in range(self.count):
            if rank in self.away | self.left | self.stopped:
                continue
            slowest = min((self.clock[each] for each in self._active(rank)), default=None)
            if slowest is not None and self.clock[rank] - slowest > self.bound:
                assert self.pace.missing(rank), "it may go on, and is too far ahead"

    @invariant()
    def somebody_may_always_go_on(self) -> None:
        if not hasattr(self, "pace"):
            return
        active = [r for r in range(self.count) if r not in self.away | self.left | self.stopped]
        assert not active or any(not self.pace.missing(rank) for rank in active)

    @invariant()
    def nobody_waits_for_who_is_not_there(self) -> None:
        if not hasattr(self, "pace"):
            return
        for rank in range(self.count):
            assert not set(self.pace.missing(rank)) & (self.away | self.stopped | {rank})
            if self.bound is None:
                assert not self.pace.missing(rank)


TestWorkers = Workers.TestCase
TestWorkers.settings = settings(max_examples=150, stateful_step_count=30)


@given(bound=st.integers(0, 5), workers=st.integers(2, 5))
def test_a_worker_is_ahead_of_the_slowest_by_the_bound_and_then_waits(bound: int, workers: int) -> None:
    pace = Pace(workers, ssp(bound))
    for done in range(bound + 1):
        assert not pace.missing(0), done
        assert pace.arrive(0, 1) == 0
        pace.pull(0)
    assert pace.missing(0) == list(range(1, workers))
    for rank in range(1, workers):
        pace.arrive(rank, 1)
    assert not pace.missing(0)


@given(bound=st.integers(0, 4), others=st.integers(0, 8))
def test_the_push_of_one_that_was_not_waited_for_is_judged_by_the_bound(bound: int, others: int) -> None:
    """In rounds, by how many of them it has missed."""
    pace = Pace(2, Terms(staleness=bound, groups=1))
    pace.excuse(1)
    for _ in range(others):
        assert pace.arrive(0, 1) == 0
        pace.version += 1
        pace.pull(0)
    assert (pace.arrive(1, 1) is None) == (others > bound)
    pace.pull(1)
    assert pace.arrive(1, 1) == 0  # the next one is fresh again


@given(bound=st.integers(0, 4), others=st.integers(0, 9))
def test_in_bounded_staleness_it_is_judged_by_clocks(bound: int, others: int) -> None:
    pace = Pace(2, ssp(bound))
    pace.excuse(1)
    for _ in range(others):
        pace.arrive(0, 1)
    assert (pace.arrive(1, 1) is None) == (others > bound + 1)
    assert not others or not pace.missing(1)


@given(others=st.integers(0, 30))
def test_without_a_bound_nothing_is_late_but_what_was_dealt_again(others: int) -> None:
    pace = Pace(2, ssp(None))
    pace.excuse(1)
    pace.version = others
    assert pace.arrive(1, 1) == others
    pace.lose(1)
    pace.welcome(1)
    assert pace.arrive(1, 1) is None
    assert pace.arrive(1, 1) is not None
    pace.lose(1)
    assert pace.arrive(1, 1) is None  # before anybody knows that it is there
    pace.welcome(1)
    assert pace.arrive(1, 1) is not None


def test_clocks_begin_anew_in_every_epoch() -> None:
    pace = Pace(2, ssp(1))
    for _ in range(5):
        pace.arrive(0, 1)
        pace.arrive(1, 1)
    pace.leave(0, 1)
    pace.arrive(1, 2)
    pace.arrive(1, 2)
    assert pace.missing(1) == [0]  # it has left the epoch before, and may push in this one
    pace.arrive(0, 2)
    assert not pace.missing(1)


def test_who_has_left_is_not_waited_for_and_enters_where_the_slowest_is() -> None:
    pace = Pace(3, ssp(0))
    pace.leave(2, 1)
    for _ in range(4):
        pace.arrive(0, 1)
        assert pace.missing(0) == [1]
        pace.arrive(1, 1)
        assert not pace.missing(0)
    pace.arrive(2, 1)
    pace.leave(2, 1)
    pace.enter(2, 1)
    assert not pace.missing(2)
    assert not pace.missing(0)
    pace.arrive(0, 1)
    assert pace.missing(0) == [1, 2]


@given(ranks=st.sets(st.integers(0, 4)), waiting=st.sets(st.integers(0, 4)), lost=st.sets(st.integers(0, 4)))
def test_a_gradient_can_still_come_from_who_lives_and_does_not_wait(
    ranks: set[int], waiting: set[int], lost: set[int]
) -> None:
    pace = Pace(5, Terms())
    for rank in ranks:
        pace.leave(rank, 1)
    for rank in lost:
        pace.lose(rank)
    assert set(pace.outstanding(1, waiting)) == set(range(5)) - ranks - waiting - lost
    assert set(pace.outstanding(2, waiting)) == set(range(5)) - waiting - lost
    assert set(pace.live) == set(range(5)) - lost


def test_a_new_worker_looks_at_the_parameters_before_it_takes_part() -> None:
    pace = Pace(2, ssp(1))
    pace.pull(2)
    assert pace.live == [0, 1] and pace.arrive(0, 1) == 0
    pace.admit(2)
    assert pace.live == [0, 1, 2] and not pace.missing(0)
