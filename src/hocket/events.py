"""Typed records of what happens in a job, and the sinks that take them.

A record is the head of a message (see hocket.messages). Records travel to the launcher through an inherited pipe;
where there is none they go nowhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, get_args

from hocket import messages


@dataclass(frozen=True)
class Progress:
    """How far a worker is.

    Attributes:
        epoch: The number of the epoch, from 1.
        step: Batches of this epoch so far.
        steps: Batches that the epoch has, if that is known.
        samples: Samples of this epoch so far, of all workers.
        total: Steps of the optimizer since the training began.
        seen: Samples since the training began, of all workers.
        waited: Seconds that this worker has slept for others since it started.
        exchanging: Seconds that it has spent in exchanges since it started, waiting included.
        own: Samples that this worker itself has trained on since it started.
        before: Samples of all workers in the run that this one goes on from.
        ends: Whether a loop has ended, or the script ends: such a record is never left out.
    """

    epoch: int
    step: int
    steps: int | None
    samples: int
    total: int = 0
    seen: int = 0
    waited: float = 0.0
    exchanging: float = 0.0
    own: int = 0
    before: int = 0
    ends: bool = False

    kind = "progress"


@dataclass(frozen=True)
class PassDone:
    """Workers that are in step have come to the end of an epoch, as each of them tells: some may be lost then.

    Attributes:
        loader: The number of the loader.
        epoch: The number of the epoch, from 1.
        samples: How many samples have counted in it.
        whole: How many it has.
    """

    loader: int
    epoch: int
    samples: int
    whole: int

    kind = "pass done"


@dataclass(frozen=True)
class Metrics:
    """What the script has reported of its training (``hocket.report``)."""

    step: int  # steps of the optimizer since the training began
    samples: int  # samples since the training began, of all workers
    time: float  # seconds since the epoch of the clock
    values: dict[str, float]
    sent: int = 0  # bytes that this worker had handed to exchanges by then

    kind = "metrics"


@dataclass(frozen=True)
class Traffic:
    """What a worker's exchanges with other hosts have taken since it started.

    Attributes:
        host: The worker's host.
        under_way: Seconds in which gradients were under way, of the exchanges that were looked at.
        exposed: Seconds of ``under_way`` in which the worker did nothing but wait.
        waited_for: Seconds that the worker waited because another one was not there yet, by the other's host.
        uses: For each algorithm of sums between hosts, by name: the numbers of ``Use``.
        links: What was measured of the links between hosts, in words.
        rates: What each host sends to each other one over them, in MB/s.
        refused: Connections and messages between workers that were refused, by reason.
    """

    host: str
    under_way: float
    exposed: float
    waited_for: dict[str, float]
    uses: dict[str, list[float]] = field(default_factory=dict)
    links: str = ""
    rates: list[list[float]] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)

    kind = "traffic"


@dataclass(frozen=True)
class Sent:
    """Bytes of gradients or parameters that a worker has handed to exchanges since it started."""

    nbytes: int

    kind = "sent"


@dataclass(frozen=True)
class Gradients:
    """How large a worker's own gradients and the averages over all workers were, in steps that were looked at.

    Attributes:
        number: The number of the model (and optimizer), the same on all ranks.
        workers: How many workers an average is over.
        parameters: How many numbers a gradient has.
        steps: Steps since the worker started.
        knows_samples: Whether shares are in samples, or in batches of a worker.
        length: Steps of a block.
        blocks: By the number of the block, as a text, sums over its looks: how many, a worker's share of the step,
            |g|² of its gradient, |G|² of the average, and these two multiplied by the share. The mean over ranks is
            what counts: a worker may have seen a slice of everybody's gradients, in place of its own.
    """

    number: int
    workers: int
    parameters: int
    steps: int
    knows_samples: bool
    length: int
    blocks: dict[str, list[float]]

    kind = "gradients"


@dataclass(frozen=True)
class ServerReport:
    """What a parameter server has done since it started.

    Attributes:
        server: The number of the server.
        host: The host of the server.
        seconds: How long the server has been at work.
        busy: Seconds of ``seconds`` in which the server updated parameters or moved them.
        updates: How often it has updated parameters.
        received: Bytes that came in, through shared memory or a network.
        sent: Bytes that went out, through shared memory or a network.
        refused: Connections and messages that it has refused, by reason.
        workers: What each worker did, by rank as a text: ``pushes``, ``staleness`` (how often it was which, as texts),
            ``seconds`` between its first and last push, ``waited`` (for others), ``late`` (pushes refused because of
            the bound), ``lost`` (whether it is).
    """

    server: int
    host: str
    seconds: float
    busy: float
    updates: int
    received: int
    sent: int
    refused: dict[str, int]
    workers: dict[str, dict[str, Any]]

    kind = "served"


@dataclass(frozen=True)
class Facts:
    """What only a worker knows of the run: the strategy that the script chose, the size of the model …"""

    values: dict[str, Any]

    kind = "facts"


@dataclass(frozen=True)
class Happening:
    """Something worth remembering: a checkpoint, a skipped step, a difference between replicas.

    Attributes:
        name: What happened, in a few words that are always the same: ``checkpoint saved``.
        details: Plain data about it.
    """

    name: str
    details: dict[str, Any]
    time: float = field(default_factory=time.time)

    kind = "happening"


WORKERS_CHANGED = "workers changed"
"""What happens when workers that are in step go on without one that is lost."""

BATCHES_AGAIN, SAMPLES_AGAIN = "batches dealt again", "samples dealt again"
"""Details of it: what lost workers had at work."""

FOLDER_BEGUN, FOLDER_DONE = "temporary folder begun", "temporary folder done"
"""What the guardian is told of folders, before they are made and when they are gone."""


@dataclass(frozen=True)
class Stage:
    """Where a worker is in its life: ``joining`` the others, ``joined``, ``left`` or ``failed`` (it has raised).

    A spare is ``standing by`` before. One that is ``cut off`` from other workers ends; ``words`` say who does not reach
    whom. Whoever has ``left`` did so on notice, between two batches, and ends. Beside these, perhaps late, comes
    ``on notice``: SIGTERM was heard. For ``failed``, ``status`` is the exit status to come, and ``words`` are the
    traceback if there is no stream for it.
    """

    stage: str
    status: int = 0
    words: str = ""

    kind = "stage"


@dataclass(frozen=True)
class Survival:
    """Whether the strategy that a worker trains with goes on when a worker is lost; the launcher decides by it.

    Attributes:
        survives: Whether the others go on.
        replaces: Whether a newcomer can join them; told later, when the script has called ``hocket.resume()``.
        leaves: Whether SIGTERM is a notice to the worker, after which it leaves in order.
        obstacle: Why nobody can join them, though the script has called ``hocket.resume()``, in words.
    """

    survives: bool
    replaces: bool = False
    leaves: bool = False
    obstacle: str = ""

    kind = "survival"


@dataclass(frozen=True)
class Spans:
    """What a process has done when, for a timeline (see hocket.spans).

    Attributes:
        base: Nanoseconds of the monotonic clock of its host, from which the others count.
        names: The name, track and kind of spans that are alike.
        rows: Four numbers for each span: which of ``names``, when it began, how long it took (nanoseconds), its number.
        lost: How many spans there was no room for, since the process started.
    """

    base: int
    names: list[list[str]]
    rows: list[int]
    lost: int = 0

    kind = "spans"


@dataclass(frozen=True)
class Replicas:
    """What a worker's parameters were after its last step, where all workers must have the same.

    Attributes:
        values: Fingerprints by name.
    """

    values: dict[str, int]

    kind = "replicas"

    REMEDY: ClassVar[str] = (
        "something changes them on some ranks only: look for code under `if hocket.rank() == …`, for gradients that "
        "are edited by a rank's own rule, for random numbers in the optimizer, or for hosts with different processors "
        "(--check-replicas 0 does not look)"
    )

    @staticmethod
    def differences(everyone: Sequence[Mapping[str, int]], ranks: Sequence[int] | None = None) -> str:
        """Which parameters differ, and on which ranks; those of most ranks are taken as right."""
        numbers = range(len(everyone)) if ranks is None else ranks
        differing = [name for name in everyone[0] if len({other.get(name) for other in everyone}) > 1]
        said = []
        for name in differing[:3]:
            values = [other.get(name) for other in everyone]
            usual = max(values, key=lambda value: (values.count(value), value == values[0]))
            odd = [rank for rank, value in zip(numbers, values, strict=True) if value != usual]
            said.append(f"{name!r} on rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))}")
        more = f", and {len(differing) - 3} more parameters" if len(differing) > 3 else ""
        return ", ".join(said) + more


Record = (
    Progress | PassDone | Metrics | Traffic | Sent | Gradients | ServerReport | Facts | Happening
    | Stage | Survival | Spans | Replicas
)  # fmt: skip
_KINDS: dict[str, type[Record]] = {kind.kind: kind for kind in get_args(Record)}
_PIPE = 1 << 19  # bytes of the pipe to the launcher
_MOST_KEPT = 1 << 20  # bytes of records that wait for room in the pipe


class Sink(Protocol):
    """Takes records."""

    def put(self, record: Record) -> None: ...

    def has_room(self) -> bool:
        """Whether nothing waits to be sent, so that what is put now is under way at once."""


class NoSink:
    """Forgets everything."""

    def put(self, record: Record) -> None:
        """Forget the record."""

    def has_room(self) -> bool:
        return True


class PipeSink:
    """Writes to the launcher's pipe; a full pipe or a launcher that has gone never holds up the training.

    Where the pipe is full, progress is dropped and everything else is kept for later.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._next, self._kept = descriptor, 0.0, b""
        self._lock = threading.Lock()  # checkpoints are written by a thread that tells, too
        os.set_blocking(descriptor, False)
        with contextlib.suppress(OSError, AttributeError):  # the system may allow less, or not know of it
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE)

    def put(self, record: Record) -> None:
        """Send at most ten records of progress a second, but always the last one of a loop."""
        if isinstance(record, Progress) and not record.ends:
            now = time.monotonic()
            if now < self._next and record.step != record.steps:
                return
            self._next = now + 0.1
            if not self.has_room():
                return
        self._write(encode(record))

    def has_room(self) -> bool:
        """Whether nothing waits for room in the pipe."""
        if self._kept:
            self._write(b"")
        return not self._kept

    def _write(self, data: bytes) -> None:
        with self._lock:
            data = self._kept + data
            try:
                self._kept = data[os.write(self._descriptor, data) :]
            except BlockingIOError:
                self._kept = data if len(data) < _MOST_KEPT else self._kept
            except OSError:
                self._kept = b""


def encode(record: Record) -> bytes:
    """A record as a message without a body."""
    return messages.encode(0, {"kind": record.kind, **vars(record)}, b"")


class RecordDecoder:
    """Takes in the bytes of a pipe as they come, and gives out whole records; messages that are no records are skipped.

    A script may write other bytes into the pipe: nothing that comes after them is understood, or believed.
    """

    def __init__(self) -> None:
        self._messages: messages.Decoder | None = messages.Decoder()

    def feed(self, data: bytes) -> list[Record]:
        """The records that ``data`` completes."""
        try:
            found = self._messages.feed(data) if self._messages is not None else []
        except messages.WireError:
            self._messages = None
            return []
        return [record for message, _ in found if (record := _read(message.head)) is not None]


def _read(fields: dict[str, Any]) -> Record | None:
    try:
        return _KINDS[fields.pop("kind")](**fields)
    except (TypeError, KeyError):
        return None
