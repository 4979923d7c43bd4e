"""Messages between the launcher and its agents on other hosts: length-prefixed, capped, never unpickled.

A frame is a fixed header (magic, length of the head, length of the body), a head of JSON with its ``kind``, and raw
bytes. An agent writes a marker before its first frame, so that whatever a shell prints at login is not taken for one.
"""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple

from hocket.errors import JobError

MARKER = b"\n\0hocket agent, frames from here\0\n"
MOST_HEAD = 1 << 20
MOST_BODY = 1 << 20
_HEADER = struct.Struct("!4sII")
_MAGIC = b"HKT1"


class Frame(NamedTuple):
    """One message: what it says, and bytes that belong to it."""

    head: dict[str, Any]
    body: bytes

    @property
    def kind(self) -> str:
        return str(self.head["kind"])


def encode(kind: str, body: bytes = b"", **head: Any) -> bytes:
    """The bytes of one frame; ``head`` is plain data."""
    text = json.dumps({"kind": kind, **head}).encode()
    assert len(text) <= MOST_HEAD and len(body) <= MOST_BODY
    return _HEADER.pack(_MAGIC, len(text), len(body)) + text + body


class Decoder:
    """Takes in bytes as they come, and gives out whole frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that ``data`` completes.

        Raises:
            JobError: these bytes are no frames, or too long ones.
        """
        self._data += data
        frames = []
        while len(self._data) >= _HEADER.size:
            magic, head, body = _HEADER.unpack_from(self._data)
            if magic != _MAGIC:
                raise JobError("what came is no message of Hocket's")  # and may be secret, so it is not shown
            if head > MOST_HEAD or body > MOST_BODY:
                raise JobError(f"a message of {head} + {body} bytes came, and at most {MOST_HEAD} + {MOST_BODY} may")
            if len(self._data) < (whole := _HEADER.size + head + body):
                break
            text, rest = bytes(self._data[_HEADER.size : _HEADER.size + head]), self._data[whole - body : whole]
            frames.append(Frame(_parse(text), bytes(rest)))
            del self._data[:whole]
        return frames


def _parse(text: bytes) -> dict[str, Any]:
    try:
        head = json.loads(text)
    except ValueError:
        head = None
    if not isinstance(head, dict) or not isinstance(head.get("kind"), str):
        raise JobError("a message without a kind came")
    return head
