"""Hosts that do not reach each other, though both reach the coordinator: which of them goes, so that others go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Verdict(NamedTuple):
    """Who goes.

    Attributes:
        goes: The numbers of the workers that go.
        why: Which hosts do not reach each other, in words.
    """

    goes: frozenset[int]
    why: str


def judge(members: Sequence[int], hosts: Mapping[int, str], silent: Mapping[int, Sequence[int]]) -> Verdict:
    """Decide who goes; all workers come to the same result, since all know the same.

    The host with most cut links goes; of equal ones that with fewest workers, and then the last one; never that of
    rank 0.

    Args:
        members: The number of each worker, by rank.
        hosts: The name of the host of each worker.
        silent: The workers that each worker does not reach.
    """
    pairs = {
        frozenset((hosts[one], hosts[other]))
        for one, others in silent.items()
        for other in others
        if one in hosts and other in hosts and hosts[one] != hosts[other]
    }
    order = list(dict.fromkeys(hosts[member] for member in members))
    said = "; ".join(sorted(f"{' and '.join(sorted(pair))} do not reach each other" for pair in pairs))
    goes: set[str] = set()
    while left := [pair for pair in pairs if not pair & goes]:
        concerned = [host for host in order[1:] if any(host in pair for pair in left)]
        goes.add(max(concerned, key=lambda host: _weight(host, left, members, hosts, order)))
    return Verdict(
        frozenset(member for member in members if hosts[member] in goes),
        f"{said}, though all reach the coordinator" if said else "",
    )


def _weight(
    host: str, pairs: Sequence[frozenset[str]], members: Sequence[int], hosts: Mapping[int, str], order: Sequence[str]
) -> tuple[int, int, int]:
    links = sum(host in pair for pair in pairs)
    return links, -sum(hosts[member] == host for member in members), order.index(host)
