"""Which workers a job goes on without, and whether it may: losses, hosts that were lost, and those that have left."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hocket.launch import report
from hocket.launch.crew import Crew, CrewMember, Loss
from hocket.launch.environment import Job
from hocket.launch.listener import EventListener
from hocket.launch.newcomers import Newcomers

_HOUR = 3600.0  # seconds


@dataclass
class _Lost:
    """Who was lost, in words for the end, and the ranks of those whom nobody has replaced."""

    text: str
    ranks: set[int]
    is_replaced: bool = field(default=False, init=False)

    def replace(self, rank: int) -> None:
        """A newcomer has this rank now."""
        if rank in self.ranks:
            self.ranks.discard(rank)
            self.is_replaced = not self.ranks


class Losses:
    """Decides whether a job survives a loss, says so, and remembers who was lost.

    Attributes:
        is_over: Whether the job ends, so that nothing more is survived.
        gone: The workers that the job has gone on without.
        limits: Why the job does not go on without a worker, though its strategy could.
    """

    def __init__(self, job: Job, crew: Crew, listener: EventListener, newcomers: Newcomers) -> None:
        self.is_over = False
        self.gone: set[CrewMember] = set()
        self.limits: list[str] = []
        self._job, self._crew, self._listener, self._newcomers = job, crew, listener, newcomers
        self._lost: list[_Lost] = []
        self._fewest, self._most = (int(job.setting(name)) for name in ("min-workers", "max-losses"))
        self._times: list[float] = []  # when each worker was lost
        self._known = 0  # how many of the crew's lost hosts were looked at
        self._started = time.monotonic()

    @property
    def size(self) -> int:
        """How many workers the job has, those that have just failed included."""
        return sum(member.is_worker and member not in self.gone for member in self._crew.members)

    @property
    def have_all_left(self) -> bool:
        """Whether no worker has finished: each has left before the end, or was lost."""
        return not any(
            member.returncode == 0 and not member.has_left for member in self._crew.members if member.is_worker
        )

    @property
    def lines(self) -> tuple[list[str], list[str]]:
        """Who was lost and not replaced, in words for the end, and who was replaced."""
        replaced = [lost.text for lost in self._lost if lost.is_replaced]
        return [lost.text for lost in self._lost if not lost.is_replaced], replaced

    @property
    def some_have_finished(self) -> bool:
        """Whether a worker has come to the end of the script, so that the others will, and nobody can join them."""
        return any(
            member.returncode == 0 and member.takes_part and not member.has_left for member in self._crew.members
        )

    def survives(self, member: CrewMember, *, failed_for_another: bool = False) -> bool:
        """Whether the job goes on after the end of ``member``: of a worker that was killed before it raised.

        ``failed_for_another`` says that it is a newcomer which failed only because of the loss of another worker.
        """
        was_killed = (member.returncode or 0) < 0 and member.stage not in ("failed", "reported")
        is_lost = member.is_worker and (was_killed or failed_for_another)
        return is_lost and self._can_go_on() and self._is_within_limits(1)

    def go_on_without(self, worker: CrewMember) -> None:
        """Take note of a worker whose end is survived, and have a newcomer take its place if that is wanted."""
        self.gone.add(worker)
        how = f"{report.how(worker.returncode or 0, hints=False)} after {self._seconds:.1f} s"
        if worker.stage == "cut off":
            how = f"was cut off after {self._seconds:.1f} s ({worker.words})"
            if self._crew.hosts is not None:
                self._crew.hosts.shun(worker.host)
        if not worker.takes_part:
            how += ", before it had joined"
        name = f"{worker.name} on {worker.host}"
        self._lost.append(_Lost(f"{name}, which {how}", {worker.number}))
        self._listener.note("worker lost", {"rank": worker.number, "host": worker.host, "how": how})
        self._say(f"{name} {how}", self._rest([worker]))

    def can_let_go(self, member: CrewMember) -> bool:
        """Whether the job goes on after the end of ``member``, which has left on notice or was dismissed."""
        quiet = (0, -signal.SIGTERM, -signal.SIGKILL)  # it may have been killed before it could hear, or after it left
        if not member.has_left or member.returncode not in quiet or self.is_over or not self._left():
            return False
        left = len(self._left())
        if left < self._fewest and member.takes_part:
            self.limits = [f"workers that are left: {left}, and --min-workers is {self._fewest}."]
        return not self.limits

    def let_go(self, worker: CrewMember) -> None:
        """Take note of a worker that has left."""
        self.gone.add(worker)
        text = f"{worker.name} on {worker.host} has left{'' if worker.is_dismissed else ' on notice'}"
        details = {"rank": worker.number, "host": worker.host, "dismissed": worker.is_dismissed}
        self._listener.note("worker left", details)
        rest = "the others go on." if worker.is_dismissed else self._rest([worker])
        self._say(f"{text} after {self._seconds:.1f} s", rest)

    def forget(self, newcomer: CrewMember) -> None:
        """Take note of a newcomer that has ended without joining the others, in order or because they finish."""
        self.gone.add(newcomer)
        text = f"the new {newcomer.name} on {newcomer.host} has ended without joining the others"
        self._listener.note("newcomer ended", {"rank": newcomer.number, "host": newcomer.host})
        self._say(text, "these go on without it.")

    def take_losses(self) -> list[Loss]:
        """Take note of the hosts that were lost since the last look; return the losses that end the job."""
        new = self._crew.losses[self._known :]
        self._known += len(new)
        fatal = []
        for loss in new:
            if loss.servers or loss.coordinator or not self._can_go_on() or not self._is_within_limits(len(loss.ranks)):
                fatal.append(loss)
                continue
            lost = [m for m in self._crew.members if m.is_worker and m.host == loss.host and m.is_lost]
            lost = [member for member in lost if member not in self.gone]
            self.gone |= set(lost)
            text = report.describe_loss(loss, self._seconds)
            self._lost.append(_Lost(text, {member.number for member in lost}))
            self._listener.note("host lost", {"host": loss.host, "ranks": loss.ranks, "how": loss.reason})
            self._say(text, self._rest(lost))
        return fatal

    def renew_spare(self, spare: CrewMember) -> None:
        """Take note of a spare that has ended, and have another one, which counts as much as the loss of a worker."""
        if spare.returncode is None or spare.is_dismissed:  # with its host, which counts already, or has left
            self._newcomers.stand_by(spare.host)
            return
        how = report.how(spare.returncode, hints=False)
        self._listener.note("spare lost", {"spare": spare.number, "host": spare.host, "how": how})
        if spare.returncode == 0:
            rest = "no other one is started: it did not wait in hocket.init()."
        elif (count := self._count(1)) > self._most:
            rest = f"no other one is started: losses within an hour: {count}, and --max-losses is {self._most}."
        else:
            rest = self._newcomers.stand_by(spare.host)
        self._listener.say(f"hocket: {spare.name} on {spare.host} {how} after {self._seconds:.1f} s; {rest}")

    def note_joined(self, newcomer: CrewMember) -> None:
        """Take note that a newcomer is one of the workers now."""
        for lost in self._lost:
            lost.replace(newcomer.number)
        seconds = time.monotonic() - newcomer.began
        details = {"rank": newcomer.number, "host": newcomer.host, "seconds": round(seconds, 1)}
        line = f"hocket: the new {newcomer.name} on {newcomer.host} has joined after {seconds:.1f} s."
        self._listener.note("newcomer joined", details, line)

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _rest(self, gone: Sequence[CrewMember]) -> str:
        """What follows, in words, for which a newcomer is started if that is wanted."""
        if not self._running():
            return "the others have finished."
        return self._newcomers.replace(sorted(gone, key=lambda member: member.number))

    def _running(self) -> list[CrewMember]:
        """The workers that go on, by number."""
        return sorted((member for member in self._left() if member.is_running), key=lambda member: member.number)

    def _left(self) -> list[CrewMember]:
        """The workers that go on or have finished."""
        return [
            member
            for member in self._crew.members
            if member.takes_part and not member.has_left and (member.is_running or member.returncode == 0)
        ]

    def _can_go_on(self) -> bool:
        """Whether workers may be lost now: all with which the job began had joined, and one runs or has finished."""
        first = [member for member in self._crew.members if member.is_worker and not member.is_newcomer]
        is_told = any(member.survives for member in self._crew.members if member.is_worker)
        return is_told and not self.is_over and all(member.has_joined for member in first) and bool(self._left())

    def _count(self, count: int) -> int:
        """Count so many losses; how many there were within an hour."""
        now = time.monotonic()
        self._times = [*(then for then in self._times if now - then < _HOUR), *[now] * count]
        return len(self._times)

    def _is_within_limits(self, count: int) -> bool:
        """Whether the job may go on after the loss of ``count`` more workers, whose processes have ended."""
        left, lost = len(self._left()), self._count(count)
        few = f"workers that are left: {left}, and --min-workers is {self._fewest}."
        many = f"workers lost within an hour: {lost}, and --max-losses is {self._most}."
        self.limits = [few] * (left < self._fewest) + [many] * (lost > self._most)
        return not self.limits

    def _say(self, text: str, rest: str) -> None:
        """Tell the user what has happened and what follows."""
        self._listener.say(f"hocket: {text}; {rest}")
        self.follow_another()

    def follow_another(self) -> None:
        """Show the progress of somebody who is there, if the one who was followed is gone or leaves."""
        running = self._running()
        if running and self._listener.lead not in [member.number for member in running]:
            self._listener.follow(running[0].number)
