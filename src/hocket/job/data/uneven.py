"""Data whose length differs between ranks: ranks tell each other in every step how many samples they have.

A rank whose data has ended goes on with a batch that it has had before, with weight 0, until the data of all has
ended; so everyone takes the same number of steps, and every average is over the samples that are there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hocket.comm.communicator import Communicator
from hocket.errors import UsageError
from hocket.job.data.sharding import Counts
from hocket.job.packing import pack, unpack

Item = tuple[Any, Counts]


def level(communicator: Communicator, items: Iterator[Item], is_uneven: Callable[[], bool]) -> Iterator[Item]:
    """``items``, with as many on all ranks as on the one with the most; every step is collective.

    Args:
        communicator: Of all ranks.
        items: Those of this rank.
        is_uneven: Asked after the first item: whether this is needed at all.
    """
    item = next(items, None)
    if not is_uneven():
        while item is not None:
            yield item
            item = next(items, None)
        return
    spare: Any = None
    while True:
        if item is not None and spare is None:
            spare = item[0]
        here = item[1].here if item is not None else 0
        rows = communicator.allgather(torch.tensor([here, spare is not None])).tolist()
        if not any(count for count, _ in rows):
            return
        if not all(has for _, has in rows):
            lender = next(rank for rank, (_, has) in enumerate(rows) if has)
            spare = _lend(communicator, spare, lender)
        everywhere = sum(count for count, _ in rows)
        if item is None:
            yield spare, Counts(0, everywhere, 0)
        else:
            yield item[0], item[1]._replace(everywhere=everywhere)
            item = next(items, None)


def _lend(communicator: Communicator, spare: Any, lender: int) -> Any:
    """For ranks that never had a batch: one of rank ``lender``'s."""
    tensors: dict[str, torch.Tensor] = {}
    described = b""
    if communicator.rank == lender:
        try:
            skeleton = pack(spare, "batch", tensors)
        except (UsageError, TypeError):
            skeleton = None
        kinds = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()]
        described = json.dumps([skeleton, kinds]).encode()
    skeleton, kinds = json.loads(communicator.gather_bytes(described)[lender])
    if skeleton is None:
        raise UsageError(
            "a rank has no data at all, and the batches of the others cannot be lent to it, because they hold more "
            "than tensors and plain data: give every rank at least one batch"
        )
    for name, dtype, shape in kinds:
        lent = tensors[name].contiguous() if name in tensors else torch.empty(shape, dtype=getattr(torch, dtype))
        communicator.broadcast(lent, lender)
        tensors[name] = lent
    return unpack(skeleton, tensors.__getitem__) if spare is None else spare
