"""The hosts that run a job together: what the user says about them, and their places once they are ready."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hocket.launch.environment import Job, Place
from hocket.launch.hosts import Host
from hocket.launch.link import Link
from hocket.launch.links import Links
from hocket.launch.remote import RemoteCrew
from hocket.launch.signals import Signals


@dataclass(frozen=True)
class Wishes:
    """What the user says about the hosts.

    Attributes:
        hosts: In the order of their ranks.
        workers: How many of the slots to take; None is all.
        ssh: The ssh command.
        python: The interpreter on other hosts; None is the same path as here.
        interface: The network interface for the job; None is the one that is found.
        exported: Variables for the environment of all workers.
        servers: The numbers of the servers on each host that has some, by its name; none means that they are dealt
            out over the hosts of the workers.
    """

    hosts: Sequence[Host]
    workers: int | None
    ssh: str
    python: str | None
    interface: str | None
    exported: dict[str, str]
    servers: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Party:
    """Hosts that are ready to start.

    Attributes:
        links: Their agents.
        places: Who of them is who, in the order of the ranks; those without workers come last.
        port: MASTER_PORT, reserved on the host at whose address all meet.
        folder: Where workers and servers start.
        exported: Variables for the environment of all workers.
        warnings: What a user should know, in lines.
    """

    links: Links
    places: dict[Link, Place]
    port: int
    folder: str
    exported: dict[str, str]
    warnings: list[str]

    @property
    def size(self) -> int:
        return sum(place.count for place in self.places.values())

    def start(self, job: Job, _: Signals) -> RemoteCrew:
        """Start ``job``; to be given to the supervisor."""
        return RemoteCrew(job, self.links, self.places, self.port, self.folder)

    def facts(self) -> dict[str, dict[str, Any]]:
        """What a record says of each host, by its name."""
        found = {}
        for link, place in self.places.items():
            ranks = f"{place.first}-{place.first + place.count - 1}" if place.count else None
            servers = {"servers": ", ".join(map(str, place.servers))} if place.servers else {}
            known = {name: link.hello.get(name) for name in ("hostname", "system", "cores", "gpus", "torch")}
            where = {"address": place.address, "interface": place.interface}
            found[place.name] = {"ranks": ranks, **servers, **where, **known}
        return found
