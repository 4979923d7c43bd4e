"""Anonymous memory that the workers of one host share.

A ``memfd`` has no name, so nothing is left behind even after SIGKILL, and the size of ``/dev/shm`` does not
limit it. It travels between processes as a file descriptor (see ``handoff``).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

from hocket.errors import JobError

if TYPE_CHECKING:
    import torch  # the coordinator makes areas, too, and runs without torch

LINE = 64  # bytes of a cache line; everything in an area starts at a multiple of it


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to whole cache lines."""
    return -(-nbytes // LINE) * LINE


class Area:
    """One mapped piece of shared memory, seen as bytes or as tensors."""

    def __init__(self, descriptor: int) -> None:
        """Map the whole memory behind ``descriptor``, and take ownership of the descriptor."""
        self.descriptor = descriptor
        self.nbytes = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self.nbytes)
        self.words = memoryview(self._map)

    @staticmethod
    def size(nbytes: int) -> int:
        """How large an area of at least ``nbytes`` is."""
        return max(aligned(nbytes), mmap.PAGESIZE)

    @classmethod
    def create(cls, nbytes: int, purpose: str) -> Area:
        """Make a new area of at least ``nbytes``, all zero."""
        descriptor = os.memfd_create(f"hocket-{purpose}", os.MFD_CLOEXEC)
        size = cls.size(nbytes)
        try:
            os.ftruncate(descriptor, size)
            # Take the pages now: running out of memory here is an error, later it would be a SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            os.close(descriptor)
            raise JobError(
                f"cannot get {size:,} bytes of shared memory for {purpose}: {error.strerror}; "
                "start fewer workers (-n), use a smaller model, or free memory on this host"
            ) from error
        return cls(descriptor)

    def close_descriptor(self) -> None:
        """Give up the descriptor once everyone has mapped it; the mapping itself stays."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of ``count`` elements at byte ``offset``, with a storage of its own.

        Views of one storage would make ``torch.save`` write the whole area.
        """
        import torch

        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)

    def address(self) -> int:
        """Where the area is mapped in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))
