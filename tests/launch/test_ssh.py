"""The ssh command, and what the words of ssh mean."""

import shlex
import sys

import pytest

from hocket.errors import UsageError
from hocket.launch.engines import ssh
from hocket.launch.engines.ssh import SshEngine
from hocket.launch.host_list import Host

NODE = Host("node1", 4)


def test_the_command() -> None:
    command = ssh.command(NODE, "ssh -p 2222 -i 'my key'", None, {"PYTHONPATH": "/a b", "OTHER": "x"})
    assert command[:5] == ["ssh", "-p", "2222", "-i", "my key"]
    assert "BatchMode=yes" in command and "ConnectTimeout=10" in command
    assert not any("StrictHostKeyChecking" in word or "KnownHosts" in word for word in command), "that is the user's"
    assert command[-3:-1] == ["--", "node1"]
    words = shlex.split(command[-1])
    assert words == ["exec", "env", "PYTHONSAFEPATH=1", "PYTHONPATH=/a b", sys.executable, "-m", "hocket.launch.agent"]
    assert "/opt/python" in ssh.command(NODE, "ssh", "/opt/python", {})[-1]


def test_this_machine_needs_no_ssh() -> None:
    for name in ("localhost", "127.0.0.1"):
        link = SshEngine([], "/nowhere/ssh", "/other/python").begin(Host(name), 0)
        link.close(0)
    with pytest.raises(UsageError, match="/nowhere/ssh cannot be started"):
        SshEngine([], "/nowhere/ssh").begin(Host("me@localhost"), 0)


def test_an_ssh_command_that_no_shell_would_read() -> None:
    with pytest.raises(UsageError, match="--ssh ssh 'x: No closing quotation"):
        ssh.command(NODE, "ssh 'x", None, {})


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        ("ssh: Could not resolve hostname node1: Name or service not known", 255,
         "its name does not resolve: check the spelling, or give it a HostName in ~/.ssh/config"),
        ("me@node1: Permission denied (publickey,password).", 255, "put your key there with ssh-copy-id node1"),
        ("Received disconnect from 10.0.0.1 port 22:2: Too many authentication failures", 255, "ssh-copy-id node1"),
        ("ssh: connect to host node1 port 22: Connection refused", 255, "start sshd, or give its Port"),
        ("ssh: connect to host node1 port 22: Connection timed out", 255, "does not answer (time-out)"),
        ("ssh: connect to host node1 port 22: No route to host", 255, "cannot be reached"),
        ("No ED25519 host key is known for node1 and you have requested strict checking.\n"
         "Host key verification failed.", 255, "its host key is not known: run ssh node1 once by hand"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", 255,
         "its host key is not the one that is known: if you know why, run ssh-keygen -R node1"),
        ("kex_exchange_identification: read: Connection reset by peer", 255, "MaxStartups"),
        ("bash: line 1: /opt/python: No such file or directory", 127,
         "there is no /opt/python: install the same environment there, or name its interpreter with --python"),
        ("bash: line 1: /opt/python: Permission denied", 126, "/opt/python cannot be executed there"),
        ("/opt/python: No module named hocket", 1, "Hocket is not installed for /opt/python: install it there"),
        ("/opt/python: Error while finding module specification for 'hocket.launch.agent' "
         "(ModuleNotFoundError: No module named 'hocket')", 1, "Hocket is not installed for /opt/python"),
        ("Bad configuration option: foo\nterminating, 1 bad configuration options", 255,
         "ssh ended with status 255 (Bad configuration option: foo / terminating, 1 bad configuration options): "
         "does ssh node1 true work?"),
        ("", None, "no answer within the time: does ssh node1 true work?"),
        ("", 1, "ssh ended with status 1: does ssh node1 true work?"),
    ],
)  # fmt: skip
def test_the_words_of_ssh_are_understood(words: str, status: int | None, expected: str) -> None:
    assert expected in ssh.diagnose(NODE, words.splitlines(), status, "/opt/python")
