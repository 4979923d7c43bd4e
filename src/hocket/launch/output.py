"""Turns what workers write into lines: whole ones, with tracebacks held back until it is clear what they mean."""

from __future__ import annotations

import re
import time

_MOST = 1 << 20  # bytes of a line without an end
_HOLD = 1.0  # seconds that a traceback of a worker that lives on is held back
_BEGIN = ("Traceback (most recent call last)", "Fatal Python error", "  + Exception Group Traceback")


_TORCH_PREFIX = re.compile(rb"^\[rank\d+\]: ?")  # by torch.distributed, and Hocket has its own


class Stream:
    """One output stream of one worker."""

    def __init__(self, *, holds_tracebacks: bool) -> None:
        self._rest = b""
        self._holds = holds_tracebacks
        self._held: list[str] = []
        self._released: list[str] = []
        self._since = 0.0
        self.status = ""  # an unfinished line that the worker overwrites: a progress bar

    def feed(self, data: bytes) -> list[str]:
        """Take in bytes; return the lines that are to be shown now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if b"\r" in self._rest:
            self._rest = self._rest[max(0, self._rest.rstrip(b"\r").rfind(b"\r")) :]
        if len(self._rest) > _MOST:
            lines.append(self._rest)
            self._rest = b""
        self.status = _visible(self._rest)
        return [line for raw in lines for line in self._show(_visible(raw))]

    def release(self) -> list[str]:
        """Lines of a traceback that need not be held back any longer: the worker lives on."""
        if self._held and time.monotonic() - self._since > _HOLD:
            self._released, self._held = self._held, []
            return self._released
        return []

    def take_held(self) -> list[str]:
        """Lines that are still held back, at the worker's end; ``traceback`` remembers them."""
        held, self._held = self._held, []
        self._released = held or self._released
        return held

    @property
    def traceback(self) -> list[str]:
        """The last traceback that the worker has written, held back or already shown."""
        return self._held or self._released

    def finish(self) -> list[str]:
        """At the worker's end: the last lines to be shown, without a traceback that is held back."""
        return self.feed(b"\n") if self._rest.strip() else []

    def _show(self, line: str) -> list[str]:
        if self._holds and not self._held and line.startswith(_BEGIN):
            self._since = time.monotonic()
            self._held.append(line)
            return []
        if self._held:
            self._held.append(line)
            return []
        return [line]


def _visible(raw: bytes) -> str:
    """What remains on a screen of a line that overwrites itself."""
    shown = raw.rstrip(b"\r").rsplit(b"\r", 1)[-1]
    return _TORCH_PREFIX.sub(b"", shown).decode(errors="replace")
