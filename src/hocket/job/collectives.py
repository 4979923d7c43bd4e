"""The collectives that a script calls by hand, on all workers or in a group of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, overload

import torch

from hocket import spans
from hocket.comm import group_operations
from hocket.comm.communicator import describe
from hocket.comm.group_operations import Gone, Party
from hocket.errors import UsageError
from hocket.job.arrays import Given, check_operation
from hocket.job.group_calls import Group, Handle, Place
from hocket.job.worker import together

A = TypeVar("A")  # a tensor, or an array of NumPy


@overload
def allreduce(
    tensor: A, operation: str = ..., *, out: A | None = ..., group: Group | None = ..., wait: Literal[True] = ...
) -> A: ...
@overload
def allreduce(
    tensor: A, operation: str = ..., *, out: A | None = ..., group: Group | None = ..., wait: Literal[False]
) -> Handle[A]: ...
@together("hocket.allreduce()")
def allreduce(
    tensor: Any, operation: str = "mean", *, out: Any = None, group: Group | None = None, wait: bool = True
) -> Any:
    """The mean (or sum, max, min, product) of ``tensor`` over all ranks; every rank must call it.

    Args:
        tensor: Same shape and type on every rank; not changed.
        operation: ``mean``, ``sum``, ``max``, ``min`` or ``product``.
        out: Where to put the result instead of a new tensor; may be ``tensor`` itself.
        group: The workers that take part, all of whom call this; by default all workers of the job.
        wait: Whether to wait for the result. Else a handle is returned, whose ``wait()`` gives the result, and the
            tensor has to stay as it is until then.
    """
    call = "hocket.allreduce()"
    mine = Given(tensor, call)
    check_operation(operation, mine.tensor.dtype, call)
    place = Place(call, group)
    there = None if out is None else Given(out, call)
    if there is not None:
        there.check_place_for(mine.tensor.shape, mine.tensor.dtype)
    finish = mine.like if there is None else there.fill
    if place.is_all and wait:
        is_there = there is not None and there.is_in_place
        if there is not None and is_there:
            result = there.tensor if out is tensor else there.tensor.copy_(mine.tensor)
        else:
            result = mine.tensor.clone() if mine.is_in_place else mine.tensor
        worker = place.enter()
        with spans.span(spans.EXCHANGE, call):
            worker.communicator.allreduce(result, operation)
        return out if is_there else finish(result)
    return place.do(
        f"allreduce of {describe(mine.tensor)}, {operation}",
        2 * mine.tensor.nbytes,
        lambda party: group_operations.allreduce(party, mine.tensor, operation),
        finish,
        wait=wait,
    )


@overload
def reduce(
    tensor: A, operation: str = ..., root: int = ..., *, group: Group | None = ..., wait: Literal[True] = ...
) -> A | None: ...
@overload
def reduce(
    tensor: A, operation: str = ..., root: int = ..., *, group: Group | None = ..., wait: Literal[False]
) -> Handle[A | None]: ...
@together("hocket.reduce()")
def reduce(
    tensor: Any, operation: str = "mean", root: int = 0, *, group: Group | None = None, wait: bool = True
) -> Any:
    """The mean (or sum, max, min, product) over all ranks, on rank ``root`` alone; None on others.

    Every rank must call it. For the arguments see ``hocket.allreduce``; ``root`` is a rank of the job.
    """
    call = "hocket.reduce()"
    mine = Given(tensor, call)
    check_operation(operation, mine.tensor.dtype, call)
    place = Place(call, group)
    number = place.root(root)
    return place.do(
        f"reduce of {describe(mine.tensor)}, {operation}, to rank {root}",
        mine.tensor.nbytes,
        lambda party: group_operations.reduce(party, mine.tensor, operation, party.find(number)),
        _or_none(mine.like),
        wait=wait,
    )


@overload
def broadcast(tensor: A, root: int = ..., *, group: Group | None = ..., wait: Literal[True] = ...) -> A: ...
@overload
def broadcast(tensor: A, root: int = ..., *, group: Group | None = ..., wait: Literal[False]) -> Handle[A]: ...
@together("hocket.broadcast()")
def broadcast(tensor: Any, root: int = 0, *, group: Group | None = None, wait: bool = True) -> Any:
    """Replace ``tensor``, in place, by that of rank ``root``, and return it; every rank must call it.

    For the arguments see ``hocket.allreduce``. Without ``wait``, the tensor is replaced in the handle's ``wait()``.
    """
    call = "hocket.broadcast()"
    mine, place = Given(tensor, call), Place(call, group)
    mine.check_place_for(mine.tensor.shape, mine.tensor.dtype)
    number = place.root(root)
    if place.is_all and wait:
        worker = place.enter()
        with spans.span(spans.EXCHANGE, call):
            worker.communicator.broadcast(mine.tensor, root)
        return tensor if mine.is_in_place or worker.config.rank == root else mine.fill(mine.tensor)
    return place.do(
        f"broadcast of {describe(mine.tensor)} from rank {root}",
        mine.tensor.nbytes,
        lambda party: group_operations.broadcast(party, mine.tensor, party.find(number)),
        mine.fill,
        wait=wait,
    )


@overload
def allgather(tensor: A, *, group: Group | None = ..., wait: Literal[True] = ...) -> A: ...
@overload
def allgather(tensor: A, *, group: Group | None = ..., wait: Literal[False]) -> Handle[A]: ...
@together("hocket.allgather()")
def allgather(tensor: Any, *, group: Group | None = None, wait: bool = True) -> Any:
    """The tensors of all ranks, stacked in a new first dimension; every rank must call it, with the same shape.

    For the arguments see ``hocket.allreduce``. Where numbers of rows differ, call ``hocket.allgather_rows``.
    """
    call = "hocket.allgather()"
    mine, place = Given(tensor, call), Place(call, group)
    if place.is_all and wait:
        worker = place.enter()
        with spans.span(spans.EXCHANGE, call):
            return mine.like(worker.communicator.allgather(mine.tensor))
    return place.do(
        f"allgather of {describe(mine.tensor)}",
        mine.tensor.nbytes,
        lambda party: group_operations.allgather(party, mine.tensor),
        mine.like,
        wait=wait,
    )


@overload
def allgather_rows(tensor: A, *, group: Group | None = ..., wait: Literal[True] = ...) -> A: ...
@overload
def allgather_rows(tensor: A, *, group: Group | None = ..., wait: Literal[False]) -> Handle[A]: ...
@together("hocket.allgather_rows()")
def allgather_rows(tensor: Any, *, group: Group | None = None, wait: bool = True) -> Any:
    """The rows of all ranks' tensors, one after the other in the order of the ranks; every rank must call it.

    For the arguments see ``hocket.allreduce``. Numbers of rows (the first dimension) may differ, and may be 0.
    """
    call = "hocket.allgather_rows()"
    mine, place = Given(tensor, call), Place(call, group)
    mine.check_rows()
    return place.do(
        f"allgather_rows of {describe(mine.tensor)}",
        mine.tensor.nbytes,
        lambda party: group_operations.allgather_rows(party, mine.tensor),
        mine.like,
        wait=wait,
    )


@overload
def gather(tensor: A, root: int = ..., *, group: Group | None = ..., wait: Literal[True] = ...) -> list[A] | None: ...
@overload
def gather(
    tensor: A, root: int = ..., *, group: Group | None = ..., wait: Literal[False]
) -> Handle[list[A] | None]: ...
@together("hocket.gather()")
def gather(tensor: Any, root: int = 0, *, group: Group | None = None, wait: bool = True) -> Any:
    """A list of all ranks' tensors, on rank ``root`` alone; None on others. Every rank must call it.

    For the arguments see ``hocket.allreduce``; ``root`` is a rank of the job. Numbers of rows (the first dimension) may
    differ.
    """
    call = "hocket.gather()"
    mine, place = Given(tensor, call), Place(call, group)
    number = place.root(root)
    return place.do(
        f"gather of {describe(mine.tensor)} to rank {root}",
        mine.tensor.nbytes,
        lambda party: group_operations.gather(party, mine.tensor, party.find(number)),
        _or_none(lambda parts: [mine.like(part) for part in parts]),
        wait=wait,
    )


@overload
def scatter(
    tensors: Sequence[A] | None = ..., root: int = ..., *, group: Group | None = ..., wait: Literal[True] = ...
) -> A: ...
@overload
def scatter(
    tensors: Sequence[A] | None = ..., root: int = ..., *, group: Group | None = ..., wait: Literal[False]
) -> Handle[A]: ...
@together("hocket.scatter()")
def scatter(tensors: Any = None, root: int = 0, *, group: Group | None = None, wait: bool = True) -> Any:
    """This rank's one of the ``tensors`` that rank ``root`` has; every rank must call it.

    Args:
        tensors: On ``root`` one for each rank, of one type, whose numbers of rows (the first dimension) may differ. On
            others nothing, or anything: the result is a tensor of the CPU there.
        root: A rank of the job.
        group: See ``hocket.allreduce``.
        wait: See ``hocket.allreduce``.
    """
    call = "hocket.scatter()"
    place = Place(call, group)
    number, given = place.root(root), list[Given]()
    if place.worker.config.rank == root:
        given = [] if tensors is None else [Given(tensor, call) for tensor in tensors]
        if len(given) != len(place.ranks):
            raise UsageError(f"{call}: {len(given)} tensors, for {len(place.ranks)} ranks: rank {root} gives each one")
        kinds = {(each.tensor.dtype, each.tensor.dim(), each.tensor.shape[1:]) for each in given}
        if len(kinds) > 1:
            raise UsageError(
                f"{call}: tensors of {', '.join(describe(each.tensor) for each in given)}: they may differ in their "
                "numbers of rows alone"
            )
    parts = [each.tensor for each in given] or None

    def carry_out(party: Party) -> torch.Tensor:
        if parts is not None and len(parts) != party.size:
            raise Gone(f"{call}: {len(parts)} tensors, and {party.size} workers are left: call it again, for these")
        return group_operations.scatter(party, parts, party.find(number))

    mine = given[list(place.ranks).index(root)] if given else None
    return place.do(
        f"scatter from rank {root}",
        sum(part.nbytes for part in parts or ()),
        carry_out,
        (lambda part: part) if mine is None else mine.like,
        wait=wait,
    )


@overload
def reduce_scatter(
    tensor: A,
    operation: str = ...,
    *,
    rows: Sequence[int] | None = ...,
    group: Group | None = ...,
    wait: Literal[True] = ...,
) -> A: ...
@overload
def reduce_scatter(
    tensor: A,
    operation: str = ...,
    *,
    rows: Sequence[int] | None = ...,
    group: Group | None = ...,
    wait: Literal[False],
) -> Handle[A]: ...
@together("hocket.reduce_scatter()")
def reduce_scatter(
    tensor: Any,
    operation: str = "mean",
    *,
    rows: Sequence[int] | None = None,
    group: Group | None = None,
    wait: bool = True,
) -> Any:
    """This rank's rows of the mean (or sum, max, min, product) over all ranks; every rank must call it.

    Args:
        tensor: Same shape and type on every rank; not changed.
        operation: See ``hocket.allreduce``.
        rows: How many rows (of the first dimension) each rank gets. By default they are divided as evenly as possible,
            as ``torch.tensor_split`` does.
        group: See ``hocket.allreduce``.
        wait: See ``hocket.allreduce``.
    """
    call = "hocket.reduce_scatter()"
    mine = Given(tensor, call)
    check_operation(operation, mine.tensor.dtype, call)
    place = Place(call, group)
    mine.check_rows()
    if rows is not None:
        _check_parts(call, "rows", rows, len(mine.tensor), len(place.ranks))

    def carry_out(party: Party) -> torch.Tensor:
        each = _split(call, len(mine.tensor), rows, party)
        return group_operations.reduce_scatter(party, mine.tensor, operation, each)

    what = f"reduce_scatter of {describe(mine.tensor)}, {operation}"
    return place.do(what, mine.tensor.nbytes, carry_out, mine.like, wait=wait)


@overload
def alltoall(
    tensor: A, splits: Sequence[int] | None = ..., *, group: Group | None = ..., wait: Literal[True] = ...
) -> tuple[A, list[int]]: ...
@overload
def alltoall(
    tensor: A, splits: Sequence[int] | None = ..., *, group: Group | None = ..., wait: Literal[False]
) -> Handle[tuple[A, list[int]]]: ...
@together("hocket.alltoall()")
def alltoall(tensor: Any, splits: Sequence[int] | None = None, *, group: Group | None = None, wait: bool = True) -> Any:
    """Give each rank some rows; returns the rows that all ranks gave this one, and how many each gave.

    Every rank must call it.

    Args:
        tensor: The rows for the first rank, for the second, and so on; numbers of rows may differ between ranks.
        splits: How many rows each rank gets. By default they are divided as evenly as possible, as
            ``torch.tensor_split`` does.
        group: See ``hocket.allreduce``.
        wait: See ``hocket.allreduce``.
    """
    call = "hocket.alltoall()"
    mine, place = Given(tensor, call), Place(call, group)
    mine.check_rows()
    if splits is not None:
        _check_parts(call, "splits", splits, len(mine.tensor), len(place.ranks))

    def carry_out(party: Party) -> tuple[torch.Tensor, list[int]]:
        return group_operations.alltoall(party, mine.tensor, _split(call, len(mine.tensor), splits, party))

    return place.do(
        f"alltoall of {describe(mine.tensor)}",
        mine.tensor.nbytes,
        carry_out,
        lambda found: (mine.like(found[0]), found[1]),
        wait=wait,
    )


@overload
def barrier(*, group: Group | None = ..., wait: Literal[True] = ...) -> None: ...
@overload
def barrier(*, group: Group | None = ..., wait: Literal[False]) -> Handle[None]: ...
@together("hocket.barrier()")
def barrier(*, group: Group | None = None, wait: bool = True) -> Any:
    """Wait until every rank has called this. For the arguments see ``hocket.allreduce``."""
    place = Place("hocket.barrier()", group)
    if place.is_all and wait:
        worker = place.enter()
        with spans.span(spans.WAIT, "hocket.barrier()"):
            return worker.communicator.barrier()
    return place.do("a barrier", 0, group_operations.barrier, lambda _: None, wait=wait)


def _check_parts(call: str, name: str, parts: Sequence[int], rows: int, size: int) -> None:
    if len(parts) != size or any(part < 0 for part in parts) or sum(parts) != rows:
        raise UsageError(
            f"{call}: {name}={list(parts)} of a tensor with {rows} rows, for {size} ranks: give each rank a number of "
            f"rows, 0 or more, {rows} together"
        )


def _split(call: str, rows: int, parts: Sequence[int] | None, party: Party) -> list[int]:
    """How many of the rows each member gets."""
    if parts is None:
        return [rows // party.size + (member < rows % party.size) for member in range(party.size)]
    if len(parts) != party.size:
        raise Gone(f"{call}: rows for {len(parts)} workers, and {party.size} are left: call it again, for these")
    return list(parts)


def _or_none(finish: Callable[[Any], A]) -> Callable[[Any], A | None]:
    return lambda result: None if result is None else finish(result)
