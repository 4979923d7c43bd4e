"""Which hosts a job runs on: reads ``-H`` and host files, and deals out the workers."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hocket.errors import UsageError

# A name that ssh takes: letters, digits, dots; a user before @; an IPv6 address. Never an option.
_NAME = re.compile(r"(?!-)(?:[\w.+-]+@)?(?!-)(?:[\w.-]+|[0-9a-fA-F:]*:[0-9a-fA-F:.]*(?:%[\w.-]+)?)")


@dataclass(frozen=True)
class Host:
    """A machine of the job.

    Attributes:
        name: As the user wrote it; ssh knows what it means.
        slots: How many workers it may have; None is one per GPU, or where there is none, per core.
    """

    name: str
    slots: int | None = None

    @property
    def is_here(self) -> bool:
        """Whether it is this machine, so that no ssh is needed."""
        own = socket.gethostname()
        return self.name in {"localhost", "127.0.0.1", "::1", own, own.partition(".")[0]}


def parse(text: str) -> list[Host]:
    """Read the value of ``-H``: ``node1:4,node2:4``."""
    hosts = [_parse_host(part.strip(), f"-H {text}") for part in text.split(",")]
    _refuse_duplicates(hosts, f"-H {text}")
    return hosts


def read_file(path: Path) -> list[Host]:
    """Read a host file: lines ``node1``, ``node1:4`` or ``node1 slots=4``, and comments after #.

    A name that stands there several times without a number, as in the node files of schedulers, has as many slots.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"--hostfile {path}: {reason}; name a file with a host in every line") from None
    hosts: list[Host] = []
    times: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        where = f"--hostfile {path}, line {number}"
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
        raise UsageError(f"--hostfile {path}: there is no host in it; write one in every line")
    _refuse_duplicates(hosts, f"--hostfile {path}")
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


def deal(slots: Sequence[int], workers: int | None) -> list[int]:
    """How many workers each host gets: the first ``workers`` slots, or all."""
    if workers is None:
        return list(slots)
    if workers > sum(slots):
        raise UsageError(
            f"-n {workers}, but the hosts have {sum(slots)} slots: use at most -n {sum(slots)}, or give them more, "
            "as in -H node1:8"
        )
    counts: list[int] = []
    for count in slots:
        counts.append(min(count, workers - sum(counts)))
    return counts


def _parse_host(text: str, where: str, slots: str | None = None) -> Host:
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
        raise UsageError(f"{where}: {text!r}: {slots!r} is no number of workers from 1: write for example {name}:4")
    return Host(name, None if slots is None else int(slots))


def _refuse_duplicates(hosts: list[Host], where: str) -> None:
    names = [host.name for host in hosts]
    for host in hosts:
        if names.count(host.name) > 1:
            raise UsageError(f"{where}: {host.name} is there {names.count(host.name)} times: name it once, with the "
                             f"number of its workers, as in {host.name}:4")  # fmt: skip
