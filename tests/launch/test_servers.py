"""``hocket run --servers`` on one host, with a stand-in for the server: environment, output, ends and losses."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.test_faults import mark_of
from launch.test_run import HOCKET

STUB = str(Path(__file__).parent / "stub")
BEGIN = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from hocket.events import Facts, Happening, PipeSink, Stage, Survival

rank, sink = int(os.environ["RANK"]), PipeSink(int(os.environ["HOCKET_EVENTS"]))

def until(*conditions):
    while not all(Path(c).exists() if isinstance(c, str) else c() for c in conditions):
        time.sleep(0.01)

def join(survives=True, joins=True):
    if joins:
        sink.put(Stage("joined"))
    sink.put(Survival(survives))
    Path(f"joined{rank}").touch()
    until(*(f"joined{r}" for r in range(int(os.environ["WORLD_SIZE"]))))

def serving(*numbers):
    until(*(lambda n=n: Path(f"logs/server-{n}.log").read_text() for n in numbers))  # its handler is there
"""


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (STUB, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **more}


def command(folder: Path, text: str, *flags: str) -> list[str]:
    (folder / "script.py").write_text(BEGIN + text)
    return [*HOCKET, "run", *flags, "--log-dir", "logs", "script.py"]


def run(
    folder: Path, text: str, *flags: str, workers: int = 2, servers: int = 1, **env: str
) -> subprocess.CompletedProcess[str]:
    counts = ("-n", str(workers), "--servers", str(servers))
    return subprocess.run(
        command(folder, text, *counts, *flags), cwd=folder, env=environment(**env), capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


def told(folder: Path, number: int) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / f"told{number}").read_text())
    return found


