"""Horovod's collectives: each submits an operation under a name, and most wait for the result."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from hocket.horovod import context
from hocket.horovod.cycles import Cycles
from hocket.horovod.negotiation import Request
from hocket.horovod.operation import Operation
from hocket.horovod.process_sets import ProcessSet, global_process_set

Average, Sum, Adasum, Min, Max, Product = range(6)
_HOW = {Average: "mean", Sum: "sum", Adasum: "adasum", Min: "min", Max: "max", Product: "product"}

Tensors = Sequence[torch.Tensor]

_handles: dict[int, tuple[Cycles, Operation, bool]] = {}
_next = 0


def _hand_over(engine: Cycles, operation: Operation, *, grouped: bool = False) -> int:
    """Submit an operation; returns the number by which the script knows it."""
    global _next
    engine.submit(operation)
    _next += 1
    _handles[_next] = engine, operation, grouped
    return _next


def poll(handle: int) -> bool:
    """Whether an operation is over, so that ``synchronize`` does not wait."""
    return handle not in _handles or _handles[handle][1].is_over


def synchronize(handle: int) -> Any:
    """Wait for an operation, and return its result; None if it was waited for before.

    Raises:
        HorovodInternalError: it is not possible, or a worker is lost.
    """
    if handle not in _handles:
        return None
    engine, operation, grouped = _handles[handle]
    try:
        engine.wait(operation)
    finally:
        del _handles[handle]
    result = operation.result
    if operation.in_place:
        result = list(operation.tensors)
    if operation.request.kind == "alltoall":
        return result[0], result[1]
    return result if grouped else result[0]


def _engine(process_set: ProcessSet) -> Cycles:
    number = process_set.process_set_id
    if number is None:
        raise ValueError(f"{process_set} was not added: call hvd.add_process_set(), or give it to hvd.init()")
    return context.current().engine(number)


def _check_tensor(kind: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{kind}: {type(tensor).__name__} is no tensor")
    if tensor.layout != torch.strided:
        raise ValueError(f"{kind} of a sparse tensor: use sparse_allreduce_async, or to_dense()")


def _request(
    engine: Cycles, kind: str, name: str | None, tensors: Tensors, options: tuple[Any, ...], splits: Sequence[int] = ()
) -> Request:
    if not tensors:
        raise ValueError(f"{kind}: no tensors were given")
    for tensor in tensors:
        _check_tensor(kind, tensor)
    dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    if name is None:
        return Request(kind, f"{kind}.noname", engine.number(kind + ".noname"), options, dtypes, shapes, tuple(splits))
    return Request(kind, name, -1, options, dtypes, shapes, tuple(splits))


def chosen(op: int | None, average: bool | None) -> int:
    """What ``op`` and Horovod's older ``average`` mean."""
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    warnings.warn("average is deprecated: use op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=4)
    return Average if average else Sum


def _operation(op: int | None, average: bool | None, tensors: Tensors) -> str:
    """How tensors are combined, if these can be so."""
    op = chosen(op, average)
    if op not in _HOW:
        raise ValueError(f"op={op!r}: use hvd.Average, Sum, Adasum, Min, Max or Product")
    how = _HOW[op]
    for tensor in tensors:
        _check_tensor("a reduction", tensor)
        if tensor.dtype.is_complex and how not in ("mean", "sum", "product"):
            raise ValueError(f"{how} of {tensor.dtype}: complex numbers have no order; use hvd.Average, Sum or Product")
        if how == "adasum" and not tensor.dtype.is_floating_point:
            raise ValueError(f"Adasum of {tensor.dtype}: it is for floating point numbers")
    return how


def _reduce(
    kind: str,
    tensors: Tensors,
    name: str | None,
    how: str,
    factors: tuple[float, float],
    process_set: ProcessSet,
    *,
    in_place: bool = False,
    grouped: bool = False,
) -> int:
    engine = _engine(process_set)
    options = (how, float(factors[0]), float(factors[1]))
    operation = Operation(_request(engine, kind, name, tensors, options), tensors, in_place=in_place)
    return _hand_over(engine, operation, grouped=grouped)


def allreduce_async(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Begin ``allreduce``; the tensor has to stay as it is until ``synchronize``."""
    how = _operation(op, average, [tensor])
    return _reduce("allreduce", [tensor], name, how, (prescale_factor, postscale_factor), process_set)


def allreduce_async_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Begin ``allreduce_``."""
    how = _operation(op, average, [tensor])
    return _reduce("allreduce", [tensor], name, how, (prescale_factor, postscale_factor), process_set, in_place=True)


def allreduce_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> torch.Tensor:  # fmt: skip
    """As ``allreduce``, replacing the tensor by the result."""
    return _one(
        synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set))
    )


