"""Workers that come and go on several hosts: over a real sshd, with scripts without torch."""

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch.sshd import Sshd
from launch.test_newcomers import BEGIN, REPLACE
from launch.test_run import HOCKET

TCP = ("--transport", "tcp")
TOLD = """
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "HOCKET_HOST_NAME", "OMP_NUM_THREADS")
spare = dict(zip(names, told.decode().split())) if was_spare else {}
print("is", *({**os.environ, **spare}[name] for name in names), "new" if is_new else "old")
"""

HEARD = """
def heard():
    # The launcher then knows all that this worker and the others, which call this too, have told it so far.
    for turn in range(2):
        print("turn", turn, flush=True)
        until(*(f"logs/rank-{r}.log" for r in range(int(os.environ["WORLD_SIZE"]))))
        until(*(lambda r=r: f"turn {turn}" in Path(f"logs/rank-{r}.log").read_text()
                for r in range(int(os.environ["WORLD_SIZE"]))))

"""


@contextmanager
def started(sshd: Sshd, folder: Path, hosts: str, text: str, *flags: str) -> Iterator["subprocess.Popen[str]"]:
    """A job on hosts; its errors go to the file ``err``."""
    command = sshd.command(
        hosts, folder, BEGIN.replace("while not (told", "global told\n    while not (told") + HEARD + text
    )
    env = {**os.environ, "HOCKET_RUN_DIR": "runs", "OMP_NUM_THREADS": ""}
    with (folder / "err").open("w") as err:
        job = subprocess.Popen(
            [*command[:-1], *TCP, "--log-dir", "logs", *flags, "script.py"], cwd=folder, env=env, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err,
        )  # fmt: skip
        try:
            yield job
        finally:
            job.kill()
            job.communicate()


def run(sshd: Sshd, folder: Path, hosts: str, text: str, *flags: str) -> tuple[int, list[str], list[str]]:
    """Run a job; its status, the lines of its errors and of its output."""
    with started(sshd, folder, hosts, text, *flags) as job:
        out, _ = job.communicate(timeout=60)
    return job.returncode, (folder / "err").read_text().splitlines(), sorted(out.splitlines())


@pytest.mark.all_combinations
def test_a_lost_worker_is_replaced_on_its_host(sshd: Sshd, tmp_path: Path) -> None:
    text = f"""
join()
{TOLD}
if not is_new:
    heard()
if rank == 2 and tries == 1:
    die()
until("joined2-2", said("has joined"))
"""
    status, err, out = run(sshd, tmp_path, "a:1,b:2", text, *REPLACE)
    assert status == 0, err
    assert re.search(
        r"rank 2 on b was killed by SIGKILL .*; the others go on, and a new worker takes its place\.", err[0]
    )
    assert [line.split()[2:6] for line in out if line.endswith("new")] == [["2", "1", "2", "b"]]


