"""A simulation runs one thread at a time, in the order of the virtual clock, and leaves nothing behind."""

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import JobError
from hocket.transport.simulated import SimulatedCondition, Simulation

Steps = list[list[float]]


def walk(simulation: Simulation, steps: Steps) -> list[tuple[float, int]]:
    """Who was awake when, in the order in which they ran."""
    seen: list[tuple[float, int]] = []

    def worker(rank: int) -> None:
        for seconds in steps[rank]:
            simulation.sleep(seconds)
            seen.append((simulation.now(), rank))

    simulation.run([lambda rank=rank: worker(rank) for rank in range(len(steps))])
    return seen


@given(st.lists(st.lists(st.floats(0, 10), max_size=6), min_size=1, max_size=5))
def test_time_only_goes_forward_and_every_run_is_the_same(steps: Steps) -> None:
    simulation = Simulation()
    seen = walk(simulation, steps)
    assert seen == sorted(seen, key=lambda each: each[0])
    assert seen == walk(Simulation(), steps)
    assert len(seen) == sum(map(len, steps))
    assert simulation.now() == max((sum(each) for each in steps), default=0.0)


def test_of_those_who_wake_at_once_the_first_goes_first() -> None:
    assert walk(Simulation(), [[2.0], [1.0, 1.0], [2.0]]) == [(1.0, 1), (2.0, 0), (2.0, 1), (2.0, 2)]


def test_exactly_one_runs_at_a_time() -> None:
    simulation, inside = Simulation(), threading.Lock()

    def worker() -> None:
        for _ in range(100):
            assert inside.acquire(blocking=False)
            inside.release()
            simulation.sleep(1.0)

    simulation.run([worker] * 8)


def test_results_are_in_order_and_no_thread_is_left() -> None:
    before = threading.active_count()
    simulation = Simulation()

    def worker(rank: int) -> int:
        helper = simulation.start(lambda: simulation.sleep(3.0) or rank * 10, f"helper of {rank}")
        simulation.sleep(1.0)
        return helper.result() + 1

    assert simulation.run([lambda rank=rank: worker(rank) for rank in range(4)]) == [1, 11, 21, 31]
    assert simulation.now() == 3.0
    assert threading.active_count() == before


def test_a_wait_ends_with_a_notice_or_in_time() -> None:
    simulation = Simulation()
    condition = simulation.condition()

    def waiter(timeout: float | None) -> tuple[bool, float]:
        with condition:
            return condition.wait(timeout), simulation.now()

    def notifier() -> tuple[bool, float]:
        simulation.sleep(2.0)
        with condition:
            condition.notify_all()
        return True, simulation.now()

    found = simulation.run([lambda: waiter(None), lambda: waiter(1.5), lambda: waiter(5.0), notifier])
    assert found == [(True, 2.0), (False, 1.5), (True, 2.0), (True, 2.0)]


def test_a_lock_is_kept_while_its_owner_sleeps_and_can_be_taken_again() -> None:
    simulation = Simulation()
    condition = simulation.condition()

    def worker() -> tuple[float, float]:
        with condition, condition:
            begin = simulation.now()
            simulation.sleep(1.0)
            with condition:
                pass
            return begin, simulation.now()

    assert simulation.run([worker] * 3) == [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]


def test_a_wait_gives_back_a_lock_that_was_taken_twice() -> None:
    simulation = Simulation()
    condition = simulation.condition()
    seen: list[str] = []

    def first() -> None:
        with condition, condition:
            condition.wait()
            seen.append("first")
            simulation.sleep(1.0)
            seen.append("first")

    def second() -> None:
        with condition:
            condition.notify_all()
            seen.append("second")
        with condition:
            seen.append("second")

    simulation.run([first, second])
    assert seen == ["second", "second", "first", "first"]


def test_the_first_error_ends_all() -> None:
    simulation = Simulation()
    condition = simulation.condition()
    ended: list[str] = []

    def waiter() -> None:
        try:
            with condition:
                condition.wait()
        finally:
            ended.append("waiter")

    def failing(after: float) -> None:
        simulation.sleep(after)
        raise ValueError(f"after {after:g} s")

    before = threading.active_count()
    with pytest.raises(ValueError, match="after 1 s"):
        simulation.run([waiter, lambda: failing(2.0), lambda: failing(1.0)])
    assert ended == ["waiter"]
    assert threading.active_count() == before
    assert simulation.run([simulation.now]) == [1.0]  # it can be used again


def test_what_a_started_thread_raises_is_for_those_who_ask() -> None:
    simulation = Simulation()

    def worker() -> str:
        helper: Any = simulation.start(lambda: 1 / 0, "helper")
        simulation.sleep(1.0)
        with pytest.raises(ZeroDivisionError):
            helper.result()
        return "fine"

    assert simulation.run([worker]) == ["fine"]


def test_those_who_wait_for_each_other_are_named() -> None:
    simulation = Simulation()
    conditions = [simulation.condition(), simulation.condition()]

    def wait_for_ever(condition: SimulatedCondition) -> None:
        with condition:
            condition.wait()

    before = threading.active_count()
    with pytest.raises(JobError, match=r"at 0 s all wait for each other: worker 0 in .*wait_for_ever.*; worker 1 in"):
        simulation.run([lambda: wait_for_ever(conditions[0]), lambda: wait_for_ever(conditions[1])])
    assert threading.active_count() == before


def test_two_locks_in_two_orders() -> None:
    simulation = Simulation()
    one, two = simulation.condition(), simulation.condition()

    def worker(first: SimulatedCondition, second: SimulatedCondition) -> None:
        with first:
            simulation.sleep(1.0)
            with second:
                pass

    with pytest.raises(JobError, match="all wait for each other"):
        simulation.run([lambda: worker(one, two), lambda: worker(two, one)])


def test_what_never_ends_is_ended() -> None:
    simulation = Simulation(limit=100.0)

    def worker() -> None:
        while True:
            simulation.sleep(1.0)

    with pytest.raises(JobError, match=r"no end after 100 s: worker 0 in .*worker"):
        simulation.run([worker])


def test_nothing_to_run() -> None:
    assert Simulation().run([]) == []
