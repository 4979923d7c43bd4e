"""Which address of this host others reach: found by trying, with a proof that it leads to the right host.

Addresses that are written down may lead nowhere, to another machine, or back to the one that asks (many hosts have the
same address on docker0). So every host listens, every other one tries each of its addresses, and an address counts if
who answers there proves that it knows the job's secret and is the host that was meant (see ``proof``). The proof covers
the address that was tried: who only passes it on is not that host.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import ipaddress
import socket
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hocket.transport.proof import ANSWER, CHALLENGE, NotProved, Proof

_SIOCGIFCONF, _SIOCGIFFLAGS = 0x8912, 0x8913
_ENTRY = struct.Struct("16s16s8x")  # a name and a socket address
_UP = 1
_ASKS = (1 << 32) - 1  # the number of an end that tries addresses
_AFTER = 0.5  # seconds for the other addresses of hosts that have all answered somewhere


class Target(NamedTuple):
    """An address at which the host of a number is thought to be."""

    number: int
    address: str
    port: int


def addresses(interface: str | None = None) -> list[tuple[str, str]]:
    """The names and addresses of this host's interfaces that are up, loopback last.

    With ``interface``, only those of one interface, or of several, separated by commas: names may differ between hosts.
    IPv6 addresses that hold on one link only are left out.
    """
    found = [*_version_4(), *_version_6()]
    if interface is not None:
        found = [entry for entry in found if entry[0] in interface.split(",")]
    return sorted(found, key=lambda entry: ipaddress.ip_address(entry[1]).is_loopback)


class Listener:
    """Answers on one port of all interfaces, from a thread of its own, until it is closed.

    Args:
        secret: The secret of the job.
        number: The number of this host.

    Attributes:
        port: The port.
    """

    def __init__(self, secret: bytes, number: int) -> None:
        self._secret, self._number = secret, number
        server = open_server()
        self.port = int(server.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(server,), name="hocket-reach")
        self._thread.start()

    def close(self) -> None:
        """Stop to listen; returns when the thread has ended."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self, server: socket.socket) -> None:
        try:
            self._loop.run_until_complete(self._serve(server))
        finally:
            self._loop.close()

    async def _serve(self, server: socket.socket) -> None:
        tasks: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Not a coroutine: where that of a connection is cancelled, Python 3.11 prints a traceback."""
            task = self._loop.create_task(self._answer(reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        started = await asyncio.start_server(accept, sock=server, limit=128)
        await self._stop.wait()
        started.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError, TimeoutError, NotProved):
            async with asyncio.timeout(5):
                address = writer.get_extra_info("sockname")[0]
                await _prove(reader, writer, self._secret, self._number, address, accepts=True)
        writer.close()


def try_addresses(targets: Sequence[Target], secret: bytes, seconds: float) -> list[Target]:
    """Try all ``targets`` at once; returns those that lead to the host that is meant.

    Blocks at most ``seconds``, and not long after every host has answered somewhere: addresses that lead nowhere often
    are silent.
    """
    found: list[Target] = []
    # In a thread of its own: the caller may have an event loop already, as a notebook has.
    thread = threading.Thread(target=lambda: found.extend(asyncio.run(_try_all(targets, secret, seconds))))
    thread.start()
    thread.join()
    return found


async def _try_all(targets: Sequence[Target], secret: bytes, seconds: float) -> list[Target]:
    tasks = {asyncio.create_task(_try(target, secret)): target for target in targets}
    wanted = {target.number for target in targets}
    deadline = time.monotonic() + seconds
    pending = set(tasks)
    while pending and (left := deadline - time.monotonic()) > 0:
        done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        wanted -= {tasks[task].number for task in done if task.result()}
        if not wanted:
            deadline = min(deadline, time.monotonic() + _AFTER)
            wanted = {-1}
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    return [target for task, target in tasks.items() if not task.cancelled() and task.result()]


async def _try(target: Target, secret: bytes) -> bool:
    try:
        reader, writer = await asyncio.open_connection(target.address, target.port, limit=128)
    except OSError:
        return False
    try:
        return await _prove(reader, writer, secret, _ASKS, target.address, accepts=False) == target.number
    except (OSError, EOFError, NotProved):
        return False
    finally:
        writer.close()


async def _prove(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, name: int, address: str, *, accepts: bool
) -> int:
    """As ``proof.prove``, for the address that was tried."""
    proof = Proof(secret, name, _plain(address).encode(), accepts=accepts)
    writer.write(proof.challenge)
    theirs = await reader.readexactly(CHALLENGE)
    writer.write(proof.answer(theirs))
    return proof.check(theirs, await reader.readexactly(ANSWER))


def open_server(port: int = 0) -> socket.socket:
    """A listening socket at all addresses of this host; port 0 is any that is free."""
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=256, dualstack_ipv6=True)
    except (OSError, ValueError):
        return socket.create_server(("", port), backlog=256)


def _plain(address: str) -> str:
    """The address as text that is the same on both ends."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return str(parsed)


def _version_4() -> list[tuple[str, str]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        room = array.array("B", bytes(_ENTRY.size * 256))
        asked = struct.pack("iL", len(room), room.buffer_info()[0])
        size = struct.unpack("iL", fcntl.ioctl(asking, _SIOCGIFCONF, asked))[0]
        found = []
        for raw_name, raw in _ENTRY.iter_unpack(room.tobytes()[:size]):
            name = raw_name.partition(b"\0")[0].decode()
            flags = struct.unpack_from("H", fcntl.ioctl(asking, _SIOCGIFFLAGS, struct.pack("256s", raw_name)), 16)[0]
            if flags & _UP:
                found.append((name.partition(":")[0], socket.inet_ntoa(raw[4:8])))
        return found


def _version_6() -> list[tuple[str, str]]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return []
    found = []
    for number, _, _, scope, _, name in map(str.split, lines):
        address = ipaddress.IPv6Address(bytes.fromhex(number))
        if scope in ("00", "10"):  # global, or this host
            found.append((name, str(address)))
    return found
