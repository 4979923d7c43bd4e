"""A new generation of a job, as its workers see it: who has come, and who is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Change:
    """A new generation of a job: who is in it, and who is not any more.

    Attributes:
        generation: The number of the generation; the job begins with 0.
        before: Who was in the generation before: the number that each worker had when the job began, by rank.
        now: Who is in the job now, in the same way.
        rank: The rank of this worker now.
        said: What each worker of ``now`` has said of itself.
        is_planned: Whether all workers are between two batches: somebody joins or leaves, and nobody was lost.
    """

    generation: int
    before: tuple[int, ...]
    now: tuple[int, ...]
    rank: int
    said: tuple[dict[str, Any], ...]
    is_planned: bool = False

    @property
    def size(self) -> int:
        """How many workers there are now."""
        return len(self.now)

    @property
    def lost(self) -> list[int]:
        """Who is gone: the numbers that they had when the job began."""
        return [each for each in self.before if each not in self.now]

    @property
    def joined(self) -> list[int]:
        """Who is new: the numbers that lost workers had, or further ones."""
        return [each for each in self.now if each not in self.before]

    @property
    def is_new(self) -> bool:
        """Whether this worker itself has just joined."""
        return self.now[self.rank] not in self.before


class Left(SystemExit):
    """This worker leaves the job as it was asked to, and its script ends."""
