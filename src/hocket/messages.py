"""The one format of messages in a job: a fixed header, a small JSON head, and raw bytes that go straight into place.

Lengths are capped before anything is read into memory, and nothing is unpickled. Messages travel over sockets (see
hocket.transport.wire) and through the pipes between workers, launcher, guardian and agents.
"""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple

from hocket.errors import JobError

MAGIC = b"HOCK"
VERSION = 1
HEADER = struct.Struct("!4sBBHIQIQ")  # magic, version, kind, nothing, generation, sequence, bytes of head and of body
MOST_HEAD = 8 << 20
MOST_BODY = 1 << 40
_NO_MESSAGE = "what came is no message of Hocket's"  # the bytes may be secret, so they are not shown


class WireError(JobError):
    """The bytes that came are no message, or one that is not allowed here."""


class Message(NamedTuple):
    """A message whose body is still to be received."""

    kind: int
    generation: int
    sequence: int
    head: dict[str, Any]
    body: int  # bytes of the body


class Decoder:
    """Takes in the bytes of messages as they come, and gives out whole messages with their bodies.

    Args:
        most_head: Bytes of a head beyond which a message is refused.
        most_body: Bytes of a body beyond which a message is refused.
    """

    def __init__(self, most_head: int = MOST_HEAD, most_body: int = MOST_BODY) -> None:
        self._most_head, self._most_body = most_head, most_body
        self._data = bytearray()

    def feed(self, data: bytes) -> list[tuple[Message, bytes]]:
        """The messages that ``data`` completes, each with its body.

        Raises:
            WireError: these bytes are no messages, or messages that are too long.
        """
        self._data += data
        found: list[tuple[Message, bytes]] = []
        while len(self._data) >= HEADER.size:
            header = bytes(self._data[: HEADER.size])
            kind, generation, sequence, head, body = read_header(header, self._most_head, self._most_body)
            if len(self._data) < (whole := HEADER.size + head + body):
                break
            content = read_head(bytes(self._data[HEADER.size : HEADER.size + head]))
            message = Message(kind, generation, sequence, content, body)
            found.append((message, bytes(self._data[whole - body : whole])))
            del self._data[:whole]
        if not MAGIC.startswith(self._data[: len(MAGIC)]):
            raise WireError(_NO_MESSAGE)
        return found


def encode(
    kind: int, head: dict[str, Any], body: bytes, most_head: int = MOST_HEAD, most_body: int = MOST_BODY
) -> bytes:
    """The bytes of one whole message; WireError if it is too long."""
    return begin(kind, 0, head, len(body), 0, most_head, most_body) + body


def begin(
    kind: int, sequence: int, head: dict[str, Any], body: int, generation: int, most_head: int, most_body: int
) -> bytes:
    """The header and the head of a message with ``body`` bytes after them."""
    text = json.dumps(head, separators=(",", ":")).encode() if head else b""
    if len(text) > most_head or body > most_body:
        raise WireError(f"a message of {len(text):,} + {body:,} bytes is longer than servers and workers allow")
    return HEADER.pack(MAGIC, VERSION, kind, 0, generation, sequence, len(text), body) + text


def read_header(header: bytes, most_head: int, most_body: int) -> tuple[int, int, int, int, int]:
    """Kind, generation, sequence, and how many bytes head and body have."""
    magic, version, kind, nothing, generation, sequence, head, body = HEADER.unpack(header)
    if magic != MAGIC or nothing:
        raise WireError(_NO_MESSAGE)
    if version != VERSION:
        raise WireError(f"a message of version {version}, and this is version {VERSION}: install the same Hocket")
    if head > most_head or body > most_body:
        raise WireError(f"a message of {head:,} + {body:,} bytes is longer than is allowed here")
    return kind, generation, sequence, head, body


def read_head(text: bytes) -> dict[str, Any]:
    """The head of a message; WireError if it is none."""
    try:
        content = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        raise WireError("the head of a message is no JSON") from None
    if not isinstance(content, dict):
        raise WireError("the head of a message is no object")
    return content
