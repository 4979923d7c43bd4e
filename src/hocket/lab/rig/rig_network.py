"""Cables and a switch: hosts are network namespaces, joined by a bridge that has a namespace of its own.

The bridge is not among this machine's own interfaces, so the machine's packet filter (that of Docker, say) does not
apply to what hosts say to each other, and with its namespace the bridge and all cables go at once.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hocket.errors import RigError, UsageError
from hocket.lab.rig import rig_names as naming
from hocket.lab.rig.rig_names import RigHost
from hocket.lab.rig.rig_needs import batch, call

_NOBODY = "02:00:00:00:00:01"  # the address of a card that no host has
_BRIDGE, _SECOND = "bridge", "bridge-2"
_TRUNK = ("trunk-1", "trunk-2")  # the ends of the cable between the two switches
_UPLINK = "outside"  # the switch's end of the cable to this machine
_FIRST_INDEX = 1000  # two ends of a cable with the same number are taken for one, and their state lags by a second
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_LEAST, _MOST = 64 * 10**3, 100 * 10**9
_BURST_SECONDS = 0.001
_SMALLEST_BURST = 16 << 10  # some packets
_SMALLEST_QUEUE = 256 << 10  # some of what TCP hands over at once; with less, a single slow stream loses a third of it
_WHOLE_PACKET = 68 << 10  # what TCP hands over at once; the bucket cuts up what is larger than itself, which costs
_QUEUE_SECONDS = 0.025


@dataclass(frozen=True)
class Rate:
    """Bits per second, in each direction."""

    bits: int

    def __str__(self) -> str:
        for unit in ("g", "m", "k"):
            if self.bits >= _UNITS[unit]:
                return f"{self.bits / _UNITS[unit]:g}{unit}bit"
        return f"{self.bits}bit"

    def bucket(self) -> str:
        """Arguments for ``tc qdisc … tbf``.

        The bucket holds a millisecond of traffic, and at fast rates one packet of TCP's largest; the queue holds
        25 ms, as that of a switch with deep buffers, so that a single stream loses nothing and three to one receiver
        lose little.
        """
        bytes_per_second = self.bits / 8
        burst = max(_SMALLEST_BURST, bytes_per_second * _BURST_SECONDS)
        if bytes_per_second >= 100e6 / 8:
            burst = max(burst, _WHOLE_PACKET)
        queue = max(bytes_per_second * _QUEUE_SECONDS, _SMALLEST_QUEUE)
        return f"tbf rate {self.bits}bit burst {round(burst)} limit {round(burst + queue)}"


def parse_rate(text: str) -> Rate:
    """Read ``1gbit``, ``100mbit`` or ``500kbit``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text.strip().lower())
    bits = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    if not _LEAST <= bits <= _MOST:
        raise UsageError(f"--rate {text}: must be from 64kbit to 100gbit, for example 1gbit, 100mbit or 500kbit")
    return Rate(bits)


def free_network() -> ipaddress.IPv4Network:
    """A private network of 256 addresses that no route of this machine leads to."""
    taken = []
    for route in json.loads(call(["ip", "-4", "-json", "route", "show", "table", "all"]) or "[]"):
        if route["dst"] != "default":
            taken.append(ipaddress.ip_network(route["dst"], strict=False))
    blocks = [f"10.{second}.{third}" for second in (213, 87, 154) for third in range(256)]
    blocks += [f"172.29.{third}" for third in range(256)] + [f"192.168.{third}" for third in range(20, 250)]
    for block in blocks:
        network = ipaddress.IPv4Network(f"{block}.0/24")
        if not any(network.overlaps(other) for other in taken):
            return network
    raise RigError("no private network is free on this machine: remove rigs with hocket rig down --name NAME")


