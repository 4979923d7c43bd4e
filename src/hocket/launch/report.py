"""How a job ended, and what is said of it: which rank or server failed, how, and its own traceback last."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hocket.events import Replicas
from hocket.launch.crew import CrewMember, Loss

_MOST_REPLACED = 4  # that are named at the end; each was when it was lost
_COLLATERAL = ("hocket.errors.WorkerLost", "hocket.errors.ServerLost")


@dataclass
class Ending:
    """How one worker or server ended."""

    member: CrewMember
    status: int  # as subprocess has it: negative for a signal
    traceback: list[str] = field(default_factory=list)

    @property
    def who(self) -> str:
        """``rank 1 on node2``."""
        return f"{self.member.name} on {self.member.host}"

    @property
    def how(self) -> str:
        """``ended with exit code 1``, ``was killed by SIGKILL …`` or ``left on notice``."""
        return "left on notice" if self.member.has_left and not self.status else how(self.status)

    @property
    def exit_status(self) -> int:
        """The status that a shell would show; never 0, for it was an end at the wrong time."""
        return 128 - self.status if self.status < 0 else self.status or 1

    @property
    def error(self) -> str:
        """The last line of its traceback."""
        lines = [line for line in self.traceback if line.strip() and not line.startswith((" ", "\t"))]
        return lines[-1] if lines else ""

    @property
    def is_collateral(self) -> bool:
        """Whether the process failed only because another one did."""
        return self.error.startswith(_COLLATERAL)


@dataclass(frozen=True)
class Outcome:
    """How the job ended.

    Attributes:
        status: The launcher's exit status.
        reason: The cause, in one line.
        lines: What is said of it.
    """

    status: int
    reason: str
    lines: list[str] = field(default_factory=list)


def finished(summary: list[str], lost: list[str], replaced: list[str]) -> Outcome:
    """All workers have ended well, but those that were ``lost`` on the way, or ``replaced``."""
    if not lost and not replaced:
        return Outcome(0, "all workers finished", summary)
    parts = ["the other workers finished" if lost else "all workers finished"]
    parts += [f"lost on the way: {', '.join(lost)}"] if lost else []
    if replaced:
        more = len(replaced) - _MOST_REPLACED
        shown = [*replaced[:_MOST_REPLACED], f"and {more} more"] if more > 1 else replaced
        parts.append(f"replaced: {', '.join(shown)}")
    reason = "; ".join(parts)
    return Outcome(0, reason, [*summary, f"hocket: {reason}"])


def left(checkpoint: list[str]) -> Outcome:
    """All workers have left on notice before the end of the script."""
    reason = "all workers have left on notice"
    return Outcome(128 + signal.SIGTERM, reason, [f"hocket: {reason}", *checkpoint])


def stopped(number: int, checkpoint: list[str]) -> Outcome:
    """A signal asked for the end."""
    reason = f"ended by {signal.Signals(number).name}"
    return Outcome(128 + number, reason, [f"hocket: {reason}", *checkpoint])


def absence(absent: list[CrewMember], waiting: list[CrewMember], checkpoint: list[str]) -> Outcome:
    """Some workers ended before they joined the others."""
    hosts = ", ".join(dict.fromkeys(worker.host for worker in absent))
    reason = (
        f"{ranks(w.number for w in absent)} on {hosts} finished without hocket.init(), in which "
        f"{ranks(w.number for w in waiting)} wait{'' if len(waiting) > 1 else 's'}: call it on every rank"
    )
    return Outcome(1, reason, [*checkpoint, f"hocket: {reason}"])


def drifted(differences: str, checkpoint: list[str]) -> Outcome:
    """All workers have ended well, with parameters that are not equal and should be."""
    reason = f"after the last step the replicas were not equal: {differences}; {Replicas.REMEDY}"
    return Outcome(1, reason, [*checkpoint, f"hocket: {reason}"])


def describe_loss(lost: Loss, seconds: float) -> str:
    """``host node2 (ranks 4, 5, server 1) was lost after 12.3 s: the connection ended``."""
    kinds = ((ranks(lost.ranks), lost.ranks), (numbered("server", lost.servers), lost.servers))
    who = ", ".join([*(text for text, numbers in kinds if numbers), *["the coordinator"] * lost.coordinator])
    return f"host {lost.host} ({who}) was lost after {seconds:.1f} s: {lost.reason}"


def loss(losses: Sequence[Loss], failures: list[Ending], size: int, seconds: float, checkpoint: list[str]) -> Outcome:
    """Hosts were lost while workers ran; workers of other hosts may have failed for it.

    ``size`` is the number of workers that the job still had before that.
    """
    reason = "; ".join(describe_loss(lost, seconds) for lost in losses)
    others = [f"hocket: {failed.who} failed too: {failed.error}" for failed in failures if failed.error]
    gone = {rank for lost in losses for rank in lost.ranks} | _ranks_of(failures)
    return Outcome(1, reason, [*others, *_stopped(size - len(gone)), *checkpoint, f"hocket: {reason}"])


def failure(failures: list[Ending], size: int, seconds: float, checkpoint: list[str]) -> Outcome:
    """Some have failed by themselves, in the order in which that was noticed; ``size`` as for ``loss``."""
    cause = _choose_cause(failures)
    lines = _write(cause, failures, size, seconds)
    error = f": {cause.error}" if cause.error else ""
    return Outcome(
        cause.exit_status, lines[0].removeprefix("hocket: ").rstrip(".") + error, lines + checkpoint + cause.traceback
    )


def _choose_cause(failures: list[Ending]) -> Ending:
    """The process to report, among those that failed by themselves, in the order in which that was noticed."""
    return next((f for f in failures if not f.is_collateral), failures[0])


def _write(cause: Ending, failures: list[Ending], size: int, seconds: float) -> list[str]:
    """The lines of the report, which the cause's traceback follows."""
    same = [f for f in failures if f is not cause and f.error and f.error == cause.error]
    lines = [f"hocket: {cause.who} {cause.how} after {seconds:.1f} s."]
    if same:
        known = [(role, [f.member.number for f in same if f.member.role == role]) for role in ("rank", "server")]
        lines.append(f"hocket: the same error on {', '.join(numbered(r, numbers) for r, numbers in known if numbers)}.")
    for other in failures:
        if other is not cause and other not in same and other.error and not other.is_collateral:
            lines.append(f"hocket: {other.member.name} failed too: {other.error}")
    left = size - len(_ranks_of(failures))
    return lines + _stopped(left, "the" if not cause.member.is_worker and left == size else "the other")


def _ranks_of(failures: list[Ending]) -> set[int]:
    return {failed.member.number for failed in failures if failed.member.is_worker}


def _stopped(count: int, which: str = "the other") -> list[str]:
    return [f"hocket: {which} {count} worker{'s were' if count > 1 else ' was'} stopped."] if count > 0 else []


def ranks(numbers: Iterable[int]) -> str:
    """``rank 1`` or ``ranks 0, 2``."""
    return numbered("rank", numbers)


def numbered(role: str, numbers: Iterable[int]) -> str:
    """``server 1`` or ``servers 0, 2``."""
    known = list(numbers)
    return f"{role}{'s' if len(known) > 1 else ''} {', '.join(map(str, known))}"


def how(status: int, *, hints: bool = True) -> str:
    """``ended with exit code 1`` or ``was killed by SIGKILL``, perhaps with what that may mean."""
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (by hand, or because the machine ran out of memory: see dmesg)" if hints and name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
