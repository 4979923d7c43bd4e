"""Hosts whose tasks something else has started: a step of Slurm, mpirun, the pods of a JobSet, a cluster file.

Task 0 is the launcher. The others dial it; the first of each host becomes the host's agent, and the rest wait for the
end of the job, of which they return the status.
"""

from __future__ import annotations

import contextlib
import dataclasses
import select
import signal
import sys
import time
from collections.abc import Mapping

from hocket.errors import JobError, UsageError
from hocket.launch import dialing, machine, meeting
from hocket.launch.agent_links import AgentLink, here
from hocket.launch.dialing import Call
from hocket.launch.engines.engine import Engine
from hocket.launch.environment import Job
from hocket.launch.host_list import Host, Wishes
from hocket.launch.meeting import Meeting, Secret
from hocket.launch.reception import Arrival, Reception
from hocket.launch.signals import Signals
from hocket.surroundings import Surroundings
from hocket.transport.door import listen_here
from hocket.transport.interfaces import open_server
from hocket.transport.wire import Closed, Wire

_ROLE = 2  # the kind of the message with which the launcher tells a task what it is


class TasksEngine(Engine):
    """The launcher's end: it waits until all tasks have come.

    Args:
        tasks: The surroundings of task 0, which is this process.
        settings: Of this start: ``secret-file``, ``start-timeout``, ``tls``.
        environ: The environment of this process.

    Attributes:
        servers: The numbers of the servers on each host that has some, by its name.
    """

    def __init__(self, tasks: Surroundings, settings: Mapping[str, str], environ: Mapping[str, str]) -> None:
        self.tasks, self.servers = tasks, dict[str, list[int]]()
        self._seconds = float(settings["start-timeout"])
        self._secret = Secret(tasks, settings.get("secret-file") or None)
        self._agents: dict[str, Arrival] = {}
        self._waiting: list[Arrival] = []
        try:
            place = _place(tasks, settings, environ, self._secret, self._secret.make())
            self.is_open, self.secret = place.is_open, place.secret
            self.reception: Reception = _receive(tasks, place)
        except BaseException:
            self._secret.remove()
            raise

    def first(self) -> list[Host]:
        with Signals() as signals:
            arrivals = self._await_all(signals)
        self._secret.remove()
        return self._group(arrivals)

    def begin(self, host: Host, number: int) -> AgentLink:
        if host.name == self._own:
            return AgentLink(host, number, here())
        return self.begin_elsewhere(host, number)

    def begin_elsewhere(self, host: Host, number: int) -> AgentLink:
        arrival = self._agents.pop(host.name, None)
        if arrival is None:
            raise UsageError(f"{host.name} has no task of this start any more")
        link = AgentLink(host, number)
        with contextlib.suppress(Closed, TimeoutError):  # the link notices it, too
            Wire(arrival.connection).send(_ROLE, 0, {"is agent": True})
        link.channel.connect(arrival.connection)
        return link

    def own(self, job: Job, wishes: Wishes) -> tuple[Job, Wishes]:
        """The job with the secret of its tasks, on their hosts."""
        job = job if self.is_open else dataclasses.replace(job, secret=self.secret)
        return job, dataclasses.replace(wishes, engine=self, servers=wishes.servers or self.servers)

    def why_silent(self, link: AgentLink) -> str:
        return f"its task has ended or does not answer{link.said()}: see its output"

    def close(self, status: int = 1) -> None:
        """Tell the tasks that wait how the job has ended."""
        self._secret.remove()
        for arrival in (*self._waiting, *self._agents.values()):
            with contextlib.suppress(Closed, TimeoutError):
                Wire(arrival.connection).send(_ROLE, 0, {"is agent": False, "status": status})
            arrival.connection.close()
        self._waiting.clear()
        self._agents.clear()
        super().close(status)

    def _await_all(self, signals: Signals) -> list[Arrival]:
        """One arrival from each of the other tasks."""
        come: dict[int, Arrival] = {}
        deadline = time.monotonic() + self._seconds
        while len(come) < self.tasks.count - 1:
            left = deadline - time.monotonic()
            if signals.received or left < 0:
                for arrival in come.values():
                    arrival.connection.close()
            if signals.received:
                name = signal.Signals(signals.received[0]).name
                print(f"hocket: ended by {name} before all tasks were there", file=sys.stderr, flush=True)
                self.close(128 + signals.received[0])
                raise SystemExit(128 + signals.received[0])
            if left < 0:
                self.close()
                raise UsageError(_absent(self.tasks, come, self._seconds))
            select.select([self.reception.fileno(), signals.fileno()], [], [], min(left, 1.0))
            signals.drain()
            for arrival in self.reception.take():
                if trouble := _misplaced(self.tasks, come, arrival):
                    self.close()
                    raise UsageError(trouble)
                come[arrival.number] = arrival
        return [come[number] for number in sorted(come)]

    def _group(self, arrivals: list[Arrival]) -> list[Host]:
        """The hosts, with a slot for each task that is no server; a machine of a name that is taken gets a number."""
        workers = self.tasks.count - self.tasks.servers
        machines: dict[tuple[str, str], str] = {}
        slots: dict[str, int] = {}
        own = self.tasks.host, machine.network()
        told = [(0, *own), *((a.number, str(a.said["host"]), str(a.said.get("machine"))) for a in arrivals)]
        of = {arrival.number: arrival for arrival in arrivals}
        for number, name, where in told:
            if (name, where) not in machines:
                others = sum(known == name for known, _ in machines)
                machines[name, where] = f"{name}.{others + 1}" if others else name
            host = machines[name, where]
            if number < workers:
                slots[host] = slots.get(host, 0) + 1
            else:
                self.servers.setdefault(host, []).append(number - workers)
            if number and host != machines[own] and host not in self._agents:
                self._agents[host] = of[number]
            elif number:
                self._waiting.append(of[number])
        self._own = machines[own]
        return [Host(name, count) for name, count in slots.items()]