def make(
    name: str,
    crew: Sequence[RigHost],
    network: ipaddress.IPv4Network,
    decoys: Mapping[str, str],
    trunk: Rate | None = None,
) -> None:
    """Make the switch, the hosts and the cables, all up; and in every host the same ``decoys``, by name.

    With a ``trunk`` there are two switches: the first half of the hosts is at one, the others are at the other.
    """
    switch, outside = naming.namespace(name, naming.SWITCH), naming.outside_interface(name)
    own = f"{network[-2]}/{network.prefixlen}"
    add = [f"netns add {switch}", *(f"netns add {host.namespace}" for host in crew)]
    inside = ["link set lo up", f"link add {_BRIDGE} type bridge", f"link set {_BRIDGE} up"]
    indices = itertools.count(_FIRST_INDEX)
    bridges = dict.fromkeys(crew, _BRIDGE)
    if trunk is not None:
        bridges |= dict.fromkeys(crew[-(-len(crew) // 2) :], _SECOND)
        inside += [f"link add {_SECOND} type bridge", f"link set {_SECOND} up"]
        inside.append(f"link add {_TRUNK[0]} index {next(indices)} type veth peer name {_TRUNK[1]}")
        for end, bridge in zip(_TRUNK, (_BRIDGE, _SECOND), strict=True):
            inside += [f"link set {end} master {bridge}", f"link set {end} up"]
    for host in crew:
        for number, decoy in enumerate(decoys):  # first, so that they come first in the lists of interfaces, too
            end = f"decoy-{host.name}-{number}"
            add.append(f"link add dev {decoy} netns {host.namespace} type bridge")
            add.append(f"{_cable(switch, end, next(indices))} veth-{number} netns {host.namespace}")
            inside.append(f"link set {end} up")  # a cable that leads nowhere
        add.append(f"{_cable(switch, host.port, next(indices))} {host.interface} netns {host.namespace}")
        inside += [f"link set {host.port} master {bridges[host]}", f"link set {host.port} up"]
    add.append(f"{_cable(switch, _UPLINK, next(indices))} {outside}")
    add += [f"addr add {own} dev {outside}", f"link set {outside} up"]
    inside += [f"link set {_UPLINK} master {_BRIDGE}", f"link set {_UPLINK} up"]
    batch(["ip"], add)
    batch(["ip", "-n", switch], inside)
    if trunk is not None:
        for end in _TRUNK:
            call(["tc", "-n", switch, "qdisc", "replace", "dev", end, "root", *trunk.bucket().split()])
    for host in crew:
        lines = ["link set lo up", f"addr add {host.address}/{network.prefixlen} dev {host.interface}"]
        lines.append(f"link set {host.interface} up")
        for number, (decoy, address) in enumerate(decoys.items()):
            lines += [f"link set veth-{number} master {decoy}", f"link set veth-{number} up"]
            lines += [f"addr add {address} dev {decoy}", f"link set {decoy} up"]
        batch(["ip", "-n", host.namespace], lines)


def _cable(switch: str, port: str, index: int) -> str:
    return f"link add dev {port} index {index} netns {switch} type veth peer name"


def wait_until_up(crew: Iterable[RigHost], seconds: float = 10.0) -> None:
    """Return when every interface in the hosts says that it is up, which the kernel tells with a delay."""
    deadline = time.monotonic() + seconds
    for host in crew:
        while down := [link["ifname"] for link in _links(host) if link["operstate"] != "UP"]:
            if time.monotonic() > deadline:
                raise RigError(f"in {host.name}, {', '.join(down)} does not come up: see ip -n {host.namespace} link")
            time.sleep(0.01)


def _links(host: RigHost) -> list[dict[str, Any]]:
    links = json.loads(call(["ip", "-n", host.namespace, "-json", "link"]))
    return [link for link in links if "LOOPBACK" not in link["flags"]]


def set_rate(name: str, host: RigHost, rate: Rate | None) -> None:
    """Limit what ``host`` sends and what it receives to ``rate`` each; None for no limit."""
    for space, interface in ((host.namespace, host.interface), (naming.namespace(name, naming.SWITCH), host.port)):
        if rate is not None:
            call(["tc", "-n", space, "qdisc", "replace", "dev", interface, "root", *rate.bucket().split()])
        elif "tbf" in call(["tc", "-n", space, "qdisc", "show", "dev", interface]):
            call(["tc", "-n", space, "qdisc", "del", "dev", interface, "root"])


def connect(name: str, host: RigHost, connected: bool) -> None:
    """Have the switch drop all that comes from ``host`` or goes there, or not; the cable itself stays up."""
    state = "3" if connected else "0"  # forwarding, or disabled
    call(["bridge", "-n", naming.namespace(name, naming.SWITCH), "link", "set", "dev", host.port, "state", state])


def connect_two(first: RigHost, second: RigHost, connected: bool) -> None:
    """Have two hosts send what is for each other to a card that nobody has, or not; nobody is told of it."""
    for here, there in ((first, second), (second, first)):
        entry = ["neigh", "replace" if not connected else "del", there.address, "dev", here.interface]
        call(["ip", "-n", here.namespace, *entry, *([] if connected else ["lladdr", _NOBODY, "nud", "permanent"])])
