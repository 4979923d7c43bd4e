"""Goes on without workers that were lost, where the strategy survives that."""

from __future__ import annotations

import time
from typing import Any

from hocket.launch import report
from hocket.launch.crew import Crew, Loss, Member
from hocket.launch.listener import Listener


class Survival:
    """Decides whether a job survives a loss, says so, and remembers who was lost.

    Attributes:
        is_told: Whether a worker has told that the strategy survives the loss of workers.
        is_over: Whether the job ends, so that nothing more is survived.
        lost: What the job has gone on without, in words, and the ranks of it.
    """

    def __init__(self, crew: Crew, listener: Listener) -> None:
        self.is_told = self.is_over = False
        self.lost: dict[str, list[int]] = {}
        self._losses, self._known = crew.losses, 0
        self._workers = [member for member in crew.members if not member.is_server]
        self._listener = listener
        self._started = time.monotonic()

    def survives(self, member: Member) -> bool:
        """Whether the job goes on after the end of ``member``: a worker that was killed, and had not raised."""
        was_killed = member.returncode is not None and member.returncode < 0
        is_worker = not member.is_server and member.stage not in ("failed", "reported")
        return was_killed and is_worker and self._can_go_on()

    def go_on_without(self, worker: Member) -> None:
        """Take note of a worker whose end is survived."""
        how = f"{report.how(worker.returncode or 0, hints=False)} after {self._seconds:.1f} s"
        self.lost[f"{worker.name} on {worker.host}, which {how}"] = [worker.number]
        details = {"rank": worker.number, "host": worker.host, "how": how}
        self._tell("worker lost", details, f"{worker.name} on {worker.host} {how}")

    def take_losses(self) -> list[Loss]:
        """Of the hosts that were lost since the last look, take note; return those that end the job."""
        new = self._losses[self._known :]
        self._known += len(new)
        fatal = []
        for loss in new:
            if loss.servers or not self._can_go_on():
                fatal.append(loss)
                continue
            text = report.describe_loss(loss, self._seconds)
            self.lost[text] = loss.ranks
            self._tell("host lost", {"host": loss.host, "ranks": loss.ranks, "how": loss.reason}, text)
        return fatal

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _can_go_on(self) -> bool:
        """Whether workers may be lost now: all had joined, and one runs or has finished."""
        has_begun = self.is_told and not self.is_over and all(worker.has_joined for worker in self._workers)
        return has_begun and any(worker.is_running or worker.returncode == 0 for worker in self._workers)

    def _tell(self, name: str, details: dict[str, Any], text: str) -> None:
        left = [worker.number for worker in self._workers if worker.is_running]
        rest = "the others go on without it." if left else "the others have finished."
        self._listener.note(name, details, f"hocket: {text}; {rest}")
        if left:
            self._listener.follow(left[0])
