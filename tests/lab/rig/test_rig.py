"""Hosts of a rig: what is inside, who reaches whom, and what goes when it is taken down."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Rigs

from hocket.errors import HocketError, RigError, UsageError
from hocket.lab.rig import Rig, names, rig_ssh
from hocket.lab.rig.rig import DOCKER

CLI = [sys.executable, "-m", "hocket.launch.cli", "rig"]


def command(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *args], capture_output=True, text=True, timeout=60, cwd=cwd, check=False)


def inside(rig: Rig, host: str, *argv: str) -> str:
    return subprocess.run(rig.command(host, argv), capture_output=True, text=True, timeout=60, check=True).stdout


def sleeping(rig: Rig, host: str) -> subprocess.Popen[str]:
    process = rig.start(host, ["sh", "-c", "echo inside; exec sleep 600"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "inside\n"
    process.stdout.close()
    return process


def over_ssh(rig: Rig, host: str, text: str) -> str:
    argv = [*shlex.split(rig.ssh), host, text]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout


def remains(name: str) -> list[Path]:
    folders = ("/run/netns", "/etc/netns", "/run/hocket-rig", "/sys/class/net")
    return [path for folder in folders for path in Path(folder).glob(f"*{name}*")]


@pytest.mark.all_combinations
def test_a_rig_by_command(rig: Rigs, tmp_path: Path) -> None:
    name = rig.name()
    made = command("up", "3", "--rate", "100mbit", "--name", name)
    assert made.returncode == 0, made.stderr
    assert "3 hosts, 100mbit" in made.stdout and f"hocket rig exec --name {name}" in made.stdout
    assert f"{name}: h1=" in command("list").stdout

    script = 'echo "$(hostname) $(pwd) $HOME"; exit 7'
    ran = command("exec", "--name", name, "--host", "h2", "sh", "-c", script, cwd=tmp_path)
    assert ran.returncode == 7
    assert ran.stdout == f"h2 {tmp_path} {os.environ['HOME']}\n"
    assert command("exec", "--name", name, "sh", "-c", "$HOCKET_SSH h3 hostname").stdout == "h3\n"
    assert command("exec", "--name", name, "no-such-program").returncode == 127

    assert "already" in command("up", "2", "--name", name).stderr
    assert "h1, h2, h3" in command("exec", "--name", name, "--host", "h9", "true").stderr
    assert "removed" in command("down", "--name", name).stdout
    assert not remains(name)
    again = command("down", "--name", name)
    assert again.returncode == 0 and "no rig" in again.stdout
    gone = command("exec", "--name", name, "true")
    assert gone.returncode == 2 and f"hocket rig up 2 --name {name}" in gone.stderr


def test_exec_becomes_the_command_so_that_signals_reach_it(rig: Rigs) -> None:
    made = rig(1)
    code = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    argv = [*CLI, "exec", "--name", made.name, sys.executable, "-c", code]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM


def test_every_host_has_its_own_name_and_knows_the_others(rig: Rigs) -> None:
    made = rig(3)
    assert list(made.hosts) == ["h1", "h2", "h3"]
    code = "import socket; print(socket.gethostname(), *(socket.gethostbyname(f'h{n}') for n in (1, 2, 3)))"
    addresses = " ".join(host.address for host in made.hosts.values())
    for name in made.hosts:
        assert inside(made, name, sys.executable, "-c", code) == f"{name} {addresses}\n"
        assert over_ssh(made, name, shlex.join([sys.executable, "-c", code])) == f"{name} {addresses}\n"
    assert os.uname().nodename not in made.hosts, "this machine keeps its own name"


def test_ssh_from_outside_and_from_host_to_host(rig: Rigs) -> None:
    made = rig(2)
    assert over_ssh(made, "h1", "hostname; pwd") == f"h1\n{Path('~root').expanduser()}\n"
    assert over_ssh(made, "h1", f"{made.ssh} h2 hostname") == "h2\n"
    assert inside(made, "h2", "sh", "-c", "$HOCKET_SSH h1 hostname") == "h1\n"
    by_address = [*shlex.split(made.ssh), made.hosts["h2"].address, "hostname"]
    assert subprocess.check_output(by_address, text=True) == "h2\n"


def test_over_ssh_a_host_sees_its_own_processes_only(rig: Rigs) -> None:
    made = rig(2)
    with sleeping(made, "h1") as sleeper:
        assert over_ssh(made, "h1", "test -e /proc/1 && echo yes") == "yes\n"
        listed = over_ssh(made, "h2", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert "sleep 600" not in listed and "/h1/" not in listed and "sshd" in listed
        sleeper.kill()


def test_interfaces_and_decoys(rig: Rigs) -> None:
    made = rig(2, interfaces=("eth0", "ens3"), decoys=DOCKER, loopback_names=True)
    for host in made.hosts.values():
        lines = inside(made, host.name, "ip", "-br", "-4", "addr").splitlines()
        shown = {line.split()[0].partition("@")[0]: line.split()[1:] for line in lines}
        assert shown[host.interface] == ["UP", f"{host.address}/24"]
        assert shown["docker0"] == ["UP", "172.17.0.1/16"]
        assert inside(made, host.name, "hostname", "-i").split() == ["127.0.1.1"]
    assert [host.interface for host in made.hosts.values()] == ["eth0", "ens3"]
    assert over_ssh(made, "h1", f"{made.ssh} h2 hostname") == "h2\n"


def test_two_rigs_at_once(rig: Rigs) -> None:
    first, second = rig(2), rig(2)
    assert first.network != second.network
    assert over_ssh(first, "h1", "echo $HOCKET_RIG") == f"{first.name}\n"
    assert over_ssh(second, "h1", "echo $HOCKET_RIG") == f"{second.name}\n"
    first.down()
    assert over_ssh(second, "h1", f"{second.ssh} h2 hostname") == "h2\n"
    assert first.name not in names() and second.name in names()


def test_down_ends_everything(rig: Rigs) -> None:
    with rig(2) as made:
        direct = sleeping(made, "h1")
        argv = [*shlex.split(made.ssh), "h2", "setsid sleep 600 >/dev/null 2>&1 & echo started"]
        assert subprocess.check_output(argv, text=True) == "started\n"
        sleepers = made.processes("h1") + made.processes("h2")
        assert len(sleepers) >= 2
        folder = Path("/run/hocket-rig", made.name)
        assert folder.stat().st_mode & 0o777 == 0o700
    assert direct.wait() == -signal.SIGKILL
    assert not [pid for pid in sleepers if _runs(pid)]
    assert not remains(made.name)
    made.down()


def _runs(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())  # nothing if it only waits to be collected
    except OSError:  # it was, perhaps just now
        return False


@pytest.mark.parametrize("error", [RigError("as if"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_failure_half_way_leaves_nothing(rig: Rigs, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    name = rig.name()
    start = rig_ssh.start

    def fail(*args: object) -> None:
        start(*args)  # type: ignore[arg-type]
        raise error

    monkeypatch.setattr(rig_ssh, "start", fail)
    with pytest.raises(type(error)):
        rig(2, name=name)
    assert not remains(name)
    monkeypatch.undo()
    rig(2, name=name)


def test_inside_a_rig_there_are_no_rigs(rig: Rigs) -> None:
    made = rig(1)
    for args in (["up", "2"], ["down"], ["exec", "true"]):
        ran = subprocess.run(made.command("h1", [*CLI, *args]), capture_output=True, text=True, check=False)
        assert ran.returncode == 2 and f"host of rig '{made.name}'" in ran.stderr


@pytest.mark.parametrize(
    "options",
    [
        {"hosts": 0},
        {"hosts": 251},
        {"rate": "fast"},
        {"rate": "1kbit"},
        {"rate": "1gbps"},
        {"name": "a.b"},
        {"name": "../x"},
        {"interfaces": ("a-name-with-16-ch",)},
        {"interfaces": ("lo",)},
        {"interfaces": ("docker0",), "decoys": DOCKER},
    ],
    ids=str,
)
def test_wrong_words_are_refused(rig: Rigs, options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        rig(**options)  # type: ignore[arg-type]


def test_unknown_hosts_and_rigs_are_refused(rig: Rigs) -> None:
    made = rig(2)
    with pytest.raises(UsageError, match="the hosts are h1, h2"):
        made.cut("h3")
    with pytest.raises(HocketError, match="hocket rig up"):
        Rig.find(rig.name())
    assert Rig.find(made.name).hosts == made.hosts
