"""Which rank is on which host, and who carries what between hosts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Topology:
    """The hosts of a job, as one of its ranks sees them.

    Attributes:
        rank: The rank of this worker.
        hosts: The ranks on each host.
        names: The names of the hosts.
    """

    rank: int
    hosts: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]

    @cached_property
    def size(self) -> int:
        return sum(map(len, self.hosts))

    @cached_property
    def host_of(self) -> dict[int, int]:
        """The number of each rank's host."""
        return {rank: number for number, ranks in enumerate(self.hosts) for rank in ranks}

    @property
    def host(self) -> int:
        """The number of this rank's host."""
        return self.host_of[self.rank]

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks on this host."""
        return self.hosts[self.host]

    @property
    def home(self) -> tuple[int, ...]:
        """The ranks on rank 0's host."""
        return self.hosts[self.host_of[0]]

    @property
    def local_rank(self) -> int:
        """The place of this rank among the ranks on its host."""
        return self.local.index(self.rank)

    @property
    def columns(self) -> list[list[int]]:
        """The ranks that carry each slice between hosts: the i-th of every host, as many as the smallest host has."""
        return [[ranks[i] for ranks in self.hosts] for i in range(min(map(len, self.hosts)))]

    def name_of(self, rank: int) -> str:
        """The name of a rank's host."""
        return self.names[self.host_of[rank]]
