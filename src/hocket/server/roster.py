"""Where the servers of a job are reached; kept by server 0, whom all know."""

from __future__ import annotations

import time
from typing import Any

from hocket.errors import DeadlineExceeded
from hocket.server.waiting import Condition


class Roster:
    """The servers of a job, as they come.

    Args:
        condition: Guards everything here.
        servers: How many there will be.
        timeout: Seconds that one waits for them.
    """

    def __init__(self, condition: Condition, servers: int, timeout: float) -> None:
        self._condition, self._servers, self._timeout = condition, servers, timeout
        self._known: dict[int, dict[str, Any]] = {}

    def join(self, number: int, said: dict[str, Any]) -> None:
        """A server is there, and says where it is reached."""
        with self._condition:
            self._known[number] = said
            self._condition.notify_all()

    def everyone(self) -> list[dict[str, Any]]:
        """What all servers have said, in the order of their numbers; blocks until all are there."""
        deadline = time.monotonic() + self._timeout
        with self._condition:
            while missing := [str(number) for number in range(self._servers) if number not in self._known]:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"server {', '.join(missing)} did not come within {self._timeout:g} s: see its output"
                    )
                self._condition.wait(0.5)
            return [said for _, said in sorted(self._known.items())]
