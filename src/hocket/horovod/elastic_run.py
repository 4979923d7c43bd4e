"""``hvd.elastic.run``: a training function goes on from its last commit when workers are lost, come or leave."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from hocket.comm.changing_group import RegroupingCommunicator
from hocket.errors import WorkerLost
from hocket.events import Survival
from hocket.horovod import context
from hocket.horovod.elastic_states import State
from hocket.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt, OperationError
from hocket.horovod.operations import broadcast_


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function, whose first argument is a ``State``.

    It is called when all workers have the same state. When a worker is lost, all others go back to the last
    ``state.commit()``; when workers come or leave, that happens in a commit. Then it is called again.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        allow_changes()
        skips_sync = False
        while True:
            try:
                if not skips_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except OperationError:
                raise  # the same would come again
            except HorovodInternalError:
                state.restore()
                skips_sync = False
                renew()
            except HostsUpdatedInterrupt as change:
                skips_sync = change.skip_sync
                renew(is_planned=True)
            state.on_reset()

    return wrapper


def allow_changes() -> None:
    """From now on the job goes on without lost workers, and takes new ones."""
    worker = context.current().worker
    group = worker.communicator
    if isinstance(group, RegroupingCommunicator) and group.changes and not group.goes_on:
        group.goes_on = True
    if isinstance(group, RegroupingCommunicator) and group.changes:
        group.begin()
        worker.notice.is_expected = True
        replaces = worker.config.on_loss in ("auto", "replace")
        worker.sink.put(Survival(survives=True, replaces=replaces, leaves=worker.notice.is_heeded))


def renew(*, is_planned: bool = False) -> None:
    """Go on with the workers that there are; all of them call this.

    Args:
        is_planned: Whether workers are to come or to leave now.

    Raises:
        WorkerLost: the job cannot go on.
        Left: this worker leaves.
    """
    worker = context.current().worker
    context.stop()
    group = worker.communicator
    if isinstance(group, RegroupingCommunicator):
        try:
            _regroup(group, is_planned)
        except SystemExit:
            worker.notice.say_left()
            raise
    context.start()


def _regroup(group: RegroupingCommunicator, is_planned: bool) -> None:
    """Do without workers that are lost; or, if all have come for that, have workers come and leave."""
    try:
        everyone = group.group.gather_data(is_planned)
    except WorkerLost as loss:
        group.regroup(loss)
        return
    if all(everyone):
        group.renew()


def look_for_changes() -> None:
    """Between two batches: whether workers are to come or to leave; all ranks call this.

    Raises:
        HostsUpdatedInterrupt: they are.
    """
    found = context.current()
    group = found.worker.communicator
    if not isinstance(group, RegroupingCommunicator) or not group.changes or not group.goes_on:
        return
    group.look()  # which tells the others if this worker is to leave
    wanted = torch.tensor([found.worker.config.rank == 0 and group.is_wanted()])
    if broadcast_(wanted, 0, "elastic: whether workers are to come or to leave"):
        raise HostsUpdatedInterrupt
