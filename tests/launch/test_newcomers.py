"""Workers that take the place of lost ones, spares, and workers that leave on notice: with scripts without torch."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch.test_run import HOCKET
from launch.test_served_jobs import read_until

BEGIN = """
import json, os, signal, sys, time
from pathlib import Path
from hocket.events import Happening, PipeSink, Progress, Replicas, Stage, Survival

sink, is_new = PipeSink(int(os.environ["HOCKET_EVENTS"])), "HOCKET_NEWCOMER" in os.environ
was_spare, before = "HOCKET_SPARE_FD" in os.environ, {k: v for k, v in os.environ.items() if k.endswith("RANK")}

def until(*conditions):
    while not all(Path(c).exists() if isinstance(c, str) else c() for c in conditions):
        time.sleep(0.01)

def stand_by():
    sink.put(Stage("standing by"))
    print("standing by", flush=True)
    while not (told := os.read(int(os.environ["HOCKET_SPARE_FD"]), 100)):
        os._exit(0)
    os.environ["RANK"] = told.decode().split()[0]

if was_spare:
    Path(f"spare{os.getpid()}").touch()
    stand_by()
rank = int(os.environ["RANK"])
tries = len(list(Path().glob(f"try{rank}-*"))) + 1
Path(f"try{rank}-{tries}").write_text(str(os.getpid()))

def join(survives=True, replaces=True):
    sink.put(Stage("joining"))
    sink.put(Stage("joined"))
    sink.put(Survival(survives))
    sink.put(Survival(survives, replaces, leaves=survives))
    Path(f"joined{rank}-{tries}").touch()
    if not is_new:
        until(*(f"joined{r}-1" for r in range(int(os.environ["WORLD_SIZE"]))))

def die(number=signal.SIGKILL):
    os.kill(os.getpid(), number)
    time.sleep(60)

def said(text):
    return lambda: text in Path("err").read_text()

def leave(status=0):
    sink.put(Stage("left"))
    sys.exit(status)

"""
REPLACE = ("--on-loss", "replace")


@contextmanager
def started(folder: Path, text: str, *flags: str) -> Iterator["subprocess.Popen[str]"]:
    """A job whose errors go to the file ``err``, which the workers can read."""
    (folder / "script.py").write_text(BEGIN + text)
    env = {**os.environ, "HOCKET_RUN_DIR": "runs"}
    with (folder / "err").open("w") as err:
        job = subprocess.Popen(
            [*HOCKET, "run", *flags, "--log-dir", "logs", "script.py"], cwd=folder, env=env, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err,
        )  # fmt: skip
        try:
            yield job
        finally:
            job.kill()
            job.communicate()


def run(folder: Path, text: str, *flags: str) -> tuple[int, list[str], list[str]]:
    """Run a job; its status, the lines of its errors and of its output."""
    with started(folder, text, *flags) as job:
        out, _ = job.communicate(timeout=60)
    return job.returncode, (folder / "err").read_text().splitlines(), out.splitlines()


def events(folder: Path) -> list[tuple[str, dict[str, object]]]:
    (database,) = (folder / "runs").glob("*/*.sqlite")
    with sqlite3.connect(database) as record:
        return [(name, json.loads(d)) for name, d in record.execute("SELECT name, details FROM events ORDER BY time")]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_new_worker_takes_the_place_of_a_lost_one(tmp_path: Path, victim: int) -> None:
    text = f"""
join()
sink.put(Progress(1, 1, 9, 9, 1, 9, 1.0, 2.0, own=10 * rank + tries, ends=True))
print("worker", tries, json.dumps({{k: v for k, v in os.environ.items() if "RANK" in k or "WORLD_SIZE" in k}}))
sink.put(Replicas({{"weight": 5 if (rank, tries) == ({victim}, 1) else 4}}))
if rank == {victim} and tries == 1:
    die()
until("joined{victim}-2")
if is_new:
    until(said("has joined"))
