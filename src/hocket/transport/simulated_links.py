"""Messages between simulated members of a group, which take virtual time; see ``PointToPoint``.

A member sends one message after the other, and takes in one after the other, at the bandwidth of the network. So who
sends to many, or gets from many, needs as much longer, as at a real network card.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hocket.transport.simulated import Simulation, Speed

Parts = tuple[torch.Tensor, ...]


class Trunk(NamedTuple):
    """One link, with its own bytes per second in each direction, that all messages between two sites share.

    Attributes:
        sites: The site of each member, by rank.
        bandwidth: Bytes per second in one direction.
    """

    sites: Sequence[int]
    bandwidth: float


class SimulatedWires:
    """What connects the simulated members of a group.

    Args:
        simulation: The simulation by whose clock messages arrive.
        size: How many members there are.
        speed: The speed of each member's connection to the network.
        trunk: What joins the sites of the members, if they are in several.

    Attributes:
        messages: How many messages each member has sent.
        nbytes: How many bytes each member has sent.
        under_way: How many messages of each member are under way.
        condition: Notified when a message has arrived.
    """

    def __init__(self, simulation: Simulation, size: int, speed: Speed, trunk: Trunk | None = None) -> None:
        self.simulation, self.size, self._speed, self._trunk = simulation, size, speed, trunk
        self.messages, self.nbytes, self.under_way = [0] * size, [0] * size, [0] * size
        self.condition = simulation.condition()
        self._arrived: dict[tuple[int, int], deque[torch.Tensor]] = {}
        self._sends_until, self._takes_until = [0.0] * size, [0.0] * size
        self._trunk_until: dict[tuple[int, int], float] = {}  # until when it is busy, from site to site

    def carry(self, source: int, to: int, parts: Parts) -> None:
        """Have a message arrive when it can."""
        simulation, nbytes = self.simulation, sum(part.nbytes for part in parts)
        self.messages[source] += 1
        self.nbytes[source] += nbytes
        self.under_way[source] += 1
        begun = max(simulation.now(), self._sends_until[source])
        seconds = nbytes / self._speed.bandwidth
        self._sends_until[source] = begun + seconds
        simulation.at(begun, lambda: self._cross(source, to, parts, seconds))

    def arrived(self, source: int, to: int) -> deque[torch.Tensor]:
        """The messages that have arrived and were not received, as bytes."""
        return self._arrived.setdefault((source, to), deque())

    def _cross(self, source: int, to: int, parts: Parts, seconds: float) -> None:
        """The first byte leaves, and waits before a trunk that others keep busy."""
        simulation, trunk, left, last = self.simulation, self._trunk, self.simulation.now(), 0.0
        if trunk is not None and trunk.sites[source] != trunk.sites[to]:
            way = trunk.sites[source], trunk.sites[to]
            left = max(left, self._trunk_until.get(way, 0.0))
            last = left + sum(part.nbytes for part in parts) / trunk.bandwidth
            self._trunk_until[way] = last
        latency = self._speed.latency
        simulation.at(left + latency, lambda: self._take_in(source, to, parts, seconds, last + latency))

    def _take_in(self, source: int, to: int, parts: Parts, seconds: float, last: float) -> None:
        """The first byte is there; others may be before it, and the last one comes at the time ``last``, or earlier."""
        simulation = self.simulation
        self._takes_until[to] = max(simulation.now(), self._takes_until[to]) + seconds
        simulation.at(max(self._takes_until[to], last), lambda: self._deliver(source, to, parts))

    def _deliver(self, source: int, to: int, parts: Parts) -> None:
        """The whole message is there. What was sent is read now and not before, as the contract allows."""
        self.arrived(source, to).append(torch.cat([part.view(torch.uint8) for part in parts]))
        self.under_way[source] -= 1
        with self.condition:
            self.condition.notify_all()


class SimulatedLinks:
    """One simulated member's messages."""

    def __init__(self, wires: SimulatedWires, rank: int) -> None:
        self.rank, self.size, self._wires = rank, wires.size, wires

    def send(self, to: int, *parts: torch.Tensor) -> None:
        self._wires.carry(self.rank, to, parts)

    def receive(self, source: int, *into: torch.Tensor) -> None:
        condition, arrived = self._wires.condition, self._wires.arrived(source, self.rank)
        with condition:
            condition.wait_for(lambda: bool(arrived))
        message = arrived.popleft()
        assert message.numel() == sum(part.nbytes for part in into), "a message of another length was to come"
        for part in into:
            part.view(torch.uint8).copy_(message[: part.nbytes])
            message = message[part.nbytes :]

    def flush(self) -> None:
        wires = self._wires
        with wires.condition:
            wires.condition.wait_for(lambda: not wires.under_way[self.rank])
