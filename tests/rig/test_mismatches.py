"""Ranks on several hosts that do not do the same, or do not come: all are told who does what, in seconds."""

import re
from pathlib import Path

import pytest
from conftest import Rigs
from rig import jobs

TOGETHER = r"MismatchError: the ranks do not do the same: "
EXCHANGE = r"backward\(\), the gradient exchange of step 3 with learning rate"
STEPS = ", after 2 optimizer steps"
BY_HAND = r"hocket.allreduce\(\): allreduce of float32\["
CASES = {
    "other collective 0": rf"{TOGETHER}rank 0: {BY_HAND}1000, 1000\], mean; ranks? .*: {EXCHANGE} 0.05",
    # In the order of the ranks that wait when the first of both kinds are found.
    "other collective 13": rf"{TOGETHER}(ranks? .*: {EXCHANGE} 0.05{STEPS}; ranks? .*: {BY_HAND}1000, 1000\], mean|"
    rf"ranks? .*: {BY_HAND}1000, 1000\], mean; ranks? .*: {EXCHANGE} 0.05{STEPS})",
    "other shape 3": rf"{TOGETHER}ranks 0, 1, 2: {BY_HAND}2\], mean; rank 3: {BY_HAND}3\], mean",
    "early end 0": rf"WorkerLost: .* in {EXCHANGE} 0.05{STEPS}, but rank 0 finished the script: every rank must take",
    "early end 1": rf"WorkerLost: .* in {EXCHANGE} 0.05{STEPS}, but rank 1 finished the script: every rank must take",
    "early end 3": rf"WorkerLost: .* in {EXCHANGE} 0.05{STEPS}, but rank 3 finished the script: every rank must take",
    "other rate at the start 2": r"MismatchError: the optimizers differ: .* lr is 0.05 on rank 0 and 0.1 on rank 2",
    "other rate 1": rf"{TOGETHER}ranks 0, 2, 3: {EXCHANGE} 0.05{STEPS}; rank 1: {EXCHANGE} 0.25",
}
SOON = 30.0  # seconds, of the 300 that they would wait for each other otherwise


def test_ranks_that_differ(rig: Rigs, tmp_path: Path) -> None:
    with jobs.on(rig(2), tmp_path) as started:
        workers = started.plain(["h1", "h1", "h2", "h2"], "cases", *CASES, HOCKET_TIMEOUT="300")
        for rank, worker in enumerate(workers):
            assert worker.finish(240) == 0
            for number, (case, expected) in enumerate(CASES.items()):
                written = worker.between(f"case {case}", "ended with")
                if case == f"early end {rank}":
                    assert "ended with 0" in written, written
                else:
                    assert re.search(expected, written) and "ended with 1" in written, (rank, case, written)
                assert worker.time_of("ended with", count=number + 1) - worker.time_of(f"case {case}") < SOON
        started.wait_until_empty()


@pytest.mark.all_combinations
def test_a_rank_that_does_not_come(rig: Rigs, tmp_path: Path) -> None:
    """Its neighbour waits for it in shared memory, and the other host over the network."""
    with jobs.on(rig(2), tmp_path) as started:
        job = started.launch("h1:2,h2:1", "late", "1", "5")
        assert job.finish() == 1, str(job)
        for rank in range(3):
            assert len(re.findall(rf'\[{rank}\]   File ".*script.py", line \d+ in late', str(job))) == 1, str(job)
        waits = r"hocket.errors.DeadlineExceeded: ranks? .* waits? in backward\(\), the gradient exchange of step 3 .*"
        assert re.match(f"{waits}, for 5 s, for rank 1 on h1: the stacks above", job.lines[-1])
        started.wait_until_empty()
