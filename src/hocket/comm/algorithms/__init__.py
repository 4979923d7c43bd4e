"""Algorithms for means over all ranks, one class for each, and the choice between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.comm.algorithms.gpu_reductions import Nccl, Staged
from hocket.comm.algorithms.host_reductions import HostSlices
from hocket.comm.algorithms.memory_reductions import ONE_PHASE_BYTES, OnePhase, Split, TwoPhase
from hocket.comm.algorithms.network_reductions import Flat
from hocket.comm.bucket_layout import Layout
from hocket.comm.exchange import Algorithm, Alone
from hocket.specs.codecs import CodecSpec

if TYPE_CHECKING:
    from hocket.comm.communicator import Communicator


def choose(
    communicator: Communicator, layout: Layout, *, background: bool, private: bool, codec: CodecSpec | None = None
) -> Algorithm:
    """The fastest algorithm for these ranks, this device and layout; collective. See ``Communicator.exchange``."""
    on_gpu = layout.device.type != "cpu"
    if on_gpu and communicator.nccl is not None:
        return Nccl(communicator.nccl, communicator.size, communicator.meet, layout, background=background)
    if communicator.size == 1:
        return Alone(layout)
    if on_gpu:
        inner = choose(communicator, layout.on_cpu(), background=background, private=True, codec=codec)
        return Staged(inner, layout)
    memory, lane = communicator.on_host.memory, communicator.open_lane(sum(bucket.nbytes for bucket in layout.buckets))
    if lane is not None and len(lane.topology.local) == 1:
        # What a codec leaves between the tensors of a bucket must not be there in the next round.
        return Flat(lane, layout, in_place=private and codec is None, codec=codec)
    assert memory is not None
    if lane is not None:
        return HostSlices(lane, layout, memory, private=private, codec=codec)
    if background:
        return Split(memory, layout)
    total = sum(bucket.nbytes for bucket in layout.buckets)
    return (OnePhase if memory.size == 2 or total <= ONE_PHASE_BYTES else TwoPhase)(memory, layout)
