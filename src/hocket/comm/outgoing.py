"""What one worker has to say to another: each message is kept until it was heard, and sent again on a new wire."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hocket.comm.peers import Sending
from hocket.transport import handoff
from hocket.transport.area import Area
from hocket.transport.wire import Bell, Closed, Wire

WELCOME = 0  # the one message that goes the other way: how many messages were heard, over all wires of the link
_MOST = 64  # messages under way: their answers fit into what a socket keeps, so that the other end never blocks
_LONG = 60.0  # seconds


class Item(NamedTuple):
    """A message to be sent; ``sent`` is told when it was heard, or never will be, and ``area`` goes with it."""

    kind: int
    sequence: int
    head: dict[str, Any]
    parts: Sequence[memoryview]
    sent: Sending | None
    area: Area | None


class Outgoing:
    """The messages to be sent to one worker, and the thread that sends them.

    Args:
        rank: The other worker.
        link: Names what this end says to the other, whatever wire carries it.
        wire: The first wire.
        renew: Makes another wire when one broke, and tells how many messages were heard; None if the worker is gone.
        lose: Called, by the thread, when nothing more can be sent.
    """

    def __init__(
        self, rank: int, link: str, wire: Wire, renew: Callable[[Outgoing], tuple[Wire, int] | None],
        lose: Callable[[Outgoing], None],
    ) -> None:  # fmt: skip
        self.rank, self.link, self.wire = rank, link, wire
        self._renew, self._lose = renew, lose
        self._bell = Bell()
        self._lock = threading.Lock()
        self._items: deque[Item] = deque()  # the first ``_under_way`` of them were sent, and not heard yet
        self._under_way = self._heard = 0
        self._ends = self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"hocket-to-{rank}")
        self._thread.start()

    def put(self, item: Item) -> None:
        with self._lock:
            is_over = self._is_over
            if not is_over:
                self._items.append(item)
                self._bell.ring()
        if is_over and item.sent is not None:
            item.sent.note(heard=False)

    def end(self) -> None:
        """No more messages will be given."""
        with self._lock:
            self._ends = True
            if not self._is_over:
                self._bell.ring()

    def close(self, deadline: float) -> None:
        """Close the wire when all is heard, or at the monotonic time ``deadline``."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self.wire.close()

    def stop(self) -> None:
        """Send nothing more."""
        self.end()
        self.wire.close()

    def _run(self) -> None:
        try:
            while True:
                try:
                    self._send()
                    break
                except (Closed, OSError):
                    found = None if self._ends else self._renew(self)
                    if found is None:
                        break
                    self._begin_again(*found)
        except Exception as error:  # whatever it was, nothing more can be sent
            print(f"hocket: nothing can be sent to rank {self.rank}: {error!r}", file=sys.stderr, flush=True)
        self._lose(self)
        with self._lock:
            self._is_over = True
            self._bell.close()
        self._settle(len(self._items), heard=False)  # so that nobody waits for them

    def _send(self) -> None:
        """Send what is given, until no more will be."""
        while True:
            with self._lock:
                count, ends = len(self._items), self._ends
                item = self._items[self._under_way] if self._under_way < min(count, _MOST) else None
            if item is not None:
                self._under_way += 1
                self.wire.send(item.kind, item.sequence, item.head, item.parts)
                if item.area is not None:
                    handoff.give(self.wire.connection, item.area.descriptor)
            elif ends and not count:
                return
            if self.wire.wait(self._bell, 0.0 if item is not None else _LONG):
                self._note(self.wire.receive().sequence)

    def _begin_again(self, wire: Wire, heard: int) -> None:
        with self._lock:
            self.wire, ended = wire, self._ends
        if ended:
            wire.close()
        self._note(heard)
        self._under_way = 0

    def _note(self, heard: int) -> None:
        """The other worker has heard so many messages since the link was made."""
        count = heard - self._heard
        if not 0 <= count <= self._under_way:
            raise Closed(f"{heard} messages were heard, and {self._heard + self._under_way} were sent")
        self._heard = heard
        self._under_way -= count
        self._settle(count)

    def _settle(self, count: int, *, heard: bool = True) -> None:
        """Nobody needs the first messages any more."""
        for _ in range(count):
            with self._lock:
                item = self._items.popleft()
            if item.sent is not None:
                item.sent.note(heard=heard)
