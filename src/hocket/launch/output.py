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
        self._since = 0.0
        self.status = ""  # an unfinished line that the worker overwrites: a progress bar

    def feed(self, data: bytes) -> list[str]:
        """Take in bytes; return the lines that are to be shown now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if b"\r" in self._rest or len(self._rest) > _MOST:
            self._rest = self._rest[max(0, self._rest.rstrip(b"\r").rfind(b"\r"), len(self._rest) - _MOST) :]
            self.status = _visible(self._rest)
        elif lines:
            self.status = ""
        return [line for raw in lines for line in self._show(_visible(raw))]

    def release(self, *, now: bool = False) -> list[str]:
        """Lines that were held back and need not be any longer."""
        if self._held and (now or time.monotonic() - self._since > _HOLD):
            held, self._held = self._held, []
            return held
        return []

    def finish(self) -> tuple[list[str], list[str]]:
        """At the worker's end: the last lines to be shown, and the traceback with which it ended, if any."""
        shown = self.feed(b"\n") if self._rest.strip() else []
        held, self._held = self._held, []
        return shown, held

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
