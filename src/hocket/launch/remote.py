"""The workers of other hosts, each behind the agent of its host."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

from hocket.launch import ssh
from hocket.launch.crew import Chunk, Crew, Loss, Worker
from hocket.launch.environment import Job, Place
from hocket.launch.frames import Frame
from hocket.launch.link import Link
from hocket.launch.links import Links

_END = 4.0  # seconds that agents have to end everything of the job on their hosts
_INPUT = 1 << 16


class RemoteCrew(Crew):
    """Workers that agents start, watch over and end."""

    def __init__(self, job: Job, links: Links, places: dict[Link, Place], port: int, folder: str) -> None:
        """Have the agents start their workers.

        Args:
            job: What to start.
            links: The agents; closed with this crew.
            places: The host that each of them is, in the order of the ranks.
            port: MASTER_PORT, which the first agent has reserved.
            folder: Where workers start.
        """
        self.losses: list[Loss] = []
        self.workers: list[Worker] = []
        self._links, self._places = links, places
        self._lost: set[Link] = set()
        self._is_closed = False
        self._of: dict[Worker, Link] = {}
        for link, place in places.items():
            for rank in range(place.first, place.first + place.count):
                worker = Worker(rank, place.name)
                self.workers.append(worker)
                self._of[worker] = link
            told = {name: getattr(job, name) for name in ("command", "size", "settings", "mark")}
            link.channel.send("start", **told, place=dataclasses.asdict(place), port=port, folder=folder)
        links.mind_silence()
        self._first = next(iter(places))
        signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # in the background, reading fails instead of stopping us
        self._reads_input = False
        self._input_again = float("inf")
        self._read_input(True)

    def read(self, seconds: float) -> Iterator[Chunk]:
        for link, frame in self._links.receive(seconds):
            yield from self._take(link, frame)
        if time.monotonic() > self._input_again:
            self._input_again = float("inf")
            self._read_input(True)
        for link in self._places:
            if link.trouble and not link.is_done and link not in self._lost:
                self._note_loss(link)

    def signal(self, worker: Worker, number: int) -> None:
        if worker.is_running:
            self._of[worker].channel.send("signal", rank=worker.rank, number=int(number))

    def end(self) -> Iterator[Chunk]:
        left = [link for link in self._places if not link.trouble]
        for link in left:
            link.channel.send("end")
        deadline = time.monotonic() + _END
        while time.monotonic() < deadline and any(not link.is_over for link in left):
            for link, frame in self._links.receive(0.1):
                yield from self._take(link, frame)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._links.close()

    def _take(self, link: Link, frame: Frame) -> Sequence[Chunk]:
        head = frame.head
        if frame.kind == "input taken":
            self._read_input(True)
        elif frame.kind in ("output", "ended"):
            worker = self._find(link, head)
            if worker is None:
                link.trouble = "it spoke of a worker that it does not have"
            elif frame.kind == "output" and head.get("pipe") in ("stdout", "stderr", "events"):
                return [Chunk(worker, head["pipe"], frame.body)]
            elif frame.kind == "ended":
                worker.returncode = int(head.get("status", 1))
        return []

    def _find(self, link: Link, head: dict[str, Any]) -> Worker | None:
        rank = head.get("rank")
        if not isinstance(rank, int) or not 0 <= rank < len(self.workers):
            return None
        worker = self.workers[rank]
        return worker if self._of[worker] is link else None

    def _note_loss(self, link: Link) -> None:
        self._lost.add(link)
        # Who has failed a moment before did so because the host was about to be lost.
        mine = [worker for worker in self._of if self._of[worker] is link and worker.returncode != 0]
        if not mine:
            return
        for worker in mine:
            worker.is_lost = worker.is_running
        self._links.listen_to_end(link)
        status = link.process.poll()
        ended = "" if status is None else f", {'its agent' if link.host.is_here else 'ssh'} with status {status}"
        reason = f"{link.trouble}{ended}{ssh.said(list(link.words))}"
        self.losses.append(Loss(link.host.name, [worker.rank for worker in mine], reason))

    def _read_input(self, on: bool) -> None:
        """Begin or stop to wait for the standard input, which belongs to rank 0."""
        if on == self._reads_input:
            return
        try:
            os.fstat(0)
        except OSError:  # it was closed
            self._first.channel.send("input")
            return
        self._reads_input = on
        if on:
            self._links.watch(0, self._pass_input)
        else:
            self._links.unwatch(0)

    def _pass_input(self) -> None:
        """Send some of the standard input, and wait until rank 0 has taken it before there is more."""
        self._read_input(False)
        try:
            data = os.read(0, _INPUT)
        except BlockingIOError:
            self._read_input(True)
            return
        except OSError:  # this job is in the background of its terminal, perhaps not for ever
            self._input_again = time.monotonic() + 1
            return
        self._first.channel.send("input", data)
