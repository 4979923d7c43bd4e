"""``hocket bench``, as far as it does not take long."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hocket.lab.bench import bench_grid


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hocket.launch.cli", "bench", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.all_combinations
def test_the_bench_of_servers_measures_what_it_is_asked_to() -> None:
    done = bench("server", "--parts", "straggler", "--rounds", "1", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["part"] for row in rows] == ["straggler"]
    assert rows[0]["asynchronous_samples/s"] > 0


@pytest.mark.all_combinations
def test_the_bench_of_hogwild_has_speed_and_loss_of_each_way() -> None:
    done = bench("hogwild", "--rounds", "1", "--samples", "2000", "--json")
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)["rows"][0]
    for name in ("plain", "hogwild", "locked"):
        assert row[f"{name}_samples/s"] > 0 and 0 < row[f"{name}_loss"] < 0.7


@pytest.mark.parametrize(
    ("name", "choices"),
    [("server", "shared, tcp, tls, servers, straggler, rows"), ("churn", "recover, hosts, leave, go_on, step")],
)
def test_unknown_parts_are_told(name: str, choices: str) -> None:
    done = bench(name, "--parts", "moon")
    assert done.returncode == 2 and f"the choices are {choices}" in done.stderr


@pytest.mark.all_combinations
def test_the_bench_of_stragglers_compares_strategies() -> None:
    strategies = "mirrored; gossip(asynchronous=True)"
    done = bench("straggler", "-n", "2", "--rounds", "1", "--seconds", "0.3", "--strategies", strategies, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["strategy"] for row in rows] == ["mirrored", "gossip(asynchronous=True)"]
    assert rows[0]["speed_ratio"] == 1 and rows[1]["speed_samples/s"] > 0


@pytest.mark.all_combinations
def test_the_bench_of_noise_says_what_looks_cost() -> None:
    done = bench("noise", "--rounds", "1", "--models", "cnn", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["strategy"] for row in rows] == ["mirrored", "central", "central(fused=True)"]
    assert all(row["a look in_steps"] >= 1 and row["in looks_%"] > 0 for row in rows)


@pytest.mark.all_combinations
def test_the_bench_of_churn_has_a_step_with_each_flag() -> None:
    done = bench("churn", "--parts", "step", "--rounds", "1", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["what"] for row in rows] == ["a step, --on-loss end", "a step, --on-loss replace --spares 0"]
    assert all(row["value"] > 0 for row in rows)


@pytest.mark.all_combinations
def test_the_bench_of_simulated_workers_has_both_times() -> None:
    done = bench("simulated", "-n", "5", "--steps", "3", "--strategies", "mirrored; asynchronous", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["strategy"] for row in rows] == ["mirrored", "asynchronous"]
    assert all(10 < row["virtual step_ms"] < 12 and row["real step of all_ms"] > 0 for row in rows)


def grid_row(algorithm: str, kib: float, over: float, error: float, auto: str = "") -> dict[str, Any]:
    where = {"hosts": "4", "network": "1gbit/s", "algorithm": algorithm, "size_KiB": kib, "auto": auto}
    return {**where, "measured_ms": 1.0 + over, "predicted_ms": 1.0, "error_%": error, "over the fastest_%": over}


def test_a_grid_is_judged_by_cells_and_drawn(tmp_path: Path) -> None:
    rows = [
        grid_row("direct", 4, 0, -10, "takes it"),
        grid_row("ring", 4, 50, 20),
        grid_row("direct", 1024, 30, -40, "takes it"),
        grid_row("ring", 1024, 0, 5),
    ]
    assert bench_grid.judge(rows) == [
        "auto took an algorithm within 10 % of the fastest in 1 of 2 cells (50%); at worst 30 % slower: direct, "
        "4 hosts, 1gbit/s, 1,024 KiB.",
        "Median error of the predicted times: 15 %.",
    ]
    bench_grid.draw([*rows, {**rows[0], "hosts": "2"}], tmp_path / "times.png")
    assert (tmp_path / "times.png").stat().st_size > 1000


@pytest.mark.parametrize(("hosts", "said"), [("1", "from 2 on"), ("4,x", "with commas")])
def test_a_grid_needs_numbers_of_hosts(hosts: str, said: str) -> None:
    done = bench("collectives", "--hosts", hosts)
    assert done.returncode == 2 and said in done.stderr


def test_open_mpi_is_compared_on_one_machine() -> None:
    done = bench("allreduce", "--mpi", "--hosts", "2")
    assert done.returncode == 2 and "--mpi compares on this machine" in done.stderr
