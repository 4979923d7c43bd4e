"""The connections of the watch are made, between ends that prove to each other that they belong to the job."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from hocket.errors import JobError
from hocket.transport.gate import ranks
from hocket.transport.peer import Peer
from hocket.transport.proof import prove

_LOOK = 0.02  # seconds between two looks at who has proved it
_STRANGERS = 256  # connections at once of which nothing is known yet


def accept(
    address: str, announce: Callable[[str, int], None], size: int, secret: bytes, deadline: float, timeout: float
) -> list[Peer]:
    """Wait for a connection of every other rank; whoever else connects does not hold them up.

    Args:
        address: Where to listen, on a port that is free.
        announce: Is told address and port.
        size: How many ranks there are.
        secret: The job's.
        deadline: The monotonic time until which to wait.
        timeout: How many seconds that is, for the message.
    """
    found: dict[int, socket.socket] = {}
    unknown: dict[socket.socket, threading.Thread] = {}

    def ask(connection: socket.socket) -> None:
        try:
            rank = prove(connection, secret, 0, accepts=True)
        except (OSError, JobError):
            connection.close()
        else:
            found[rank] = connection
        unknown.pop(connection, None)

    with socket.create_server((address, 0), family=_family(address), backlog=size + _STRANGERS) as server:
        announce(address, server.getsockname()[1])
        try:
            while len(found) < size - 1:
                if time.monotonic() > deadline:
                    absent = [r for r in range(1, size) if r not in found]
                    raise JobError(
                        f"{ranks(absent)} did not reach hocket.init() within {timeout:g} s: see their output"
                    )
                server.settimeout(_LOOK)
                with contextlib.suppress(TimeoutError):
                    connection, _ = server.accept()
                    connection.settimeout(max(deadline - time.monotonic(), 1.0))
                    if len(unknown) >= size + _STRANGERS:
                        _hang_up(next(iter(unknown)))
                    unknown[connection] = thread = threading.Thread(target=ask, args=(connection,), daemon=True)
                    thread.start()
        finally:
            for connection, thread in list(unknown.items()):
                _hang_up(connection)
                thread.join(1.0)
    return [Peer(connection, rank) for rank, connection in found.items()]


def connect(address: str, port: int, rank: int, secret: bytes, deadline: float) -> Peer:
    """Connect to rank 0, as ``rank``; tries again until the monotonic time ``deadline``."""
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=5.0)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise JobError(
                    f"rank {rank} on {socket.gethostname()} cannot reach rank 0 at {address}:{port} "
                    f"({error.strerror or error}): open the firewall between the hosts, or name the interface that "
                    "connects them (--interface)"
                ) from None
            time.sleep(0.05)
    connection.settimeout(max(deadline - time.monotonic(), 1.0))
    prove(connection, secret, rank, accepts=False)
    return Peer(connection, 0)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _hang_up(connection: socket.socket) -> None:
    """Have the thread that listens to it notice the end."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