"""
    status, err, out = run(tmp_path, text, "-n", "3", *REPLACE)
    assert status == 0, err
    lost, joined, *rest = err
    who = rf"rank {victim} on \S+"
    assert re.fullmatch(
        rf"hocket: {who} was killed by SIGKILL after [\d.]+ s; the others go on, and a new worker takes its place\.",
        lost,
    )
    assert re.fullmatch(rf"hocket: the new {who} has joined after [\d.]+ s\.", joined)
    assert re.fullmatch(
        rf"hocket: all workers finished; replaced: {who}, which was killed by SIGKILL after [\d.]+ s", rest[-1]
    )
    assert len(rest) == 1, rest
    environments = {line[:3]: [] for line in out}
    for line in out:
        environments[line[:3]].append(json.loads(line.partition("worker ")[2][2:]))
    first, second = environments[f"[{victim}]"]
    assert first == second and second["RANK"] == second["LOCAL_RANK"] == str(victim) and second["WORLD_SIZE"] == "3"
    log = (tmp_path / "logs" / f"rank-{victim}.log").read_text()
    assert re.findall(r"worker (\d)", log) == ["1", "2"]
    told = dict(events(tmp_path))
    assert told["worker lost"]["rank"] == told["newcomer started"]["rank"] == told["newcomer joined"]["rank"] == victim
    (database,) = (tmp_path / "runs").glob("*/*.sqlite")
    with sqlite3.connect(database) as record:
        # Each worker has told 10 times its rank, and 1; the new one 1 more.
        assert record.execute("SELECT max(seen) FROM steps").fetchone()[0] == 30 + 3 + 10 * victim + 2
        times = dict(record.execute("SELECT rank, waited FROM ranks"))
    assert times == {rank: 2.0 if rank == victim else 1.0 for rank in range(3)}


def test_a_spare_takes_the_place_of_a_lost_worker(tmp_path: Path) -> None:
    text = """
join()
if rank == 1 and tries < 3:
    if is_new:
        until(lambda: len(list(Path().glob("spare*"))) == tries)  # another one is there
    until(lambda: len(list(Path("logs").glob("spare-*.log"))) >= tries)
    until(lambda: Path(f"logs/spare-{tries - 1}.log").read_text())
    die()
until("joined1-3")
if is_new:
    print("began with", [*before], "was", was_spare)
    until(lambda: len(list(Path().glob("spare*"))) == 3, lambda: Path("logs/spare-2.log").exists())
    Path("over").touch()
until("over")
"""
    status, err, out = run(tmp_path, text, "-n", "2", *REPLACE, "--spares", "1")
    assert status == 0, err
    used = [line for line in err if "takes its place" in line]
    assert [re.findall(r"and (.*) takes", line) for line in used] == [["spare 0"], ["spare 1"]]
    assert sorted(out) == [*["[1] began with ['GROUP_RANK'] was True"], *[f"[spare {n}] standing by" for n in range(3)]]
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "began with ['GROUP_RANK'] was True\n"
    assert err[-1].startswith("hocket: all workers finished; replaced: rank 1 on ") and err[-1].count("rank 1") == 2
    assert not any("spare 2" in line for line in err), "spares end quietly"


def test_a_spare_that_dies_is_started_anew(tmp_path: Path) -> None:
    text = """
join()
until(said("another one is started"), lambda: len(list(Path().glob("spare*"))) == 2)
"""
    begin = "if was_spare and len(list(Path().glob('spare*'))) == 1: os.kill(os.getpid(), 9)\n"
    script = BEGIN.replace("    stand_by()\nrank", f"    {begin}    stand_by()\nrank")
    assert script != BEGIN
    (tmp_path / "script.py").write_text(script + text)
    with (tmp_path / "err").open("w") as err:
        done = subprocess.run(
            [*HOCKET, "run", "-n", "1", *REPLACE, "--spares", "1", "script.py"], cwd=tmp_path, timeout=60, check=False,
            stderr=err, stdout=subprocess.PIPE, text=True, env={**os.environ, "HOCKET_RUN_DIR": "runs"},
        )  # fmt: skip
    lines = (tmp_path / "err").read_text().splitlines()
    assert done.returncode == 0, lines
    assert re.fullmatch(
        r"hocket: spare 0 on \S+ was killed by SIGKILL after [\d.]+ s; another one is started\.", lines[0]
    )
    assert len(lines) == 1, lines


@pytest.mark.parametrize(("most", "status"), [(3, 0), (2, 137)])
def test_a_new_worker_that_dies_before_it_has_joined_is_a_loss(tmp_path: Path, most: int, status: int) -> None:
    text = """
