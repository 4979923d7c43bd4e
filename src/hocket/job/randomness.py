"""Random numbers of a job: those that all ranks share, those that each has for itself, and how both are kept.

Covered are torch, with the GPU that is in use, ``random`` and, where it is loaded, numpy.
"""

from __future__ import annotations

import hashlib
import random
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hocket.comm.communicator import Communicator


@dataclass(frozen=True)
class RandomState:
    """The states of all generators of a process."""

    torch: torch.Tensor
    python: Any
    numpy: Any  # None where numpy was not loaded
    cuda: Any = None  # the state of the current GPU, where one was in use

    @staticmethod
    def capture() -> RandomState:
        """The states that this process has now."""
        numpy = sys.modules.get("numpy")
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return RandomState(torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None, cuda)

    @staticmethod
    def from_seed(seed: int) -> RandomState:
        """New states that follow from ``seed``."""
        numpy = sys.modules.get("numpy")
        return RandomState(
            torch.Generator().manual_seed(seed).get_state(),
            random.Random(seed).getstate(),
            numpy.random.RandomState(seed % 2**32).get_state() if numpy else None,
        )

    def restore(self) -> None:
        """Give this process these states."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        numpy = sys.modules.get("numpy")
        if numpy and self.numpy is not None:
            numpy.random.set_state(self.numpy)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda)

    def as_data(self) -> list[Any]:
        """These states as plain data with tensors."""
        version, numbers, gauss = self.python
        numpy = self.numpy
        if numpy is not None:
            numpy = [torch.from_numpy(part) if hasattr(part, "dtype") else part for part in numpy]
        return [self.torch, [version, torch.tensor(numbers), gauss], numpy, self.cuda]

    @staticmethod
    def from_data(data: list[Any]) -> RandomState:
        """The states that ``as_data`` gave."""
        own, (version, numbers, gauss), numpy, *cuda = data
        if numpy is not None:
            numpy = tuple(part.numpy() if isinstance(part, torch.Tensor) else part for part in numpy)
        return RandomState(own, (version, tuple(numbers.tolist()), gauss), numpy, *cuda)


class SharedRandom:
    """A random state of its own, put in place of the process's for a moment; alike on all ranks if it starts alike."""

    def __init__(self, start: RandomState) -> None:
        self._state = start

    def capture(self) -> RandomState:
        """The state as it is now."""
        return self._state

    def __enter__(self) -> None:
        self._own = RandomState.capture()
        self._state.restore()

    def __exit__(self, *_: object) -> None:
        self._state = RandomState.capture()
        self._own.restore()


class OwnRandom(nullcontext[None]):
    """The random state that the process has anyway: what a script alone draws from."""

    def capture(self) -> RandomState:
        """The state as it is now."""
        return RandomState.capture()


def shared_seed(communicator: Communicator, number: int) -> int:
    """A seed that follows from rank 0's random state and ``number``, without drawing from it; collective."""
    digest = hashlib.sha256(bytes(torch.get_rng_state().tolist()) + number.to_bytes(8, "little")).digest()[:8]
    tensor = torch.tensor([int.from_bytes(digest, "little") >> 2])
    communicator.broadcast(tensor, 0)
    return int(tensor)


def diversify(communicator: Communicator) -> None:
    """Give every rank but rank 0 random numbers of its own, which follow from rank 0's state; collective."""
    seed = shared_seed(communicator, 0)
    if communicator.rank:
        reseed(mix(seed, communicator.rank))


def reseed(seed: int) -> None:
    """Start all generators of this process anew."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed(seed % 2**32)


def mix(*numbers: int) -> int:
    """A seed that depends on all of ``numbers``."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2
