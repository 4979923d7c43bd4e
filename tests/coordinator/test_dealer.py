"""The dealer of batches: every batch of an epoch is done once, whoever is slow, dies or gives something back."""

import threading
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server.serving import together

from hocket.coordinator.dealer import Dealer
from hocket.errors import DeadlineExceeded

WORKERS = 4


def make(timeout: float = 5.0, live: Collection[int] = range(WORKERS)) -> Dealer:
    return Dealer(threading.Condition(), lambda: live, timeout)


def ignore(ranks: list[int], seconds: float) -> None:
    """Nobody is told."""


@settings(max_examples=200)
@given(data=st.data(), total=st.integers(0, 12), known=st.booleans())
def test_every_batch_is_done_once_whatever_happens(data: st.DataObject, total: int, known: bool) -> None:
    """Workers take, push, finish, give back and die in any order; one of them stays to the end.

    What a worker has pushed, the servers have, and whoever tells of its death says so.
    """
    queue, workers = make(), WORKERS
    held: dict[int, list[int]] = {rank: [] for rank in range(workers)}
    pushed: dict[int, list[int]] = {rank: [] for rank in range(workers)}
    done: list[int] = []
    length = total if known else None
    for _ in range(data.draw(st.integers(0, 60))):
        rank = data.draw(st.integers(0, workers - 1))
        what = data.draw(st.sampled_from(["take", "take", "lease", "push", "finish", "give back", "die"]))
        if what == "take":
            found = queue.take(rank, 1, length)
            if isinstance(found, int) and found >= total:
                queue.end(1, found)  # it looked, and there was nothing
                length = total
            elif isinstance(found, int):
                held[rank].append(found)
        elif what == "lease":
            more = queue.take_more(rank, 1, data.draw(st.integers(0, 5)), workers)
            assert all(number < total for number in more)
            held[rank] += more
        elif what == "die":
            assert queue.held(rank) == sorted([*held[rank], *pushed[rank]])
            assert queue.lose(rank, pushed[rank]) == sorted(held[rank])
            done += pushed[rank]
            held[rank], pushed[rank] = [], []
        elif held[rank] and what == "push":
            pushed[rank].append(held[rank].pop())
        elif pushed[rank] and what == "finish":
            queue.finish(rank, (number := pushed[rank].pop(),))
            done.append(number)
        elif held[rank] and what == "give back":
            queue.give_back(rank, (held[rank].pop(),))
    for rank in range(1, workers):
        queue.lose(rank, pushed[rank])
        done += pushed[rank]
    rest = [*held[0], *pushed[0]]
    queue.finish(0, tuple(rest))
    done += rest
    while isinstance(found := queue.take(0, 1, length), int):
        if found >= total:
            queue.end(1, found)
            continue
        done.append(found)
        queue.finish(0, (found,))
    assert found == "over"
    assert sorted(done) == list(range(total))


def test_what_one_does_not_hold_it_cannot_finish() -> None:
    queue = make()
    assert queue.take(0, 1, 1) == 0
    queue.finish(1, (0,))
    queue.give_back(1, (0,))
    assert queue.take(1, 1, 1) == "held"
    queue.lose(0)
    assert queue.take(1, 1, 1) == 0
    queue.finish(0, (0,))  # late: it was dealt again
    assert queue.take(2, 1, 1) == "held"


def test_a_batch_that_two_dead_workers_had_in_a_row_is_fatal() -> None:
    queue = make()
    assert [queue.take(rank, 1, 9) for rank in range(4)] == [0, 1, 2, 3]
    queue.lose(0)
    assert queue.take(1, 1, 9) == 0
    queue.lose(2)
    assert not queue.fatal
    queue.lose(1)  # after somebody else, with another batch
    assert not queue.fatal
    assert [queue.take(3, 1, 9) for _ in range(3)] == [0, 1, 2]
    queue.finish(3, (1, 2, 3))
    queue.lose(3, has_died=False)  # a worker that finishes
    assert not queue.fatal
    assert queue.take(4, 1, 9) == 0
    queue.lose(4)
    assert queue.fatal == [0]
    assert queue.take(0, 2, 9) == 0
    assert not queue.fatal  # of another epoch


def test_who_waits_gets_what_a_lost_one_held() -> None:
    queue = make()
    assert queue.take(0, 1, 1) == 0

    def work(rank: int) -> Any:
        if rank == 0:
            return queue.lose(0)
        return queue.take(1, 1, 1, ignore)

    assert together(2, work) == [[0], 0]


def test_who_waits_goes_when_all_is_done() -> None:
    queue = make()
    assert queue.take(0, 1, 1) == 0
    assert together(2, lambda rank: queue.take(1, 1, 1, ignore) if rank else queue.finish(0, (0,)))[1] == "over"


