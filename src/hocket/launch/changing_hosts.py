"""Which hosts a running job is to have: its user names them, an engine lists them, one gets notice or comes back."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hocket.errors import UsageError
from hocket.launch.crew import Crew
from hocket.launch.crew_hosts import CrewHosts
from hocket.launch.engines.engine import Engine
from hocket.launch.environment import Job
from hocket.launch.host_list import Host
from hocket.launch.listener import EventListener
from hocket.launch.newcomers import Newcomers
from hocket.launch.resizing import Resizing

_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 300.0  # seconds until a host that was lost, or could not join, is asked again
_STEADY = 60.0  # seconds after which a host that has joined counts as well again


class ChangingHosts:
    """Asks hosts to join and lets others go; workers follow by ``Resizing``.

    Args:
        job: The job.
        crew: The processes of the job.
        listener: Says what happens.
        newcomers: Knows whether workers can join.
        resizing: Starts workers where there is room, and asks others to leave.
        engine: Lists hosts now and then, and tells which will be taken away; None in a job of this machine alone.
    """

    def __init__(
        self,
        job: Job,
        crew: Crew,
        listener: EventListener,
        newcomers: Newcomers,
        resizing: Resizing,
        engine: Engine | None,
    ) -> None:
        self._crew, self._listener, self._newcomers, self._resizing = crew, listener, newcomers, resizing
        self._engine, self._fewest = engine, int(job.setting("min-workers"))
        newcomers.ask_reserve, newcomers.count_reserve = self.ask_reserve, self.count_reserve
        self._arrived = self._lost = 0  # as far as they were looked at
        self._pauses: dict[str, tuple[float, float]] = {}  # of each host: until when, and for how many seconds
        self._said: dict[str, str] = {}  # the last line about each host that could not join

    def resize(self, count: int | None, hosts: Sequence[Host] | None) -> str:
        """Have ``count`` workers on ``hosts`` and no others, or on those that there are; what is done, in words.

        Raises:
            UsageError: that cannot be.
        """
        if hosts is None:
            assert count is not None
            return self._resizing.resize(count)
        there = self._hosts()
        if count is not None:
            slots = [host.slots for host in hosts]
            if None not in slots and count > (have := sum(each or 0 for each in slots)):
                raise UsageError(f"-n {count}, but these hosts have {have} slots: use at most -n {have}")
            self._resizing.check(count)
        if why := self._newcomers.refusal():
            raise UsageError(f"it takes no more workers: {why}")
        names = {host.name for host in hosts}
        gone = [name for name in there.slots if name not in names]
        for name in gone:
            if why := there.fixed(name):
                raise UsageError(f"-H without {name}, but {why}: name {name}, too")
        left = sum(member.host not in gone for member in self._resizing.workers)
        if left < self._fewest:
            raise UsageError(
                f"{left} worker{'s' if left > 1 else ''} would be left at first, and --min-workers is {self._fewest}: "
                "name more of the hosts that it has"
            )
        self._resizing.aim(count)
        new = self._follow(hosts)
        done = [f"{', '.join(new)} {'is' if len(new) == 1 else 'are'} asked to join"] if new else []
        done += [f"{', '.join(gone)} {'leaves' if len(gone) == 1 else 'leave'}"] if gone else []
        return "; ".join(done) or "its hosts stay"

    def ask_reserve(self, more: int) -> list[str]:
        """Ask hosts that were named and not needed so far for ``more`` slots; those that are asked."""
        hosts = self._crew.hosts
        asked: list[Host] = []
        for host in hosts.reserve if hosts is not None else ():
            if more > 0:
                asked.append(host)
                more -= host.slots or more
        if hosts is not None and asked:
            hosts.ask(asked)
        return [host.name for host in asked]

    def count_reserve(self) -> int | None:
        """How many slots those hosts have; None if that is not known of each."""
        slots = [host.slots for host in self._crew.hosts.reserve] if self._crew.hosts is not None else []
        return None if None in slots else sum(each or 0 for each in slots)

    def tick(self) -> None:
        """To be called often."""
        hosts = self._crew.hosts
        if hosts is None or self._engine is None:
            return
        self._note_losses()
        while hosts.recruits.refused:
            self._note_refusal(*hosts.recruits.refused.pop(0))
        while hosts.noticed:
            name, signal = hosts.noticed.pop(0)
            self._heed_notice(hosts, name, f"its agent was told so by {signal}", f"its agent was ended by {signal}")
        for name, why in self._engine.notices():
            self._heed_notice(hosts, name, why, f"it had to leave: {why}")
        if hosts.arrived > self._arrived:
            self._arrived = hosts.arrived
            self._resizing.fill()
        if (listed := self._engine.look(self._listener.say)) is not None:
            self._discover(hosts, listed)

    def _hosts(self) -> CrewHosts:
        hosts = self._crew.hosts
        if hosts is None:
            raise UsageError("it was started on this machine alone: a job that begins with -H can have other hosts")
        if not hosts.spans:
            raise UsageError(
                "its workers share the memory of one host: a job that begins with several, or with --transport tcp, "
                "can have other hosts"
            )
        return hosts

    def _follow(self, hosts: Sequence[Host]) -> list[str]:
        """Be on ``hosts``, as far as others can leave; the names of those that are asked to join."""
        there = self._hosts()
        now, coming = there.slots, there.recruits.coming
        names = {host.name for host in hosts}
        for host in hosts:
            if host.name in now and host.slots is not None:
                there.set_slots(host)
        for name in now:
            if name not in names and not there.fixed(name):
                self._let_go(there, name)
        new = [host for host in hosts if host.name not in now and host.name not in coming]
        there.ask(new)
        self._resizing.fit()
        self._resizing.fill()
        return [host.name for host in new]

    def _let_go(self, hosts: CrewHosts, name: str) -> None:
        """A host leaves, as its user wants: its workers finish their batch, and others come where there is room."""
        hosts.leave(name)
        self._resizing.dismiss([member for member in self._crew.members if member.host == name])
        self._listener.note("host leaves", {"host": name}, f"hocket: {name} leaves the job.")

    def _heed_notice(self, hosts: CrewHosts, name: str, why: str, ended: str) -> None:
        """A host has to leave: the workers there leave on notice, if the others can go on; else it is lost at once."""
        if name not in hosts.slots:
            return
        mine = [member for member in self._crew.members if member.host == name and member.is_running]
        others = [m for m in self._crew.members if m.takes_part and m.is_running and m.host != name]
        goes_on = others and all(member.survives or member.replaces for member in mine if member.takes_part)
        if hosts.fixed(name) or not goes_on:
            hosts.drop(name, ended)
            return
        hosts.leave(name)
        line = f"hocket: {name} has to leave: {why}; its workers finish their batch."
        self._listener.note("host leaves", {"host": name, "why": why}, line)
        self._resizing.dismiss(mine, on_notice=True)

    def _note_losses(self) -> None:
        for loss in self._crew.losses[self._lost :]:
            self._pause(loss.host)
        self._lost = len(self._crew.losses)

    def _note_refusal(self, name: str, why: str) -> None:
        self._pause(name)
        if self._said.get(name) != why:
            self._said[name] = why
            again = "; it is asked again now and then" if self._engine is not None and self._engine.looks else ""
            self._listener.note(
                "host refused", {"host": name, "why": why}, f"hocket: {name} cannot join the job: {why}{again}."
            )
        self._resizing.fill()

    def _pause(self, name: str) -> None:
        """Leave a host alone for a while, each time for twice as long."""
        until, seconds = self._pauses.get(name, (0.0, 0.0))
        well = time.monotonic() > until + _STEADY
        seconds = _FIRST_PAUSE if well else min(_LONGEST_PAUSE, 2 * seconds)
        self._pauses[name] = time.monotonic() + seconds, seconds

    def _discover(self, hosts: CrewHosts, listed: Sequence[Host]) -> None:
        """The engine has listed these hosts."""
        if not hosts.spans:
            return  # workers share the memory of one host
        now = time.monotonic()
        slots = [host.slots for host in listed]
        line = ""
        if None not in slots and (have := sum(each or 0 for each in slots)) < self._fewest:
            line = f"hocket: the hosts that are listed have {have} slots, and --min-workers is {self._fewest}: the job "
            line += "stays on those that it has"
        if line and self._said.get("") != line:
            self._listener.say(line)
        self._said[""] = line
        if line:
            return
        names = {host.name for host in listed}
        for name in hosts.slots:
            why = hosts.fixed(name) if name not in names else ""
            line = f"hocket: {name} is not listed any more, but {why}: it stays" if why else ""
            if line and self._said.get(name) != line:
                self._listener.say(line)
            if line:
                self._said[name] = line
        ready = [
            host for host in listed if host.name in hosts.slots or self._pauses.get(host.name, (0.0, 0.0))[0] < now
        ]
        self._follow(ready)
