"""The standard input of rank 0, where the launcher is elsewhere: piece by piece, and nobody ever blocks on it."""

from __future__ import annotations

import contextlib
import os
import selectors
from collections.abc import Callable


class Input:
    """A pipe to rank 0, filled with what the launcher sends; it sends the next piece when one is taken."""

    def __init__(self, selector: selectors.BaseSelector, taken: Callable[[], None]) -> None:
        """``selector`` calls the ``data`` of what is ready; ``taken`` is called when rank 0 has room for more."""
        self._selector, self._taken = selector, taken
        self._data = b""
        self._writer = -1

    def open(self) -> int:
        """What rank 0 is to read from; the caller closes it when rank 0 has it."""
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        return reader

    def take(self, data: bytes) -> None:
        """Pass on ``data``; none is the end of the input."""
        self._data += data
        if self._writer >= 0 and not data:
            self.close()
        elif self._writer >= 0:
            self._write()

    def close(self) -> None:
        """The input ends here."""
        if self._writer >= 0:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._writer)
            os.close(self._writer)
            self._writer = -1

    def _write(self) -> None:
        try:
            self._data = self._data[os.write(self._writer, self._data) :]
        except BlockingIOError:
            pass
        except OSError:  # rank 0 reads no more
            self.close()
            return
        if self._data:
            if self._writer not in self._selector.get_map():
                self._selector.register(self._writer, selectors.EVENT_WRITE, self._write)
            return
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._writer)
        self._taken()
