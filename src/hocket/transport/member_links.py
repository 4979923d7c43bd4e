"""Connections between all members of a group: over them, any member sends tensors to any other.

A connection carries messages one way, as those of gossip do (see ``streams``). One thread serves all of them: while it
waits for a message, it sends what others are to get. The members prove the job's secret at each other's doors, which
are open only until all have come.
"""

from __future__ import annotations

import math
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hocket.errors import JobError
from hocket.transport import tls
from hocket.transport.door import Door, can_be_reached, knock, knock_here, listen, listen_here
from hocket.transport.network_group import Wait
from hocket.transport.proof import NotProved
from hocket.transport.streams import Incoming, Outgoing
from hocket.transport.tensor_bytes import as_bytes
from hocket.transport.wire import Closed, Wire, hang_up, until

_HELLO, _HERE = 1, 2  # kinds of messages before those of streams
_MOST_HEAD = 1024
_KNOCK = 2.0  # seconds of one attempt to come in
_RETRY = 0.01
_SLACK = 5.0  # seconds that the other end has more, since it may be the slower one
_UNWATCHED = 0.02  # seconds of a wait in which nobody looks whether the others are there
_SILENT = 6.0  # seconds without an answer of a host's kernel after which its connections are taken for cut
_UNREACHED = 10.0  # seconds in which the host of a member must be reached


