"""The class Rig: makes hosts, runs commands in them, and has their network fail."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from hocket.errors import RigError, UsageError
from hocket.rig import etc, needs, network, processes, removal, ssh, state
from hocket.rig import hosts as naming
from hocket.rig.hosts import Host
from hocket.rig.rate import parse

DOCKER = {"docker0": "172.17.0.1/16"}


class Rig:
    """Hosts on this machine that see each other over a network of their own; ``with`` takes them down at the end.

    Attributes:
        name: The rig's name.
        hosts: The hosts by name, ``h1`` first.
        network: The network of their addresses.
        ssh: The ssh command that reaches hosts by name, from outside and from inside: a value for ``HOCKET_SSH``.
    """

    def __init__(self, name: str, found: state.State, daemons: Sequence[subprocess.Popen[bytes]] = ()) -> None:
        self.name = name
        self.hosts: dict[str, Host] = {host.name: host for host in found.hosts}
        self.network = found.network
        self.ssh = ssh.command(name)
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
    ) -> Rig:
        """Make a rig. If that fails, nothing of it is left.

        Args:
            hosts: How many hosts.
            rate: What each host can send, and receive, such as ``"1gbit"``; without it, what the processor can do.
            name: The rig's name. A rig of this name that is damaged, or whose process has ended, is removed first.
            interfaces: What the hosts call their network interface; if there are fewer than hosts, in turns.
            decoys: Interfaces that all hosts have with the same address, up but leading nowhere; see ``DOCKER``.
            loopback_names: Whether a host's own name is 127.0.1.1 to itself, as Debian does it.
            keep: Whether the rig is to stay when this process ends; else the next of its name may take its place.
        """
        needs.check()
        _refuse_inside("made")
        naming.check_name(name)
        if not 1 <= hosts <= naming.MOST_HOSTS:
            raise UsageError(f"{hosts} hosts: a rig has from 1 to {naming.MOST_HOSTS}, for example: hocket rig up 4")
        limit = parse(rate) if rate is not None else None
        decoys = decoys or {}
        for interface in [*interfaces, *decoys]:
            naming.check_interface(interface)
        if not interfaces or set(interfaces) & set(decoys):
            raise UsageError(f"interfaces {list(interfaces)}, decoys {list(decoys)}: give one interface, no name twice")
        with state.locked():
            before = state.load(name)
            if before is not None and not state.is_abandoned(before):
                raise UsageError(
                    f"there is a rig {name!r} already: remove it with hocket rig down --name {name}, "
                    f"or use another --name"
                )
            removal.remove(name)
            try:
                naming.folder(name).mkdir(mode=0o700)
                addresses = network.free_network()
                crew = tuple(
                    Host(
                        name=f"h{number}",
                        address=str(addresses[number]),
                        interface=interfaces[(number - 1) % len(interfaces)],
                        namespace=naming.namespace(name, f"h{number}"),
                        port=f"port-h{number}",
                    )
                    for number in range(1, hosts + 1)
                )
                etc.write(crew, loopback_names)
                network.make(name, crew, addresses, decoys)
                if limit is not None:
                    for host in crew:
                        network.set_rate(name, host, limit)
                ssh.prepare(name, crew)
                daemons = ssh.start(name, crew)
                network.wait_until_up(crew)
                pid = os.getpid()
                made = state.State(crew, str(addresses), None if keep else (pid, state.started(pid) or 0))
                state.save(name, made)
            except BaseException:
                removal.remove(name)
                raise
        return cls(name, made, daemons)

    @classmethod
    def find(cls, name: str = naming.DEFAULT) -> Rig:
        """The rig of this name that someone has made."""
        needs.check()
        _refuse_inside("used")
        found = state.load(naming.check_name(name))
        if found is None:
            there = state.names()
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
        return processes.entering(self.name, self._host(host).name, self.ssh, argv)

    def start(self, host: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start ``argv`` inside ``host``, itself with the pid returned; options are those of ``subprocess.Popen``."""
        return subprocess.Popen(self.command(host, argv), **options)

    def cut(self, host: str) -> None:
        """Pull the cable at the switch: what the host sends or should receive is lost, and its interface stays up."""
        network.connect(self.name, self._host(host), False)

    def restore(self, host: str) -> None:
        """Undo ``cut``."""
        network.connect(self.name, self._host(host), True)

    def set_rate(self, host: str, rate: str | None) -> None:
        """Limit what the host sends, and what it receives, to ``rate`` each; None is no limit."""
        network.set_rate(self.name, self._host(host), parse(rate) if rate is not None else None)

    def processes(self, host: str) -> list[int]:
        """The processes in ``host``, without the daemon that waits for ssh."""
        name = self._host(host).namespace
        space = processes.inode(naming.NAMED_NAMESPACES / name)
        found = processes.inside([space] if space is not None else [], f"{name}\0")
        return sorted(found - processes.first(found))

    def kill(self, host: str) -> int:
        """SIGKILL every process in ``host`` but the daemon that waits for ssh; return how many there were.

        Their connections are closed by the kernel, which peers notice; after ``cut`` they do not, as when a host
        loses power.
        """
        return processes.kill(lambda: self.processes(host))

    def _host(self, name: str) -> Host:
        if name not in self.hosts:
            raise UsageError(f"no host {name!r} in rig {self.name!r}: the hosts are {', '.join(self.hosts)}")
        return self.hosts[name]


def down(name: str = naming.DEFAULT) -> bool:
    """Remove the rig of this name, whatever its state; return whether there was anything of it."""
    needs.check()
    _refuse_inside("removed")
    naming.check_name(name)
    with state.locked():
        return removal.remove(name)


def _refuse_inside(what: str) -> None:
    around = state.surrounding()
    if around is not None:
        raise UsageError(f"this is a host of rig {around!r}, and rigs are {what} from outside: leave it first")
