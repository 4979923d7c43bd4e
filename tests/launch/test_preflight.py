"""All that is wrong on the hosts is told before anything starts, one line each, with its remedy."""

import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.sshd import Sshd

HELLO = "print('hello')"


def refused(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The problems that were told."""
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert lines[0] == "hocket: nothing was started, because of these problems:"
    assert all(line.startswith("hocket:   ") for line in lines[1:]), lines
    return [line.removeprefix("hocket:   ") for line in lines[1:]]


def test_all_problems_of_all_hosts_at_once(sshd: Sshd, tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # reserved, and nobody listens
        first = (
            f"Host stranger\n  HostName 127.0.0.1\n  IdentityFile {sshd.folder}/stranger_key\n"
            f"Host shut\n  HostName 127.0.0.1\n  Port {closed.getsockname()[1]}\n"
            f"Host unknown\n  HostName 127.0.0.1\n  UserKnownHostsFile /dev/null\n"
        )
        # A key that comes later in the file is tried too, so the stranger needs a file of its own.
        command = sshd.configured(first, "problems")
        config = sshd.folder / "problems"
        config.write_text(config.read_text().replace("Host *\n", "Host * !stranger\n  IdentityFile none\nHost *\n"))
        config.write_text(config.read_text().replace(f"  IdentityFile {sshd.folder}/user_key\n", ""))
        config.write_text(
            config.read_text().replace("  IdentityFile none\n", f"  IdentityFile {sshd.folder}/user_key\n")
        )
        hosts = "a:1,stranger:1,shut:1,unknown:1,nowhere.invalid:1,b:1"
        problems = refused(sshd.run(hosts, tmp_path, HELLO, "--ssh", command))
    assert len(problems) == 4
    assert problems[0].startswith("stranger: SSH lets nobody in without a password (")
    assert problems[0].endswith("put your key there with ssh-copy-id stranger")
    assert problems[1].startswith("shut: nothing listens for SSH there (connection refused): start sshd")
    assert problems[2].startswith("unknown: its host key is not known: run ssh unknown once by hand")
    assert problems[3].startswith("nowhere.invalid: its name does not resolve: check the spelling")


def test_a_host_that_does_not_answer(sshd: Sshd, tmp_path: Path) -> None:
    with socket.socket() as full:  # its backlog is full, so connections are not taken
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        blockers = [socket.socket() for _ in range(4)]
        for blocker in blockers:
            blocker.setblocking(False)
            blocker.connect_ex(full.getsockname())
        command = sshd.configured(f"Host slow\n  HostName 127.0.0.1\n  Port {full.getsockname()[1]}\n", "slow")
        done = sshd.run("slow:1", tmp_path, HELLO, "--ssh", f"{command} -o ConnectTimeout=1")
        for blocker in blockers:
            blocker.close()
    assert refused(done) == [
        "slow: does not answer (time-out): is it switched on, and does a firewall let SSH through?"
    ]


def test_no_such_python(sshd: Sshd, tmp_path: Path) -> None:
    problems = refused(sshd.run("a:1,b:1", tmp_path, HELLO, "--python", "/nowhere/bin/python"))
    remedy = "install the same environment there, or name its interpreter with --python"
    assert problems == [f"{host}: there is no /nowhere/bin/python: {remedy}" for host in "ab"]


def test_hocket_is_not_installed_there(sshd: Sshd, tmp_path: Path) -> None:
    python = doctored(tmp_path, "import sys; sys.exit('python: No module named hocket')")
    problems = refused(sshd.run("a:1", tmp_path, HELLO, "--python", python))
    assert problems[0].startswith(f"a: Hocket is not installed for {python}: install it there")


def doctored(folder: Path, change: str) -> str:
    """An interpreter that starts an agent that is not as it should be."""
    path = folder / "doctored"
    path.write_text(
        f"#!{sys.executable}\nimport os, sys\nsys.path[0] = {os.environ.get('PYTHONPATH', '')!r}\n"
        f"import hocket\nfrom hocket.launch import agent, machine, scripts\n{change}\nagent.main()\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def hello_with(**values: object) -> str:
    return f"right = machine.describe\nmachine.describe = lambda: {{**right(), **{values!r}}}"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"hocket": "9.9"}, "b: Hocket 9.9 there and "),
        ({"python": "3.6.1"}, "b: Python 3.6 there and "),
        ({"torch": "1.0"}, "b: torch 1.0 there and "),
        ({"torch": None}, "b: torch None there and "),
    ],
)
def test_other_versions(sshd: Sshd, tmp_path: Path, values: dict[str, object], told: str) -> None:
    python = doctored(tmp_path, hello_with(**values))
    (problem,) = refused(sshd.run("localhost:1,b:1", tmp_path, HELLO, "--python", python))
    assert problem.startswith(told)
    assert problem.endswith(" here: install the same versions, or name another interpreter with --python")


def test_the_same_torch_for_another_device_is_fine(sshd: Sshd, tmp_path: Path) -> None:
    from hocket.launch import machine

    python = doctored(tmp_path, hello_with(torch=f"{str(machine.version('torch')).partition('+')[0]}+cu999"))
    done = sshd.run("localhost:1,b:1", tmp_path, HELLO, "--python", python)
    assert sorted(done.stdout.splitlines()) == ["[0] hello", "[1] hello"], done.stderr


def test_clocks_that_differ_are_told_and_training_goes_on(sshd: Sshd, tmp_path: Path) -> None:
    python = doctored(tmp_path, hello_with(time=time.time() + 3600))
    done = sshd.run("localhost:1,b:1", tmp_path, HELLO, "--python", python)
    assert done.returncode == 0 and done.stdout.count("hello") == 2
    assert "hocket: the clock of b is 3" in done.stderr and "ahead of that of localhost" in done.stderr


def test_no_such_folder(sshd: Sshd, tmp_path: Path) -> None:
    python = doctored(tmp_path, "scripts.Path = lambda *_: __import__('pathlib').Path('/nowhere')")
    (problem,) = refused(sshd.run("localhost:1,b:1", tmp_path, HELLO, "--python", python))
    assert problem == f"b: there is no folder {tmp_path}: share it between the hosts, or copy it there"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("scripts.digest = lambda _: None", "there is no script 'script.py' in {}: share the folder between the hosts"),
        ("scripts.digest = lambda _: 'x'", "the script 'script.py' there has other contents than the one here"),
    ],
)
def test_another_script(sshd: Sshd, tmp_path: Path, change: str, told: str) -> None:
    (problem,) = refused(sshd.run("localhost:1,b:1", tmp_path, HELLO, "--python", doctored(tmp_path, change)))
    assert problem.startswith(f"b: {told.format(tmp_path)}")


def test_a_module(sshd: Sshd, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import os; print('package', os.environ['RANK'])")
    command = [sys.executable, "-m", "hocket.launch.cli", "run", "-H", "a:1,b:1", "--ssh", sshd.ssh]
    done = subprocess.run(
        [*command, "-m", "package", "x"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert sorted(done.stdout.splitlines()) == ["[0] package 0", "[1] package 1"], done.stderr
    python = doctored(tmp_path, "scripts.find_module = lambda *_: None")
    done = subprocess.run(
        [*command, "--python", python, "-m", "package"], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert refused(done)[0].startswith(f"a: there is no module 'package' in {tmp_path}: share the folder")


def test_hosts_that_do_not_reach_each_other(sshd: Sshd, tmp_path: Path) -> None:
    python = doctored(tmp_path, "agent.interfaces.try_addresses = lambda *_: []")
    (problem,) = refused(sshd.run("localhost:1,b:1", tmp_path, HELLO, "--python", python))
    assert problem.startswith("localhost: b cannot reach it at ") and "firewall" in problem


def test_an_interface_that_is_not_there(sshd: Sshd, tmp_path: Path) -> None:
    problems = refused(sshd.run("a:1,b:1", tmp_path, HELLO, "--interface", "nothing0"))
    assert [p[:2] for p in problems] == ["a:", "b:"]
    assert "has no interface 'nothing0' that is up, but " in problems[0] and "lo" in problems[0]
    done = sshd.run("a:1,b:1", tmp_path, "import os; print(os.environ['GLOO_SOCKET_IFNAME'])", "--interface", "lo")
    assert sorted(done.stdout.splitlines()) == ["[0] lo", "[1] lo"], done.stderr


def test_too_many_workers_for_the_memory(sshd: Sshd, tmp_path: Path) -> None:
    problems = refused(sshd.run("a:100000,b:1", tmp_path, HELLO))
    assert len(problems) == 1
    assert problems[0].startswith("a: 100000 workers need about ") and ": write a:" in problems[0]


def test_an_agent_that_fails_shows_its_words(sshd: Sshd, tmp_path: Path) -> None:
    python = doctored(tmp_path, "scripts.look_for = None")
    (problem,) = refused(sshd.run("localhost:1,b:1", tmp_path, HELLO, "--python", python))
    assert problem.startswith("b: its agent did not understand the launcher: TypeError")


def test_something_else_that_answers(sshd: Sshd, tmp_path: Path) -> None:
    python = doctored(tmp_path, "import sys; sys.stdout.write('x' * 100000); sys.stdout.flush(); input()")
    (problem,) = refused(sshd.run("b:1", tmp_path, HELLO, "--python", python))
    assert problem.startswith("b: ")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["-n", "5"], "-n 5, but the hosts have 3 slots: use at most -n 3"),
        (["-n", "0"], "-n 0: must be a number of workers from 1"),
        (["--hostfile", "x"], "-H and --hostfile both name the hosts: use one of them"),
        (["--ssh", "/nowhere/ssh"], "/nowhere/ssh cannot be started (No such file or directory): name the ssh command"),
        (["-x", "NOT_SET"], "-x NOT_SET: must be a variable that is set here, or NAME=VALUE"),
    ],
)
def test_bad_flags_are_one_clear_line(sshd: Sshd, tmp_path: Path, flags: list[str], told: str) -> None:
    done = sshd.run("a:2,b:1", tmp_path, HELLO, *flags)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"hocket: {told}")
