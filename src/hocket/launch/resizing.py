"""Gives a running job more workers, or fewer, when its user asks for that."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from hocket.errors import UsageError
from hocket.launch import machine, report
from hocket.launch.crew import Crew, CrewMember
from hocket.launch.environment import Job
from hocket.launch.listener import EventListener
from hocket.launch.newcomers import Newcomers, say_ranks

_GRACE = 1.0  # seconds: a worker says itself when its time is over


class Resizing:
    """Starts newcomers, and asks workers to leave, highest numbers first; what they do then others see to."""

    def __init__(self, job: Job, crew: Crew, listener: EventListener, newcomers: Newcomers) -> None:
        self._job, self._crew, self._listener, self._newcomers = job, crew, listener, newcomers
        self._until: dict[CrewMember, float] = {}  # when those that were asked to leave are killed
        self._target: int | None = job.most or job.size  # workers; None is as many as the hosts have slots
        self._is_filling = self._is_fitting = False

    @property
    def workers(self) -> list[CrewMember]:
        """The workers that the job has, or will have when newcomers have joined, by number."""
        found = [m for m in self._crew.members if m.is_worker and m.is_running and not m.has_left]
        return sorted(found, key=lambda member: member.number)

    def resize(self, count: int) -> str:
        """Have ``count`` workers from now on; what is done for it, in words.

        Raises:
            UsageError: that cannot be.
        """
        now = self.workers
        self.check(count)
        if count == len(now):
            raise UsageError(f"it has {count} worker{'s' if count > 1 else ''} already")
        if count > len(now):
            asked = self._check_growth(count - len(now))
            self._target = count
            if asked:
                self.fill()
                return f"{', '.join(asked)} {'is' if len(asked) == 1 else 'are'} asked to join, for new workers"
            return self._grow(count - len(now))
        self._target = count
        return self._shrink(now[count:])

    def aim(self, count: int | None) -> None:
        """Have ``count`` workers, or as many as the hosts have slots, from when there are hosts for them."""
        self._target = count
        self.fill()

    def fill(self) -> None:
        """Have workers come where there is room, up to as many as are wanted, as soon as they can."""
        self._is_filling = True

    def fit(self) -> None:
        """Have workers leave hosts that have fewer slots now, and those that are more than are wanted.

        If those who stay have not joined yet, the others leave later: somebody has to tell newcomers how far all are.
        """
        leaving: list[CrewMember] = []
        for room in self._crew.rooms():
            here = sorted(self._newcomers.workers_on(room.host), key=lambda member: member.number)
            leaving += here[room.slots :] if room.slots is not None else []
        left = [member for member in self.workers if member not in leaving and not member.is_dismissed]
        leaving += left[self._target :] if self._target is not None else []
        self._is_fitting = bool(leaving) and not any(member.takes_part for member in left if member not in leaving)
        if leaving and not self._is_fitting:
            self._shrink(leaving)

    def dismiss(self, members: Sequence[CrewMember], *, on_notice: bool = False) -> None:
        """Have workers leave, and end spares; those that leave ``on_notice`` are replaced where there is room."""
        for member in members:
            if not member.is_running or member.role not in ("rank", "spare"):
                continue
            member.is_dismissed = not on_notice or member.role == "spare"
            self._until[member] = time.monotonic() + float(self._job.setting("notice")) + _GRACE
            if not (on_notice and member.has_notice):  # the host may have told all of its processes
                self._crew.signal(member, signal.SIGTERM if member.is_worker else signal.SIGKILL)

    def tick(self) -> None:
        """Start those that are wanted, and kill those that have not left in time; to be called often."""
        if self._is_fitting:
            self.fit()
        if self._is_filling:
            self._try_to_fill()
        for member, until in list(self._until.items()):
            if not member.is_running:
                del self._until[member]
            elif time.monotonic() > until:
                self._crew.signal(member, signal.SIGKILL)

    def check(self, count: int) -> None:
        """Raise UsageError if the job cannot have ``count`` workers, wherever they are."""
        now = self.workers
        least, most = int(self._job.setting("min-workers")), self._job.most or count
        part = int(self._job.setting("max-part"))
        if not all(member.has_joined or member.is_newcomer for member in now):
            raise UsageError("its workers have not all joined yet: try again when they train")
        if not any(member.takes_part for member in now[:count]):
            raise UsageError("the workers that would stay have not all joined yet: try again when they train")
        if count < least:
            raise UsageError(f"-n {count}, but it may not have fewer than {least} workers (--min-workers, or -n)")
        if count > most:
            raise UsageError(f"-n {count}, but it was started with -n {least}..{most}: use at most -n {most}")
        stays = self._job.setting("batch") != "per-worker"
        if stays and count * part < self._job.size and count < len(now):
            raise UsageError(
                f"-n {count}: each worker would get more than {part} times its first batch (--max-part): use at least "
                f"-n {-(-self._job.size // part)}"
            )
        if count < len(now) and not all(member.survives or member.replaces for member in now if member.takes_part):
            raise UsageError("it cannot go on with fewer workers: start it with --on-loss continue or replace")

    def _check_growth(self, more: int) -> list[str]:
        """Raise UsageError if so many workers cannot come; the hosts that are asked to join for them, if any."""
        if why := self._newcomers.refusal():
            raise UsageError(f"it takes no more workers: {why}")
        slots = self._newcomers.free_slots()
        if slots is not None and more > slots:
            reserve = self._newcomers.count_reserve()
            suffices = reserve is None or more <= slots + reserve
            if suffices and (asked := self._newcomers.ask_reserve(more - slots)):
                return asked
            have = len(self.workers) + slots + (reserve or 0)
            raise UsageError(
                f"-n {len(self.workers) + more}, but its hosts have {have} slots: use at most -n {have}, or name more "
                "hosts with -H"
            )
        free = None if slots is not None else machine.free_memory()
        if (most := machine.most_workers(free)) is not None and more > most:
            raise UsageError(machine.too_many(more, free))
        return []

    def _try_to_fill(self) -> None:
        now = self.workers
        if self._newcomers.refusal() or not all(member.has_joined or member.is_newcomer for member in now):
            return  # perhaps they have not begun to train
        self._is_filling = False
        free = self._newcomers.free_slots()
        if free is None:
            return
        bounds = [bound for bound in (self._target, self._job.most) if bound is not None]
        more = min([free, *(bound - len(now) for bound in bounds)])
        if more > 0:
            try:
                self._grow(more)
            except UsageError as error:
                self._listener.say(f"hocket: fewer workers join than there is room for: {error}")

    def _grow(self, more: int) -> str:
        taken = {member.number for member in self._crew.members if member.is_worker and member.is_running}
        ranks = [number for number in range(len(taken) + more) if number not in taken][:more]
        for rank in ranks:
            try:
                self._newcomers.bring(rank)
            except (OSError, LookupError) as error:
                if isinstance(error, LookupError):
                    raise UsageError(str(error)) from None
                raise UsageError(f"rank {rank} cannot be started ({error.strerror})") from None
        return self._say(say_ranks(ranks), ranks=ranks)

    def _shrink(self, leaving: list[CrewMember]) -> str:
        self.dismiss(leaving)
        ranks = [member.number for member in leaving]
        return self._say(f"{report.ranks(ranks)} {'leave' if len(ranks) > 1 else 'leaves'}", ranks=ranks)

    def _say(self, text: str, **details: object) -> str:
        self._listener.note("resized", {"workers": len(self.workers), **details}, f"hocket: resized: {text}.")
        return text
