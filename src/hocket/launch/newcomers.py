"""Brings new processes into a job that goes on: workers in the place of others, and spares that stand by for that."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from hocket.launch import report
from hocket.launch.crew import Crew, CrewMember, Room
from hocket.launch.environment import Job
from hocket.launch.listener import EventListener

_NO_ROOM = "no host of the job has a free slot"


class Newcomers:
    """Starts processes while the job goes on.

    Attributes:
        ask_reserve: Asks hosts that were named and not needed so far for so many slots; tells which.
        count_reserve: How many slots these hosts have; None if that is not known of each.
    """

    def __init__(self, job: Job, crew: Crew, listener: EventListener) -> None:
        self._crew, self._listener = crew, listener
        self.ask_reserve: Callable[[int], list[str]] = lambda _: []
        self.count_reserve: Callable[[], int | None] = lambda: 0
        self._began_alone = not job.has_coordinator
        self._on_loss = job.setting("on-loss")
        self._numbers = itertools.count(job.spares)  # of spares: none has a number that another one had
        self._known = len(crew.members)
        self._obstacle = ""  # why nobody can join, though the script allows it

    def hear_of(self, obstacle: str) -> None:
        """A worker has told why nobody can join, if that is not empty; the user is told once."""
        if obstacle and not self._obstacle:
            self._obstacle = obstacle
            line = f"hocket: lost workers are not replaced: {obstacle}"
            self._listener.note("no new workers", {"why": obstacle}, line)

    def take_started(self) -> list[CrewMember]:
        """The processes that were started since the last call."""
        new = self._crew.members[self._known :]
        self._known += len(new)
        return new

    def replace(self, gone: Sequence[CrewMember]) -> str:
        """Bring workers in the place of ``gone``, if that is wanted and possible; what follows, in words."""
        why = self.refusal()
        is_told = self._on_loss == "replace" or bool(self._obstacle)
        if self._on_loss not in ("auto", "replace") or (why and not is_told):
            return "the others go on without it."
        come: dict[int, str] = {}
        for worker in () if why else gone:
            try:
                come[worker.number] = self.bring(worker.number, worker.host)
            except LookupError:
                asked = ", ".join(self.ask_reserve(len(gone) - len(come)))
                why = f"{_NO_ROOM}; asked for some: {asked}" if asked else _NO_ROOM
                break
            except OSError as error:
                why = f"no new worker can be started ({error.strerror})"
                break
        if not come:
            return f"the others go on without it: {why}."
        if len(gone) == 1:
            return f"the others go on, and {come[gone[0].number]} takes its place."
        named = ", ".join(f"{who} takes the place of rank {number}" for number, who in come.items())
        return f"the others go on, and {named}{f'; more cannot come: {why}' if why else ''}."

    def refusal(self) -> str:
        """Why no newcomer can join now; empty if one can."""
        workers = [member for member in self._crew.members if member.takes_part and not member.has_left]
        if self._began_alone:
            return "a job that began with one worker has no coordinator, at which others could meet it"
        if self._crew.refusal:
            return self._crew.refusal
        if any(member.returncode == 0 for member in workers):
            return "some have finished already"
        if self._obstacle:
            return self._obstacle
        if not any(member.replaces for member in workers if member.is_running):
            return (
                "new workers can join only after the script has called hocket.resume(), and with a strategy that takes "
                "them"
            )
        return ""

    def free_slots(self) -> int | None:
        """How many more workers there may be; None if there is no bound."""
        rooms = self._crew.rooms()
        if any(room.slots is None for room in rooms):
            return None
        return sum(max(0, (room.slots or 0) - len(self.workers_on(room.host))) for room in rooms)

    def workers_on(self, host: str) -> list[CrewMember]:
        """The workers that a host has, or will have when they have joined."""
        return [
            member for member in self._crew.members
            if member.is_worker and member.is_running and not member.has_left and member.host == host
        ]  # fmt: skip

    def bring(self, number: int, preferred: str = "") -> str:
        """Have a spare or a new process be the worker ``number``, on the host ``preferred`` if that has room.

        Returns:
            Which process it is, in words, with its host if that is another one.

        Raises:
            LookupError: no host has room.
            OSError: no process can be started.
        """
        room = self._choose(preferred)
        host, size = room.host, 0 if room.slots is None else len(self.workers_on(room.host)) + 1
        spares = [spare for spare in self._spares() if spare.host == host]
        if spares:
            spare = max(spares, key=lambda member: (member.stage == "standing by", -member.number))
            who = spare.name
            self._listener.renew(number)
            spare.local_size = size
            self._crew.appoint(spare, number)
            self.stand_by(host)
        else:
            who = "a new worker"
            self._crew.add(CrewMember(number, host, local_size=size, is_newcomer=True))
            self._listener.renew(number)
        details = {"rank": number, "host": host, **({"was": who} if spares else {})}
        self._listener.note("newcomer started", details)
        return who if host == preferred else f"{who} on {host}"

    def stand_by(self, preferred: str) -> str:
        """Start another spare, on the host ``preferred`` if that is there; what follows, in words."""
        rooms = [room.host for room in self._crew.rooms()]
        if not rooms:
            return "no other one is started: no host is left for it."
        host = preferred if preferred in rooms else rooms[0]
        try:
            self._crew.add(CrewMember(next(self._numbers), host, "spare"))
        except OSError as error:
            return f"no other one can be started ({error.strerror})."
        return "another one is started."

    def _spares(self) -> list[CrewMember]:
        return [member for member in self._crew.members if member.role == "spare" and member.is_running]

    def _choose(self, preferred: str) -> Room:
        """The host of a newcomer: the one that is preferred, else the first with a spare, else the first with room."""
        free = [
            room for room in self._crew.rooms()
            if room.slots is None or len(self.workers_on(room.host)) < room.slots
        ]  # fmt: skip
        if not free:
            raise LookupError(_NO_ROOM)
        ready = {spare.host for spare in self._spares()}
        return max(free, key=lambda room: (room.host == preferred, room.host in ready))


def say_ranks(numbers: Sequence[int]) -> str:
    """Who joins, in words."""
    new = "a new worker joins" if len(numbers) == 1 else f"{len(numbers)} new workers join"
    return f"{new} as {report.ranks(numbers)}"
