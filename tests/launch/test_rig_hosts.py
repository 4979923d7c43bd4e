"""``hocket run -H`` between hosts of a rig: other interfaces, decoys, cut cables and hosts that die."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hocket.lab.rig import Rig

HOCKET = [sys.executable, "-m", "hocket.launch.cli", "run"]
TELL = """
import os
print(*(os.environ[n] for n in ("HOCKET_HOST_NAME", "HOCKET_ADDRESS", "GLOO_SOCKET_IFNAME", "MASTER_ADDR")))
"""
SLEEP = "import time; print('running', flush=True); time.sleep(600)"
MakeRig = Callable[..., Rig]


def run(rig: Rig, host: str, folder: Path, text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    command = rig.command(host, [*HOCKET, *flags, "script.py"])
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=90, stdin=subprocess.DEVNULL, check=False
    )


def test_hosts_whose_interfaces_differ_and_who_have_decoys(rig: MakeRig, tmp_path: Path) -> None:
    made = rig(
        3, interfaces=("eth0", "ens3", "enp1s0"), decoys={"docker0": "172.17.0.1/16", "br0": "10.9.9.1/24"},
        loopback_names=True,
    )  # fmt: skip
    done = run(made, "h1", tmp_path, TELL, "-H", "h1:1,h2:1,h3:1")
    first = made.hosts["h1"].address
    expected = [f"[{i}] {h.name} {h.address} {h.interface} {first}" for i, h in enumerate(made.hosts.values())]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr
    done = run(made, "h1", tmp_path, TELL, "-H", "h2:1,h3:1")
    assert {line.split()[-1] for line in done.stdout.splitlines()} == {made.hosts["h2"].address}, done.stderr
    done = run(made, "h1", tmp_path, TELL, "-H", "h1:1,h2:1", "--interface", "eth0")
    assert "h2: it has no interface 'eth0' that is up, but " in done.stderr
    assert "use --interface eth0,NAME" in done.stderr
    done = run(made, "h1", tmp_path, TELL, "-H", "h1:1,h2:1", "--interface", "eth0,ens3")
    assert sorted(done.stdout.splitlines()) == expected[:2], done.stderr
    done = run(made, "h1", tmp_path, TELL, "-H", "h1:1,h2:1", "--interface", "docker0")
    assert "h1: h2 cannot reach it at 172.17.0.1 (docker0): " in done.stderr, done.stderr


def test_gloo_between_hosts(rig: MakeRig, tmp_path: Path) -> None:
    made = rig(2, interfaces=("eth0", "ens3"), decoys={"docker0": "172.17.0.1/16"}, loopback_names=True)
    text = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\nx = torch.ones(1)\ndist.all_reduce(x)\nprint('sum', int(x))\n"
        "dist.destroy_process_group()\n"
    )
    done = run(made, "h1", tmp_path, text, "-H", "h1:1,h2:1")
    assert sorted(done.stdout.splitlines()) == ["[0] sum 2", "[1] sum 2"], done.stderr


def test_two_hosts_that_do_not_reach_each_other_are_named(rig: MakeRig, tmp_path: Path) -> None:
    made = rig(3)
    route = ["ip", "route", "add", "blackhole", made.hosts["h3"].address]
    assert made.start("h2", route).wait(10) == 0
    done = run(made, "h1", tmp_path, TELL, "-H", "h1:1,h2:1,h3:1")
    assert done.returncode == 2
    assert f"h3: h2 cannot reach it at {made.hosts['h3'].address} (eth0): let TCP through" in done.stderr


def test_a_host_that_is_cut_off_before(rig: MakeRig, tmp_path: Path) -> None:
    made = rig(2)
    made.cut("h2")
    done = run(made, "h1", tmp_path, TELL, "-H", "h1:1,h2:1", "--ssh", f"{made.ssh} -o ConnectTimeout=1")
    assert done.returncode == 2 and "h2: does not answer (time-out)" in done.stderr


@contextmanager
def launched(made: Rig, folder: Path, hosts: str) -> Iterator[subprocess.Popen[str]]:
    (folder / "script.py").write_text(SLEEP)
    job = made.start(
        "h1", [*HOCKET, "-H", hosts, "script.py"], cwd=folder, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert job.stdout is not None
        for _ in range(2):
            assert "running" in job.stdout.readline(), job.communicate()[1]
        yield job
    finally:
        job.kill()
        job.communicate()


def wait_until_empty(made: Rig, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := {name: found for name in made.hosts if (found := made.processes(name))}:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.few(1)
@pytest.mark.parametrize("hosts", ["h1:1,h2:1", "h2:1,h3:1"])
def test_a_host_whose_processes_are_killed(rig: MakeRig, tmp_path: Path, hosts: str) -> None:
    made = rig(3)
    with launched(made, tmp_path, hosts) as job:
        assert made.kill("h2") > 0
        _, err = job.communicate(timeout=10)
        assert job.returncode == 1
        who = r"\(rank \d(, the coordinator)?\)"
        assert re.search(rf"hocket: host h2 {who} was lost after [\d.]+ s: ", err.splitlines()[-1]), err
    wait_until_empty(made, 5)


@pytest.mark.all_combinations
def test_a_host_that_falls_silent(rig: MakeRig, tmp_path: Path) -> None:
    made = rig(2)
    with launched(made, tmp_path, "h1:1,h2:1") as job:
        made.cut("h2")
        _, err = job.communicate(timeout=25)
        assert job.returncode == 1
        assert "hocket: host h2 (rank 1) was lost after " in err and "nothing was heard of it for 10 s" in err
        assert not made.processes("h1")
        # Its agent cannot know that the others are gone, only that it hears nothing.
        deadline = time.monotonic() + 8
        while b"script.py" in b"".join(map(cmdline, made.processes("h2"))):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        made.restore("h2")


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_launcher_is_ended(rig: MakeRig, tmp_path: Path, number: signal.Signals) -> None:
    made = rig(2)
    with launched(made, tmp_path, "h1:1,h2:1") as job:
        job.send_signal(number)
        job.communicate(timeout=10)
        assert job.returncode == (130 if number == signal.SIGINT else -9)
        wait_until_empty(made, 5)