def test_waiting_has_a_deadline_that_names_who_holds_the_last() -> None:
    queue = make(timeout=0.05)
    queue.take(3, 1, 2)
    queue.take(1, 1, 2)
    with pytest.raises(DeadlineExceeded, match=r"ranks 1, 3 did not end a batch within 0.05 s"):
        queue.take(0, 1, 2, ignore)


def test_a_lease_leaves_enough_for_the_others() -> None:
    queue, total = make(), 100
    assert queue.take_more(0, 1, 10, 4) == []  # of an epoch that nobody has begun
    assert queue.take(0, 1, total) == 0
    assert queue.take_more(0, 1, 10, 4) == list(range(1, 11))
    assert queue.take_more(1, 1, 99, 4) == list(range(11, 22))  # an eighth of the 89 that are left
    while isinstance(queue.take(1, 1, total), int):
        left = total - len(queue._now.held)
        assert len(queue.take_more(1, 1, 99, 4)) == left // 8
    queue.lose(1)
    assert queue.take_more(2, 1, 3, 1) == [11, 12, 13]
    assert make().take_more(0, 0, 5, 1) == []  # nobody knows how many there are


def test_an_epoch_that_is_over_stays_so() -> None:
    queue = make()
    assert queue.take(0, 2, 1) == 0
    assert queue.take(1, 1, 1) == "over"
    queue.end(1, 0)  # of the epoch before
    assert queue.take(1, 2, 2) == "held"


@settings(max_examples=100)
@given(
    taken=st.integers(0, 8),
    finished=st.sets(st.integers(0, 7)),
    applied=st.sets(st.integers(0, 7)),
    lost=st.booleans(),
)
def test_a_queue_goes_on_from_its_state(taken: int, finished: set[int], applied: set[int], lost: bool) -> None:
    """What was held counts as not done, unless its gradient is in the parameters.

    Nor does what the servers kept of a lost worker, as long as it waits there for a round to end.
    """
    queue, total = make(), 10
    numbers = [queue.take(n % 3, 1, total) for n in range(taken)]
    for number in numbers:
        assert isinstance(number, int)
        if number in finished:
            queue.finish(number % 3, (number,))
    if lost:
        queue.lose(2, [number for number in queue.held(2) if number % 2 == 0 or number in applied])
    other = make()
    other.restore(queue.state(applied & {*queue.held()}))
    rest = []
    while isinstance(found := other.take(0, 1, total), int):
        rest.append(found)
        other.finish(0, (found,))
    assert sorted(rest) == sorted(set(range(total)) - {n for n in numbers if n in finished | applied})


