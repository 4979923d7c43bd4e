"""What is no tensor goes to all ranks: plain data, the parameters of a model, the state of an optimizer."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from hocket.errors import UsageError
from hocket.horovod import context, pickled_objects
from hocket.horovod.operations import (
    allgather_async,
    broadcast_async,
    broadcast_async_,
    synchronize,
)
from hocket.horovod.process_sets import ProcessSet, global_process_set
from hocket.job.packing import pack, unpack
from hocket.transport.tensor_bytes import view_bytes

_HEAD = struct.Struct("<BI")  # how an object is written, and the length of its description
_PLAIN, _PICKLED = 0, 1


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The object of ``root_rank``, on all ranks.

    Plain data and tensors travel as such. Anything else is pickled, between workers that know the secret of the job.
    """
    is_root = context.current().worker.config.rank == root_rank
    written = write(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([written.numel()], dtype=torch.int64)
    length = synchronize(broadcast_async(length, root_rank, _named("broadcast_object.size", name), process_set))
    data = written if is_root else torch.empty(int(length), dtype=torch.uint8)
    data = synchronize(broadcast_async(data, root_rank, _named("broadcast_object.data", name), process_set))
    return obj if is_root else read(data)


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """A function of an object that returns that of ``root_rank``."""
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The objects of all ranks, in the order of the ranks; see ``broadcast_object``."""
    written = write(obj)
    length = torch.tensor([written.numel()], dtype=torch.int64)
    lengths = synchronize(allgather_async(length, _named("allgather_object.size", name), process_set))
    data = synchronize(allgather_async(written, _named("allgather_object.data", name), process_set))
    return [read(part) for part in data.split(lengths.tolist())]


def _named(what: str, name: str | None) -> str | None:
    return None if name is None else f"{what}.{name}"


def write(value: Any) -> torch.Tensor:
    """An object as bytes."""
    tensors: dict[str, torch.Tensor] = {}
    try:
        packed = pack(value, "object", tensors)
    except UsageError:
        return torch.frombuffer(bytearray(_HEAD.pack(_PICKLED, 0) + pickled_objects.write(value)), dtype=torch.uint8)
    flats = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    shapes = [[name, str(flat.dtype).removeprefix("torch."), list(flat.shape)] for name, flat in flats.items()]
    text = json.dumps([packed, shapes]).encode()
    head = torch.frombuffer(bytearray(_HEAD.pack(_PLAIN, len(text)) + text), dtype=torch.uint8)
    parts = [view_as_bytes(flat) for flat in flats.values()]
    return torch.cat([head, *parts]) if parts else head


def view_as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor."""
    return flat.reshape(-1).view(torch.uint8)


def read(data: torch.Tensor) -> Any:
    """The object that ``write`` was given."""
    kind, length = _HEAD.unpack(bytes(view_bytes(data[: _HEAD.size])))
    if kind == _PICKLED:
        return pickled_objects.read(bytes(view_bytes(data[_HEAD.size :].contiguous())))
    start = _HEAD.size + length
    packed, shapes = json.loads(bytes(view_bytes(data[_HEAD.size : start].contiguous())))
    tensors: dict[str, torch.Tensor] = {}
    for name, dtype, shape in shapes:
        found = torch.empty(shape, dtype=getattr(torch, dtype))
        view_as_bytes(found).copy_(data[start : start + found.nbytes])
        start += found.nbytes
        tensors[name] = found
    return unpack(packed, tensors.__getitem__)


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Replace parameters and buffers, in place, by those of ``root_rank``.

    Args:
        params: A ``state_dict()``, or what ``named_parameters()`` gives.
        root_rank: A rank of the job.
        process_set: The ranks that take part.
    """
    named = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    if any(not isinstance(each, tuple) or len(each) != 2 for each in named):
        raise ValueError(f"invalid params of type: {type(params)}: give model.state_dict() or model.named_parameters()")
    handles = []
    for name, tensor in named:
        if isinstance(tensor, UninitializedTensorMixin):
            raise ValueError(f"{name!r} has no shape yet: run the model once before hvd.broadcast_parameters()")
        if isinstance(tensor, torch.Tensor):
            handles.append(broadcast_async_(tensor.detach(), root_rank, f"parameters.{name}", process_set))
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give the optimizer the state of that of ``root_rank``: hyperparameters, moments, counts of steps.

    Args:
        optimizer: Its parameters are the same on all ranks.
        root_rank: A rank of the job.
        model: Of no meaning here.
        process_set: The ranks that take part.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    is_root = context.current().worker.config.rank == root_rank
    state = broadcast_object(optimizer.state_dict() if is_root else None, root_rank, "optimizer state", process_set)
    if not is_root:
        optimizer.load_state_dict(state)
