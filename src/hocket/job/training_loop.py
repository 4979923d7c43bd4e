"""One pass over a loader as training sees it: the batches that the script was given, and how the pass ended."""

from __future__ import annotations

import dis
import gc
import inspect
from collections import deque
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from hocket.capture.collector import BackwardPasses
from hocket.capture.model_hooks import tensors
from hocket.strategies.base import Strategy


class Batch:
    """One batch that a loop was given.

    Args:
        contents: What the script got.
        samples: How many samples of this worker the batch has.
        place: How far the pass is with this batch.
        start: Sets weights and counts to those of this batch; returns how much the batch weighs.
    """

    def __init__(self, contents: object, samples: int, place: Any, start: Callable[[], float]) -> None:
        self.contents, self.samples, self.place, self.start = contents, samples, place, start
        self.steps: dict[Strategy, int] = {}

    def has(self, inputs: object) -> bool:
        """Whether ``inputs`` are, as far as can be seen, made of this batch."""
        mine = storages(self.contents)
        return bool(mine & storages(inputs)) or any(each is self.contents for each in _things(inputs))


class Loop:
    """One pass over a loader, as training sees it.

    Attributes:
        given: Batches that have been given to the script and are not done, in this order.
        at_work: The batch that the script trains on.
        is_ahead: Whether the script asks for batches before it has trained on those that it has.
        in_thread: Whether the script takes batches in another thread; nothing is collective there.
    """

    def __init__(self, loader: object, epoch: int, backward: BackwardPasses, *, in_thread: bool) -> None:
        self.loader, self.epoch, self._backward = loader, epoch, backward
        self.given: deque[Batch] = deque()
        self.at_work: Batch | None = None
        self.is_ahead = self.in_thread = in_thread
        self.passes = 0  # backward passes when work on the batch at work began
        self.place: Any = None  # how far the pass is with the last batch that is done
        self.has_begun = self.has_trained = False
        self.weight = 1.0  # the weight of the batch at work
        self.is_suspect = False  # whether the script may be ahead unseen
        self.pause: Callable[[], None] | None = None  # what the loader does before all settle
        self.between: Callable[[], None] | None = None  # what the loader does between two batches
        self.after: Callable[[], None] | None = None  # called when all batches are done, and no more will come

    @property
    def trains(self) -> bool:
        """Whether the script has trained on the batch at work."""
        return self.at_work is not None and self._backward.count > self.passes

    @property
    def waits(self) -> bool:
        """Whether the script has asked for batches ahead of time, and has not trained on them yet."""
        return self.is_ahead and len(self.given) > self.trains


def _things(value: object) -> list[object]:
    """A value and all that is in it, as far as plain containers go."""
    if isinstance(value, dict):
        return [value, *(thing for each in value.values() for thing in _things(each))]
    if isinstance(value, (list, tuple)):
        return [value, *(thing for each in value for thing in _things(each))]
    return [value]


def storages(value: object) -> set[int]:
    """Where the tensors of a value are in memory."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors(value) if tensor.numel()}


_LETS_GO = {  # instructions that let go of an iterator, and never raise
    "POP_TOP",  # break, and return in a loop
    "POP_ITER",
    "END_FOR",
    "STORE_FAST",  # another value for the variable
    "STORE_NAME",
    "STORE_GLOBAL",
    "STORE_DEREF",
    "DELETE_FAST",
    "DELETE_NAME",
    "DELETE_GLOBAL",
    "DELETE_DEREF",
    "RETURN_VALUE",
    "RETURN_CONST",
}
_ENDS = "FOR_ITER"  # at the end of zip or islice, or at an error of another iterator in them
_CALLS = ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "PRECALL")


def on_purpose(frame: FrameType | None) -> bool:
    """Whether a generator that is being closed is let go without any error, so that code after the loop goes on.

    Inside of ``close()`` nothing in Python's API tells ``break`` from ``raise``. The instruction that the closing frame
    is at does: an iterator that is let go by ``break`` is let go by another instruction than one that an exception
    unwinds. Where that leaves a doubt, it is an error.

    Args:
        frame: The frame that closes the generator.
    """
    while frame is not None and _is_closed(frame):
        frame = frame.f_back
    if frame is None:
        return False
    name, is_inside = _instruction(frame)
    if name in _CALLS:
        return is_inside  # a function of the script has returned, and its variables are let go
    return name in _LETS_GO or (name == _ENDS and not _raises(frame))


def _is_closed(frame: FrameType) -> bool:
    """Whether the frame belongs to a generator around this one, which is being closed as well."""
    return bool(inspect.CO_GENERATOR & frame.f_code.co_flags) and _instruction(frame)[0] == "YIELD_VALUE"


def _instruction(frame: FrameType) -> tuple[str, bool]:
    """The instruction of a frame, and whether it is past its beginning: a function was called, and has returned."""
    found = ""
    for each in dis.get_instructions(frame.f_code, show_caches=True):
        if each.opname != "CACHE":
            found = each.opname
        if each.offset == frame.f_lasti:
            return found, each.opname == "CACHE"
    return "", False


def _raises(frame: FrameType) -> bool:
    """Whether an error is on its way through a frame: its traceback knows the frame then."""
    return any(type(each) is TracebackType for each in gc.get_referrers(frame))
