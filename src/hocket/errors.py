"""Every exception that Hocket raises.

    HocketError
    ├── UsageError            the call or the flag is wrong; the message says what to write instead
    │   ├── StrategyError     unknown strategy or option, or one that does not fit this model or optimizer
    │   └── SharedCopyError   a parameter has left the shared copy, or was written to behind its back
    ├── MismatchError         ranks disagree: other shapes, another collective, another number of steps
    │   └── ReplicaError      parameters that should be equal on all ranks are not
    ├── CheckpointError       a checkpoint cannot be written, is damaged, or does not fit
    ├── NonFiniteError        a gradient is NaN or infinite, and ``--on-nan`` is ``raise``
    ├── RecordError           the record of a run cannot be written or read
    ├── RigError              a rig cannot be made, used or removed
    └── JobError              the job cannot go on
        ├── HostError         a host of ``-H`` cannot take part
        ├── WorkerLost        a rank has ended while others wait for it
        ├── ServerLost        a parameter server has ended
        ├── TakenForDead      this worker was out of reach for so long that the others have gone on without it
        └── DeadlineExceeded  a rank is alive but has not arrived within ``--timeout``

A wrong user gets one of these; a broken invariant of Hocket itself gets an ``AssertionError``.
"""

from __future__ import annotations


class HocketError(Exception):
    """The root of all of Hocket's own exceptions."""


class UsageError(HocketError, ValueError):
    """The call or the flag is wrong; the message says what to write instead."""


class StrategyError(UsageError):
    """An unknown strategy or option, or one that does not fit this model or optimizer."""


class SharedCopyError(UsageError):
    """A parameter has left the shared copy, or was written to behind its back."""


class MismatchError(HocketError):
    """Ranks disagree about what is exchanged."""


class ReplicaError(MismatchError):
    """Parameters that should be equal on all ranks are not."""


class CheckpointError(HocketError):
    """A checkpoint cannot be written, is damaged, or does not fit what it is loaded into."""


class NonFiniteError(HocketError, ArithmeticError):
    """A gradient is NaN or infinite."""


class RecordError(HocketError):
    """The record of a run cannot be written or read."""


class RigError(HocketError):
    """A rig cannot be made, used or removed."""


class JobError(HocketError, RuntimeError):
    """The job cannot go on."""


class HostError(JobError):
    """A host cannot take part in the job; the message has a line for each problem."""


class WorkerLost(JobError):
    """A rank has ended while others wait for it.

    Attributes:
        died: Whether the rank has said nothing, neither that its script has failed nor that it has ended.
    """

    died: bool = False


class ServerLost(JobError):
    """A parameter server has ended."""


class TakenForDead(JobError):
    """This worker was out of reach for so long that the others have gone on without it."""


class DeadlineExceeded(JobError, TimeoutError):
    """A rank is alive but has not arrived in time."""
