"""Picks the address of each host from what was tried: one that all other hosts reach."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Node:
    """A host, and what was found out about its addresses.

    Attributes:
        name: The host as the user wrote it.
        addresses: Its interfaces and their addresses, the better ones first.
        preferred: The address at which the launcher reaches the host, if that is known.
        reached_by: For each other host, by name, the addresses at which it reaches this host.
    """

    name: str
    addresses: list[tuple[str, str]]
    preferred: str | None = None
    reached_by: dict[str, set[str]] = field(default_factory=dict)


def choose(node: Node, *, same_network: bool) -> tuple[str, str] | None:
    """The interface and address of ``node`` for the job; None if there is none that all others reach.

    Args:
        node: The host.
        same_network: Whether all hosts are one machine, so that loopback is as good as any.
    """
    common = [entry for entry in node.addresses if all(entry[1] in reached for reached in node.reached_by.values())]

    def rank(entry: tuple[str, str]) -> tuple[bool, bool]:
        return _is_loopback(entry[1]) != same_network, entry[1] != node.preferred

    return min(common, key=rank, default=None)  # the first of equals


def explain(node: Node, interface: str | None) -> str:
    """Why there is no address for ``node``, and what to do."""
    tried = ", ".join(f"{address} ({name})" for name, address in node.addresses if not _is_loopback(address))
    remedy = (
        "let TCP through between them (firewall?), or leave out --interface"
        if interface
        else "let TCP through between them (firewall?), or name the network that they share with --interface"
    )
    cut_off = [name for name, reached in node.reached_by.items() if not reached]
    if cut_off:
        return f"{_join(cut_off)} cannot reach it at {tried or 'any address'}: {remedy}"
    seen = "; ".join(f"{name} reaches it at {', '.join(sorted(found))}" for name, found in node.reached_by.items())
    return f"none of its addresses is reached by all others ({seen}): {remedy}"


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
