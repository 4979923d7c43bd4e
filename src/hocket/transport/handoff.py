"""Hand file descriptors from one worker to the others of the same host.

The giver listens on an abstract Unix socket: it has no file, and the kernel removes it with the process. Both
sides check that the other belongs to the same user before anything is sent.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time

from hocket.errors import JobError
from hocket.transport.proof import receive

_PEER = struct.Struct("iII")  # pid, uid, gid of SO_PEERCRED
_MESSAGE = struct.Struct("!I")


def new_name() -> str:
    """A fresh socket name that nobody can guess."""
    return f"hocket-{secrets.token_hex(16)}"


def listen(name: str, backlog: int) -> socket.socket:
    """Open the abstract socket ``name``."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.bind(f"\0{name}")
    except OSError as error:
        server.close()
        raise JobError(
            f"the socket {name} of this job is already taken ({error.strerror}): "
            "two processes have the same rank; check RANK and LOCAL_RANK"
        ) from error
    server.listen(backlog)
    return server


def accept(server: socket.socket, peers: int, deadline: float) -> dict[int, socket.socket]:
    """Accept ``peers`` connections of this user until the monotonic time ``deadline``, by their rank."""
    found: dict[int, socket.socket] = {}
    while len(found) < peers:
        server.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            break
        if _peer_uid(connection) != os.geteuid():
            connection.close()
            continue
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        (rank,) = _MESSAGE.unpack(receive(connection, _MESSAGE.size))
        found[rank] = connection
    return found


def connect(name: str, rank: int, deadline: float) -> socket.socket:
    """Connect to the abstract socket ``name``, trying until the monotonic time ``deadline``."""
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(f"\0{name}")
            break
        except (ConnectionRefusedError, BlockingIOError):
            connection.close()
            if time.monotonic() > deadline:
                raise JobError("rank 0 did not open its socket in time: see its output for the reason") from None
            time.sleep(0.005)
    if _peer_uid(connection) != os.geteuid():
        connection.close()
        raise JobError(f"the socket {name} of this job belongs to another user; run the job again")
    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    connection.sendall(_MESSAGE.pack(rank))
    return connection


def give(connection: socket.socket, descriptor: int) -> None:
    """Send ``descriptor`` over ``connection``."""
    socket.send_fds(connection, [b"\0"], [descriptor])


def take(connection: socket.socket) -> int:
    """Receive the descriptor that the other side gives; an error if it has gone."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise JobError("rank 0 ended before it handed out the shared memory: see its output for the reason")
    return descriptors[0]


def _peer_uid(connection: socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(raw)[1])
