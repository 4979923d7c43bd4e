"""Horovod's exceptions, by which scripts written for it tell what they can go on after."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective has failed. ``hvd.elastic.run`` goes back to the last commit, and on with the workers left."""


class HostsUpdatedInterrupt(RuntimeError):
    """Workers are to come or to leave; ``hvd.elastic.run`` goes on with those that there are then.

    Attributes:
        skip_sync: Whether the state need not be sent to all workers again.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("workers are to come or to leave")
        self.skip_sync = skip_sync


class OperationError(HorovodInternalError):
    """One operation is not possible, which all ranks are told; the others go on. No reason to go back to a commit."""
