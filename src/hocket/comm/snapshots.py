"""Snapshots of other workers: one asks all others for their tensors; their threads answer, so training goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from hocket.comm.neighbour_rounds import Flats, PeerKind
from hocket.comm.peers import Peers
from hocket.messages import Message, WireError
from hocket.transport.tensor_bytes import as_bytes
from hocket.transport.wire import Wire

Snapshot = tuple[dict[str, Any], Flats]


class Snapshots:
    """Asks other workers for snapshots, and answers when they ask.

    Args:
        peers: The links; handlers are set here.
        take: Copies this worker's tensors, with a few words about them; called by any thread. The tensors are flat, of
            the CPU, and of the same lengths on all workers.
    """

    def __init__(self, peers: Peers, take: Callable[[], Snapshot]) -> None:
        self._peers, self._take = peers, take
        self._condition = peers.condition()
        self._number = 0
        self._found: dict[int, Snapshot] = {}
        self._template: Flats = []
        peers.handlers |= {PeerKind.ASK: self._answer, PeerKind.SNAPSHOT: self._keep}
        peers.on_loss.append(self._wake)

    def collect(self, timeout: float) -> list[Snapshot]:
        """The snapshots of all other workers that are alive and answer in time."""
        deadline = self._peers.now() + timeout
        others = [rank for rank in self._peers.live if rank != self._peers.rank]
        with self._condition:
            self._number += 1
            self._found, self._template = {}, self._take()[1]
        for rank in others:
            self._peers.send(rank, PeerKind.ASK, {}, sequence=self._number)
        with self._condition:
            while set(others) & set(self._peers.live) - set(self._found) and self._peers.now() < deadline:
                self._condition.wait(min(1.0, timeout))
            found, self._found = self._found, {}
            for rank in sorted(set(others) & set(self._peers.live) - set(found)):
                print(
                    f"hocket: rank {rank} has not answered within {timeout:g} s, and is left out of the mean that a "
                    "checkpoint keeps",
                    file=sys.stderr,
                    flush=True,
                )
            self._number += 1  # answers that come later are dropped
            return [snapshot for _, snapshot in sorted(found.items())]

    def _answer(self, rank: int, message: Message, _: Wire) -> None:
        head, flats = self._take()
        self._peers.send(rank, PeerKind.SNAPSHOT, head, as_bytes(flats), sequence=message.sequence)

    def _keep(self, rank: int, message: Message, wire: Wire) -> None:
        flats = [torch.empty_like(flat) for flat in self._template]
        if message.body != sum(flat.nbytes for flat in flats):
            raise WireError(f"a snapshot of {message.body:,} bytes, which is not what was asked for")
        wire.receive_into(as_bytes(flats))
        with self._condition:
            if message.sequence == self._number:
                self._found[rank] = message.head, flats
                self._condition.notify_all()

    def _wake(self, _: int) -> None:
        with self._condition:
            self._condition.notify_all()