def take_part(tasks: Surroundings, settings: Mapping[str, str], environ: Mapping[str, str]) -> int:
    """Be one of the other tasks, to the end of the job; returns its status.

    Raises:
        UsageError: the launcher was not there in time.
    """
    seconds = float(settings["start-timeout"])
    with Signals() as signals:
        secret = Secret(tasks, settings.get("secret-file") or None)
        place = _place(tasks, settings, environ, secret, secret.find(seconds))
        call = Call((place.address,), place.port, place.secret, tasks.number, tasks.host, place.encrypted, seconds)
        try:
            wire = dialing.dial(call, machine=machine.network())
        except JobError as error:
            what = f"task {_name(tasks, tasks.number)} of {tasks.count} ({tasks.sign})"
            raise UsageError(f"{what} does not reach task 0 within {seconds:g} s: {error}") from None
        wire.connection.settimeout(None)
        try:
            said = wire.receive().head  # signals are for task 0, which says what follows
        except JobError:
            print(f"hocket: {tasks.host}: task 0, the launcher, is gone: see its output", file=sys.stderr, flush=True)
            return 1
        if said.get("is agent"):
            return dialing.talk(wire.connection, b"" if place.is_open else place.secret, signals)
        return int(said.get("status", 1))


def _place(
    tasks: Surroundings, settings: Mapping[str, str], environ: Mapping[str, str], kept: Secret, secret: bytes
) -> Meeting:
    return meeting.arrange(tasks, environ, secret, tls=settings["tls"], is_open=kept.is_open)


def _receive(tasks: Surroundings, place: Meeting) -> Reception:
    if place.address.startswith("@"):
        return Reception(listen_here(place.address[1:]), place.secret, encrypted=False)
    try:
        listener = open_server(place.port)
    except OSError as error:
        raise UsageError(
            f"{tasks.sign}: port {place.port}, at which the tasks are to meet, cannot be had here ({error.strerror}): "
            "set MASTER_PORT to a free one for all of them"
        ) from None
    return Reception(listener, place.secret, encrypted=place.encrypted)


def _misplaced(tasks: Surroundings, come: Mapping[int, Arrival], arrival: Arrival) -> str:
    """Why a task that has come cannot be what it says; empty if it can."""
    number, host = arrival.number, arrival.said.get("host")
    if not 0 < number < tasks.count:
        return f"a task on {host} says that it is number {number} of {tasks.count}: is the cluster the same for all?"
    if number in come:
        there = come[number].said.get("host")
        return f"task {_name(tasks, number)} was started twice, on {there} and on {host}: start each task once"
    return ""


def _name(tasks: Surroundings, number: int) -> str:
    return tasks.names[number] if tasks.names else str(number)


def _absent(tasks: Surroundings, come: Mapping[int, Arrival], seconds: float) -> str:
    missing = [_name(tasks, number) for number in range(1, tasks.count) if number not in come]
    return (
        f"{len(missing)} of {tasks.count} tasks ({tasks.sign}) did not come within {seconds:g} s (--start-timeout): "
        f"{', '.join(missing)}: see their output"
    )
