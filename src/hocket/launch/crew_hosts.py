"""The hosts of a job over several: their agents, how many workers each may have, who comes, and who is to leave."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from hocket.launch import report
from hocket.launch.agent_links import AgentLink
from hocket.launch.environment import Job
from hocket.launch.host_list import Host, Wishes
from hocket.launch.message_pipe import Frame
from hocket.launch.preflight import ReadyHosts, slots_of
from hocket.launch.recruits import Recruits

_SHUNNED = 60.0  # seconds, at first


class CrewHosts:
    """Hosts that come and go while the job runs.

    Attributes:
        parts: What each host has, or had, of the job, by the link to its agent.
        reserve: Hosts that the user has named, and that were not needed so far.
        noticed: Hosts whose agents were told to end, and with which signal; who heeds that takes them away.
        recruits: Those that are asked to join.
        arrived: How many hosts have joined since the beginning, or are tried again.
    """

    def __init__(self, job: Job, ready: ReadyHosts, wishes: Wishes, start: Callable[[AgentLink], None]) -> None:
        """``start`` has the agent of a host that joins begin its part."""
        self.parts = dict(ready.parts)
        self.reserve = list(ready.reserve)
        self.noticed: list[tuple[str, str]] = []
        self.recruits = Recruits(wishes, job, ready.links)
        self.arrived = 0
        self._tried = 0.0  # until when the host was shunned that was tried again last
        self._start = start
        self._leaving: set[AgentLink] = set()
        self._shunned: dict[str, tuple[float, float]] = {}  # until when, and for how many seconds

    @property
    def slots(self) -> dict[str, int]:
        """The hosts of the job that do not leave, and how many workers each may have."""
        return {link.host.name: self.parts[link].slots for link in self.open()}

    @property
    def free(self) -> dict[str, int]:
        """Those of them that take workers now."""
        now = time.monotonic()
        return {name: slots for name, slots in self.slots.items() if self._shunned.get(name, (0.0,))[0] < now}

    @property
    def spans(self) -> bool:
        """Whether workers of other hosts may join those of the first."""
        return any(part.spans for part in self.parts.values())

    def open(self) -> list[AgentLink]:
        """The agents of the hosts that take workers."""
        return [
            link for link, part in self.parts.items()
            if part.slots and not link.trouble and not link.is_done and link not in self._leaving
        ]  # fmt: skip

    def shun(self, name: str) -> None:
        """Leave a host alone for a while, since others do not reach it; each time for twice as long."""
        until, seconds = self._shunned.get(name, (0.0, _SHUNNED / 2))
        if time.monotonic() > until:
            self._shunned[name] = time.monotonic() + 2 * seconds, 2 * seconds

    def link_of(self, name: str) -> AgentLink:
        """The agent of a host that takes workers."""
        return next(link for link in self.open() if link.host.name == name)

    def fixed(self, name: str) -> str:
        """Why a host cannot leave the job; empty if it can."""
        part = self.parts[self.link_of(name)]
        if part.number == 0:
            return "the coordinator is there"
        return f"{report.numbered('server', part.servers)} {'is' if len(part.servers) == 1 else 'are'} there" if (
            part.servers) else ""  # fmt: skip

    def set_slots(self, host: Host) -> None:
        """A host that is there may have another number of workers."""
        link = self.link_of(host.name)
        link.host = host
        self.parts[link] = dataclasses.replace(self.parts[link], slots=slots_of(link))

    def leave(self, name: str) -> None:
        """A host takes no more workers, and is let go when those that it has have ended."""
        self._leaving.add(self.link_of(name))

    def drop(self, name: str, why: str) -> None:
        """A host is lost to the job at once, for a reason in words."""
        link = self.link_of(name)
        link.channel.send("end")
        link.trouble = why

    def ask(self, hosts: Sequence[Host]) -> None:
        """Have hosts join, if they can."""
        self.recruits.ask(hosts)
        names = {host.name for host in hosts}
        self.reserve = [host for host in self.reserve if host.name not in names]

    def take(self, link: AgentLink, frame: Frame) -> None:
        """An agent has said something that is not about its processes."""
        self.recruits.take(link, frame)
        if frame.kind == "notice" and link in self.parts and link not in self._leaving:
            self.noticed.append((link.host.name, str(frame.head.get("signal"))))

    def tick(self, is_at_work: Callable[[AgentLink], bool]) -> None:
        """Take in those that are ready, and let go those that leave and are not at work any more."""
        for until, _ in self._shunned.values():
            if self._tried < until <= time.monotonic():
                self.arrived += 1
                self._tried = until
        there = {link: self.parts[link] for link in self.open() if link.host.name in self.free}
        for link, part in self.recruits.tick(there):
            self.parts[link] = part
            self.arrived += 1
            self._start(link)
        for link in [link for link in self._leaving if not is_at_work(link)]:
            self._leaving.discard(link)
            link.channel.send("end")
            link.is_done = True
