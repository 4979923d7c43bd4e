"""A coordinator at work: its doors, and its connections to the parameter servers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hocket.config import Config
from hocket.coordinator.coordinator_client import SOCKET
from hocket.coordinator.coordinator_service import Batch, CoordinatorService, Tell
from hocket.transport.replies import Reception
from hocket.transport.requests import COORDINATOR, WATCH, WireLink, join, reach
from hocket.transport.wire import Wire


class HostedCoordinator:
    """Lets workers and servers in until it is closed. A process has it, or a thread of rank 0.

    Args:
        config: The configuration of the job: how many workers and servers, and where the coordinator listens.
        secret: The secret of the job.

    Attributes:
        service: What the coordinator does.
        said: Where the coordinator is reached: what ``requests.reach`` wants.
    """

    def __init__(self, config: Config, secret: bytes) -> None:
        self._config, self._secret = config, secret
        self._servers: list[_ServerLink] = []
        self.service = CoordinatorService(config.size, config.servers, config.timeout, self._reach)
        self._reception = Reception(self.service, secret, COORDINATOR)
        self.service.liveness.wire_of = lambda rank: self._reception.wire_of(WATCH + rank)
        self.service.liveness.give_up = self._reception.give_up
        try:
            self.said = self._reception.open_for(config, SOCKET, config.coordinator_port or 0)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of everyone."""
        self._reception.close()
        for server in self._servers:
            server.close()
        self.service.close()

    def _reach(self, number: int, said: dict[str, Any]) -> _ServerLink:
        nonce = secrets.token_hex(8)

        def make(deadline: float) -> Wire:
            wire = reach(self._config, self._secret, COORDINATOR, said, deadline)
            join(wire, nonce, deadline)
            return wire

        server = _ServerLink(WireLink(f"server {number}", make, self._config.timeout))
        self._servers.append(server)
        return server


class _ServerLink:
    """A parameter server that hears of losses from the coordinator, in a thread of its own."""

    def __init__(self, link: WireLink) -> None:
        self._link = link
        self._thread = ThreadPoolExecutor(1, "hocket-server-link")

    def lose(self, rank: int, why: str, held: Sequence[Batch]) -> Callable[[], dict[str, Any]]:
        return self._request(Tell.LOSE, {"rank": rank, "why": why, "held": held})

    def welcome(self, rank: int) -> Callable[[], dict[str, Any]]:
        return self._request(Tell.WELCOME, {"rank": rank})

    def admit(self, rank: int) -> Callable[[], dict[str, Any]]:
        return self._request(Tell.ADMIT, {"rank": rank})

    def applied(self, held: Sequence[Batch]) -> Sequence[Batch]:
        found: list[list[int]] = self._request(Tell.APPLIED, {"held": held})()["applied"]
        return found

    def close(self) -> None:
        self._link.close()
        self._thread.shutdown(wait=False)

    def _request(self, kind: Tell, head: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        return self._thread.submit(lambda: self._link.request(kind, head)[0]).result
