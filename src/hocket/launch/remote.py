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

from hocket.launch import preflight, supervisor
from hocket.launch.agent_links import AgentLink
from hocket.launch.crew import Chunk, Crew, CrewMember, Loss, Room
from hocket.launch.crew_hosts import CrewHosts
from hocket.launch.environment import Job, members
from hocket.launch.host_list import Wishes
from hocket.launch.message_pipe import Frame
from hocket.launch.preflight import ReadyHosts
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
    report: Path | None = None,
) -> int:
    """Run ``job`` on the hosts of ``wishes`` to its end; its size is known when the hosts have been looked at.

    The engine is closed then.
    """
    status = 1
    try:
        with Signals() as signals:
            ready = preflight.gather(wishes, job, signals)
            with contextlib.closing(ready.links):
                for line in ready.warnings:
                    print(line, file=sys.stderr, flush=True)
                job = dataclasses.replace(job, size=ready.size)
                recorder = make_record(job, ready.facts())

                def start(sized: Job, _: Signals) -> RemoteCrew:
                    return RemoteCrew(sized, ready, wishes)

                status = supervisor.run(
                    job, log_dir, recorder, report, start, signals, timeline=timeline, engine=wishes.engine
                )
    finally:
        wishes.engine.close(status)
    return status


class RemoteCrew(Crew):
    """Processes of a job that agents start, watch over and end."""

    hosts: CrewHosts

    def __init__(self, job: Job, ready: ReadyHosts, wishes: Wishes) -> None:
        """Have the agents start what is theirs; ``wishes`` hold for hosts that come later, too."""
        self.losses: list[Loss] = []
        self.notes: list[str] = []
        self._job, self._ready, self._links = job, ready, ready.links
        self.hosts = CrewHosts(job, ready, wishes, self._start)
        parts = self._parts = self.hosts.parts
        self._lost: set[AgentLink] = set()
        self._is_closed = False
        self._of: dict[CrewMember, AgentLink] = {}
        if job.settings.get("timeline"):
            self._links.compare_clocks()
        for link, part in parts.items():
            self._of |= dict.fromkeys(members(job, part), link)
            self._start(link)
        self.members = sorted(self._of, key=lambda member: (not member.is_worker, member.role, member.number))
        self._named = {(link, member.name): member for member, link in self._of.items()}
        self._links.mind_silence()
        self._first = next(iter(parts))
        self.refusal = ""
        if self.hosts.spans and not _can_grow(job, near_gpus=any(part.near_gpus for part in parts.values())):
            self.refusal = (
                "between hosts nobody can join over Gloo, with --on-loss end, or where there are GPUs unless --on-loss "
                "replace asks for it"
            )
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
        self.hosts.tick(lambda link: any(self._of[member] is link and member.is_running for member in self.members))
        for link in self._parts:
            if link.trouble and not link.is_done and link not in self._lost:
                self._note_loss(link)

    def signal(self, member: CrewMember, number: int) -> None:
        if member.is_running:
            self._of[member].channel.send("signal", name=member.name, number=int(number))

    def add(self, member: CrewMember) -> None:
        link = self.hosts.link_of(member.host)
        self._of[member] = link
        self._named[link, member.name] = member  # what had this name there has ended
        self.members.append(member)
        link.channel.send("add", number=member.number, role=member.role, local_size=member.local_size)

    def appoint(self, spare: CrewMember, number: int) -> None:
        link, before = self._of[spare], spare.name
        spare.role, spare.number, spare.is_newcomer, spare.began = "rank", number, True, time.monotonic()
        self._named[link, spare.name] = spare
        link.channel.send("appoint", name=before, number=number, local_size=spare.local_size)

    def rooms(self) -> list[Room]:
        return [Room(name, slots if self.hosts.spans else None) for name, slots in self.hosts.free.items()]

    def watch(self, descriptor: int, action: Callable[[], None]) -> None:
        self._links.watch(descriptor, action)

    def unwatch(self, descriptor: int) -> None:
        self._links.unwatch(descriptor)

    def end(self) -> Iterator[Chunk]:
        left = [link for link in self._parts if not link.trouble]
        for link in left:
            link.channel.send("end")
        deadline = time.monotonic() + _END
        while time.monotonic() < deadline and any(not link.is_over for link in left):
            for link, frame in self._links.receive(0.1):
                yield from self._take(link, frame)

    def clock(self, host: str) -> HostClock | None:
        return next((link.monotonic for link in reversed(self._parts) if link.host.name == host), None)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._links.close()

    def _start(self, link: AgentLink) -> None:
        """Have an agent begin its part of the job."""
        job, part = self._job, dataclasses.asdict(self.hosts.parts[link])
        told = {name: getattr(job, name) for name in ("command", "size", "settings", "mark")}
        link.channel.send("start", **told, part=part, ports=self._ready.ports, folder=self._ready.folder)

    def _take(self, link: AgentLink, frame: Frame) -> Sequence[Chunk]:
        head = frame.head
        if frame.kind == "input taken":
            self._read_input(True)
        elif frame.kind == "note":
            self.notes.append(f"{link.host.name}: {head.get('text')}")
        elif frame.kind in ("output", "ended"):
            member = self._named.get((link, str(head.get("name"))))
            if member is None:
                link.trouble = "it spoke of a process that it does not have"
            elif frame.kind == "output" and head.get("pipe") in ("stdout", "stderr", "events"):
                return [Chunk(member, head["pipe"], frame.body)]
            elif frame.kind == "ended" and not link.trouble:  # else it ended because its host is lost
                member.returncode = int(head.get("status", 1))
        else:
            self.hosts.take(link, frame)
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
        status = link.status
        ended = "" if status is None else f", {'its agent' if link.host.is_here else 'ssh'} with status {status}"
        reason = f"{link.trouble}{ended}{link.said()}"
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


def _can_grow(job: Job, *, near_gpus: bool) -> bool:
    """Whether the workers of several hosts let others in."""
    transport, on_loss = job.setting("transport"), job.setting("on-loss")
    if transport == "auto" and on_loss == "auto":
        return not near_gpus
    return transport != "gloo" and on_loss != "end"