if is_new and tries < 4:
    die()
join()
if rank == 1 and tries == 1:
    die()
until("joined1-4")
"""
    returned, err, _ = run(tmp_path, text, "-n", "2", *REPLACE, "--max-losses", str(most))
    assert returned == status, err
    assert sum("before it had joined; the others go on, and a new worker takes its place" in e for e in err) == most - 1
    assert (f"hocket: workers lost within an hour: {most + 1}, and --max-losses is {most}." in err) == bool(status)
    if status == 0:
        assert err[-1].startswith("hocket: all workers finished; replaced: rank 1 ") and err[-1].count("rank 1") == 3
    else:
        assert "hocket: the other 1 worker was stopped." in err


def test_an_error_of_the_script_in_a_new_worker_ends_the_job(tmp_path: Path) -> None:
    text = """
if is_new:
    sys.excepthook = lambda *error: (sys.__excepthook__(*error), sink.put(Stage("failed", 1)))
    raise ValueError("this newcomer is broken")
join()
if rank == 1:
    die()
until("never")
"""
    status, err, _ = run(tmp_path, text, "-n", "2", *REPLACE)
    assert status == 1
    assert err[-1] == "ValueError: this newcomer is broken" and any("rank 1 on" in line for line in err)
    assert "hocket: the other 1 worker was stopped." in err


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "join(replaces=False)\nif rank == 1: die()\nuntil(said('the others'))",
            "the others go on without it: new workers can join only after the script has called hocket.resume(), and "
            "with a strategy that takes them.",
        ),
        (
            "join()\nif rank == 0: sys.exit()\nif rank == 1:\n    until(lambda: not Path('/proc', "
            "Path('try0-1').read_text()).exists())\n    time.sleep(0.1)\n    die()\nuntil(said('the others'))",
            "the others go on without it: some have finished already.",
        ),
    ],
    ids=["not told", "some have finished"],
)
def test_where_nobody_can_join_the_others_go_on(tmp_path: Path, text: str, line: str) -> None:
    status, err, _ = run(tmp_path, text, "-n", "3", *REPLACE)
    assert status == 0, err
    assert err[0].endswith(line), err
    assert err[-1].startswith("hocket: the other workers finished; lost on the way: rank 1 on ")


@pytest.mark.parametrize("can", [True, False])
def test_whoever_asks_for_what_is_possible_gets_a_new_worker_where_one_can_join(tmp_path: Path, can: bool) -> None:
    text = f"""
join(replaces={can})
if rank == 1 and tries == 1:
    die()
until("joined1-2" if {can} else said("go on without it.\\n"))
"""
    status, err, _ = run(tmp_path, text, "-n", "2", "--on-loss", "auto", "--spares", "1")
    assert status == 0, err
    assert ("takes its place" in err[0]) == can, err


@pytest.mark.parametrize("how", ["auto", "replace"])
def test_why_nobody_can_join_is_told_once_and_with_each_loss(tmp_path: Path, how: str) -> None:
    text = """
join()
sink.put(Survival(True, obstacle="the script is odd"))
until(said("not replaced"))
if rank == 1:
    die()
until(said("the others"))
"""
    status, err, _ = run(tmp_path, text, "-n", "3", "--on-loss", how)
    assert status == 0, err
    assert err[0] == "hocket: lost workers are not replaced: the script is odd"
    assert err[1].endswith("; the others go on without it: the script is odd."), err
    assert len(err) == 3 and err[2].startswith("hocket: the other workers finished; lost on the way: rank 1 on "), err
    assert dict(events(tmp_path))["no new workers"] == {"why": "the script is odd"}


def test_an_agent_starts_new_workers_too(tmp_path: Path) -> None:
    text = """
join()
print("worker", os.environ["RANK"], os.environ["LOCAL_RANK"], is_new)
if rank == 1 and tries == 1:
    die()
