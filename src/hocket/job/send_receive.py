"""Messages that a script sends from one worker to another, in which no other worker takes part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

import torch

from hocket.comm import group_operations
from hocket.comm.communicator import describe
from hocket.comm.group_operations import Party
from hocket.comm.groups import Task
from hocket.errors import UsageError
from hocket.job.arrays import Given
from hocket.job.group_calls import Handle, perform
from hocket.job.worker import current, together

A = TypeVar("A")  # a tensor, or an array of NumPy


@overload
def send(tensor: Any, to: int, *, wait: Literal[True] = ...) -> None: ...
@overload
def send(tensor: Any, to: int, *, wait: Literal[False]) -> Handle[None]: ...
@together("hocket.send()")
def send(tensor: Any, to: int, *, wait: bool = True) -> Any:
    """Send ``tensor`` to rank ``to``, which receives it; no other rank takes part.

    Waits until the other rank has come to receive it. Messages from one rank to another come in the order in which they
    were sent. Where two ranks send to each other before they receive, let them send with ``wait=False``.

    Args:
        tensor: A tensor or an array; not changed.
        to: A rank of the job.
        wait: Whether to wait until it is sent. Else a handle is returned, and the tensor has to stay as it is until its
            ``wait()`` has returned.
    """
    call = "hocket.send()"
    mine = Given(tensor, call)
    return _with_other(
        call, to, f"send of {describe(mine.tensor)} to rank {to}", mine.tensor.nbytes, wait,
        lambda party: group_operations.send(party, mine.tensor), lambda _: None,
    )  # fmt: skip


@overload
def receive(source: int, *, out: A, wait: Literal[True] = ...) -> A: ...
@overload
def receive(source: int, *, out: None = ..., wait: Literal[True] = ...) -> torch.Tensor: ...
@overload
def receive(source: int, *, out: A, wait: Literal[False]) -> Handle[A]: ...
@overload
def receive(source: int, *, out: None = ..., wait: Literal[False]) -> Handle[torch.Tensor]: ...
@together("hocket.receive()")
def receive(source: int, *, out: Any = None, wait: bool = True) -> Any:
    """The next tensor that rank ``source`` sends to this one; no other rank takes part.

    Args:
        source: A rank of the job.
        out: Where to put it; its type and shape must be those of what is sent. By default the result is a new tensor of
            the CPU.
        wait: Whether to wait for it. Else a handle is returned, whose ``wait()`` returns it.
    """
    call = "hocket.receive()"
    there = None if out is None else Given(out, call)
    if there is not None:
        there.check_place_for(there.tensor.shape, there.tensor.dtype)
    like = None if there is None else there.tensor
    return _with_other(
        call, source, f"receive from rank {source}", 0 if like is None else like.nbytes, wait,
        lambda party: group_operations.receive(party, like), (lambda found: found) if there is None else there.fill,
    )  # fmt: skip


def _with_other(
    call: str,
    other: int,
    what: str,
    nbytes: int,
    wait: bool,
    carry_out: Callable[[Party], Any],
    finish: Callable[[Any], Any],
) -> Any:
    """Do something with one other worker; what goes from one to another has an order of its own."""
    worker = current()
    rank, size = worker.config.rank, worker.config.size
    if not isinstance(other, int) or not 0 <= other < size or other == rank:
        others = ", ".join(str(each) for each in range(size) if each != rank) or "none"
        raise UsageError(f"{call}: rank {other!r} is not another rank of this job, which for rank {rank} are: {others}")
    me, them = worker.groups.numbers[rank], worker.groups.numbers[other]
    name = f"{me} to {them}" if call == "hocket.send()" else f"{them} to {me}"

    def with_them(party: Party) -> Any:
        party.find(them)
        return carry_out(party)

    task = Task(f"{call}: {what}", nbytes, with_them, waits=wait)
    return perform(worker, worker.groups.line(name, [me, them]), task, finish)
