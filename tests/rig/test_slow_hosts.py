"""Hosts and ranks that are slow or busy are waited for: nobody calls them lost. Here, two jobs share the hosts."""

from pathlib import Path

import pytest
from conftest import Rigs
from rig import jobs
from rig.jobs import Running


def check(*workers: Running) -> None:
    for worker in workers:
        assert worker.finish() == 0, "\n\n".join(map(str, workers))
        assert "does not answer" not in str(worker), worker


@pytest.mark.all_combinations
def test_a_rank_that_lets_nothing_else_run(rig: Rigs, tmp_path: Path) -> None:
    """For twelve seconds no thread of it can say that it lives: rank 0, with the coordinator or not, and another."""
    with jobs.on(rig(2), tmp_path) as started:
        job = started.launch("h1:1,h2:1", "busy", "in a call", "0", "12")
        plain = started.plain(["h1", "h2"], "busy", "in a call", "1", "12")
        plain += started.plain(["h1", "h2"], "busy", "in a call", "0", "12")
        check(job, *plain)
        started.wait_until_empty()


@pytest.mark.all_combinations
def test_a_host_ten_times_slower(rig: Rigs, tmp_path: Path) -> None:
    """One job computes more slowly on h2, and what the other one exchanges takes ten times as long there."""
    made = rig(3, "40mbit")
    made.set_rate("h2", "4mbit")
    (tmp_path / "go").touch()
    with jobs.on(made, tmp_path) as started:
        plain = started.plain(["h1", "h2", "h3"], "big", "1", "2")
        job = started.launch("h3:1,h1:1", "slow", "1", "10", at="h3")
        check(job, *plain)
