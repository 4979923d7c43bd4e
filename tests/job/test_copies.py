"""Copies of a script that do not know of each other are told how to become one job."""

import json
import sys
from typing import Any

import pytest

from hocket import config
from hocket.job import copies, runtime

OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "0",
}
SLURM = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NNODES": "2"}


def tensorflow(*workers: str) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": 1}})}


@pytest.mark.parametrize(
    ("environ", "count", "command"),
    [
        (OPEN_MPI, "2", "hocket run -n 2 train.py"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "2", "hocket run -H HOST1:N1,HOST2:N2 train.py"),
        ({"PMI_SIZE": "3", "PMI_RANK": "0"}, "3", "hocket run -n 3 train.py"),
        ({"PMIX_RANK": "1"}, "several", "hocket run -n 2 train.py"),
        (SLURM, "4", "hocket run -H HOST1:N1,HOST2:N2 train.py"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}, "2", "hocket run -n 2 train.py"),
        (tensorflow("localhost:1", "localhost:2"), "2", "hocket run -n 2 train.py"),
        (tensorflow("node1:1", "node2:1", "node2:2"), "3", "hocket run -H node1:1,node2:2 train.py"),
    ],
)
def test_one_line_says_how_they_become_a_job(
    environ: dict[str, str], count: str, command: str, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py", "--epochs", "3"])
    copies.warn(environ)
    said = capsys.readouterr().err
    assert (
        said.count("\n") == 1 and f"one of {count} copies of the script" in said and "each of them trains alone" in said
    )
    assert f"'{command}'" in said


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "1"},  # the first one says it
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMIX_RANK": "0"},
        {"PMIX_RANK": "2"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # a batch script, which is there once
        {**SLURM, "SLURM_STEP_ID": "4294967291"},
        tensorflow("localhost:1"),
        {"TF_CONFIG": "{"},
        {"TF_CONFIG": '{"cluster": []}'},
    ],
)
def test_a_script_that_is_alone_hears_nothing(environ: dict[str, str], capsys: Any) -> None:
    copies.warn(environ)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("launched", [False, True])
def test_only_who_is_no_worker_of_a_job_is_told(launched: bool, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(runtime, "_current", None)
    monkeypatch.setattr(config, "environment", lambda: OPEN_MPI)
    monkeypatch.setattr(config, "read", lambda: config.Config(launched=launched))
    runtime.init()
    assert ("one of 2 copies" in capsys.readouterr().err) is not launched
