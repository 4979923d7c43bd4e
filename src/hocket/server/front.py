"""The front of a server process: its doors, its place in the job, and who is answered how."""

from __future__ import annotations

import threading
from typing import Any

from hocket.config import Config
from hocket.coordinator import coordinator_client as coordinator
from hocket.coordinator.coordinator_service import Ask, Tell
from hocket.server.answers import AnswersToWorker
from hocket.server.server_service import Service
from hocket.transport.replies import Answer, Body, Reception
from hocket.transport.requests import COORDINATOR, SERVER
from hocket.transport.waiting import Note


class Front:
    """Opens the doors of server ``config.server``, and joins the job at its coordinator.

    Args:
        config: The configuration of this process.
        secret: The secret of the job.
        service: What the server does.
    """

    def __init__(self, config: Config, secret: bytes, service: Service) -> None:
        assert config.server is not None
        self.who = f"server {config.server}"
        self._config, self._service = config, service
        self._lock = threading.Lock()
        self._answers: dict[int, AnswersToWorker] = {}
        self._reception = Reception(self, secret, SERVER + config.server)
        try:
            self.said = self._reception.open_for(config, f"server-{config.server}")
            with self._lock:  # a worker may want a total before the coordinator has answered
                if config.servers > 1:
                    service.total = self._ask_total
                self._coordinator, _ = coordinator.connect(config, secret, SERVER + config.server, self.said)
        except BaseException:
            self._reception.close()
            raise

    def close(self) -> None:
        """Let go of all workers, and of the coordinator."""
        self._reception.close()
        self._coordinator.close()

    def welcome(self, peer: int, said: dict[str, Any]) -> dict[str, Any]:
        if peer != COORDINATOR and peer >= self._config.size and not said.get("newcomer"):
            raise ValueError(f"rank {peer} in a job of {self._config.size} workers")
        return {}

    def answer(self, peer: int, kind: int, head: dict[str, Any], body: Body, note: Note) -> Answer:
        if peer == COORDINATOR:
            return Answer(self._hear(kind, head))
        answers = self._answers.get(peer)
        if answers is None:
            answers = self._answers[peer] = AnswersToWorker(self._service, peer)
        # Without its ``look``: a push counts, and its wait goes on, until the coordinator says that the worker is lost.
        return answers.answer(kind, head, body, note.__call__)

    def lose(self, peer: int, why: str) -> None:
        """A connection is over; whether its worker is lost is for the coordinator to say."""

    def refuse(self, why: str) -> None:
        self._service.refuse(why)

    def _hear(self, kind: int, head: dict[str, Any]) -> dict[str, Any]:
        """What the coordinator says of workers, or wants to know."""
        service = self._service
        if kind == Tell.APPLIED:
            return {"applied": service.batches.applied(head["held"])}
        rank = int(head["rank"])
        if kind == Tell.WELCOME:
            service.welcome(rank)
            return {}
        if kind == Tell.ADMIT:
            service.admit(rank)
            return {}
        if kind != Tell.LOSE:
            raise ValueError(f"kind {kind} from the coordinator")
        ends = service.lose(rank, str(head["why"]))  # from here on nothing more of that worker is taken
        self._reception.drop(rank)  # a worker that is alive after all notices, and comes back
        return {"round": ends, "kept": service.batches.accepted(head["held"])}

    def _ask_total(self, table: int, update: int, value: float) -> float:
        """The sum of what all servers tell for an update of a table; blocks until all have."""
        with self._lock:
            head, _ = self._coordinator.request(Ask.SUM, {"table": table, "update": update, "value": value})
        return float(head["total"])