def test_servers_get_the_environment_of_workers_without_a_rank(tmp_path: Path) -> None:
    text = "serving(0, 1); Path(f'worker{rank}').write_text(json.dumps(dict(os.environ)))"
    done = run(
        tmp_path, text, "--tls", "off", "--verbose", servers=2, STANDIN_TELL="told", OMP_NUM_THREADS="", RANK="7",
        HOCKET_SERVER="9",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cores = len(os.sched_getaffinity(0))
    worker = json.loads((tmp_path / "worker1").read_text())
    assert worker["OMP_NUM_THREADS"] == str(max(1, cores // 4)) and "HOCKET_SERVER" not in worker
    same = ("HOCKET_RENDEZVOUS", "HOCKET_JOB", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
            "HOCKET_SERVERS", "HOCKET_TLS", "HOCKET_VERBOSE", "GROUP_RANK")  # fmt: skip
    for number in range(2):
        server = told(tmp_path, number)
        assert not {"RANK", "LOCAL_RANK", "ROLE_RANK"} & set(server)
        assert server["HOCKET_SERVER"] == str(number)
        assert [server[name] for name in same] == [worker[name] for name in same]
        assert server["OMP_NUM_THREADS"] == str(max(1, cores // 4))
        assert (server["secret"], server["args"], server["cwd"], server["input"]) == (
            32, [str(tmp_path)], str(tmp_path), ""
        )  # fmt: skip
    assert (worker["HOCKET_SERVERS"], worker["HOCKET_TLS"], worker["HOCKET_VERBOSE"]) == ("2", "off", "on")
    assert (worker["MASTER_ADDR"], worker["WORLD_SIZE"]) == ("127.0.0.1", "2")


def test_servers_are_seen_and_end_with_the_job(tmp_path: Path) -> None:
    done = run(tmp_path, "serving(0, 1)", servers=2, HOCKET_RUN_DIR="runs")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[server 0] serving", "[server 1] serving"]
    assert sorted(done.stderr.splitlines()[:2]) == ["[server 0] last words", "[server 1] last words"]
    assert (tmp_path / "logs" / "server-1.log").read_text() == "serving\nlast words\n"
    assert (tmp_path / "logs" / "rank-1.log").exists()
    assert done.stderr.splitlines()[2:] == [
        "hocket: staleness (updates between a worker's pull and its push): mean 1.9, most 3",
        "hocket: rank 0: 10.0 pushes/s, staleness 1.5 (0:25% 2:75%), waited 0.5 s",
        "hocket: rank 1: 10.0 pushes/s, staleness 2.2 (0:25% 3:75%), waited 0.5 s",
        "hocket: server 0 on here: busy 25%, 2 updates, 3.1 GB in, 5.0 kB out",
        "hocket: server 1 on here: busy 25%, 2 updates, 3.1 GB in, 5.0 kB out",
        "hocket: pushes refused as too late: 1 of rank 1",
        "hocket: refused: wrong secret 2×",
    ], "what a server told last counts"
    show = [*HOCKET, "runs", "--run-dir", "runs", "show", "last"]
    shown = subprocess.run(show, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False).stdout
    assert "\nServers\n  staleness                   mean 1.9, most 3\n" in shown
    assert ", server 1: shards placed: shards 3\n" in shown
    data = json.loads(subprocess.check_output([*show, "--json"], cwd=tmp_path, timeout=60))
    assert data["facts"]["served"]["server 1"]["workers"]["1"]["staleness"] == {"0": 1, "3": 3}


def test_a_server_of_a_module_gets_no_folder(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "module.py").write_text(BEGIN + "until('told0')")
    line = [*HOCKET, "run", "-n", "1", "-m", "module"]
    env = environment(STANDIN_TELL="told", HOCKET_SERVERS="1")
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert told(tmp_path, 0)["args"] == [""]


def test_a_server_that_does_not_end_is_killed(tmp_path: Path) -> None:
    done = run(tmp_path, "serving(0)", STANDIN="stubborn")
    assert done.returncode == 0, done.stderr
    assert "last words" not in done.stderr and "server 0 on here: busy 25%, 1 update," in done.stderr


def test_a_server_that_fails_at_the_end_is_reported(tmp_path: Path) -> None:
    done = run(tmp_path, "serving(0)", STANDIN="fail at the end")
    assert done.returncode == 3
    assert "hocket: server 0 on " in done.stderr and "ended with exit code 3 after " in done.stderr


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("kill", 137, "was killed by SIGKILL (by hand, or because the machine ran out of memory: see dmesg) after "),
        ("raise", 1, "ended with exit code 1 after "),
        ("leave", 1, "ended with exit code 0 after "),
    ],
)
def test_a_server_that_ends_early_ends_the_job(tmp_path: Path, how: str, status: int, said: str) -> None:
    text = "sink.put(Happening('checkpoint saved', {'path': str(Path('c/step-1').absolute())}))\nuntil('never')"
    done = run(tmp_path, text, "--checkpoint", "c", servers=2, STANDIN=how, STANDIN_NUMBER="1")
    assert done.returncode == status, done.stderr
    lines = done.stderr[done.stderr.rindex("hocket: server 1 on ") :].splitlines()
    assert said in lines[0]
    assert lines[1] == "hocket: the 2 workers were stopped."
    assert lines[2] == f"hocket: the last checkpoint is {tmp_path}/c/step-1; the same command continues from it."
    assert (lines[-1] == "ValueError: this server is broken") == (how == "raise") and len(lines) > 2


def test_workers_that_miss_their_server_are_not_the_cause(tmp_path: Path) -> None:
    text = (
        "import hocket.errors; serving(0)\n"
        "if rank == 0: os.kill(json.loads(Path('told0').read_text())['pid'], signal.SIGKILL)\n"
        "raise hocket.errors.ServerLost('server 0 is gone')"
    )
    done = run(tmp_path, text, STANDIN_TELL="told")
    assert done.returncode == 137, done.stderr
    assert done.stderr.splitlines()[-1].startswith("hocket: server 0 on ") and "ServerLost" not in done.stderr


KILL = "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
LOST = "until(lambda: 'the others go on' in Path('err').read_text())\n"


def run_lossy(folder: Path, text: str, workers: int = 3, **env: str) -> tuple[int, list[str], str]:
    """Run with the launcher's words in a file that workers read."""
    with (folder / "err").open("w") as err:
        counts = ("-n", str(workers), "--servers", "1")
        done = subprocess.run(
            command(folder, text, *counts), cwd=folder, env=environment(**env), stdout=subprocess.PIPE, stderr=err,
            text=True, timeout=60, check=False,
        )  # fmt: skip
    return done.returncode, (folder / "err").read_text().splitlines(), done.stdout


def test_a_killed_worker_is_survived_where_the_strategy_does(tmp_path: Path) -> None:
    text = (
        "join(survives=rank == 1)\n"  # one that tells so is enough
        "if rank == 1:\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    Path('child').write_text(str(child.pid)); os.kill(os.getpid(), signal.SIGKILL)\n"
        + LOST
        + "until(lambda: not Path('/proc', Path('child').read_text()).exists())\n"
        "print('finished')"
    )
    status, lines, out = run_lossy(tmp_path, text, HOCKET_RUN_DIR="runs")
    assert status == 0, lines
    assert sorted(line for line in out.splitlines() if "finished" in line) == ["[0] finished", "[2] finished"]
    (said,) = [line for line in lines if "go on" in line]
    assert said.startswith("hocket: rank 1 on ") and " was killed by SIGKILL after " in said
    assert said.endswith(" s; the others go on without it.")
    assert lines[-1].startswith("hocket: the other workers finished; lost on the way: rank 1 on ")
    assert " was killed by SIGKILL after " in lines[-1]
    show = [*HOCKET, "runs", "--run-dir", "runs", "show", "last", "--json"]
    record = json.loads(subprocess.check_output(show, cwd=tmp_path, timeout=60))
    (event,) = [event for event in record["events"] if event["name"] == "worker lost"]
    assert event["rank"] is None and event["details"]["rank"] == 1 and record["state"] == "finished"
    assert record["reason"] == lines[-1].removeprefix("hocket: ")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("join(survives=False)\n" + KILL, 137, "rank 1 on .* was killed by SIGKILL"),
        ("join(joins=rank == 1)\n" + KILL, 137, "rank 1 on .* was killed by SIGKILL"),
        ("join()\nif rank == 1: sys.exit(5)\n", 5, "rank 1 on .* ended with exit code 5"),
        ("join()\n" + KILL + LOST + "sys.exit(6) if rank == 2 else None\n", 6, "rank 2 on .* ended with exit code 6"),
        ("join()\n" + KILL + LOST + "os.kill(os.getpid(), 9)\n", 137, "rank [02] on .* was killed by SIGKILL"),
    ],
    ids=["not survived", "before all joined", "exit", "exit later", "the last ones"],
)
def test_what_is_no_survivable_loss_ends_the_job(tmp_path: Path, text: str, status: int, said: str) -> None:
    returned, lines, _ = run_lossy(tmp_path, text + "until('never')")
    assert returned == status, lines
    (cause,) = [line for line in lines if line.endswith(" s.")]
    assert re.search(said, cause)


def test_a_loss_after_the_others_have_finished(tmp_path: Path) -> None:
    text = (
        "Path(f'pid{rank}').write_text(str(os.getpid()))\njoin()\nif rank == 1:\n"
        "    until(lambda: not Path('/proc', Path('pid0').read_text()).exists())\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    status, lines, _ = run_lossy(tmp_path, text, workers=2)
    assert status == 0, lines
    assert any(line.endswith(" s; the others have finished.") for line in lines)


@pytest.mark.few(2)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("how", ["", "stubborn"])
def test_a_signal_to_the_launcher_ends_servers_too(
    tmp_path: Path, number: signal.Signals, status: int, how: str
) -> None:
    line = command(tmp_path, "serving(0); print('running', flush=True); until('never')", "-n", "1", "--servers", "1")
    with subprocess.Popen(
        line, cwd=tmp_path, env=environment(STANDIN=how), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        while "running" not in job.stdout.readline():
            pass
        mark = mark_of(job.pid)
        job.send_signal(number)
        _, err = job.communicate(timeout=20)
    assert job.returncode == status and mark
    assert "Traceback" not in err and ("last words" in err) == (how == "")


def test_the_launchers_own_death_leaves_no_server(tmp_path: Path) -> None:
    line = command(tmp_path, "serving(0); print('running', flush=True); until('never')", "-n", "1", "--servers", "1")
    with subprocess.Popen(line, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        while "running" not in job.stdout.readline():
            pass
        job.kill()  # what is left then, the fixture of all tests finds


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--servers", "many"], "--servers many: must be a whole number from 0"),
        (["--tls", "maybe"], "--tls maybe: the choices are auto, on, off"),
        (["--servers", "1", "--server-hosts", "a"], "--server-hosts is for other hosts: name these with -H node1:4"),
        (["-H", "a:1", "--server-hosts", "a,b"], "--server-hosts a,b, but there are no servers: add --servers 2"),
        (
            ["-H", "a:1", "--servers", "3", "--server-hosts", "a:1,b:1"],
            "--servers 3, but --server-hosts a:1,b:1 has 2: write --servers 2, or leave out the numbers of the hosts",
        ),
        (["-H", "a:1", "--servers", "1", "--server-hosts", "a:x"], "'x' is no number of servers from 1"),
    ],
)
def test_wrong_flags_are_one_line(tmp_path: Path, flags: list[str], said: str) -> None:
    (tmp_path / "script.py").touch()
    done = subprocess.run(
        [*HOCKET, "run", *flags, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_hocket_launch_has_servers_too(tmp_path: Path) -> None:
    text = """
import hocket

def push():
    import torch
    store = hocket.KeyValue({"a": torch.zeros(2)}, lambda p: torch.optim.SGD(p, lr=1.0))
    store.push("a", torch.ones(2))
    store.wait()
    hocket.barrier()
    found = store.pull("a").tolist()
    store.close()
    return found

print(hocket.launch(push, n=2, servers=2, verbose=True))
"""
    (tmp_path / "caller.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "caller.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "[-2.0, -2.0]\n", done.stderr
