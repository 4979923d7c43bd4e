"""All ranks decide the same, in the same order, whatever the order in which each has submitted."""

import random

from hypothesis import given
from hypothesis import strategies as st

from hocket.horovod.negotiation import Decision, Negotiation, Request


def request(name: str, number: int = -1, rows: int = 2, how: str = "sum") -> Request:
    return Request("allreduce", name, number, (how, 1.0, 1.0), ("float32",), ((rows, 3),))


def cycle(ranks: list[Negotiation]) -> list[Decision]:
    messages = [rank.message() for rank in ranks]
    decided = [rank.hear(messages) for rank in ranks]
    assert all(each == decided[0] for each in decided)
    return decided[0]


@given(size=st.integers(1, 5), seed=st.integers(0, 10**6), names=st.integers(1, 12), rounds=st.integers(1, 4))
def test_each_operation_is_decided_on_once_when_all_have_submitted_it(
    size: int, seed: int, names: int, rounds: int
) -> None:
    dice = random.Random(seed)
    ranks = [Negotiation(rank, size) for rank in range(size)]
    for number in range(rounds):
        requests = [request(f"n{i}") if i % 2 else request("unnamed", number * names + i) for i in range(names)]
        left = [dice.sample(requests, names) for _ in ranks]
        said: list[set[str]] = [set() for _ in ranks]
        found: list[str] = []
        while any(left):
            for rank, mine, mentioned in zip(ranks, left, said, strict=True):
                for _ in range(dice.randint(0, len(mine))):
                    rank.submit(mine.pop())
                mentioned |= {each.key for each in rank._news}
            for decision in cycle(ranks):
                assert not decision.error and all(decision.by_rank)
                assert all(decision.request.key in mentioned for mentioned in said)
                found.append(decision.request.key)
        assert sorted(found) == sorted(each.key for each in requests)
    assert not ranks[0].unready()


def test_what_was_said_before_is_one_bit() -> None:
    ranks = [Negotiation(rank, 2) for rank in range(2)]
    for number in range(3):
        for rank in ranks:
            for i in range(200):
                rank.submit(request(f"a name as long as those of models, {i}"))
        sizes = {len(rank.message()) for rank in ranks} if number == 2 else set()
        if number < 2:
            assert len(cycle(ranks)) == 200
    assert sizes == {200 // 8 + 8}


def test_with_no_news_nothing_is_said() -> None:
    assert Negotiation(0, 2).message() == b""


def test_a_difference_is_an_error_for_all_and_the_rest_goes_on() -> None:
    ranks = [Negotiation(rank, 3) for rank in range(3)]
    for rank in ranks:
        rank.submit(request("x", rows=2 if rank.rank < 2 else 3))
        rank.submit(request("y"))
    first, second = cycle(ranks)
    assert "'x'" in first.error and "ranks 0, 1: allreduce of float32[2, 3]" in first.error
    assert "rank 2: allreduce of float32[3, 3]" in first.error and not second.error
    for rank in ranks:
        rank.submit(request("x", rows=5))
    assert [decision.error for decision in cycle(ranks)] == [""]


def test_those_who_have_joined_are_not_waited_for_and_the_last_one_is_known() -> None:
    ranks = [Negotiation(rank, 3) for rank in range(3)]
    ranks[0].join()
    ranks[1].submit(request("x"))
    assert cycle(ranks) == []
    ranks[2].submit(request("x"))
    (decision,) = cycle(ranks)
    assert decision.by_rank == (None, request("x"), request("x")) and not decision.error
    ranks[2].join()
    assert cycle(ranks) == []
    ranks[1].submit(request("largest", how="max"))
    ranks[1].submit(Request("broadcast", "b", -1, (0, "from rank 0"), ("float32",), ((1,),)))
    largest, broadcast = cycle(ranks)
    assert "max is not possible after join(), which ranks 0, 2 called" in largest.error
    assert "broadcast is not possible after join(), which ranks 0, 2 called" in broadcast.error
    ranks[1].join()
    (joined,) = cycle(ranks)
    assert joined.last == 1
    for rank in ranks:
        rank.submit(request("x"))
    (decision,) = cycle(ranks)
    assert all(decision.by_rank)


def test_a_join_completes_what_was_waiting_for_that_rank() -> None:
    ranks = [Negotiation(rank, 2) for rank in range(2)]
    ranks[0].submit(request("x"))
    assert cycle(ranks) == []
    ranks[1].join()
    (decision,) = cycle(ranks)
    assert decision.by_rank == (request("x"), None)


@given(done=st.lists(st.integers(0, 5), min_size=3, max_size=3))
def test_unnamed_operations_match_again_after_a_join(done: list[int]) -> None:
    ranks = [Negotiation(rank, 3) for rank in range(3)]
    for step in range(max(done)):
        for rank, steps in zip(ranks, done, strict=True):
            if step < steps:
                rank.submit(request("unnamed", step))
            elif step == steps:
                rank.join()
        cycle(ranks)
    for rank, steps in zip(ranks, done, strict=True):
        if steps == max(done):
            rank.join()
    cycle(ranks)
    assert {rank.unnamed.get("unnamed", 0) for rank in ranks} == {max(done)}


def test_who_is_missing_is_known_on_all_ranks() -> None:
    ranks = [Negotiation(rank, 3) for rank in range(3)]
    ranks[2].submit(request("late"))
    cycle(ranks)
    for rank in ranks:
        (unready,) = rank.unready()
        assert "submitted by rank 12, not by ranks 10, 11" in unready.describe([10, 11, 12])
    ranks[0].give_up(["late"])
    (decision,) = cycle(ranks)
    assert decision.error.startswith("given up: 'late'") and not ranks[1].unready()


def test_more_requests_than_are_numbered_are_no_harm() -> None:
    ranks = [Negotiation(rank, 2) for rank in range(2)]
    for number in range(30):
        for rank in ranks:
            for i in range(400):
                rank.submit(request(f"{number} {i}"))
            rank.submit(request("every time"))
        assert len(cycle(ranks)) == 401
