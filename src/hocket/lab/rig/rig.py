"""The class Rig: makes hosts, runs commands in them, has their network fail, and removes them."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hocket.errors import RigError, UsageError
from hocket.lab.rig import rig_names as naming
from hocket.lab.rig import rig_needs, rig_network, rig_processes, rig_ssh, rig_state
from hocket.lab.rig.rig_names import RigHost
from hocket.lab.rig.rig_needs import call
from hocket.lab.rig.rig_network import parse_rate

_SHADOW = Path("/etc/shadow")
DOCKER = {"docker0": "172.17.0.1/16"}


class Rig:
    """Hosts on this machine that see each other over a network of their own; ``with`` takes them down at the end.

    Attributes:
        name: The rig's name.
        hosts: The hosts by name, ``h1`` first.
        network: The network of their addresses.
        ssh: The ssh command that reaches hosts by name, from outside and from inside: a value for ``HOCKET_SSH``.
    """

    def __init__(self, name: str, found: rig_state.State, daemons: Sequence[subprocess.Popen[bytes]] = ()) -> None:
        self.name = name
        self.hosts: dict[str, RigHost] = {host.name: host for host in found.hosts}
        self.network = found.network
        self.ssh = rig_ssh.command(name)
        self._daemons = daemons

    @classmethod
    def up(
        cls,
        hosts: int = 2,
        rate: str | None = None,
        name: str = naming.DEFAULT,
        *,
        interfaces: Sequence[str] = ("eth0",),
        decoys: Mapping[str, str] | None = None,
        loopback_names: bool = False,
        keep: bool = False,
        trunk: str | None = None,
    ) -> Rig:
        """Make a rig. If that fails, nothing of it is left.

        Args:
            hosts: How many hosts.
            rate: What each host can send, and receive, such as ``"1gbit"``; without it, what the processor can do.
            name: The rig's name. A rig of this name that is damaged, or whose process has ended, is removed first.
            interfaces: What the hosts call their network interface; if there are fewer than hosts, in turns.
            decoys: Interfaces that all hosts have with the same address, up but leading nowhere; see ``DOCKER``.
            loopback_names: Whether a host's own name is 127.0.1.1 to itself, as Debian does it.
            trunk: What the link between two sites carries each way, each of which has half of the hosts; without it
                there is one site.
            keep: Whether the rig is to stay when this process ends; else the next of its name may take its place.
        """
        rig_needs.check()
        _refuse_inside("made")
        naming.check_name(name)
        if not 1 <= hosts <= naming.MOST_HOSTS:
            raise UsageError(f"{hosts} hosts: a rig has from 1 to {naming.MOST_HOSTS}, for example: hocket rig up 4")
        limit = parse_rate(rate) if rate is not None else None
        between = parse_rate(trunk) if trunk is not None else None
        decoys = decoys or {}
        for interface in [*interfaces, *decoys]:
            naming.check_interface(interface)
        if not interfaces or set(interfaces) & set(decoys):
            raise UsageError(f"interfaces {list(interfaces)}, decoys {list(decoys)}: give one interface, no name twice")
        with rig_state.locked():
            before = rig_state.load(name)
            if before is not None and not rig_state.is_abandoned(before):
                raise UsageError(
                    f"there is a rig {name!r} already: remove it with hocket rig down --name {name}, "
                    f"or use another --name"
                )
            _remove(name)
            try:
                naming.folder(name).mkdir(mode=0o700)
                addresses = rig_network.free_network()
                crew = tuple(
                    RigHost(
                        name=f"h{number}",
                        address=str(addresses[number]),
                        interface=interfaces[(number - 1) % len(interfaces)],
                        namespace=naming.namespace(name, f"h{number}"),
                        port=f"port-h{number}",
                    )
                    for number in range(1, hosts + 1)
                )
                _write_etc(crew, loopback_names)
                rig_network.make(name, crew, addresses, decoys, between)
                if limit is not None:
                    for host in crew:
                        rig_network.set_rate(name, host, limit)
                rig_ssh.prepare(name, crew)
                daemons = rig_ssh.start(name, crew)
                rig_network.wait_until_up(crew)
                pid = os.getpid()
                made = rig_state.State(crew, str(addresses), None if keep else (pid, rig_state.started(pid) or 0))
                rig_state.save(name, made)
            except BaseException:
                _remove(name)
                raise
        return cls(name, made, daemons)

    @classmethod
    def find(cls, name: str = naming.DEFAULT) -> Rig:
        """The rig of this name that someone has made."""
        rig_needs.check()
        _refuse_inside("used")
        found = rig_state.load(naming.check_name(name))
        if found is None:
            there = rig_state.names()
            remedy = f"make it with hocket rig up 2 --name {name}"
            if there:
                remedy += f" (there is: {', '.join(there)})"
            if name in there:
                remedy = f"it is half-made or damaged, so remove it with hocket rig down --name {name}"
            raise RigError(f"no rig {name!r} to be used: {remedy}")
        return cls(name, found)

    def down(self) -> None:
        """End every process in the hosts and remove all of the rig; more than once does no harm."""
        down(self.name)
        for daemon in self._daemons:
            daemon.wait()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """The command that becomes ``argv`` inside ``host``: with its network, name and /etc/hosts, and HOCKET_SSH."""
        return rig_processes.entering(self.name, self._host(host).name, self.ssh, argv)

    def write_shell(self, path: Path) -> None:
        """Write a script that is a value for ``--ssh``: it enters hosts without sshd, so all see the same processes."""
        lines = ["#!/bin/sh", 'while [ "$#" -gt 2 ]; do shift; done', "host=$1; shift", "case $host in"]
        for name in self.hosts:
            lines.append(f'{name}) exec {shlex.join(self.command(name, ["sh", "-c"]))} "$1";;')
        path.write_text("\n".join([*lines, "esac", 'echo "Could not resolve hostname $host"', "exit 255", ""]))
        path.chmod(0o700)

    def start(self, host: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start ``argv`` inside ``host``, itself with the pid returned; options are those of ``subprocess.Popen``."""
        return subprocess.Popen(self.command(host, argv), **options)

    def cut(self, host: str) -> None:
        """Pull the cable at the switch: what the host sends or should receive is lost, and its interface stays up."""
        rig_network.connect(self.name, self._host(host), False)

    def restore(self, host: str) -> None:
        """Undo ``cut``."""
        rig_network.connect(self.name, self._host(host), True)

    def cut_between(self, first: str, second: str) -> None:
        """Have all be lost that two hosts send each other; other hosts reach both."""
        rig_network.connect_two(self._host(first), self._host(second), False)

    def restore_between(self, first: str, second: str) -> None:
        """Undo ``cut_between``."""
        rig_network.connect_two(self._host(first), self._host(second), True)

    def set_rate(self, host: str, rate: str | None) -> None:
        """Limit what the host sends, and what it receives, to ``rate`` each; None is no limit."""
        rig_network.set_rate(self.name, self._host(host), parse_rate(rate) if rate is not None else None)

    def processes(self, host: str) -> list[int]:
        """The processes in ``host``, without the daemon that waits for ssh."""
        name = self._host(host).namespace
        space = rig_processes.inode(naming.NAMED_NAMESPACES / name)
        found = rig_processes.inside([space] if space is not None else [], f"{name}\0")
        return sorted(found - rig_processes.first(found))

    def kill(self, host: str) -> int:
        """SIGKILL every process in ``host`` but the daemon that waits for ssh; return how many there were.

        Their connections are closed by the kernel, which peers notice; after ``cut`` they do not, as when a host
        loses power.
        """
        return rig_processes.kill(lambda: self.processes(host))

    def _host(self, name: str) -> RigHost:
        if name not in self.hosts:
            raise UsageError(f"no host {name!r} in rig {self.name!r}: the hosts are {', '.join(self.hosts)}")
        return self.hosts[name]


