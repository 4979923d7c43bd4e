"""Workers that nothing but six variables make one job: with --on-loss continue the others go on without a lost one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rig.test_going_on import SCRIPT, check_samples

from hocket.launch.local_crew import reserve_port

PATIENCE = 90


@contextmanager
def workers(
    folder: Path, hosts: list[int], script: str, *args: str, **env: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """A worker for each of ``hosts``, which are names for this machine, as a scheduler would start them."""
    (folder / "train.py").write_text(script)
    reserved = reserve_port()
    port = str(reserved.getsockname()[1])
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("HOCKET_", "TORCHELASTIC_"))}
    plain |= {"WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **env}
    started = [
        subprocess.Popen(
            [sys.executable, str(folder / "train.py"), *args],
            env={**plain, "RANK": str(rank), "GROUP_RANK": str(host), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, host in enumerate(hosts)
    ]  # fmt: skip
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()
        reserved.close()


@pytest.mark.few(1)
@pytest.mark.parametrize(("hosts", "strategy"), [([0, 0, 0], "mirrored"), ([0, 1, 1], "local_sgd(period=2)")])
def test_one_is_killed(tmp_path: Path, hosts: list[int], strategy: str) -> None:
    with workers(tmp_path, hosts, SCRIPT, str(tmp_path), strategy, HOCKET_ON_LOSS="continue") as processes:
        first, victim, _ = processes
        assert first.stdout is not None
        assert first.stdout.readline() == "now\n", first.communicate()[1]
        victim.kill()
        ends = []
        for process in (first, processes[2]):
            out, err = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, err
            ends.append(out.split(maxsplit=3))
            said = [line for line in err.splitlines() if "was lost" in line]
            assert said == ["hocket: rank 1 was lost; ranks 0, 2 go on."] * (process is first)
    assert [(word, rank, size) for word, rank, size, _ in ends] == [("end", "0", "2"), ("end", "1", "2")]
    assert ends[0][3] == ends[1][3]
    check_samples(tmp_path, [tmp_path / "1.counted"])


@pytest.mark.all_combinations
def test_the_first_is_killed(tmp_path: Path) -> None:
    """The coordinator is a thread of it, so the job ends."""
    with workers(tmp_path, [0, 1, 1], SCRIPT, str(tmp_path), "mirrored", HOCKET_ON_LOSS="continue") as processes:
        first = processes[0]
        assert first.stdout is not None
        assert first.stdout.readline() == "now\n", first.communicate()[1]
        first.kill()
        for process in processes[1:]:
            err = process.communicate(timeout=PATIENCE)[1]
            assert process.returncode == 1, err
            assert "the coordinator" in err.splitlines()[-1], err


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"HOCKET_ON_LOSS": "replace"}, "needs hocket run, which starts new workers"),
        ({"HOCKET_ON_LOSS": "continue", "TORCHELASTIC_RUN_ID": "none"}, "torchrun, which ends all workers when one"),
    ],
)
def test_what_cannot_be(tmp_path: Path, env: dict[str, str], why: str) -> None:
    with workers(tmp_path, [0, 0], "import hocket\nhocket.init()", **env) as processes:
        for process in processes:
            err = process.communicate(timeout=PATIENCE)[1]
            assert process.returncode == 1 and why in err.splitlines()[-1], err