until("joined1-2")
"""
    status, err, out = run(tmp_path, text, "-H", "localhost:2", *REPLACE)
    assert status == 0, err
    assert sorted(out) == ["[0] worker 0 0 False", "[1] worker 1 1 False", "[1] worker 1 1 True"]
    assert err[-1].startswith("hocket: all workers finished; replaced: rank 1 on localhost, which "), err


def test_a_new_worker_that_fails_for_another_is_a_loss(tmp_path: Path) -> None:
    text = """
if is_new and tries == 2:
    print("Traceback (most recent call last):\\nhocket.errors.WorkerLost: gone", file=sys.stderr)
    sink.put(Stage("failed", 1))
    sys.exit(1)
join()
if rank == 1 and tries == 1:
    die()
until("joined1-3")
"""
    status, err, _ = run(tmp_path, text, "-n", "2", *REPLACE)
    assert status == 0, err
    assert any(
        re.search(r"ended with exit code 1 after [\d.]+ s, before it had joined; the others go on, ", e) for e in err
    )


def test_a_new_worker_that_fails_when_others_have_finished_is_no_failure(tmp_path: Path) -> None:
    text = """
if is_new:
    Path("new").touch()
    until(lambda: not Path("/proc", Path("try0-1").read_text()).exists())
    sink.put(Stage("failed", 1))
    sys.exit(1)
join()
if rank == 1:
    die()
until("new", *([said("without joining")] if rank == 2 else []))
"""
    status, err, _ = run(tmp_path, text, "-n", "3", *REPLACE)
    assert status == 0, err
    assert any(
        "the new rank 1 on" in e and "has ended without joining the others; these go on without it." in e for e in err
    )


def test_the_job_ends_with_its_last_worker_though_another_is_on_its_way(tmp_path: Path) -> None:
    text = """
if is_new:
    Path("new").touch()
    until("never")
join()
if rank == 0:
    until("new")
die()
"""
    status, err, _ = run(tmp_path, text, "-n", "2", *REPLACE)
    assert status == 137, err
    assert re.match(r"hocket: rank 0 on \S+ was killed by SIGKILL \(by hand", err[-1]), err


def test_the_job_ends_when_all_have_finished_though_another_is_on_its_way(tmp_path: Path) -> None:
    text = """
if is_new:
    Path("new").touch()
    until("never")
join()
if rank == 1:
    die()
until("new")
"""
    status, err, _ = run(tmp_path, text, "-n", "2", *REPLACE)
    assert status == 0, err
    assert len(err) == 2 and err[-1].startswith("hocket: the other workers finished; lost on the way: rank 1 on "), err


@pytest.mark.parametrize("how", ["continue", "replace"])
def test_a_worker_that_leaves_on_notice_is_no_loss(tmp_path: Path, how: str) -> None:
    text = f"""
join()
if rank == 1 and tries == 1:
    signal.signal(signal.SIGTERM, lambda *_: leave())
    Path("ready").touch()
    until("never")
until("ready")
if rank == 0:
    os.kill(int(Path("try1-1").read_text()), signal.SIGTERM)
until("joined1-2" if {how!r} == "replace" else said("go on without it"))
"""
    status, err, _ = run(tmp_path, text, "-n", "3", "--on-loss", how, "--max-losses", "0")
    assert status == 0, err
    rest = "the others go on, and a new worker takes its place" if how == "replace" else "the others go on without it"
    assert re.fullmatch(rf"hocket: rank 1 on \S+ has left on notice after [\d.]+ s; {rest}\.", err[0]), err
    assert len(err) == (2 if how == "replace" else 1), err  # nobody was lost
    assert "worker left" in dict(events(tmp_path))


def test_too_few_after_somebody_has_left(tmp_path: Path) -> None:
    text = "join()\nif rank == 1: leave()\nuntil('never')"
    status, err, _ = run(tmp_path, text, "-n", "2", "--on-loss", "continue", "--min-workers", "2")
    assert status == 1, err
    assert re.fullmatch(r"hocket: rank 1 on \S+ left on notice after [\d.]+ s\.", err[0]), err
    assert "hocket: workers that are left: 1, and --min-workers is 2." in err


def test_all_workers_leave_on_notice(tmp_path: Path) -> None:
    status, err, _ = run(tmp_path, "join()\nleave()", "-n", "2", "--on-loss", "continue")
    assert status == 143 and err[-1] == "hocket: all workers have left on notice", err


STEPS = """
join(survives=True)
def take_notice(*_):
    print("on notice", flush=True)
    until("saved")
    if rank == 0:
        sink.put(Happening("checkpoint saved", {"path": str(Path("saved/step-7").absolute())}))
    leave()
