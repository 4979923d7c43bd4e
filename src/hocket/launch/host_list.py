"""Which hosts a job runs on: reads ``-H``, ``--server-hosts`` and host files, and deals out workers and servers."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.errors import UsageError

if TYPE_CHECKING:
    from hocket.launch.engines.engine import Engine

# A name that ssh takes: letters, digits, dots; a user before @; an IPv6 address. Never an option.
_NAME = re.compile(r"(?!-)(?:[\w.+-]+@)?(?!-)(?:[\w.-]+|[0-9a-fA-F:]*:[0-9a-fA-F:.]*(?:%[\w.-]+)?)")


@dataclass(frozen=True)
class Host:
    """A machine of the job.

    Attributes:
        name: The host as the user wrote it; ssh knows what it means.
        slots: How many workers it may have; None is one per GPU, or where there is none, per core. In
            ``--server-hosts``, how many servers it has; None is its share.
    """

    name: str
    slots: int | None = None

    @property
    def is_here(self) -> bool:
        """Whether the host is this machine, so that no ssh is needed."""
        own = socket.gethostname()
        return self.name in {"localhost", "127.0.0.1", "::1", own, own.partition(".")[0]}


@dataclass(frozen=True)
class Wishes:
    """What the user says about the hosts.

    Attributes:
        hosts: The hosts, in the order of their ranks.
        workers: How many of the slots to take, or the most of them if there is a least; None is all.
        engine: Has agents begin on them, and says which hosts there are later.
        interface: The network interface for the job; None is the one that is found.
        exported: Variables for the environment of all workers.
        servers: The numbers of the servers on each host that has some, by its name; none means that they are dealt
            out over the hosts of the workers.
        least: With how few slots to begin, too; None if it has to be ``workers``.
    """

    hosts: Sequence[Host]
    workers: int | None
    engine: Engine
    interface: str | None
    exported: dict[str, str]
    servers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    least: int | None = None


def parse(text: str, flag: str = "-H", role: str = "worker") -> list[Host]:
    """Read the value of ``-H`` or ``--server-hosts``: ``node1:4,node2:4``."""
    hosts = [_parse_host(part.strip(), f"{flag} {text}", role=role) for part in text.split(",")]
    _refuse_duplicates(hosts, f"{flag} {text}", role)
    return hosts


def read_file(path: Path) -> list[Host]:
    """Read a host file: lines ``node1``, ``node1:4`` or ``node1 slots=4``, and comments after #.

    A name that stands there several times without a number, as in the node files of schedulers, has as many slots.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"--hostfile {path}: {reason}; name a file with a host in every line") from None
    return read_lines(text, f"--hostfile {path}")


def read_lines(text: str, source: str) -> list[Host]:
    """The hosts in the lines of a host file, or of a command that writes such lines; ``source`` is for messages."""
    hosts: list[Host] = []
    times: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{source}, line {number}"
        name, *rest = line.partition("#")[0].split() or [""]
        if not name:
            continue
        if len(rest) > 1 or (rest and not rest[0].startswith("slots=")):
            raise UsageError(f"{where}: {line.strip()!r} is not understood: write for example node1 slots=4")
        host = _parse_host(name, where, rest[0].removeprefix("slots=") if rest else None)
        if host.slots is None:
            times[host.name] = times.get(host.name, 0) + 1
        if host.slots is not None or times[host.name] == 1:
            hosts.append(host)
    if not hosts:
        raise UsageError(f"{source}: there is no host in it; write one in every line")
    _refuse_duplicates(hosts, source)
    return [Host(host.name, times[host.name]) if times.get(host.name, 0) > 1 else host for host in hosts]


def needed(hosts: Sequence[Host], workers: int | None) -> list[Host]:
    """The first of ``hosts`` whose slots are enough for that many workers, as far as their slots are known."""
    found: list[Host] = []
    slots = 0
    for host in hosts:
        if workers is not None and slots >= workers:
            break
        found.append(host)
        slots += host.slots or 0
    return found


def deal(slots: Sequence[int], workers: int | None, least: int | None = None) -> list[int]:
    """How many workers each host gets: the first ``workers`` slots, or all; with a ``least``, as many as there are."""
    if workers is None:
        return list(slots)
    if least is not None:
        workers = max(least, min(workers, sum(slots)))
    if workers > sum(slots):
        raise UsageError(
            f"-n {workers}, but the hosts have {sum(slots)} slots: use at most -n {sum(slots)}, or give them more, "
            "as in -H node1:8"
        )
    counts: list[int] = []
    for count in slots:
        counts.append(min(count, workers - sum(counts)))
    return counts


def deal_servers(hosts: Sequence[Host], servers: int) -> dict[str, list[int]]:
    """The numbers of the servers that each host gets, one after the other and around again, by the host's name.

    A host with a number of slots gets as many servers, the others share the rest; hosts without any are left out.

    Raises:
        UsageError: the slots are more or fewer than the servers.
    """
    fixed = sum(host.slots or 0 for host in hosts)
    shares = sum(host.slots is None for host in hosts)
    if fixed > servers or (fixed < servers and not shares):
        named = ",".join(host.name if host.slots is None else f"{host.name}:{host.slots}" for host in hosts)
        raise UsageError(
            f"--servers {servers}, but --server-hosts {named} has {fixed}: write --servers {fixed}, or leave out the "
            "numbers of the hosts"
        )
    left = {host.name: host.slots for host in hosts if host.slots is not None}
    names = [host.name for host in hosts if host.slots is None]
    for turn in range(servers - fixed):
        name = names[turn % shares]
        left[name] = left.get(name, 0) + 1
    dealt: dict[str, list[int]] = {host.name: [] for host in hosts if host.name in left}
    number = 0
    while number < servers:
        for name, numbers in dealt.items():
            if len(numbers) < left[name]:
                numbers.append(number)
                number += 1
    return dealt


def _parse_host(text: str, where: str, slots: str | None = None, role: str = "worker") -> Host:
    name = text
    if slots is not None:
        name = text.replace("[", "").replace("]", "")
    elif bracketed := re.fullmatch(r"((?:[\w.+-]+@)?)\[([^\]]*)\](?::(.*))?", text):
        name, slots = bracketed[1] + bracketed[2], bracketed[3]
    elif text.count(":") == 1:
        name, _, slots = text.partition(":")
    if not _NAME.fullmatch(name):
        raise UsageError(f"{where}: {text!r} is no host: write for example node1:4 or user@node1 (IPv6: [fd00::1]:4)")
    if slots is not None and (not slots.isdecimal() or int(slots) < 1):
        raise UsageError(f"{where}: {text!r}: {slots!r} is no number of {role}s from 1: write for example {name}:4")
    return Host(name, None if slots is None else int(slots))


def _refuse_duplicates(hosts: list[Host], where: str, role: str = "worker") -> None:
    names = [host.name for host in hosts]
    for host in hosts:
        if names.count(host.name) > 1:
            raise UsageError(f"{where}: {host.name} is there {names.count(host.name)} times: name it once, with the "
                             f"number of its {role}s, as in {host.name}:4")  # fmt: skip
