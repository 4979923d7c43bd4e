"""``hocket run -H … --servers``: where servers run, what they are told, and the loss of their hosts and of others."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from hocket.errors import UsageError
from hocket.launch import host_list
from launch.sshd import Sshd
from launch.test_host_faults import cmdline, parent, session_processes, variable
from launch.test_rig_hosts import MakeRig
from launch.test_run import HOCKET
from launch.test_servers import BEGIN, environment, told

TELL = "until('told0', 'told1', 'told2'); Path(f'worker{rank}').write_text(json.dumps(dict(os.environ)))"


def run(sshd: Sshd, folder: Path, hosts: str, text: str, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "logs").mkdir()
    return sshd.run(hosts, folder, BEGIN + text, "--log-dir", "logs", *flags, **environment(**env))


@pytest.mark.parametrize(
    ("names", "servers", "dealt"),
    [
        ("a,b", 3, {"a": [0, 2], "b": [1]}),
        ("a,b,c", 2, {"a": [0], "b": [1]}),
        ("a:2,b:1", 3, {"a": [0, 2], "b": [1]}),
        ("a:2,b,c", 5, {"a": [0, 3], "b": [1, 4], "c": [2]}),
        ("a,b:2", 2, {"b": [0, 1]}),
        ("a", 0, {}),
    ],
)
def test_servers_are_dealt_around(names: str, servers: int, dealt: dict[str, list[int]]) -> None:
    assert host_list.deal_servers(host_list.parse(names), servers) == dealt


@pytest.mark.parametrize(("names", "servers"), [("a:2", 1), ("a:2", 3), ("a:2,b", 1)])
def test_numbers_that_do_not_fit(names: str, servers: int) -> None:
    with pytest.raises(UsageError, match=f"--servers {servers}, but --server-hosts {names} has 2: write --servers 2"):
        host_list.deal_servers(host_list.parse(names), servers)


def test_servers_on_the_hosts_of_the_workers(sshd: Sshd, tmp_path: Path) -> None:
    env = {"STANDIN_TELL": "told", "OMP_NUM_THREADS": "", "HOCKET_RUN_DIR": "runs"}
    done = run(sshd, tmp_path, "a:2,b:1", TELL, "--servers", "3", "-x", "STANDIN_TELL", **env)
    assert done.returncode == 0, done.stderr
    servers = [told(tmp_path, number) for number in range(3)]
    workers = [json.loads((tmp_path / f"worker{rank}").read_text()) for rank in range(3)]
    assert [server["HOCKET_HOST_NAME"] for server in servers] == ["a", "b", "a"]
    for server, worker in zip(servers, (workers[0], workers[2], workers[0]), strict=True):
        same = ("HOCKET_RENDEZVOUS", "HOCKET_JOB", "HOCKET_ADDRESS", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE",
                "LOCAL_WORLD_SIZE", "GROUP_RANK", "HOCKET_SERVERS", "GLOO_SOCKET_IFNAME")  # fmt: skip
        assert [server[name] for name in same] == [worker[name] for name in same]
        assert "RANK" not in server and (server["HOCKET_SERVERS"], server["WORLD_SIZE"]) == ("3", "3")
        assert (server["secret"], server["args"], server["input"]) == (32, [str(tmp_path)], "")
    cores = len(os.sched_getaffinity(0))
    assert [server["OMP_NUM_THREADS"] for server in servers] == [str(max(1, cores // n)) for n in (4, 2, 4)]
    assert "[server 1] serving" in done.stdout and "[server 2] last words" in done.stderr
    assert "hocket: server 1 on here: busy 25%, 2 updates" in done.stderr
    shown = subprocess.check_output([*HOCKET, "runs", "--run-dir", "runs", "show", "last"], cwd=tmp_path, text=True)
    assert "\n  a  ranks 0-1, servers 0, 2, at 127.0.0.1 (lo), " in shown


def test_servers_on_hosts_of_their_own(sshd: Sshd, tmp_path: Path) -> None:
    flags = ("--servers", "3", "--server-hosts", "c:2,b:1", "-n", "2", "-x", "STANDIN_TELL")
    done = run(sshd, tmp_path, "a:1,b:2", TELL, *flags, STANDIN_TELL="told", HOCKET_RUN_DIR="runs")
    assert done.returncode == 0, done.stderr
    servers = [told(tmp_path, number) for number in range(3)]
    workers = [json.loads((tmp_path / f"worker{rank}").read_text()) for rank in range(2)]
    assert [worker["HOCKET_HOST_NAME"] for worker in workers] == ["a", "b"]
    assert [server["HOCKET_HOST_NAME"] for server in servers] == ["c", "b", "c"]
    assert [server["GROUP_RANK"] for server in servers] == ["2", "1", "2"]
    assert [server["LOCAL_WORLD_SIZE"] for server in servers] == ["0", "1", "0"]
    assert {process["GROUP_WORLD_SIZE"] for process in (*workers, *servers)} == {"2"}
    shown = subprocess.check_output([*HOCKET, "runs", "--run-dir", "runs", "show", "last"], cwd=tmp_path, text=True)
    assert "\n  c  servers 0, 2, at 127.0.0.1 (lo), " in shown


def test_hosts_that_are_not_needed_are_not_counted(sshd: Sshd, tmp_path: Path) -> None:
    flags = ("--servers", "1", "--server-hosts", "c,b", "-n", "1", "-x", "STANDIN_TELL")
    done = run(sshd, tmp_path, "a,b", "until('told0')", *flags, STANDIN_TELL="told")
    assert done.returncode == 0, done.stderr
    server = told(tmp_path, 0)
    assert (server["HOCKET_HOST_NAME"], server["GROUP_RANK"], server["GROUP_WORLD_SIZE"]) == ("c", "1", "1")


def test_the_hosts_of_servers_are_looked_at_too(sshd: Sshd, tmp_path: Path) -> None:
    done = run(sshd, tmp_path, "a:1", "", "--servers", "1", "--server-hosts", "nowhere.invalid")
    assert done.returncode == 2
    assert "hocket:   nowhere.invalid: its name does not resolve: check the spelling" in done.stderr


def test_all_meet_at_the_address_of_rank_0(rig: MakeRig, tmp_path: Path) -> None:
    made = rig(3)
    (tmp_path / "script.py").write_text(BEGIN + "until('told0', 'told1')\nprint(os.environ['MASTER_ADDR'])")
    flags = ["-H", "h1:1,h2:1", "--servers", "2", "--server-hosts", "h3,h1", "-x", "STANDIN_TELL"]
    done = subprocess.run(
        made.command("h1", [*HOCKET, "run", *flags, "script.py"]), cwd=tmp_path, env=environment(STANDIN_TELL="told"),
        capture_output=True, text=True, timeout=90, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, third = made.hosts["h1"].address, made.hosts["h3"].address
    assert {f"[{rank}] {first}" for rank in range(2)} <= set(done.stdout.splitlines())
    assert {told(tmp_path, number)["MASTER_ADDR"] for number in range(2)} == {first}
    assert [told(tmp_path, number)["HOCKET_ADDRESS"] for number in range(2)] == [third, first]


WAIT = "join(); print('running', flush=True)\n"
UNTIL_LOST = "until(lambda: 'the others go on' in Path('err').read_text())\n"


def lose(sshd: Sshd, folder: Path, names: str, text: str, lost: str, *flags: str) -> tuple[int, list[str]]:
    """Run until all workers have told that they run; then kill the agent of host ``lost``."""
    (folder / "logs").mkdir()
    line = sshd.command(names, folder, BEGIN + text, "--log-dir", "logs", *flags)
    with (
        (folder / "err").open("w") as err,
        subprocess.Popen(
            line, cwd=folder, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err, text=True
        ) as job,
    ):
        assert job.stdout is not None
        seen = 0
        while seen < 2:
            line_read = job.stdout.readline()
            assert line_read, (folder / "err").read_text()
            seen += "running" in line_read
        there = [
            pid for pid in session_processes()
            if variable(pid, "HOCKET_HOST_NAME") == lost and any(n in cmdline(pid) for n in (b"script.py", b"standin"))
        ]  # fmt: skip
        os.kill(parent(there[0]), signal.SIGKILL)
        job.stdout.read()
        job.wait(30)
    return job.returncode, (folder / "err").read_text().splitlines()


def test_a_lost_host_without_servers_is_survived(sshd: Sshd, tmp_path: Path) -> None:
    text = WAIT + "until('never') if rank == 1 else None\n" + UNTIL_LOST
    status, lines = lose(sshd, tmp_path, "a:1,b:1", text, "b", "--servers", "1")
    assert status == 0, lines
    (said,) = [line for line in lines if "go on" in line]
    assert said.startswith("hocket: host b (rank 1) was lost after ")
    assert lines[-1].startswith("hocket: the other workers finished; lost on the way: host b (rank 1) was lost after ")


def test_a_lost_host_with_servers_ends_the_job(sshd: Sshd, tmp_path: Path) -> None:
    flags = ("--servers", "1", "--server-hosts", "c")
    status, lines = lose(sshd, tmp_path, "a:1,b:1", WAIT + "serving(0); until('never')", "c", *flags)
    assert status == 1
    assert lines[-1].startswith("hocket: host c (server 0) was lost after ")
    assert lines[-2] == "hocket: the other 2 workers were stopped."
