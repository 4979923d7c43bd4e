"""``hocket run`` and ``hocket runs`` with real processes."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = str(Path(__file__).parent / "talking.py")
HOCKET = [sys.executable, "-m", "hocket.launch.cli"]


def hocket(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HOCKET, *args], capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **env}
    )


def launch(*args: str) -> subprocess.Popen[bytes]:
    """A run that has told all it has to tell, and goes on."""
    job = subprocess.Popen([*HOCKET, "run", *args, SCRIPT, "forever"], stdout=subprocess.PIPE)
    assert job.stdout is not None
    assert b"trained" in job.stdout.readline()
    return job


def runs(*args: str) -> Any:
    done = hocket("runs", *args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def end(job: subprocess.Popen[bytes], number: signal.Signals) -> int:
    job.send_signal(number)
    assert job.stdout is not None
    job.stdout.close()
    return job.wait(timeout=20)


def test_a_run_is_recorded(folder: Path) -> None:
    done = hocket("run", "-n", "2", "--timeout", "77", SCRIPT, "train", "12", HOCKET_ON_NAN="skip")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (run,) = runs()
    assert (run["state"], run["workers"], run["strategy"], run["script"]) == ("finished", 2, "central", "talking")
    assert [path.name for path in (folder / "hocket-runs").iterdir()] == [run["id"]]
    whole = runs("show", "last")
    facts = whole["facts"]
    assert facts["run"]["command"] == ["hocket", "run", "-n", "2", "--timeout", "77", SCRIPT, "train", "12"]
    assert facts["run"]["directory"] == str(folder) and facts["told"]["parameters"] == 1234
    assert (facts["settings"]["timeout"], facts["settings"]["on-nan"]) == ("77", "skip")
    assert facts["settings"]["checkpoint-every"] == "500", "defaults are recorded too"
    assert set(facts["versions"]) == {"hocket", "python", "torch", "system"} and facts["versions"]["torch"]
    assert set(facts["host"]) == {"name", "cpu", "cores", "memory"} and facts["host"]["cores"] >= 1
    assert whole["metrics"]["loss"]["best"] == whole["metrics"]["loss"]["last"] == 1 / 12
    assert whole["speed"]["total"] == 100 and whole["speed"]["seen"] == 800
    assert {rank: totals["exchanging"] for rank, totals in whole["ranks"].items()} == {"0": 0.4, "1": 0.4}


def test_the_death_of_the_launcher_leaves_what_was_told(folder: Path) -> None:
    job = launch("-n", "2")
    wait_for(lambda: runs()[0]["metrics"].get("loss") == 0.1)
    assert runs()[0]["state"] == "running"
    assert "running" in hocket("runs").stdout
    end(job, signal.SIGKILL)
    (run,) = runs()
    assert run["state"] == "killed" and run["metrics"] == {"loss": 0.1, "accuracy": 0.1}
    assert "killed: the launcher is gone" in hocket("runs", "show").stdout
    database = sqlite3.connect(folder / "hocket-runs" / run["id"] / "run.sqlite")
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()


def test_two_jobs_at_once(folder: Path) -> None:
    jobs = [launch("-n", "1") for _ in range(2)]
    wait_for(lambda: [run["metrics"].get("loss") for run in runs()] == [0.1, 0.1])
    assert [end(job, number) for job, number in zip(jobs, (signal.SIGINT, signal.SIGTERM), strict=True)] == [130, 143]
    found = runs()
    assert {run["state"] for run in found} == {"failed (130)", "failed (143)"} and len(found) == 2
    reasons = {runs("show", run["id"])["reason"] for run in found}
    assert reasons == {"ended by SIGINT", "ended by SIGTERM"}


def test_a_failure_and_the_last_checkpoint_are_reported_and_recorded(folder: Path) -> None:
    done = hocket("run", "-n", "1", SCRIPT, "checkpoints", str(folder / "c"), "raise")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[1] == f"hocket: the last checkpoint is {folder}/c/one."
    assert lines[2] == "Traceback (most recent call last):" and lines[-1] == "ValueError: broken on purpose"
    whole = runs("show")
    assert whole["state"] == "failed (1)" and "ValueError: broken on purpose" in whole["reason"]
    assert whole["events"][-1]["name"] == "failure" and whole["events"][-1]["details"]["report"] == lines
    assert "ValueError: broken on purpose" in hocket("runs", "show").stdout


@pytest.mark.few(2)
@pytest.mark.parametrize("how", ["", "raise", "SIGTERM", "SIGKILL"])
def test_half_written_checkpoints_are_removed(folder: Path, how: str) -> None:
    done = hocket("run", "-n", "1", "--checkpoint", "kept", SCRIPT, "checkpoints", str(folder / "c"), how)
    assert done.returncode == {"": 0, "raise": 1, "SIGTERM": 143, "SIGKILL": -9}[how]
    if how == "SIGKILL":
        wait_for(lambda: len(list((folder / "c").iterdir())) == 2)
        return
    # .one was renamed by who made it; a name without a dot is none of a temporary folder
    assert sorted(path.name for path in (folder / "c").iterdir()) == [".one", "keep"]
    said = f"hocket: the last checkpoint is {folder}/c/one."  # by hand, and not in the folder of --checkpoint
    assert (said in done.stderr.splitlines()) == bool(how)
    assert runs("show")["facts"]["settings"]["checkpoint"] == str(folder / "kept")


def test_an_absent_rank_is_recorded(folder: Path) -> None:
    assert hocket("run", "-n", "2", SCRIPT, "absent").returncode == 1
    whole = runs("show")
    assert whole["state"] == "failed (1)" and "rank 1 on " in whole["reason"] and "rank 0 waits" in whole["reason"]


def test_a_failure_of_the_launcher_itself_is_recorded(folder: Path) -> None:
    code = "from hocket.launch import cli, local_crew; local_crew.LocalCrew._start = lambda *_: 1 / 0; cli.main()"
    command = [sys.executable, "-c", code, "run", "-n", "1", SCRIPT, "train"]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 1
    whole = runs("show")
    assert whole["state"] == "failed (1)" and "the launcher failed: ZeroDivisionError" in whole["reason"]


def test_without_a_record_nothing_is_written(folder: Path) -> None:
    assert hocket("run", "-n", "1", "--no-record", SCRIPT, "train").returncode == 0
    assert not list(folder.iterdir())
    refused = hocket("run", "-n", "1", "--no-record", "--tensorboard", SCRIPT, "train")
    assert refused.returncode == 2 and "leave out --no-record" in refused.stderr


def test_a_default_folder_that_cannot_be_written_does_not_stop_the_run(folder: Path) -> None:
    (folder / "hocket-runs").write_text("a file")
    done = hocket("run", "-n", "1", SCRIPT, "train")
    assert done.returncode == 0
    assert done.stderr.startswith("hocket: this run is not recorded: ") and done.stderr.count("\n") == 1


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("args", "env", "message"),
    [
        (["--run-dir", "file/below"], {}, "--run-dir file/below: Not a directory; name a folder that can be written"),
        (["--run-dir", "file"], {}, "--run-dir file: file is no folder; name a folder that can be written"),
        ([], {"HOCKET_RUN_DIR": "file/below"}, "or leave the record out with --no-record"),
        (["--checkpoint", "file/below"], {}, "Not a directory; choose a folder that can be written to"),
        (["--checkpoint-every", "0"], {}, "--checkpoint-every 0: must be a whole number from 1"),
        (["--checkpoint-keep", "all"], {}, "--checkpoint-keep all: must be a whole number from 1"),
        ([], {"HOCKET_CHECK_REPLICAS": "-1"}, "--check-replicas -1: must be a whole number from 0"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(
    folder: Path, args: list[str], env: dict[str, str], message: str
) -> None:
    (folder / "file").touch()
    done = hocket("run", "-n", "1", *args, SCRIPT, "checkpoints", str(folder / "c"), **env)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_a_full_disk_does_not_stop_the_run(folder: Path, small_disk: Path) -> None:
    done = hocket("run", "-n", "1", "--run-dir", str(small_disk), SCRIPT, "flood")
    assert (done.returncode, done.stdout) == (0, "[0] trained\n")
    assert done.stderr.startswith("hocket: the record of this run ") and "full" in done.stderr
    assert done.stderr.count("\n") == 1
    (run,) = runs("--run-dir", str(small_disk))
    assert run["state"] == "finished", "there was room for this one row"


def test_list_show_and_compare_read_well(folder: Path) -> None:
    assert hocket("runs").stdout.startswith("No runs in hocket-runs.") and runs() == []
    for workers, steps in (("1", "10"), ("2", "20")):
        assert hocket("run", "-n", workers, SCRIPT, "train", steps).returncode == 0
    first, second = (run["id"] for run in runs())
    head, *lines = hocket("runs").stdout.splitlines()
    assert head.split() == ["run", "workers", "strategy", "took", "state", "last", "metrics"]
    assert lines[0].startswith(f"{first}  1        central") and lines[0].endswith("finished  loss 0.1, accuracy 0.1")
    shown = hocket("runs", "show", second[-6:]).stdout
    assert f"run        {second}\nstate      finished\n" in shown
    for part in ("samples/s", "waiting", "communication", "rank 1", "parameters  1234", "torch"):
        assert part in shown
    lines = shown.replace("20x", "20×").splitlines()  # as it is written where the locale has no ×
    assert ["loss", "1", "0.05", "0.05", "20", "20×"] in [line.split() for line in lines]
    compared = hocket("runs", "compare", first, "last").stdout
    differs = compared[compared.index("What differs") : compared.index("Speed")]
    assert "  workers  1" in differs and "timeout" not in differs
    assert ["loss,", "best", "0.1", "0.05"] in [line.split() for line in compared.splitlines()]
    both = runs("compare", first, second)
    assert both["differences"]["workers"] == {"a": 1, "b": 2} and both["a"]["id"] == first


def test_an_unknown_or_ambiguous_id_is_one_line_with_the_choices(folder: Path) -> None:
    assert "no runs in hocket-runs: start one" in hocket("runs", "show", "x").stderr
    for _ in range(2):
        hocket("run", "-n", "1", SCRIPT, "train", "1")
    first, second = (run["id"] for run in runs())
    for part, message in (("talking", "2 runs have 'talking' in their id"), ("zebra", "no run has 'zebra' in its id")):
        done = hocket("runs", "show", part)
        assert done.returncode == 2 and done.stderr.startswith(f"hocket: {message}")
        assert first in done.stderr and second in done.stderr and done.stderr.count("\n") == 1


def test_replicas_that_differ_at_the_end_are_a_failure(folder: Path) -> None:
    done = hocket("run", "-n", "3", SCRIPT, "replicas", "1")
    assert done.returncode == 1
    assert "after the last step the replicas were not equal: '0.bias' on rank 1; something" in done.stderr
    assert runs()[0]["state"] == "failed (1)"
    assert hocket("run", "-n", "2", SCRIPT, "replicas", "").returncode == 0
