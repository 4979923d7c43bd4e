"""Checkpoints that were begun: if their worker ends before they are saved, their temporary folders are removed."""

from __future__ import annotations

import shutil
from pathlib import Path

from hocket.events import Happening, decode


class Unfinished:
    """Follows what the processes of one host tell, and cleans up after them there."""

    def __init__(self) -> None:
        self._rests: dict[str, bytes] = {}
        self._folders: set[str] = set()

    def follow(self, who: str, data: bytes) -> None:
        """Take in some bytes of the events of one of them."""
        *lines, self._rests[who] = (self._rests.get(who, b"") + data).split(b"\n")
        for line in lines:
            record = decode(line) if b"checkpoint" in line else None
            if not isinstance(record, Happening) or not isinstance(folder := record.details.get("folder"), str):
                continue
            if record.name == "checkpoint begun":
                self._folders.add(folder)
            elif record.name == "checkpoint saved":
                self._folders.discard(folder)

    def remove(self) -> None:
        """Remove what nobody is left to finish; to be called when all workers are gone."""
        for folder in self._folders:
            if Path(folder).name.startswith("."):  # what a worker tells is not believed blindly
                shutil.rmtree(folder, ignore_errors=True)
