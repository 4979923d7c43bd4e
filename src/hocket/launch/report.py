"""How a job ended, and what is said of it: which rank failed, in which way, and its own traceback last."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hocket.launch.crew import Loss, Worker

_COLLATERAL = "hocket.errors.WorkerLost"


@dataclass
class Ending:
    """How one worker ended."""

    rank: int
    host: str
    status: int  # as subprocess has it: negative for a signal
    traceback: list[str] = field(default_factory=list)

    @property
    def exit_status(self) -> int:
        """The status that a shell would show."""
        return 128 - self.status if self.status < 0 else self.status

    @property
    def error(self) -> str:
        """The last line of its traceback."""
        lines = [line for line in self.traceback if line.strip() and not line.startswith((" ", "\t"))]
        return lines[-1] if lines else ""

    @property
    def is_collateral(self) -> bool:
        """Whether it only failed because another one did."""
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


def finished() -> Outcome:
    """All workers have ended well: nothing needs to be said."""
    return Outcome(0, "all workers finished")


def stopped(number: int, checkpoint: list[str]) -> Outcome:
    """A signal asked for the end."""
    reason = f"ended by {signal.Signals(number).name}"
    return Outcome(128 + number, reason, [f"hocket: {reason}", *checkpoint])


def absence(absent: list[Worker], waiting: list[Worker], checkpoint: list[str]) -> Outcome:
    """Some workers ended before they joined the others."""
    hosts = ", ".join(dict.fromkeys(worker.host for worker in absent))
    reason = (
        f"{ranks(w.rank for w in absent)} on {hosts} finished without hocket.init(), in which "
        f"{ranks(w.rank for w in waiting)} wait{'' if len(waiting) > 1 else 's'}: call it on every rank"
    )
    return Outcome(1, reason, [*checkpoint, f"hocket: {reason}"])


def loss(losses: Sequence[Loss], failures: list[Ending], size: int, seconds: float, checkpoint: list[str]) -> Outcome:
    """Hosts were lost while their workers ran; workers of other hosts may have failed for it."""
    reason = "; ".join(
        f"host {lost.host} ({ranks(lost.ranks)}) was lost after {seconds:.1f} s: {lost.reason}" for lost in losses
    )
    others = [f"hocket: rank {f.rank} on {f.host} failed too: {f.error}" for f in failures if f.error]
    gone = {rank for lost in losses for rank in lost.ranks} | {failed.rank for failed in failures}
    return Outcome(1, reason, [*others, *_stopped(size - len(gone)), *checkpoint, f"hocket: {reason}"])


def failure(failures: list[Ending], size: int, seconds: float, checkpoint: list[str]) -> Outcome:
    """Workers have failed by themselves, in the order in which that was noticed."""
    cause = _choose_cause(failures)
    lines = _write(cause, failures, size, seconds)
    error = f": {cause.error}" if cause.error else ""
    return Outcome(
        cause.exit_status, lines[0].removeprefix("hocket: ").rstrip(".") + error, lines + checkpoint + cause.traceback
    )


def _choose_cause(failures: list[Ending]) -> Ending:
    """Of the workers that failed by themselves, in the order in which that was noticed, the one to report."""
    return next((f for f in failures if not f.is_collateral), failures[0])


def _write(cause: Ending, failures: list[Ending], size: int, seconds: float) -> list[str]:
    """The lines of the report, which the cause's traceback follows."""
    same = [f.rank for f in failures if f is not cause and f.error and f.error == cause.error]
    lines = [f"hocket: rank {cause.rank} on {cause.host} {_how(cause)} after {seconds:.1f} s."]
    if same:
        lines.append(f"hocket: the same error on {ranks(same)}.")
    for other in failures:
        if other is not cause and other.rank not in same and other.error and not other.is_collateral:
            lines.append(f"hocket: rank {other.rank} failed too: {other.error}")
    return lines + _stopped(size - len(failures))


def _stopped(count: int) -> list[str]:
    return [f"hocket: the other {count} worker{'s were' if count > 1 else ' was'} stopped."] if count > 0 else []


def ranks(numbers: Iterable[int]) -> str:
    """``rank 1`` or ``ranks 0, 2``."""
    known = list(numbers)
    return f"rank{'s' if len(known) > 1 else ''} {', '.join(map(str, known))}"


def _how(ending: Ending) -> str:
    if ending.status >= 0:
        return f"ended with exit code {ending.status}"
    try:
        name = signal.Signals(-ending.status).name
    except ValueError:
        name = f"signal {-ending.status}"
    hint = " (by hand, or because the machine ran out of memory: see dmesg)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
