"""Writes curves as TensorBoard's event files, with tensorboard's own encoding and without TensorFlow.

Its EventFileWriter is not used: it starts a thread, which prints a traceback of its own when the disk is full,
and it imports TensorFlow where that is installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import time
from pathlib import Path
from typing import Any

from hocket.errors import RecordError, UsageError


def check_installed() -> None:
    """Refuse, with the remedy, if the package tensorboard is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError("--tensorboard needs the package tensorboard: pip install 'hocket[tensorboard]'")


class TensorboardFile:
    """One event file; ``add`` only remembers, ``flush`` writes."""

    def __init__(self, folder: Path) -> None:
        """Make the folder and the file in it."""
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        self._event: Any = Event
        self._waiting: list[bytes] = []
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.0"
        try:
            folder.mkdir()
            self._file: Any = RecordWriter((folder / name).open("wb"))
        except OSError as error:
            raise RecordError(str(error)) from None
        self._waiting.append(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        self.flush()

    def add(self, tag: str, value: float, step: int, when: float) -> None:
        """Keep one point of the curve ``tag`` for the next flush."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        self._waiting.append(self._event(wall_time=when, step=step, summary=summary).SerializeToString())

    def flush(self) -> None:
        """Write all points that were kept."""
        waiting, self._waiting = self._waiting, []
        try:
            for event in waiting:
                self._file.write(event)
            self._file.flush()
        except OSError as error:
            raise RecordError(str(error)) from None

    def close(self) -> None:
        """Close the file; what was not flushed is lost."""
        with contextlib.suppress(OSError):
            self._file.close()
