"""Whole simulated workers: a script's own function runs on many of them in one process, on a virtual clock.

Each worker is a thread, of which one runs at a time, with a loader, loops, counts and a strategy as in a real job. So a
run is the same every time, and may have more workers than any machine at hand has cores.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

from hocket import specs
from hocket.comm.communicator import Communicator
from hocket.comm.coordinator_group import MeetingCommunicator
from hocket.comm.simulated_group import SimulatedCommunicator
from hocket.config import Config
from hocket.job.randomness import RandomState
from hocket.job.worker import Worker, acting_as
from hocket.server.server_client import Client
from hocket.server.simulated_servers import connect, serve
from hocket.transport.simulated import Simulation, Speed
from hocket.transport.simulated_memory import SimulatedHost, SimulatedMemory

T = TypeVar("T")


class SimulatedJob:
    """A job of simulated workers. Memory of the process is all that limits their number.

    Args:
        workers: How many workers there are.
        strategy: The strategy, as on the command line; None lets the script choose.
        servers: How many parameter servers there are.
        coordinated: Whether workers meet at the coordinator, as some strategies want; by default, as ``strategy`` does.
        speed: The network between any two processes of the job.
        timeout: Virtual seconds that a worker may wait for others.
    """

    def __init__(
        self,
        workers: int,
        strategy: str | None = None,
        *,
        servers: int = 0,
        coordinated: bool = False,
        speed: Speed | None = None,
        timeout: float = 300.0,
    ) -> None:
        self.workers, self.strategy, self.servers = workers, strategy, servers
        self._speed, self._timeout = speed or Speed(), timeout
        self._simulation = Simulation(keep=lambda: RandomState.capture().restore)
        if strategy is not None:
            spec = specs.parse(strategy)
            spec.check_fit(workers, servers)
            coordinated |= spec.meets_at_coordinator
        self._coordinated = coordinated or servers > 0
        self._served = serve(self._simulation, servers, workers, timeout)
        self._host = SimulatedHost(self._simulation, workers)

    def run(self, script: Callable[[], T]) -> list[T]:
        """Call ``script``, which does what a training script does, in every worker; returns its results by rank.

        Every worker begins with the random numbers of the caller, which goes on with its own.

        Raises:
            Exception: the first that a worker raises.
        """
        start = RandomState.capture()

        def work(rank: int) -> T:
            start.restore()
            return self._work(rank, script)

        try:
            return self._simulation.run([lambda rank=rank: work(rank) for rank in range(self.workers)])  # type: ignore[misc]
        finally:
            start.restore()
            gc.collect()  # models and their hooks hold each other, and shared memory

    def compute(self, seconds: float) -> None:
        """Have the calling worker compute for ``seconds`` virtual seconds; otherwise computing takes no time."""
        self._simulation.sleep(seconds)

    def now(self) -> float:
        """Virtual seconds since the job began."""
        return self._simulation.now()

    def _work(self, rank: int, script: Callable[[], T]) -> T:
        config = Config(
            launched=True,
            rank=rank,
            size=self.workers,
            local_rank=rank,
            local_size=self.workers,
            servers=self.servers,
            strategy=self.strategy,
            timeout=self._timeout,
        )
        communicator = self._join(rank)
        with acting_as(Worker(config, communicator)) as worker:
            failed = True
            try:
                found = script()
                worker.training.loops.end_script()
                failed = False
                return found
            finally:
                worker.has_left = True
                communicator.leave(failed)
                for strategy in worker.training.strategies:
                    strategy.collector.release()  # there may be many workers, in one job after the other

    def _join(self, rank: int) -> Communicator:
        if not self._coordinated:
            return SimulatedCommunicator(SimulatedMemory(self._host, rank), self._speed)
        client: Client = connect(self._simulation, self._served, rank, self.workers, self._speed)
        return MeetingCommunicator(client, "simulated", "simulated", "simulated")
