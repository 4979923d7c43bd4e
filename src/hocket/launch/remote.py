"""Runs a job on several hosts: the agent of each host starts its processes, and one supervisor watches over all."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hocket.launch import preflight, ssh, supervisor
from hocket.launch.agent_links import AgentLink, AgentLinks
from hocket.launch.channel import Frame
from hocket.launch.crew import Chunk, Crew, CrewMember, Loss
from hocket.launch.environment import HostPart, Job, Ports, members
from hocket.launch.host_list import Wishes
from hocket.launch.signals import Signals
from hocket.observe.recorder import Recorder
from hocket.observe.timeline import HostClock, Timeline

_END = 4.0  # seconds that agents have to end everything of the job on their hosts
_INPUT = 1 << 16


MakeRecord = Callable[[Job, Mapping[str, Any]], Recorder | None]
"""Begins the record of a job, of whose hosts something is known by name."""


def run_on_hosts(
    job: Job,
    wishes: Wishes,
    log_dir: Path | None = None,
    make_record: MakeRecord = lambda *_: None,
    timeline: Timeline | None = None,
) -> int:
    """Run ``job`` on the hosts of ``wishes`` to its end; its size is known when the hosts have been looked at."""
    with Signals() as signals:
        ready = preflight.gather(wishes, job, signals)
        with contextlib.closing(ready.links):
            for line in ready.warnings:
                print(line, file=sys.stderr, flush=True)
            job = dataclasses.replace(job, size=ready.size)
            recorder = make_record(job, ready.facts())

            def start(sized: Job, _: Signals) -> RemoteCrew:
                return RemoteCrew(sized, ready.links, ready.parts, ready.ports, ready.folder)

            return supervisor.run(job, log_dir, recorder, start=start, signals=signals, timeline=timeline)


class RemoteCrew(Crew):
    """Processes of a job that agents start, watch over and end."""

    def __init__(
        self, job: Job, links: AgentLinks, parts: dict[AgentLink, HostPart], ports: Ports, folder: str
    ) -> None:
        """Have the agents start what is theirs.

        Args:
            job: What to start.
            links: The agents; closed with this crew.
            parts: What each host has of the job, in the order of the ranks; hosts without workers come last.
            ports: The TCP ports that an agent has reserved.
            folder: The folder in which all processes start.
        """
        self.losses: list[Loss] = []
        self._links, self._parts = links, parts
        self._lost: set[AgentLink] = set()
        self._is_closed = False
        self._of: dict[CrewMember, AgentLink] = {}
        if job.settings.get("timeline"):
            links.compare_clocks()
        for link, part in parts.items():
            self._of |= dict.fromkeys(members(job, part), link)
            told = {name: getattr(job, name) for name in ("command", "size", "settings", "mark")}
            link.channel.send("start", **told, part=dataclasses.asdict(part), ports=ports, folder=folder)
        self.members = sorted(self._of, key=lambda member: (not member.is_worker, member.role, member.number))
        self._named = {member.name: member for member in self.members}
        links.mind_silence()
        self._first = next(iter(parts))
        signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # in the background, reading fails instead of stopping us
        self._reads_input = False
        self._input_again = float("inf")
        self._read_input(True)

    def read(self, seconds: float) -> Iterator[Chunk]:
        for link, frame in self._links.receive(seconds):
            yield from self._take(link, frame)
        if time.monotonic() > self._input_again:
            self._input_again = float("inf")
            self._read_input(True)
        for link in self._parts:
            if link.trouble and not link.is_done and link not in self._lost:
                self._note_loss(link)

    def signal(self, member: CrewMember, number: int) -> None:
        if member.is_running:
            self._of[member].channel.send("signal", name=member.name, number=int(number))

    def end(self) -> Iterator[Chunk]:
        left = [link for link in self._parts if not link.trouble]
        for link in left:
            link.channel.send("end")
        deadline = time.monotonic() + _END
        while time.monotonic() < deadline and any(not link.is_over for link in left):
            for link, frame in self._links.receive(0.1):
                yield from self._take(link, frame)

    def clock(self, host: str) -> HostClock | None:
        return next((link.monotonic for link, part in self._parts.items() if part.name == host), None)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._links.close()

    def _take(self, link: AgentLink, frame: Frame) -> Sequence[Chunk]:
        head = frame.head
        if frame.kind == "input taken":
            self._read_input(True)
        elif frame.kind in ("output", "ended"):
            member = self._named.get(str(head.get("name")))
            if member is None or self._of[member] is not link:
                link.trouble = "it spoke of a process that it does not have"
            elif frame.kind == "output" and head.get("pipe") in ("stdout", "stderr", "events"):
                return [Chunk(member, head["pipe"], frame.body)]
            elif frame.kind == "ended":
                member.returncode = int(head.get("status", 1))
        return []

    def _note_loss(self, link: AgentLink) -> None:
        self._lost.add(link)
        # Who has failed a moment before did so because the host was about to be lost.
        mine = [m for m in self.members if self._of[m] is link and m.returncode != 0 and not m.is_lost]
        if not mine:
            return
        for member in mine:
            member.is_lost = member.is_running
        self._links.listen_to_end(link)
        status = link.process.poll()
        ended = "" if status is None else f", {'its agent' if link.host.is_here else 'ssh'} with status {status}"
        reason = f"{link.trouble}{ended}{ssh.said(list(link.words))}"
        numbers = {role: [m.number for m in mine if m.role == role] for role in ("rank", "server", "coordinator")}
        self.losses.append(
            Loss(link.host.name, numbers["rank"], reason, numbers["server"], coordinator=bool(numbers["coordinator"]))
        )

    def _read_input(self, on: bool) -> None:
        """Begin or stop to wait for the standard input, which belongs to rank 0."""
        if on == self._reads_input:
            return
        try:
            os.fstat(0)
        except OSError:  # it was closed
            self._first.channel.send("input")
            return
        self._reads_input = on
        if on:
            self._links.watch(0, self._pass_input)
        else:
            self._links.unwatch(0)

    def _pass_input(self) -> None:
        """Send some of the standard input, and wait until rank 0 has taken it before there is more."""
        self._read_input(False)
        try:
            data = os.read(0, _INPUT)
        except BlockingIOError:
            self._read_input(True)
            return
        except OSError:  # this job is in the background of its terminal, perhaps not for ever
            self._input_again = time.monotonic() + 1
            return
        self._first.channel.send("input", data)
