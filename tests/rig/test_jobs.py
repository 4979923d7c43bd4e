"""The law over hosts: training there gives what one process would, however the job was started."""

import re
from pathlib import Path

import pytest
import torch
from conftest import Rigs
from rig import jobs
from rig.jobs import Jobs
from strategies.test_laws import STRATEGIES
from strategies.training import Case, alone, assert_equal

OTHERWISE = {"interfaces": ("eth0", "ens3", "enp1s0"), "decoys": {"docker0": "172.17.0.1/16", "br0": "10.9.9.1/24"}}


def check(folder: Path, name: str, size: int) -> None:
    expected = alone(Case(optimizer="Adam", options={"lr": 0.01}), size)
    results = [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in range(size)]
    for strategy in STRATEGIES:
        assert_equal(expected, [result[strategy] for result in results])


def test_under_hocket_run(rig: Rigs, tmp_path: Path) -> None:
    with jobs.on(rig(2), tmp_path) as started:
        job = started.launch("h1:2,h2:1", "law", "result", *STRATEGIES)
        assert job.finish() == 0, job
        started.wait_until_empty()
    check(tmp_path, "result", 3)


def test_three_hosts_and_a_slow_network(rig: Rigs, tmp_path: Path) -> None:
    with jobs.on(rig(3, "200mbit", loopback_names=True, **OTHERWISE), tmp_path) as started:
        job = started.launch("h1:1,h2:1,h3:1", "law", "result", *STRATEGIES)
        assert job.finish() == 0, job
    check(tmp_path, "result", 3)


def finish_all(started: Jobs, workers: list[jobs.Running]) -> None:
    for worker in workers:
        assert worker.finish() == 0, "\n\n".join(map(str, workers))
    started.wait_until_empty()


def test_without_a_launcher(rig: Rigs, tmp_path: Path) -> None:
    """Interfaces have other names, all hosts have some equal addresses, and their names are loopback to themselves."""
    with jobs.on(rig(2, loopback_names=True, **OTHERWISE), tmp_path) as started:
        finish_all(started, started.plain(["h1", "h1", "h2"], "law", "result", *STRATEGIES))
    check(tmp_path, "result", 3)


def test_under_torchrun(rig: Rigs, tmp_path: Path) -> None:
    with jobs.on(rig(2, **OTHERWISE), tmp_path) as started:
        finish_all(started, started.torchrun({"h1": 2, "h2": 1}, "law", "result", *STRATEGIES))
    check(tmp_path, "result", 3)


@pytest.mark.all_combinations
def test_interfaces_by_name(rig: Rigs, tmp_path: Path) -> None:
    """Under hocket run, see tests/launch/test_rig_hosts.py."""
    with jobs.on(rig(2, **OTHERWISE), tmp_path) as started:
        expected = {
            "eth0,ens3": r"\ndone \d\nended with 0",
            "docker0": r"\nhocket.errors.UsageError: h1: h2 cannot reach it at 172.17.0.1 \(docker0\): ",
            "eth0": r"UsageError: h2 has no interface 'eth0' that is up, but .*ens3.*: use HOCKET_INTERFACE=eth0,NAME",
            "none": r"UsageError: h1 has no interface 'none' that is up, but .*eth0.*: use HOCKET_INTERFACE=none,NAME",
        }
        for worker in started.plain(["h1", "h2"], "cases", *(f"interface {name}" for name in expected)):
            assert worker.finish() == 0
            for name, words in expected.items():
                assert re.search(words, worker.between(f"case interface {name}", "ended with")), str(worker)