def test_the_workers_of_a_lost_host_are_replaced_where_there_is_room(sshd: Sshd, tmp_path: Path) -> None:
    text = f"""
join()
{TOLD}
if not is_new:
    heard()
if rank == 1 and tries == 1:
    os.kill(os.getppid(), signal.SIGKILL)
until("joined1-2", said("has joined"))
"""
    status, err, out = run(sshd, tmp_path, "a:1,b:2,c:2", text, "-n", "4", *REPLACE)
    assert status == 0, err
    assert re.fullmatch(
        r"hocket: host b \(ranks 1, 2\) was lost after .*; the others go on, and a new worker on c takes the place of "
        r"rank 1; more cannot come: no host of the job has a free slot\.",
        err[0],
    ), err
    cores = len(os.sched_getaffinity(0))
    assert [line.split()[2:] for line in out if line.endswith("new")] == [
        ["1", "1", "2", "c", str(max(1, cores // 2)), "new"]
    ]
    assert "lost on the way: host b (ranks 1, 2)" in err[-1]


@pytest.mark.all_combinations
def test_spares_are_dealt_over_the_hosts(sshd: Sshd, tmp_path: Path) -> None:
    text = f"""
join()
{TOLD}
if not is_new:
    heard()
if rank == 1 and tries == 1:
    until(*(f"logs/spare-{{n}}.log" for n in range(2)))
    until(*(lambda n=n: Path(f"logs/spare-{{n}}.log").read_text() for n in range(2)))
    die()
until("joined1-2", said("has joined"), lambda: len(list(Path().glob("spare*"))) == 3)
"""
    flags = ("--spares", "2", *REPLACE)
    status, err, out = run(
        sshd,
        tmp_path,
        "a:1,b:1",
        text.replace("*(Path", "*(lambda n=n: Path").replace("read_text for", "read_text() for"),
        *flags,
    )
    assert status == 0, err
    assert "and spare 1 takes its place." in err[0], err
    assert [line.split()[2:6] for line in out if line.endswith("new")] == [["1", "0", "1", "b"]]


@pytest.mark.all_combinations
def test_over_gloo_nobody_can_join(sshd: Sshd, tmp_path: Path) -> None:
    text = """
join()
heard()
if rank == 1:
    die()
until(said("the others go on"))
"""
    status, err, _ = run(sshd, tmp_path, "a:1,b:1", text, "--transport", "gloo", *REPLACE)
    assert status == 0, err
    assert "between hosts nobody can join over Gloo, with --on-loss end, or where there are GPUs unless" in err[0]


TRAIN = f"""
join()
{TOLD}
if not is_new:
    heard()
Path(f"here-{{rank}}-{{os.environ['HOCKET_HOST_NAME']}}").touch()
signal.signal(signal.SIGTERM, lambda *_: leave())
until("over")
"""


def resize(folder: Path, *flags: str) -> str:
    """Resize the only job that runs in ``folder``; what is said."""
    (mark,) = {mark for path in folder.glob("try*") if (mark := variable(int(path.read_text()), "HOCKET_JOB"))}
    done = subprocess.run(
        [*HOCKET, "resize", mark[:6], *flags], capture_output=True, text=True, timeout=30, check=False
    )
    return done.stdout + done.stderr


def variable(process: int, name: str) -> str:
    try:
        texts = Path(f"/proc/{process}/environ").read_text().split("\0")
    except OSError:
        return ""
    return next((text.partition("=")[2] for text in texts if text.startswith(f"{name}=")), "")


def wait_for(folder: Path, *names: str, said: str = "") -> None:
    """Until there are these files, and something was said."""
    deadline = time.monotonic() + 60
    while not all((folder / name).exists() for name in names) or not re.search(said, (folder / "err").read_text()):
        assert time.monotonic() < deadline, (names, said, (folder / "err").read_text())
        time.sleep(0.02)


def end(folder: Path, job: "subprocess.Popen[str]") -> list[str]:
    (folder / "over").touch()
    job.communicate(timeout=60)
    lines = (folder / "err").read_text().splitlines()
    assert job.returncode == 0, lines
    return lines


@pytest.mark.all_combinations
def test_a_running_job_gets_other_hosts(sshd: Sshd, tmp_path: Path) -> None:
    with started(sshd, tmp_path, "a:1,b:1", TRAIN, *REPLACE) as job:
        wait_for(tmp_path, "here-0-a", "here-1-b")
        wait_for(tmp_path, "logs/rank-1.log", "logs/rank-0.log")
        assert "c is asked to join; b leaves" in resize(tmp_path, "-H", "a:1,c:2")
        wait_for(tmp_path, "here-1-c", "here-2-c", said="rank 1 on b has left ")
        assert "more than" not in (said := resize(tmp_path, "-n", "4")) and "its hosts have 3 slots" in said, said
        assert "rank 2 leaves" in resize(tmp_path, "-n", "2")
        wait_for(tmp_path, said="rank 2 on c has left ")
        lines = end(tmp_path, job)
    assert "hocket: b leaves the job." in lines
    assert any("the new rank 2 on c has joined" in line for line in lines)


WISHES = {
    "-H b:1": "-H without a, but the coordinator is there: name a, too",
    "-H a:1,b:1 -n 5": "-n 5, but these hosts have 2 slots: use at most -n 2",
    "-H a:x": "-H a:x: 'a:x': 'x' is no number of workers from 1: write for example a:4",
    "-n 5": "-n 5, but its hosts have 4 slots: use at most -n 4, or name more hosts with -H",
    "-n 2": "it has 2 workers already",
    "": "say how many workers it is to have, with -n 4, or on which hosts, with -H node1:4,node2:4",
    "-H a:1,b:1,nowhere:1": "nowhere is asked to join",
}


def test_bad_wishes_are_one_line_and_the_job_goes_on(sshd: Sshd, tmp_path: Path) -> None:
    with started(sshd, tmp_path, "a:1,b:1,c:2", TRAIN, "-n", "2", *REPLACE) as job:  # c is not needed at first
        wait_for(tmp_path, "here-0-a", "here-1-b")
        for flags, said in WISHES.items():
            answer = resize(tmp_path, *flags.split())
            assert said in answer and answer.count("\n") == 1, answer
        wait_for(tmp_path, said="hocket: nowhere cannot join the job: its name does not resolve: check the ")
        end(tmp_path, job)


def list_hosts(folder: Path, text: str) -> None:
    """Have these hosts listed from now on, at once: whoever reads the file must not find it empty."""
    (folder / "new hosts").write_text(text)
    (folder / "new hosts").rename(folder / "hosts")


def test_hosts_are_discovered_and_vanish(sshd: Sshd, tmp_path: Path) -> None:
    list_hosts(tmp_path, "a:1\nb:1\n")
    command = sshd.command(
        "x", tmp_path, BEGIN.replace("while not (t", "global told\n    while not (t") + HEARD + TRAIN
    )
    command[command.index("-H") : command.index("-H") + 2] = [
        "--discover",
        f"cat {shlex.quote(str(tmp_path / 'hosts'))}",
    ]
    with (tmp_path / "err").open("w") as err:
        job = subprocess.Popen(
            [*command[:-1], "-n", "2..3", "--log-dir", "logs", *REPLACE, "script.py"], cwd=tmp_path, text=True,
            env={**os.environ, "HOCKET_RUN_DIR": "runs"}, stdout=subprocess.PIPE, stderr=err, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    try:
        wait_for(tmp_path, "here-0-a", "here-1-b")
        list_hosts(tmp_path, "a:1\nb:1\nc:4\n")
        wait_for(tmp_path, "here-2-c", said="the new rank 2 on c has joined")
        list_hosts(tmp_path, "what: is this\n")
        wait_for(tmp_path, said=r"--discover cat .*, line 1: .*; the job goes on with the hosts that it has")
        (tmp_path / "hosts").unlink()
        wait_for(tmp_path, said=r"--discover cat .*: it ended with status 1; the job goes on")
        list_hosts(tmp_path, "b:1\nc:1\n")
        wait_for(tmp_path, said="a is not listed any more, but the coordinator is there: it stays")
        list_hosts(tmp_path, "a:1\nc:2\n")
        wait_for(tmp_path, "here-3-c", said="rank 1 on b has left after")
        lines = end(tmp_path, job)
    finally:
        job.kill()
        job.communicate()
    assert len([line for line in lines if "it ended with status 1" in line]) == 1


def test_a_signal_to_an_agent_is_a_notice_for_its_host(sshd: Sshd, tmp_path: Path) -> None:
    with started(sshd, tmp_path, "a:2,b:2", TRAIN, "-n", "3", *REPLACE) as job:
        wait_for(tmp_path, "here-0-a", "here-1-a", "here-2-b")
        wait_for(tmp_path, *(f"logs/rank-{rank}.log" for rank in range(3)))
        worker = int((tmp_path / "try2-1").read_text())
        agent = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(agent, signal.SIGTERM)
        wait_for(tmp_path, said="rank 2 on b has left on notice")
        lines = end(tmp_path, job)
    assert any("b has to leave: its agent was told so by SIGTERM; its workers finish their batch." in e for e in lines)
    assert any(e.endswith("the others go on without it: no host of the job has a free slot.") for e in lines), lines


@pytest.mark.all_combinations
def test_hosts_that_were_not_needed_are_asked_when_they_are(sshd: Sshd, tmp_path: Path) -> None:
    with started(sshd, tmp_path, "a:1,b:1,c:1", TRAIN, "-n", "2", *REPLACE) as job:
        wait_for(tmp_path, "here-0-a", "here-1-b")
        wait_for(tmp_path, "logs/rank-1.log", "logs/rank-0.log")
        worker = int((tmp_path / "try1-1").read_text())
        agent = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(agent, signal.SIGKILL)
        wait_for(tmp_path, "here-1-c", said="the new rank 1 on c has joined")
        lines = end(tmp_path, job)
    assert any("no host of the job has a free slot; asked for some: c." in line for line in lines), lines


@pytest.mark.all_combinations
def test_a_job_begins_with_the_hosts_that_are_there(sshd: Sshd, tmp_path: Path) -> None:
    with started(sshd, tmp_path, "a:1,nowhere:2,b:1", TRAIN, "-n", "2..4", *REPLACE) as job:
        wait_for(
            tmp_path, "here-0-a", "here-1-b", said="hocket: nowhere is left out: its name does not resolve: check "
        )
        end(tmp_path, job)
    done = sshd.run("a:1,nowhere:2", tmp_path, "", "-n", "2..3")
    assert done.returncode == 2 and "  nowhere: its name does not resolve" in done.stderr, done.stderr


@pytest.mark.few(1)
@pytest.mark.parametrize("flags", ["-n 2..3", "--spares 1", ""])
def test_workers_come_over_tcp_where_some_are_expected(sshd: Sshd, tmp_path: Path, flags: str) -> None:
    script = "import os; print(os.environ.get('HOCKET_TRANSPORT', 'auto'))"
    done = sshd.run("a:1,b:1", tmp_path, script, *flags.split())
    transport = "tcp" if flags else "auto"
    assert {f"[0] {transport}", f"[1] {transport}"} <= set(done.stdout.splitlines()), done
