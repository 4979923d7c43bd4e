"""Jobs on several hosts that are killed while they save go on from what was complete."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Rigs

from hocket.launch.local_crew import reserve_port

SCRIPT = str(Path(__file__).parent / "interrupted.py")
HOSTS = (2, 1)

Start = Callable[[int, list[str], dict[str, Any]], "subprocess.Popen[str]"]
"""Starts a command on a host, with the options of ``Popen``."""


class Job:
    """One process for each worker; ``with`` kills what is left of them."""

    def __init__(self, start: Start, address: str, checkpoint: str, *args: str) -> None:
        self._reserved = reserve_port()
        port = self._reserved.getsockname()[1]
        places = [(host, local) for host, count in enumerate(HOSTS) for local in range(count)]
        self.workers = []
        for rank, (host, local) in enumerate(places):
            told = {
                "RANK": rank, "WORLD_SIZE": sum(HOSTS), "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": HOSTS[host],
                "GROUP_RANK": host, "HOCKET_HOST_NAME": f"host{host}", "MASTER_ADDR": address, "MASTER_PORT": port,
                "HOCKET_TIMEOUT": 60, "HOCKET_CHECKPOINT": checkpoint, "HOCKET_CHECKPOINT_EVERY": 5,
                "OMP_NUM_THREADS": 1,
            }  # fmt: skip
            env = os.environ | {name: str(value) for name, value in told.items()}
            pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            self.workers.append(start(host, [sys.executable, SCRIPT, *args], {"env": env, "text": True, **pipes}))

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(range(len(self.workers)))
        self._reserved.close()

    def wait_for_stop(self, rank: int) -> None:
        stdout = self.workers[rank].stdout
        assert stdout is not None
        while (line := stdout.readline()) != "stopped\n":
            assert line, self.workers[rank].communicate()

    def kill(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.workers[rank].kill()
        for rank in ranks:
            self.workers[rank].communicate()

    def finish(self) -> tuple[str, str]:
        """Where all went on, and the digest of what all have in the end."""
        said = self.said = [worker.communicate(timeout=120) for worker in self.workers]
        assert all(worker.returncode == 0 for worker in self.workers), said
        found = {tuple(re.search(rf"{word} (\w+)", out)[1] for word in ("from", "digest")) for out, _ in said}  # type: ignore[index]
        assert len(found) == 1, said
        return found.pop()  # type: ignore[return-value]


def here(root: Path) -> Start:
    """Hosts that are this machine, each in a directory of its own."""
    for host in range(len(HOSTS)):
        (root / f"host{host}").mkdir(parents=True, exist_ok=True)
    return lambda host, argv, options: subprocess.Popen(argv, cwd=root / f"host{host}", **options)


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of an uninterrupted training."""
    root = tmp_path_factory.mktemp("whole")
    with Job(here(root), "127.0.0.1", "saved") as job:
        return job.finish()[1]


@pytest.mark.few(1)
@pytest.mark.parametrize(("rank", "where"), [(1, "part"), (0, "remote")])
def test_a_job_that_is_killed_in_the_middle_of_a_save(tmp_path: Path, whole: str, rank: int, where: str) -> None:
    start, saved = here(tmp_path), tmp_path / "host0/saved"
    with Job(start, "127.0.0.1", "saved", str(rank), where) as job:
        job.wait_for_stop(rank)
    assert visible(saved) == ["000001-step-5"] and len(list(saved.glob(".000002-step-10.*"))) == 1
    with Job(start, "127.0.0.1", "saved") as job:
        assert job.finish() == ("5", whole)
    assert visible(saved) == ["000002-step-10", "000003-step-15", "000004-step-20"]
    assert not list(saved.glob(".0*")), "what was half written is removed"
    assert not list((tmp_path / "host1").iterdir())


@pytest.mark.all_combinations
def test_a_save_is_completed_without_the_other_hosts(tmp_path: Path, whole: str) -> None:
    start, saved = here(tmp_path), tmp_path / "host0/saved"
    with Job(start, "127.0.0.1", "saved", "0", "remote") as job:
        job.wait_for_stop(0)
        job.kill([2])
        said, errors = job.workers[0].communicate("go on\n", timeout=60)
        assert job.workers[0].returncode == 1 and "WorkerLost" in errors, said
    assert visible(saved) == ["000001-step-5", "000002-step-10"]
    with Job(start, "127.0.0.1", "saved") as job:
        assert job.finish() == ("10", whole)


@pytest.mark.all_combinations
def test_hosts_with_file_systems_of_their_own(rig: Rigs, tmp_path: Path, whole: str) -> None:
    made, folder, other = rig(2), tmp_path / "disk", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    hide = f'mount --bind {other} {folder} && exec "$@"'

    def start(host: int, argv: list[str], options: dict[str, Any]) -> "subprocess.Popen[str]":
        if host == 1:
            argv = ["unshare", "--mount", "sh", "-c", hide, "sh", *argv]
        return made.start(f"h{host + 1}", argv, **options)

    address, saved = made.hosts["h1"].address, folder / "saved"
    with Job(start, address, str(saved), "1", "part") as job:
        job.wait_for_stop(1)
    with Job(start, address, str(saved)) as job:
        assert job.finish() == ("5", whole)
        assert f"{saved}/000001-step-5 is sent from host0: not found on host1" in job.said[0][1]
    assert visible(saved) == ["000002-step-10", "000003-step-15", "000004-step-20"]
    assert not list(other.iterdir())
