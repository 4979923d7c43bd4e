"""What a process is told by Slurm, MPI, a JobSet and TF_CONFIG: the variables are those of real starts."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hocket import clusters, surroundings
from hocket.errors import UsageError

OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "PMIX_RANK": "3", "PMIX_NAMESPACE": "2719154177",
}  # fmt: skip
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "1", "PMI_FD": "9", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
SLURM = {
    "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "2", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "localhost,n2",
    "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURMD_NODENAME": "n2",
}  # fmt: skip
JOBSET = {"JOBSET_NAME": "train", "REPLICATED_JOB_NAME": "workers", "JOB_COMPLETION_INDEX": "1", "HOCKET_PODS": "2"}


def tf_config(task: str = "worker", index: int = 0, **cluster: list[str]) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": task, "index": index}})}


CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "b:2"]}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({**OPEN_MPI, "MASTER_ADDR": "n1"}, {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
                                             "MASTER_ADDR": "n1"}),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, {"RANK": "3", "MASTER_ADDR": "127.0.0.1"}),
        (MPICH, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
                 "MASTER_ADDR": "127.0.0.1"}),
        (SLURM, {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1",
                 "MASTER_ADDR": "localhost"}),
        ({**SLURM, "PMI_SIZE": "4", "PMI_RANK": "3"}, {"GROUP_RANK": "1"}),  # srun --mpi=pmi2
        ({**SLURM, "MASTER_ADDR": "x", "MASTER_PORT": "7"}, {"MASTER_ADDR": "x", "MASTER_PORT": "7"}),
        ({**SLURM, **OPEN_MPI, "MASTER_ADDR": "x"}, {"LOCAL_WORLD_SIZE": "2"}),  # mpirun within an allocation
        (JOBSET, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "train-workers-0-0.train"}),
        (tf_config("worker", 1, **CLUSTER), {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"}),
    ],
)  # fmt: skip
def test_the_plain_variables(environ: dict[str, str], expected: dict[str, str]) -> None:
    found = surroundings.find(environ)
    assert found is not None
    told = found.variables(environ)
    assert expected.items() <= told.items()
    assert 0 < int(told["MASTER_PORT"]) < 1 << 16


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMIX_RANK": "2"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # a batch script, which is there once
        {**SLURM, "SLURM_STEP_ID": "4294967291"},
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
        {**SLURM, "WORLD_SIZE": "2"},
        {**SLURM, "HOCKET_JOB": "x"},
        tf_config(worker=["localhost:1"]),
        {"TF_CONFIG": '{"cluster": {}}'},
        {"JOBSET_NAME": "train"},
    ],
)
def test_who_is_alone_or_told_otherwise(environ: dict[str, str]) -> None:
    assert surroundings.find(environ) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (OPEN_MPI, "MPI does not say where task 0 is: set MASTER_ADDR"),
        ({"PMI_SIZE": "3", "PMI_RANK": "0", "MASTER_ADDR": "a"}, "set MASTER_PORT to a free one"),
        ({**JOBSET, "HOCKET_PODS": ""}, "HOCKET_PODS, the number of its pods, is not set"),
        (tf_config("worker", 1, ps=["a:1"], worker=["b:1", "b:2"]), "only hocket run starts: write hocket run"),
        ({"TF_CONFIG": "{"}, "TF_CONFIG is not understood"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "TF_CONFIG is not understood"),
        (tf_config("worker", 2, worker=["a:1", "b:1"]), "--task worker:2: TF_CONFIG has worker:0, worker:1"),
        (tf_config(worker=["a:1", "a:1"]), "a:1 is there twice, as worker:0 and as worker:1"),
        (tf_config(worker=["a:port", "b:1"]), "worker:0: 'a:port' is no address"),
        (tf_config(worker=["a:1"], boss=["b:1"]), "role 'boss': the roles are chief, worker, ps, evaluator"),
        (tf_config(ps=["a:1"]), "there is no worker in it"),
        (tf_config("evaluator", worker=["a:1", "b:1"], evaluator=["c:1"]), "evaluator:0 is no part of the job"),
        (tf_config(chief=["a:1", "b:1"]), "it has 2 chiefs"),
    ],
)
def test_what_is_wrong_is_one_line(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        found = surroundings.find(environ)
        assert found is not None
        found.variables(environ)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_lists_of_nodes() -> None:
    assert surroundings.expand_nodes("n[1-3,07],b,c[1-2]x[8-9]") == [
        "n1", "n2", "n3", "n07", "b", "c1x8", "c1x9", "c2x8", "c2x9"
    ]  # fmt: skip
    assert surroundings.expand_nodes("n[098-101]") == ["n098", "n099", "n100", "n101"]
    assert surroundings.expand_nodes("") == []
    assert surroundings.expand_tasks("2(x3),1") == [2, 2, 2, 1]


def test_starts_have_ports_of_their_own() -> None:
    ports = {
        found.meeting({})[1]
        for step in range(50)
        if (found := surroundings.find({**SLURM, "SLURM_STEP_ID": str(step), "SLURM_STEP_NODELIST": "localhost,b"}))
    }
    assert len(ports) > 45 and all(20_000 <= port < 30_000 for port in ports)


def test_a_file_of_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"cluster": {"worker": ["b:1", "b:2"], "chief": ["[fd00::1]:5"], "ps": ["c:1"]}}))
    cluster = clusters.read_file(path)
    assert [str(task) for task in cluster.tasks] == ["chief:0", "worker:0", "worker:1", "ps:0"]
    assert cluster.address(cluster.find("chief")) == ("fd00::1", 5)
    for text in ("{", "[1]", '{"worker": "a:1"}'):
        path.write_text(text)
        with pytest.raises(UsageError, match="write for example"):
            clusters.read_file(path)


SCRIPT = """
import sys, torch, hocket
hocket.init()
told = hocket.allgather(torch.tensor([hocket.rank(), hocket.size(), hocket.local_rank()]))
if hocket.rank() == 0:
    print("told", told.tolist())
"""


def test_copies_that_mpirun_starts_are_one_job(tmp_path: Path) -> None:
    mpirun = shutil.which("mpirun")
    if mpirun is None or "Open MPI" not in subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("Open MPI is not installed")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [mpirun, "--allow-run-as-root", "--oversubscribe", "-np", "3", sys.executable, "script.py"],
        cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "told [[0, 3, 0], [1, 3, 1], [2, 3, 2]]" in done.stdout
    assert done.stderr.count("hocket: OMPI_COMM_WORLD_SIZE=3: 3 workers of one job") == 1