@settings(max_examples=200)
@given(data=st.data(), ranks=st.integers(1, 4), rounds=st.integers(0, 5), known=st.booleans())
def test_workers_in_step_have_their_own_and_then_what_others_leave(
    data: st.DataObject, ranks: int, rounds: int, known: bool
) -> None:
    """Workers take, die, leave the loop and come back in any order; one of them stays to the end."""
    live = {*range(ranks)}
    queue, total = make(live=live), rounds * ranks
    length = total if known else None
    held: dict[int, list[int]] = {rank: [] for rank in range(ranks)}
    done: list[int] = []
    is_even = True

    def take(rank: int, wait: Any = None) -> bool:
        live.add(rank)
        found = queue.take(rank, 1, length, wait, ranks)
        if isinstance(found, int) and found >= total:
            queue.end(1, total)
            queue.give_back(rank, (found,))
            return True
        if isinstance(found, int):
            held[rank].append(found)
            if is_even:
                assert found % ranks == rank
                assert queue.pace(rank) == (found // ranks + 1, found // ranks + 1)
        return isinstance(found, int)

    for _ in range(data.draw(st.integers(0, 40))):
        rank = data.draw(st.integers(0, ranks - 1))
        what = data.draw(st.sampled_from(["take", "take", "take", "finish", "die", "leave"]))
        if what == "take":
            take(rank)
        elif what == "finish" and held[rank]:
            queue.finish(rank, (held[rank][0],))
            done.append(held[rank].pop(0))
        elif what == "leave":
            queue.give_back(rank, tuple(held[rank]))
            queue.leave(rank, 1)
            held[rank], is_even = [], False
        elif what == "die":
            live.discard(rank)
            assert queue.lose(rank) == sorted(held[rank])
            held[rank], is_even = [], False
        state = queue.state()
        assert {*range(state["next"])} - {*state["again"]} >= {*done}
        assert {*state["again"]} | {*range(state["next"], total)} == {*range(total)} - {*done}
    for rank in range(1, ranks):
        live.discard(rank)
        queue.lose(rank)
    is_even = False
    while take(0, ignore):
        pass
    assert sorted(done + held[0]) == list(range(total))


@settings(max_examples=300)
@given(data=st.data(), total=st.integers(0, 30), in_step=st.booleans(), workers=st.integers(1, 3))
def test_every_batch_is_done_once_with_workers_that_come(
    data: st.DataObject, total: int, in_step: bool, workers: int
) -> None:
    """Workers die and others come in their place, or with further numbers; a checkpoint may be made at any time."""
    live = set(range(workers))
    queue, ranks = make(live=live), workers if in_step else 0
    held: dict[int, list[int]] = {rank: [] for rank in range(workers + 3)}
    done: list[int] = []
    for _ in range(data.draw(st.integers(0, 60))):
        what = data.draw(st.sampled_from(["take", "take", "take", "finish", "finish", "die", "come", "leave"]))
        if what == "come":
            rank = data.draw(st.sampled_from(sorted(held)))
            if rank not in live and queue.epoch and queue.admit(rank, queue.epoch):
                live.add(rank)
                found = queue.take(rank, queue.epoch, total, ranks=ranks)  # it has a batch in any case
                assert isinstance(found, int)
                held[rank].append(found)
            continue
        rank = data.draw(st.sampled_from(sorted(live)))
        if what == "take":
            if isinstance(found := queue.take(rank, 1, total, ranks=ranks), int):
                held[rank].append(found)
        elif what == "finish" and held[rank]:
            queue.finish(rank, (number := held[rank].pop(),))
            done.append(number)
        elif what == "die" and len(live) > 1:
            live.remove(rank)
            assert queue.lose(rank) == sorted(held[rank])
            held[rank] = []
        elif what == "leave":
            queue.give_back(rank, tuple(held[rank]))
            held[rank] = []
            queue.leave(rank, 1)
        state = queue.state()
        undone = {*range(state["next"], total), *state["again"]} if state["epoch"] else set(range(total))
        assert len(undone) == len([*range(state["next"], total), *state["again"]]) or not state["epoch"]
        assert undone == set(range(total)) - set(done)
    for rank in sorted(live):
        for number in held[rank]:
            queue.finish(rank, (number,))
            done.append(number)
    while live:
        for rank in sorted(live):
            found = queue.take(rank, 1, total, ignore if len(live) == 1 else None, ranks)
            if isinstance(found, int):
                queue.finish(rank, (found,))
                done.append(found)
            elif found == "over" or len(live) > 1:
                live.remove(rank)
                queue.leave(rank, 1)
    assert sorted(done) == list(range(total))
    assert not in_step or sum(queue._now.got.values()) == total


@pytest.mark.parametrize("number", [1, 3])
def test_a_newcomer_is_in_step(number: int) -> None:
    """It takes what the others take then; what the lost worker has left is for all at the end."""
    live = {0, 1, 2}
    queue, total = make(live=live), 30

    def deal(*ranks: int) -> list[int]:
        found = []
        for rank in ranks:
            taken = queue.take(rank, 1, total, ranks=3)
            assert isinstance(taken, int)
            queue.finish(rank, (taken,))
            found.append(taken)
        return found

    assert deal(0, 1, 2, 0, 1, 2) == [0, 1, 2, 3, 4, 5]
    if number == 1:
        live.remove(1)
        queue.lose(1)
        assert deal(0, 2, 0, 2) == [6, 8, 9, 11]
    assert queue.admit(number, 1)
    live.add(number)
    rest = [deal(*sorted(live)) for _ in range(5)]
    if number == 1:
        assert rest == [[12, 13, 14], [15, 16, 17], [18, 19, 20], [21, 22, 23], [24, 25, 26]]
        assert deal(0, 1, 2) == [27, 28, 29] and deal(0, 1) == [7, 10]
        assert queue.total(1) == total == sum(queue._now.got.values())
    else:
        assert [row[:3] for row in rest] == [[3 * n + 6, 3 * n + 7, 3 * n + 8] for n in range(5)]
        assert [row[3] for row in rest] == [24, 25, 26, 27, 28]
        assert sorted(deal(0, 1, 2, 3)) == [21, 22, 23, 29]
    assert queue.take(0, 1, total, ranks=3) == "over"


def test_batches_of_a_dead_worker_that_nobody_asks_for_any_more_are_told() -> None:
    said = list[str]()
    queue = Dealer(threading.Condition(), lambda: range(2), say=said.append)
    assert [queue.take(0, 1, 3), queue.take(1, 1, 3), queue.take(1, 1, 3)] == [0, 1, 2]
    queue.finish(0, (0,))
    queue.lose(1)
    assert queue.take(0, 1, 3) == 1  # this one comes in time
    queue.finish(0, (1,))
    queue.take(0, 2, 3)
    assert len(said) == 1 and "in epoch 1 nobody has trained on 1 batches of lost workers" in said[0]


def test_batches_that_the_living_leave_are_not_told() -> None:
    said = list[str]()
    queue = Dealer(threading.Condition(), lambda: range(2), say=said.append)
    assert [queue.take(0, 1, 3), queue.take(1, 1, 3), queue.take(1, 1, 3)] == [0, 1, 2]
    queue.lose(1)
    queue.give_back(0, (0,))  # it leaves the loop
    queue.leave(0, 1)
    queue.take(0, 2, 3)
    assert not said