signal.signal(signal.SIGTERM, take_notice)
print("running", flush=True)
until("never")
"""


def test_sigterm_gives_workers_time_to_leave(tmp_path: Path) -> None:
    with started(tmp_path, STEPS, "-n", "2", *REPLACE, "--spares", "1", "--checkpoint", "saved1") as job:
        read_until(job.stdout, "running", 2)
        job.send_signal(signal.SIGTERM)
        read_until(job.stdout, "on notice", 2)
        time.sleep(1.5)  # longer than workers have otherwise
        (tmp_path / "saved").mkdir()
        finish_quietly(job)
    err = (tmp_path / "err").read_text().splitlines()
    assert job.returncode == 143, err
    assert err[0].startswith("hocket: SIGTERM: the workers have 30 s to finish their batch and end; another signal")
    assert err[1:] == ["hocket: ended by SIGTERM", f"hocket: the last checkpoint is {tmp_path}/saved/step-7."]


def test_workers_that_have_notice_already_get_no_other_signal(tmp_path: Path) -> None:
    """A signal to all processes of a job comes to the workers first; a busy launcher may hear it much later."""
    text = """
join()
sink.put(Stage("on notice"))
signal.signal(signal.SIGTERM, lambda *_: print("signalled", flush=True))
print("running", flush=True)
until(said("SIGTERM: the workers have"))
leave()
"""
    with started(tmp_path, text, "-n", "2", *REPLACE) as job:
        read_until(job.stdout, "running", 2)
        job.send_signal(signal.SIGTERM)
        assert job.stdout is not None and job.stdout.read() == ""
        assert job.wait(60) == 143


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["second signal", "time", "SIGINT"])
def test_notice_has_an_end(tmp_path: Path, how: str) -> None:
    flags = ("--notice", "0.5") if how == "time" else ()
    with started(tmp_path, STEPS, "-n", "2", *REPLACE, *flags) as job:
        read_until(job.stdout, "running", 2)
        job.send_signal(signal.SIGINT if how == "SIGINT" else signal.SIGTERM)
        if how == "second signal":
            read_until(job.stdout, "on notice", 2)
            job.send_signal(signal.SIGTERM)
        finish_quietly(job)
    err = (tmp_path / "err").read_text()
    assert job.returncode == (130 if how == "SIGINT" else 143), err
    assert ("SIGTERM: the workers have" in err) == (how != "SIGINT")


def test_workers_that_cannot_leave_get_no_notice(tmp_path: Path) -> None:
    with started(tmp_path, STEPS.replace("survives=True", "survives=rank == 0, replaces=False"), "-n", "2") as job:
        read_until(job.stdout, "running", 2)
        job.send_signal(signal.SIGTERM)
        finish_quietly(job)
    assert job.returncode == 143
    assert (tmp_path / "err").read_text() == "hocket: ended by SIGTERM\n"


def finish_quietly(job: "subprocess.Popen[str]") -> None:
    assert job.stdout is not None
    job.stdout.read()
    job.wait(60)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--spares", "1", "--on-loss", "end"], "--spares 1 needs --on-loss replace: leave out --on-loss end, or"),
        (["--spares", "-1"], "--spares -1: must be a whole number from 0"),
        (["--on-loss", "perhaps"], "--on-loss perhaps: the choices are auto, end, continue, replace"),
        (["--notice", "0"], "--notice 0: must be a positive number of seconds"),
    ],
)
def test_wrong_flags_are_one_line(tmp_path: Path, flags: list[str], said: str) -> None:
    (tmp_path / "script.py").touch()
    done = subprocess.run(
        [*HOCKET, "run", "-n", "1", *flags, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
