"""Links between simulated workers: messages arrive after a while on a virtual clock, and no thread carries them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hocket.comm.peers import Gather, Peers, Sending
from hocket.messages import Message
from hocket.transport.area import Area
from hocket.transport.simulated import Simulation, Speed
from hocket.transport.waiting import Condition


@dataclass
class SimulatedNetwork:
    """What connects the simulated workers of a job.

    Attributes:
        simulation: The simulation by whose clock messages arrive.
        speed: The speed of the link between any two workers.
        workers: The workers that have joined, by rank.
    """

    simulation: Simulation
    speed: Speed
    workers: dict[int, SimulatedPeers] = field(default_factory=dict)


class SimulatedPeers(Peers):
    """All other simulated workers, as one of them sees them."""

    def __init__(self, network: SimulatedNetwork, rank: int) -> None:
        super().__init__(rank)
        self._network = network
        self._arrivals: dict[int, float] = {}  # when the last message to each rank arrives: none overtakes another

    def join(self, gather: Gather) -> None:
        self._network.workers[self.rank] = self
        gather("gossip: links between workers", b"")

    def repair(self, broken: Iterable[tuple[int, int]], gather: Gather) -> None:
        """Nothing to do: no simulated link breaks."""

    @property
    def live(self) -> list[int]:
        return sorted({self.rank, *self._network.workers})

    def is_beside(self, rank: int) -> bool:
        return False

    def send(
        self, rank: int, kind: int, head: dict[str, Any], parts: Sequence[memoryview] = (), *, sequence: int = 0,
        sent: Sending | None = None, area: Area | None = None,
    ) -> None:  # fmt: skip
        network, data = self._network, b"".join(parts)
        if sent is not None:
            sent.note(heard=rank in network.workers)
        if rank not in network.workers:
            return
        message = Message(kind, 0, sequence, json.loads(json.dumps(head)), len(data))
        now = network.simulation.now()
        arrival = max(now + network.speed.seconds(len(data)), self._arrivals.get(rank, 0.0))
        self._arrivals[rank] = arrival
        network.simulation.at(arrival, lambda: self._deliver(rank, message, data))

    def close(self) -> None:
        if self._network.workers.pop(self.rank, None) is not None:
            for other in list(self._network.workers.values()):
                other._lose(self.rank)

    def now(self) -> float:
        return self._network.simulation.now()

    def condition(self) -> Condition:
        return self._network.simulation.condition()

    def _deliver(self, rank: int, message: Message, data: bytes) -> None:
        target = self._network.workers.get(rank)
        if target is not None:
            target.handlers[message.kind](self.rank, message, _ArrivedBody(data))  # type: ignore[arg-type]

    def _lose(self, rank: int) -> None:
        self.lost[rank] = self.now()
        for callback in self.on_loss:
            callback(rank)


class _ArrivedBody:
    """The bytes of one simulated message, in place of a wire."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = memoryview(data), 0

    def receive_into(self, parts: Sequence[memoryview]) -> None:
        for part in parts:
            part[:] = self._data[self._at : self._at + part.nbytes]
            self._at += part.nbytes
