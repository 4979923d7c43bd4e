"""What the ranks know of each other: who waits in what, who has ended and how. Rank 0 gathers it and tells all."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from hocket.transport.gate import ranks


@dataclass(frozen=True)
class Wait:
    """Where a rank waits.

    Attributes:
        lane: In which sequence of collectives, of which every rank must have the same ones.
        counts: How many it has begun in each lane.
        text: What for, in words.
    """

    lane: str
    counts: dict[str, int]
    text: str


class News:
    """Of ``size`` ranks, as ``rank`` knows it; every method may be called from any thread.

    Attributes:
        lost: Ranks that have died or do not answer, and how.
        failed: Ranks whose script has raised something, the first one first.
        finished: Ranks whose script has ended well.
        mismatch: What ranks that wait for each other in vain do.
        changed: Whether something is worth telling at once.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.lost: dict[int, str] = {}
        self.failed: list[int] = []
        self.finished: set[int] = set()
        self.mismatch = ""
        self.changed = self.stacks_wanted = False
        self._stacks_asked = False
        self._waits: dict[int, Wait] = {}
        self._rank, self._size = rank, size
        self._lock = threading.Lock()

    def put_wait(self, wait: Wait | None) -> None:
        """This rank waits somewhere, or no longer."""
        with self._lock:
            self.changed = True
            if wait is None:
                self._waits.pop(self._rank, None)
            else:
                self._waits[self._rank] = wait

    def ask_for_stacks(self) -> None:
        """Have every rank print what it does."""
        with self._lock:
            self.changed = self._stacks_asked = self.stacks_wanted = True

    def waiting_in(self, text: str) -> list[int]:
        """The ranks that wait in just that."""
        with self._lock:
            return [rank for rank, wait in self._waits.items() if wait.text == text]

    def elsewhere(self, text: str) -> list[tuple[int, str]]:
        """The ranks that wait in something else."""
        with self._lock:
            return sorted((rank, wait.text) for rank, wait in self._waits.items() if wait.text != text)

    def not_waiting(self) -> list[int]:
        """The ranks that do not wait."""
        with self._lock:
            return [rank for rank in range(self._size) if rank not in self._waits]

    def has_left(self, rank: int) -> bool:
        """Whether a rank has said goodbye."""
        return rank in self.finished or rank in self.failed or rank in self.lost

    def look_for_mismatch(self) -> None:
        """Find out whether two ranks wait for each other in different collectives: neither will ever arrive."""
        with self._lock:
            waits = list(self._waits.values())
            if self.mismatch or not any(_wait_in_vain(a, b) for a in waits for b in waits):
                return
            groups: dict[str, list[int]] = {}
            for rank, wait in sorted(self._waits.items()):
                groups.setdefault(wait.text, []).append(rank)
            self.mismatch = "; ".join(f"{ranks(who)}: {text}" for text, who in groups.items())
            self.changed = True

    def hear_rank(self, rank: int, message: dict[str, Any]) -> None:
        """What one rank tells of itself, or what was noticed of it."""
        with self._lock:
            before = (len(self.lost), len(self.failed), len(self.finished), self._waits.get(rank))
            left, how = message.get("left"), message.get("lost")
            if self.has_left(rank):
                pass  # only the first that is known of its end counts
            elif left == "finished":
                self.finished.add(rank)
            elif left:
                self.failed.append(rank)
            elif how:
                self.lost[rank] = str(how)
            if left or how:
                self._waits.pop(rank, None)
            elif "wait" in message:
                wait = message["wait"]
                if wait is None:
                    self._waits.pop(rank, None)
                else:
                    self._waits[rank] = Wait(*wait)
            if message.get("stacks"):
                self._stacks_asked = self.stacks_wanted = self.changed = True
            self.changed |= before != (len(self.lost), len(self.failed), len(self.finished), self._waits.get(rank))

    def hear_all(self, message: dict[str, Any]) -> None:
        """What rank 0 tells of everybody."""
        with self._lock:
            for rank, how in message.get("lost", []):
                self.lost.setdefault(rank, how)
            self.failed += [rank for rank in message.get("failed", []) if rank not in self.failed]
            self.finished |= set(message.get("finished", []))
            mine = {rank: wait for rank, wait in self._waits.items() if rank == self._rank}
            self._waits = {rank: Wait(*wait) for rank, wait in message.get("waits", []) if rank != self._rank} | mine
            self.mismatch = message.get("mismatch", "")
            self.stacks_wanted |= bool(message.get("stacks"))

    def tell_all(self) -> dict[str, Any]:
        """What rank 0 says to everybody."""
        with self._lock:
            self.changed = False
            asked, self._stacks_asked = self._stacks_asked, False
            return {
                "lost": list(self.lost.items()),
                "failed": self.failed,
                "finished": sorted(self.finished),
                "waits": [(rank, (w.lane, w.counts, w.text)) for rank, w in self._waits.items()],
                "mismatch": self.mismatch,
                "stacks": asked,
            }

    def tell_mine(self) -> dict[str, Any]:
        """What a rank says of itself."""
        with self._lock:
            self.changed = False
            asked, self._stacks_asked = self._stacks_asked, False
            wait = self._waits.get(self._rank)
            return {"wait": wait and (wait.lane, wait.counts, wait.text), "stacks": asked}


def _wait_in_vain(a: Wait, b: Wait) -> bool:
    """Whether each of two ranks is in a collective that the other one has not begun."""
    return b.counts.get(a.lane, 0) < a.counts.get(a.lane, 0) and a.counts.get(b.lane, 0) < b.counts.get(b.lane, 0)
