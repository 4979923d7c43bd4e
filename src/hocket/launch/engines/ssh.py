"""Hosts that SSH reaches: how an agent is started there, and what it means when that fails."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence

from hocket.errors import UsageError
from hocket.launch.agent_links import AgentLink, said
from hocket.launch.discovery import Discovery
from hocket.launch.engines.engine import Engine
from hocket.launch.host_list import Host

_AGENT = ("-m", "hocket.launch.agent")
# Modules that happen to lie in the folder in which it is started are none of the agent's.
_SAFE = "PYTHONSAFEPATH=1"
# The user's own options come before these, and ssh takes the first that it finds.
_OPTIONS = {
    "BatchMode": "yes",  # nobody is there to type a password
    "ConnectTimeout": "10",
    "ControlMaster": "no",  # a connection that is there is used, but none is left behind
    "ClearAllForwardings": "yes",
}


class SshEngine(Engine):
    """Hosts that the user has named, or that a command lists.

    Args:
        hosts: The hosts with which a job begins; those that ``discovery`` lists, if there is one.
        ssh: The ssh command with its options, as a shell would read it.
        python: The interpreter on other hosts; None is the same path as here.
        exported: The environment that workers get.
        discovery: Says which hosts there are later.

    Raises:
        UsageError: the ssh command makes no sense.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        ssh: str,
        python: str | None = None,
        exported: Mapping[str, str] | None = None,
        discovery: Discovery | None = None,
    ) -> None:
        self._hosts, self.ssh, self.python, self._discovery = list(hosts), ssh, python, discovery
        self._exported = exported or {}
        _split(ssh)  # what is wrong with it is wrong for all hosts

    def first(self) -> list[Host]:
        return self._hosts if self._discovery is None else self._discovery.first()

    def begin_elsewhere(self, host: Host, number: int) -> AgentLink:
        return AgentLink(host, number, command(host, self.ssh, self.python, self._exported))

    def why_silent(self, link: AgentLink) -> str:
        there = sys.executable if link.host.is_here else self.python or sys.executable
        return diagnose(link.host, list(link.words), link.status, there)

    def look(self, say: Callable[[str], None]) -> Sequence[Host] | None:
        return None if self._discovery is None else self._discovery.look(say)

    @property
    def looks(self) -> bool:
        return self._discovery is not None

    def close(self, status: int = 1) -> None:
        if self._discovery is not None:
            self._discovery.close()


def command(host: Host, ssh: str, python: str | None, exported: Mapping[str, str]) -> list[str]:
    """The command that starts the agent of ``host``.

    Args:
        host: The host of the agent.
        ssh: The ssh command with its options, as a shell would read it.
        python: The interpreter on other hosts, if it is not at the same path as here.
        exported: The environment that workers get; of it the agent needs to know where to find Hocket.
    """
    words = _split(ssh)
    options = [word for name, value in _OPTIONS.items() for word in ("-o", f"{name}={value}")]
    found_at = [f"PYTHONPATH={exported['PYTHONPATH']}"] if "PYTHONPATH" in exported else []
    remote = shlex.join(["exec", "env", _SAFE, *found_at, python or sys.executable, *_AGENT])
    return [*words, *options, "-T", "--", host.name, remote]


def _split(ssh: str) -> list[str]:
    try:
        words = shlex.split(ssh)
    except ValueError as error:
        raise UsageError(f"--ssh {ssh}: {error}; write it as a shell would read it") from None
    if not words:
        raise UsageError(f"--ssh {ssh!r}: must be a command, for example --ssh 'ssh -p 2222'")
    return words


def diagnose(host: Host, words: Sequence[str], status: int | None, python: str) -> str:
    """Why no agent answered, and what to do.

    Args:
        host: The host of the agent.
        words: What ssh, the shell or the interpreter wrote.
        status: The status with which ssh ended; None if it did not end.
        python: The interpreter that was to be started there.
    """
    text = "\n".join(words)
    name = host.name
    if status == 127:
        return f"there is no {python}: install the same environment there, or name its interpreter with --python"
    if status == 126:
        return f"{python} cannot be executed there: check its permissions, or name another one with --python"
    if re.search(r"No module named '?hocket", text):
        return f"Hocket is not installed for {python}: install it there, or name another interpreter with --python"
    for pattern, reason in _REASONS:
        if re.search(pattern, text):
            return reason.format(name=name, last=_last(words))
    if status is None:
        return f"no answer within the time{said(words)}: does ssh {name} true work?"
    return f"ssh ended with status {status}{said(words)}: does ssh {name} true work?"


_REASONS = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key is not the one that is known: if you know why, run ssh-keygen -R {name}, then ssh {name} once",
    ),
    (
        "Host key verification failed|host key is known",
        "its host key is not known: run ssh {name} once by hand, compare the key and accept it",
    ),
    (
        "Could not resolve hostname|Name or service not known",
        "its name does not resolve: check the spelling, or give it a HostName in ~/.ssh/config",
    ),
    (
        "Permission denied|Too many authentication failures|No more authentication methods",
        "SSH lets nobody in without a password ({last}): put your key there with ssh-copy-id {name}",
    ),
    (
        "Connection refused",
        "nothing listens for SSH there (connection refused): start sshd, or give its Port in ~/.ssh/config",
    ),
    (
        "timed out",
        "does not answer (time-out): is it switched on, and does a firewall let SSH through?",
    ),
    (
        "No route to host|Network is unreachable",
        "cannot be reached ({last}): is it switched on, and on a network that this machine reaches?",
    ),
    (
        "kex_exchange_identification|Connection closed by|Connection reset",
        "closed the connection before the login ({last}): does its sshd allow so many at once (MaxStartups)?",
    ),
)


def _last(words: Sequence[str]) -> str:
    return next((word.strip() for word in reversed(words) if word.strip()), "no words")