def grouped_allreduce_async(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Begin ``grouped_allreduce``."""
    how, factors = _operation(op, average, tensors), (prescale_factor, postscale_factor)
    return _reduce("allreduce", list(tensors), name, how, factors, process_set, grouped=True)


def grouped_allreduce_async_(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Begin ``grouped_allreduce_``."""
    how, factors = _operation(op, average, tensors), (prescale_factor, postscale_factor)
    return _reduce("allreduce", list(tensors), name, how, factors, process_set, in_place=True, grouped=True)


def grouped_allreduce_(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:  # fmt: skip
    """As ``grouped_allreduce``, replacing the tensors by the results."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return _several(synchronize(handle))


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int = Average, process_set: ProcessSet = global_process_set
) -> Any:
    """Begin to add up (or average) sparse tensors; call the result to get the sum, which waits."""
    if op not in (Average, Sum):
        raise ValueError("sparse tensors can be averaged and added up: use op=hvd.Average or hvd.Sum")
    coalesced = tensor if tensor.is_coalesced() else tensor.coalesce()
    indices = allgather_async(coalesced.indices().transpose(0, 1).contiguous(), f"{name}.indices", process_set)
    values = allgather_async(coalesced.values(), f"{name}.values", process_set)

    def finish() -> torch.Tensor:
        places, found = _one(synchronize(indices)), _one(synchronize(values))
        found = found / process_set.size() if op == Average else found
        return torch.sparse_coo_tensor(places.transpose(0, 1), found, tensor.size()).coalesce()

    return finish


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begin ``allgather``."""
    engine = _engine(process_set)
    return _hand_over(engine, Operation(_request(engine, "allgather", name, [tensor], ()), [tensor]))


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin ``grouped_allgather``."""
    engine, given = _engine(process_set), list(tensors)
    return _hand_over(engine, Operation(_request(engine, "allgather", name, given, ()), given), grouped=True)


def _broadcast(tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet, in_place: bool) -> int:
    engine = _engine(process_set)
    if root_rank not in engine.numbers:
        raise ValueError(f"broadcast: root_rank={root_rank!r} is none of ranks {', '.join(map(str, engine.numbers))}")
    options = (engine.numbers.index(root_rank), f"from rank {root_rank}")
    return _hand_over(
        engine, Operation(_request(engine, "broadcast", name, [tensor], options), [tensor], in_place=in_place)
    )


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin ``broadcast``."""
    return _broadcast(tensor, root_rank, name, process_set, in_place=False)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin ``broadcast_``."""
    return _broadcast(tensor, root_rank, name, process_set, in_place=True)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Replace the tensor by that of ``root_rank``, a rank of the job, and return it."""
    return _one(synchronize(broadcast_async_(tensor, root_rank, name, process_set)))


def alltoall_async(
    tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None = None, name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Begin ``alltoall``; ``synchronize`` returns what came, and how many rows came from each rank."""
    engine = _engine(process_set)
    if not tensor.dim():
        raise ValueError("alltoall: a tensor without dimensions has no rows")
    if splits is None:
        if len(tensor) % engine.size:
            raise ValueError(f"alltoall: {len(tensor)} rows for {engine.size} ranks: say how many each gets by splits=")
        splits = [len(tensor) // engine.size] * engine.size
    rows = [int(count) for count in splits]
    if len(rows) != engine.size or min(rows) < 0 or sum(rows) != len(tensor):
        raise ValueError(
            f"alltoall: splits={rows} of {len(tensor)} rows for {engine.size} ranks: give each a number of rows, "
            f"{len(tensor)} together"
        )
    return _hand_over(engine, Operation(_request(engine, "alltoall", name, [tensor], (), rows), [tensor]))


def _check_rows(tensors: Tensors) -> None:
    for tensor in tensors:
        if not tensor.dim():
            raise ValueError("reducescatter: a tensor without dimensions has no rows")


def reducescatter_async(
    tensor: torch.Tensor, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    """Begin ``reducescatter``."""
    _check_rows([tensor])
    how = _operation(op, None, [tensor])
    return _reduce("reducescatter", [tensor], name, how, (prescale_factor, postscale_factor), process_set)


def grouped_reducescatter_async(
    tensors: Tensors, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    """Begin ``grouped_reducescatter``."""
    _check_rows(tensors)
    how, factors = _operation(op, None, tensors), (prescale_factor, postscale_factor)
    return _reduce("reducescatter", list(tensors), name, how, factors, process_set, grouped=True)


def join(device: int = -1) -> int:
    """Say that this rank has no more data: it takes part with zeros until all have called this.

    Averages divide by all ranks, also by those that have joined. Returns the last rank that has joined.

    Args:
        device: Of no meaning here.
    """
    return context.current().engine(context.GLOBAL).join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks have called this; what is under way goes on."""
    engine = _engine(process_set)
    operation = Operation(Request("barrier", "barrier.noname", engine.number("barrier.noname"), ("sum",)))
    engine.submit(operation)
    engine.wait(operation)


def _one(result: Any) -> torch.Tensor:
    assert isinstance(result, torch.Tensor)
    return result


def _several(result: Any) -> list[torch.Tensor]:
    assert isinstance(result, list)
    return result
