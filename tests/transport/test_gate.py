"""Meeting, comparing and waiting at the gate."""

import os
import signal
import time

import pytest
from pool import Pool, RemoteError

import hocket
from hocket.job.worker import current
from hocket.transport.gate import Gate
from hocket.transport.waiting import ranks


def gate() -> Gate:
    return current().communicator.transport.gate  # type: ignore[attr-defined, no-any-return]


def meet_often(times: int) -> list[int]:
    """Payloads arrive although ranks run at different speeds."""
    seen = []
    for turn in range(times):
        if turn % 50 == hocket.rank():
            time.sleep(0.003)  # long enough that the others sleep
        payloads = gate().meet(turn, turn * 10 + hocket.rank(), "a test")
        assert payloads == [turn * 10 + r for r in range(hocket.size())]
        seen.append(payloads[0])
    return seen


@pytest.mark.parametrize("workers", [2, 5])
def test_everyone_gets_everyones_payload(pool: Pool, workers: int) -> None:
    assert pool.run(workers, meet_often, 400) == [[turn * 10 for turn in range(400)]] * workers


def count_past_the_end() -> None:
    transport = current().communicator.transport  # type: ignore[attr-defined]
    other = Gate(transport.allocate(Gate.nbytes(3), "a test"), hocket.rank(), 3, 20.0)
    other._sequence = 2**32 - 3
    for turn in range(6):
        other.meet(turn, 0, "a test")
    assert other._sequence == 3


def test_the_sequence_may_wrap_around(pool: Pool) -> None:
    pool.run(3, count_past_the_end)


def disagree() -> None:
    if hocket.rank() == 1:
        hocket.barrier()
    else:
        gate().meet(7, 0, lambda: "the exchange of step 9")


def test_a_disagreement_is_told_to_all(pool: Pool) -> None:
    outcomes = pool.outcomes(3, disagree)
    for outcome in outcomes:
        assert isinstance(outcome, RemoteError) and outcome.kind == "MismatchError"
        assert "ranks 0, 2: the exchange of step 9; rank 1: hocket.barrier()" in outcome.message


def wait_for_the_slow() -> None:
    gate().meet(0, 0, "the beginning")
    if hocket.rank() == 1:
        while not (gate().has_left(0) and gate().has_left(2)):
            time.sleep(0.01)
        return
    gate().timeout = 2.0  # only now: to join takes time, too
    gate().meet(1, 0, "the exchange of step 3")


def test_a_rank_that_does_not_come_in_time_is_named(pool: Pool) -> None:
    outcomes = pool.outcomes(3, wait_for_the_slow)
    for rank in (0, 2):
        assert outcomes[rank].kind == "DeadlineExceeded"
        assert "ranks 0, 2 waited 2 s in the exchange of step 3 for rank 1" in outcomes[rank].message
        assert "--timeout" in outcomes[rank].message


def test_a_wait_is_ended_by_the_death_of_a_peer(pool: Pool) -> None:
    pool.run(3, os.getpid)
    outcomes = pool.outcomes_with_death(3, die_or_wait, dead=1)
    for rank in (0, 2):
        assert outcomes[rank].kind == "WorkerLost"
        assert "ranks 0, 2 wait in the exchange of step 3, but rank 1 on " in outcomes[rank].message


def die_or_wait() -> None:
    if hocket.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gate().meet(1, 0, "the exchange of step 3")


def test_ranks_are_written_as_a_person_would() -> None:
    assert ranks([3]) == "rank 3"
    assert ranks([0, 2]) == "ranks 0, 2"
