"""The answers to the calls that workers make together before they train, kept for newcomers that make them later."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch

from hocket.comm.generation import Left
from hocket.errors import JobError, MismatchError
from hocket.transport.tensor_bytes import view_bytes

MOST, MOST_CALLS = 16 << 20, 500  # bytes of all answers, and how many there may be
_LENGTH = struct.Struct("!I")


class Answers:
    """What the collectives of one worker have returned, in order: kept until training begins, or given out again.

    Attributes:
        is_over: Whether training has begun, or nothing is kept.
        failure: Why newcomers cannot be given the answers; empty if they can.
        on_failure: Called with the reason when it turns out that newcomers cannot be given the answers.
    """

    def __init__(self, kept: bytes | None = None, *, keeps: bool = True) -> None:
        self.is_over, self.failure = not keeps, ""
        self.on_failure: Callable[[str], None] = lambda _: None
        self._left: Iterator[tuple[str, bytes]] | None = None if kept is None else _read(kept)
        self._kept: list[tuple[str, bytes]] = []
        self._nbytes = 0

    @classmethod
    def of_newcomer(cls, kept: bytes, failure: str) -> Answers:
        """What a newcomer is given.

        Raises:
            Left: there is a ``failure``; the newcomer ends, and the others go on without it.
        """
        if failure:
            _end(f"this job takes no new workers: {failure}")
        return cls(kept)

    @property
    def is_idle(self) -> bool:
        """Whether calls are neither kept nor answered."""
        return self.is_over or (self._left is None and bool(self.failure))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Calls inside this context are neither kept nor answered: newcomers do not make them."""
        before, self.is_over = self.is_over, True
        try:
            yield
        finally:
            self.is_over = before

    def find(self, what: str) -> bytes | None:
        """The answer to a call, if this worker is a newcomer that does not train yet.

        Raises:
            MismatchError: the workers that were there before have made another call.
        """
        if self.is_over or self._left is None:
            return None
        name, data = next(self._left, ("none", b""))
        if name != what:
            raise MismatchError(
                f"a worker that joins the job makes other calls before its first training loop than the others did: "
                f"{what} here, {name} there; make the same calls on every worker, whoever comes when"
            )
        return data

    def keep(self, what: str, make: Callable[[], bytes]) -> None:
        """Keep the answer to a call, if answers are kept now."""
        if self.is_over or self._left is not None or self.failure:
            return
        data = make()
        self._nbytes += len(data)
        if self._nbytes > MOST or len(self._kept) == MOST_CALLS:
            self._hinder(
                f"the script exchanges more than {MOST >> 20} MB, or more than {MOST_CALLS} times, before its first "
                "training loop"
            )
            return
        self._kept.append((what, data))

    def fail(self, why: str) -> None:
        """Nobody can join, for a reason in words."""
        self.failure, self._kept = why, []

    def refuse(self) -> None:
        """A call is made whose answer cannot be kept: nobody can join, if training has not begun.

        Raises:
            Left: this worker is a newcomer itself; it ends, and the others go on without it.
        """
        if self.is_over or self.failure:
            return
        why = "the script uses groups, or messages between workers, before its first training loop"
        if self._left is not None:
            _end(f"this worker cannot join the others: {why}")
        self._hinder(why)

    def _hinder(self, why: str) -> None:
        self.fail(why)
        self.on_failure(why)

    def end(self, keep: Callable[[bytes, str], None], *, is_in: bool) -> None:
        """Training begins.

        Args:
            keep: Is given all that was kept, and why that is of no use, unless this worker is a newcomer.
            is_in: Whether this worker is one of those that train.

        Raises:
            JobError: it is not.
        """
        if self.is_over:
            return
        if not is_in:
            raise JobError("a worker that joins a job has to call hocket.resume() before its first training loop")
        self.is_over, kept = True, self._kept
        self._kept = []
        if self._left is None:
            head = json.dumps([[what, len(data)] for what, data in kept]).encode()
            keep(_LENGTH.pack(len(head)) + head + b"".join(data for _, data in kept), self.failure)


def _end(why: str) -> NoReturn:
    """End this newcomer, which is no failure of the job."""
    print(f"hocket: {why}", file=sys.stderr, flush=True)
    raise Left(0)


def _read(kept: bytes) -> Iterator[tuple[str, bytes]]:
    (length,) = _LENGTH.unpack_from(kept)
    at = _LENGTH.size + length
    for what, nbytes in json.loads(kept[_LENGTH.size : at]):
        yield what, kept[at : at + nbytes]
        at += nbytes


def of_tensor(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    return bytes(view_bytes(tensor.detach().cpu().contiguous()))


def to_tensor(data: bytes, like: torch.Tensor) -> torch.Tensor:
    """A flat tensor of the type of ``like``, from its bytes."""
    return torch.frombuffer(bytearray(data), dtype=like.dtype) if data else like.new_empty(0, device="cpu")


def of_parts(parts: Sequence[bytes]) -> bytes:
    """Several parts as one."""
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def to_parts(data: bytes) -> list[bytes]:
    """What ``of_parts`` was given."""
    parts, at = [], 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        parts.append(data[at : at + length])
        at += length
    return parts
