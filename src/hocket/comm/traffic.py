"""How much of the communication between hosts was hidden behind the computation, and who was waited for."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Traffic:
    """Of one worker, since it started.

    Attributes:
        host: The worker's host.
        under_way: Seconds in which buckets were under way, of the exchanges that were looked at.
        exposed: Seconds of these in which the worker did nothing but wait for them.
        waited_for: Seconds that it waited because a host's slowest worker was not there yet, by host.
    """

    host: str
    under_way: float = 0.0
    exposed: float = 0.0
    waited_for: dict[str, float] = field(default_factory=dict)

    def wait_for(self, host: str, seconds: float) -> None:
        """This worker was there, and that host was not."""
        self.waited_for[host] = self.waited_for.get(host, 0.0) + seconds


class Stopwatch:
    """Takes the times of one exchange."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    def add(self, start: float, end: float) -> None:
        """A bucket was under way."""
        self._spans.append((start, end))

    def settle(self, traffic: Traffic, blocked_since: float) -> None:
        """The exchange is over; the worker has done nothing else since ``blocked_since``."""
        reached = 0.0
        for start, end in sorted(self._spans):
            begin = max(start, reached)
            if end > begin:
                traffic.under_way += end - begin
                traffic.exposed += max(0.0, end - max(begin, blocked_since))
                reached = end