class Links:
    """One member's connections. One thread at a time sends and receives; any thread may end them.

    Args:
        group: The name of the group, which no other group has whose members may be at the same addresses.
        rank: The rank of this member in the group.
        size: How many members the group has.
        secret: The secret of the job.
        address: The address at which the others reach this host.
        encrypts: Whether connections to an address are encrypted.
        socket: The name of this member's socket, where all members are on one host; then nothing goes to addresses.
        refused: Where to count what is refused; by default, in a counter of these connections alone.

    Attributes:
        said: Where the others find this member; they need it for ``connect``.
        wait: How the thread that sends and receives waits; by default, until ``hang_up``.
        refused: How many were turned away at the door, and how many messages were not those to come, by why.
        cut_off: The members whose hosts had fallen silent when the connections were ended, or could not be reached.
    """

    def __init__(
        self,
        group: str,
        rank: int,
        size: int,
        secret: bytes,
        address: str,
        encrypts: Callable[[str], bool],
        socket: str = "",
        refused: Counter[str] | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.wait: Wait | None = None
        self.cut_off: set[int] = set()
        self._group, self._secret, self._encrypts = group, secret, encrypts
        self._out: dict[int, Outgoing] = {}
        self._in: dict[int, Incoming] = {}
        self._unsent: dict[int, Outgoing] = {}  # those with something left to send, by descriptor
        self._coming: list[Wire] = []
        self._has_come = threading.Condition()
        self._at_work = threading.RLock()  # descriptors are given back when nobody sends or receives
        self._is_over = False
        security = () if socket or not encrypts(address) else tls.make_context()
        listener = listen_here(socket) if socket else listen(address, 0)
        self.refused = Counter[str]() if refused is None else refused
        self._door: Door | None = Door(listener, secret, rank, self._let_in, self._refuse, *security)
        self.said: dict[str, Any] = {"socket": socket} if socket else {"address": address, "port": self._door.port}

    def connect(self, everyone: Sequence[dict[str, Any]], wait: Wait) -> None:
        """Connect to the other members, and wait until they have; collective.

        Args:
            everyone: What each member has ``said``, by rank.
            wait: How to wait for the others.
        """
        try:
            for other in self._others():
                end = time.monotonic() + _UNREACHED
                wait(lambda s, other=other, end=end: self._reach(other, everyone[other], s, end))  # type: ignore[misc]
            wait(self._have_all_come)
        except BaseException:
            self.close()
            raise
        self._close_door()

    def send(self, to: int, *parts: torch.Tensor) -> None:
        """Have ``parts`` sent; waits for no other member. They must stay as they are, see ``PointToPoint``.

        Raises:
            Closed: the connection broke.
        """
        with self._at_work:
            out = self._out[to]
            if not out.send(as_bytes(parts)):
                self._unsent[out.wire.connection.fileno()] = out

    def receive(self, source: int, *into: torch.Tensor) -> None:
        """Wait for the next message of ``source``, which fills ``into``.

        Raises:
            Closed: the connection broke.
            JobError: something else came.
        """
        with self._at_work:
            stream = self._in[source]
            stream.expect(as_bytes(into))
            try:
                if not stream.take():
                    self._wait(stream)
            finally:
                if stream.is_wrong:
                    self._refuse("not the message that was to come")

    def flush(self) -> None:
        """Wait until the system has taken all that was sent.

        Raises:
            Closed: the connection broke.
        """
        if self._unsent:
            with self._at_work:
                self._wait(None)

    def _wait(self, stream: Incoming | None) -> None:
        """Send what is left until the message of ``stream`` is complete or, without one, until nothing is left."""

        def go_on(seconds: float) -> bool:
            deadline = time.monotonic() + seconds
            while True:
                poller = select.poll()
                for descriptor in self._unsent:
                    poller.register(descriptor, select.POLLOUT)
                if stream is not None:
                    poller.register(stream.wire.connection, stream.events)
                left = None if seconds == math.inf else max(0.0, deadline - time.monotonic()) * 1000
                found = poller.poll(left)
                for descriptor, _ in found:
                    if (out := self._unsent.get(descriptor)) is not None and out.push():
                        del self._unsent[descriptor]
                if stream.take() if stream is not None else not self._unsent:
                    return True
                if not found:
                    return False

        if self.wait is None:
            go_on(math.inf)
        elif not go_on(_UNWATCHED):
            self.wait(go_on)

    def ended(self) -> list[int]:
        """Members that have ended their connections to this one, whether or not all that they sent was received."""
        return [other for other, stream in list(self._in.items()) if stream.wire.has_ended()]

    def hang_up(self) -> None:
        """End all connections at once; any thread may. Whoever waits at one is woken."""
        with self._has_come:
            if not self._is_over:
                ends = [(other, end.wire) for other, end in self._in.items()]
                ends += [(other, end.wire) for other, end in self._out.items()]
                self.cut_off |= {other for other, wire in ends if wire.silence() > _SILENT}
            self._is_over = True
            self._has_come.notify_all()
            for wire in self._coming:
                wire.close()
            for wire in self._wires():
                hang_up(wire.connection)

    def close(self) -> None:
        """End all connections; no descriptor of theirs is left. What was flushed still arrives."""
        self.hang_up()
        self._close_door()
        with self._at_work:
            for wire in self._wires():
                wire.close()

    def _wires(self) -> list[Wire]:
        return [stream.wire for stream in self._in.values()] + [stream.wire for stream in self._out.values()]

    def _others(self) -> Iterable[int]:
        return ((self.rank + distance) % self.size for distance in range(1, self.size))

    def _close_door(self) -> None:
        door, self._door = self._door, None
        if door is not None:
            door.close()

    def _reach(self, other: int, said: dict[str, Any], seconds: float, end: float) -> bool:
        """Try to come in at another member's door; raises if its host is not reached at all until the time ``end``."""
        deadline = time.monotonic() + max(seconds, _KNOCK)
        if self._is_over:
            raise Closed("the group was closed")
        try:
            if "socket" in said:
                wire = knock_here(said["socket"], self._secret, self.rank, deadline, waits=False)
            else:
                encrypted = self._encrypts(said["address"])
                wire = knock(said["address"], said["port"], self._secret, self.rank, deadline, encrypted=encrypted)
        except NotProved:
            raise
        except JobError as error:
            if (
                time.monotonic() > end
                and "address" in said
                and not can_be_reached(said["address"], said["port"], _KNOCK)
            ):
                self.cut_off.add(other)
                raise Closed(f"the host of member {other} of the group {self._group!r} is not reached") from error
            time.sleep(min(seconds, _RETRY))
            return False
        try:
            wire.connection.settimeout(until(deadline))
            wire.receive()  # the other end may have been too busy to let this one in in time
            wire.connection.settimeout(None)
            wire.send(_HERE, 0, {"group": self._group})
        except (JobError, OSError):
            wire.close()
            return False
        with self._has_come:
            self._out[other] = Outgoing(wire)
        return True

    def _refuse(self, why: str) -> None:
        self.refused[why] += 1

    def _let_in(self, wire: Wire, other: int) -> bool:
        """Take a connection, once its maker is sure of it too."""
        wire.most_head = _MOST_HEAD
        with self._has_come:
            if self._is_over or not 0 <= other < self.size:
                self._refuse("no member of this group")
                return False
            self._coming.append(wire)
        try:
            wire.connection.settimeout(_KNOCK + _SLACK)
            wire.send(_HELLO, 0, {})
            message = wire.receive()
            wire.connection.settimeout(None)
            is_of_group = message.kind == _HERE and message.head.get("group") == self._group
        except (JobError, OSError):
            is_of_group = False
        with self._has_come:
            self._coming.remove(wire)
            if self._is_over or not is_of_group or other in self._in:
                self._refuse("no member of this group")
                return False
            self._in[other] = Incoming(wire, f"member {other} of the group {self._group!r}")
            self._has_come.notify_all()
        return True

    def _have_all_come(self, seconds: float) -> bool:
        with self._has_come:
            have_come = self._has_come.wait_for(lambda: len(self._in) == self.size - 1 or self._is_over, seconds)
            if self._is_over:
                raise Closed("the group was closed")
        if not have_come and any(out.wire.has_ended() for out in list(self._out.values())):
            raise Closed(f"another member of the group {self._group!r} has given up")
        return have_come
