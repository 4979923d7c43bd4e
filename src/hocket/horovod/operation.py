"""What a rank has submitted, from the call to its result; Horovod's integer handles stand for these."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from hocket.horovod.negotiation import Request


class Operation:
    """Something that this rank does together with the others, once all have submitted it.

    Args:
        request: What is asked for.
        tensors: What this rank gives.
        in_place: Whether results replace the tensors.

    Attributes:
        result: The results, once it is over.
        error: Why there are none, if so.
        is_over: Whether it is over, well or not.
        since: When it was submitted.
    """

    def __init__(self, request: Request, tensors: Sequence[torch.Tensor] = (), *, in_place: bool = False) -> None:
        self.request, self.tensors, self.in_place = request, tensors, in_place
        self.result: list[torch.Tensor] = []
        self.error: Exception | None = None
        self.is_over = False
        self.last = -1
        self.since = time.monotonic()
        streams = [tensor for tensor in tensors if tensor.is_cuda]
        self._written = torch.cuda.current_stream(streams[0].device).record_event() if streams else None

    def is_own(self, flat: torch.Tensor) -> bool:
        """Whether a flat tensor is the memory of one that the results replace."""
        return self.in_place and flat.data_ptr() == self.tensors[0].data_ptr()

    def output(self, index: int, shape: Sequence[int]) -> torch.Tensor:
        """Where the result for a tensor goes."""
        tensor = self.tensors[index]
        return tensor.detach() if self.in_place else torch.empty(shape, dtype=tensor.dtype, device=tensor.device)

    def await_tensors(self) -> None:
        """Wait until the tensors have been written: a GPU may still be at it."""
        if self._written is not None:
            self._written.synchronize()
