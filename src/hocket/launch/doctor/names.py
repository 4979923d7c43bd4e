"""Checks of a machine's name, its network interfaces and loopback."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading

from hocket.launch.doctor.finding import Finding, note, ok, wrong
from hocket.transport import interfaces

_PATIENCE = 4.0  # seconds for an answer of a name server


def check(interface: str | None) -> list[Finding]:
    """All of them; with ``interface``, that of the user's choice has to be there."""
    return [_name(), _localhost(), _interfaces(interface)]


def _name() -> Finding:
    name = socket.gethostname()
    found = _resolve(name)
    add = f"write its address and {name} into /etc/hosts"
    if found is None:
        return note("host name", f"no answer within {_PATIENCE:.0f} s on what {name} means",
                    f"{add}; look at the name servers in /etc/resolv.conf")  # fmt: skip
    if not found:
        return note("host name", f"{name} does not resolve: scripts that use Gloo on their own may fail", add)
    seen = f"{name} is {', '.join(found)}"
    if all(ipaddress.ip_address(address).is_loopback for address in found):
        return note("host name", f"{seen}, which other hosts cannot reach",
                    "nothing to do for hocket run, which finds addresses by trying; for other programs, "
                    f"{add}")  # fmt: skip
    return ok("host name", seen)


def _resolve(name: str) -> list[str] | None:
    """The addresses of a name; None if nobody answers. In a thread, for nothing else can be given a deadline."""
    found: list[str] | None = None

    def ask() -> None:
        nonlocal found
        answer: list[str] = []
        with contextlib.suppress(OSError, UnicodeError):
            answer = [str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(name, None)]
        found = list(dict.fromkeys(answer))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return found


def _localhost() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(2)
            with socket.create_connection(server.getsockname(), 2) as one, server.accept()[0] as other:
                one.sendall(b"x")
                other.settimeout(2)
                works = other.recv(1) == b"x"
    except OSError as error:
        return wrong("loopback", f"127.0.0.1 cannot be used: {error.strerror or error}",
                     "ip link set lo up; look for a firewall that stops it")  # fmt: skip
    named = _resolve("localhost")
    if works and named and not all(ipaddress.ip_address(address).is_loopback for address in named):
        return wrong("loopback", f"localhost is {', '.join(named)}", "write 127.0.0.1 localhost into /etc/hosts")
    return ok("loopback", "works")


def _interfaces(interface: str | None) -> Finding:
    found = [(name, address) for name, address in interfaces.addresses() if not _is_loopback(address)]
    seen = ", ".join(f"{name} {address}" for name, address in found)
    if interface is not None:
        found = [entry for entry in found if entry[0] in interface.split(",")]
        if not found and not interfaces.addresses(interface):
            return wrong("interfaces", f"no {interface} that is up, but {seen or 'loopback alone'}",
                         "name one of those that are there with --interface")  # fmt: skip
    if not found:
        return note("interfaces", "loopback alone: no other host can reach this one",
                    "nothing to do for jobs on one machine; else connect it to a network")  # fmt: skip
    return ok("interfaces", f"{seen}; {found[0][0]} would be tried first" if len(found) > 1 else seen)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
