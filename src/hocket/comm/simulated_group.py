"""The group of simulated workers: results that all would compute alike are computed once, and take virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hocket.comm.algorithm_choice import Choice
from hocket.comm.bucket_layout import Layout
from hocket.comm.channel import Begun, Carry, Channel
from hocket.comm.communicator import describe, named
from hocket.comm.exchange import Algorithm, Exchange, Ticket
from hocket.comm.kernels import average_into, reduce_into
from hocket.comm.shared import SharedCommunicator
from hocket.errors import StrategyError
from hocket.specs.codecs import CodecSpec
from hocket.transport.gate import signature
from hocket.transport.simulated import Simulation, Speed
from hocket.transport.simulated_links import SimulatedLinks, SimulatedWires
from hocket.transport.simulated_memory import SimulatedMemory
from hocket.transport.waiting import Description


class SimulatedCommunicator(SharedCommunicator):
    """Simulated workers in one process.

    Args:
        memory: The simulated memory at which the workers meet.
        speed: The network between any two workers. A collective takes as long as on a ring.
    """

    def __init__(self, memory: SimulatedMemory, speed: Speed) -> None:
        super().__init__(memory)
        self._simulated, self._speed = memory, speed
        self.way = "simulated"

    def now(self) -> float:
        return self._simulated.host.simulation.now()

    def ring_seconds(self, nbytes: int) -> float:
        """How long it takes on a ring until all ranks have the sum of ``nbytes`` bytes."""
        steps = 2 * (self.size - 1)
        return steps * self._speed.seconds(nbytes // self.size) if steps else 0.0

    def allreduce(self, tensor: torch.Tensor, operation: str) -> None:
        def combine(parts: list[torch.Tensor]) -> torch.Tensor:
            out = torch.empty_like(parts[0])
            reduce_into(out, parts, operation)
            return out

        if self.size > 1:
            what = f"allreduce of {describe(tensor)}, {operation}"
            tensor.copy_(self.together(what, tensor.clone(), combine, tensor.nbytes))

    def allgather(self, tensor: torch.Tensor) -> torch.Tensor:
        what = f"allgather of {describe(tensor)}"
        stacked: torch.Tensor = self.together(what, tensor.clone(), torch.stack, tensor.nbytes * self.size)
        return stacked.clone()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        what = f"broadcast of {describe(tensor)} from rank {root}"
        mine = tensor.clone() if self.rank == root else None
        tensor.copy_(self.together(what, mine, lambda parts: parts[root], tensor.nbytes))

    def gather_bytes(self, data: bytes) -> list[bytes]:
        found: list[bytes] = self.together("an exchange of descriptions", data, list, len(data) * self.size)
        return list(found)

    def open_channel(self, name: str, ranks: Sequence[int]) -> Channel:
        host = self._simulated.host
        if name not in host.wires:
            host.wires[name] = SimulatedWires(host.simulation, len(ranks), self._speed)
        return SimulatedChannel(host.simulation, SimulatedLinks(host.wires[name], ranks.index(self.rank)))

    def exchange(
        self,
        layout: Layout,
        *,
        background: bool = False,
        turns: int = 1,
        private: bool = True,
        codec: CodecSpec | None = None,
    ) -> Exchange:
        if codec is not None:
            raise StrategyError(f"codec {codec.name!r} is not simulated: leave it out")
        return Exchange(layout, [SimulatedMean(self, self._simulated, layout) for _ in range(turns)])

    def together(self, what: str, mine: Any, combine: Callable[[list[Any]], Any], nbytes: int) -> Any:
        """What ``combine`` makes of the values of all ranks; takes as long as ``nbytes`` bytes on a ring."""
        what = named(what)
        _, result = self._simulated.bring(signature(what), 0, what, mine, combine)
        self.sleep(self.ring_seconds(nbytes))
        return result

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        if seconds > 0:
            self._simulated.host.simulation.sleep(seconds)


class SimulatedChannel:
    """One simulated worker's end of the messages between some; see ``Channel``."""

    def __init__(self, simulation: Simulation, links: SimulatedLinks) -> None:
        self._simulation, self._links = simulation, links
        self.choice = Choice("auto", links.size)
        self._last: SimulatedWork | None = None

    def run(self, call: Carry, nbytes: int, what: Description) -> None:
        if self._last is not None:
            self.wait(self._last, what)
        call(self._links)
        self._links.flush()

    def start(self, call: Carry) -> Begun:
        self._last = SimulatedWork(self._simulation, call, self._links, self._last)
        return self._last

    def wait(self, work: Begun, what: Description) -> None:
        assert isinstance(work, SimulatedWork)
        work.task.result()

    def close(self) -> None:
        """Nothing to do: what is under way ends with the simulation."""


class SimulatedWork:
    """A call that a simulated thread of its own carries out, after those before it."""

    def __init__(
        self, simulation: Simulation, call: Carry, links: SimulatedLinks, previous: SimulatedWork | None
    ) -> None:
        self._condition, self._is_over = simulation.condition(), False

        def carry_out() -> None:
            if previous is not None:
                previous.wait(math.inf)
            try:
                call(links)
                links.flush()
            finally:
                with self._condition:
                    self._is_over = True
                    self._condition.notify_all()

        self.task = simulation.start(carry_out, "a collective")

    def is_completed(self) -> bool:
        return self._is_over

    def wait(self, seconds: float) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: self._is_over, seconds)


class SimulatedMean(Algorithm):
    """The last rank that comes averages all slots, and everyone takes the means when they would have arrived."""

    def __init__(self, group: SimulatedCommunicator, memory: SimulatedMemory, layout: Layout) -> None:
        self._group, self._memory = group, memory
        self.slots, self.results = layout.allocate(), layout.allocate()
        self._nbytes = sum(bucket.nbytes for bucket in layout.buckets)
        self._begun = 0.0

    def begin(self, ticket: Ticket) -> None:
        super().begin(ticket)
        self._begun = self._group.now()

    def finish(self) -> list[int]:
        payloads, (begun, means) = self._memory.bring(*self._ticket, (self._begun, self.slots), self._average)
        for result, mean in zip(self.results, means, strict=True):
            result.copy_(mean)
        self._group.sleep(begun + self._group.ring_seconds(self._nbytes) - self._group.now())
        return payloads

    def _average(self, brought: list[tuple[float, list[torch.Tensor]]]) -> tuple[float, list[torch.Tensor]]:
        """The time at which the last rank began, and the means."""
        means = [torch.empty_like(slot) for slot in self.slots]
        for bucket, mean in enumerate(means):
            parts = [slots[bucket] for _, slots in brought]
            if len(parts) > 1:
                average_into(mean, parts)
            else:
                mean.copy_(parts[0])
        return max(begun for begun, _ in brought), means