def down(name: str = naming.DEFAULT) -> bool:
    """Remove the rig of this name, whatever its state; return whether there was anything of it."""
    rig_needs.check()
    _refuse_inside("removed")
    naming.check_name(name)
    with rig_state.locked():
        return _remove(name)


def _refuse_inside(what: str) -> None:
    around = rig_state.surrounding()
    if around is not None:
        raise UsageError(f"this is a host of rig {around!r}, and rigs are {what} from outside: leave it first")


def _write_etc(crew: Iterable[RigHost], loopback_names: bool) -> None:
    """Write the files that stand over those of /etc inside each host; ip(8) mounts them for whoever enters the host.

    These are the names of all hosts, and an account of root where sshd would take the real account for locked.
    """
    crew = tuple(crew)
    naming.FILES_OVER_ETC.mkdir(mode=0o755, exist_ok=True)
    for host in crew:
        folder = naming.FILES_OVER_ETC / host.namespace
        folder.mkdir(mode=0o755)
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
        if loopback_names:
            lines.append(f"127.0.1.1 {host.name}")
        lines += [f"{peer.address} {peer.name}" for peer in crew if peer is not host or not loopback_names]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        if _root_is_locked():
            account = folder / "shadow"
            account.touch(mode=0o600)
            account.write_text("root:*:19000:0:99999:7:::\n")  # no password fits, but a key may


def _root_is_locked() -> bool:
    try:
        return any(line.startswith("root:!") for line in _SHADOW.read_text().splitlines())
    except OSError:
        return False


def _remove(name: str) -> bool:
    """Remove all that there is of a rig, whole, half-made or damaged: processes, interfaces, namespaces and files.

    Returns:
        Whether there was anything; parts that are not there are no error.
    """
    spaces = {found for path in rig_state.spaces_of(name) if (found := rig_processes.inode(path)) is not None}
    spaces |= _of_marked(name)
    found = rig_processes.kill(lambda: rig_processes.inside(spaces, naming.namespace(name, ""))) > 0
    found |= _remove_link(Path("/sys/class/net", naming.outside_interface(name)))
    for path in rig_state.spaces_of(name):
        call(["ip", "netns", "delete", path.name])
        found = True
    for path in [*rig_state.files_of(name), naming.folder(name)]:
        if path.exists():
            shutil.rmtree(path)
            found = True
    with contextlib.suppress(OSError):
        naming.FILES_OVER_ETC.rmdir()  # if it is empty
    return found


def _remove_link(link: Path) -> bool:
    if not link.exists():
        return False
    try:
        call(["ip", "link", "delete", link.name])
    except RigError:
        if link.exists():  # else the kernel was faster: the other end has gone with its namespace
            raise
    return True


def _of_marked(name: str) -> set[int]:
    """The namespaces of what the rig has started, those of this machine itself excepted."""
    found = {rig_processes.inode(Path(f"/proc/{pid}/ns/net")) for pid in rig_processes.marked(name)}
    outside = {rig_processes.inode(Path(f"/proc/{pid}/ns/net")) for pid in ("self", "1")}
    return {space for space in found - outside if space is not None}
