"""Algorithms over several rigs, for ``hocket bench collectives``: how good the picks of ``auto`` are, and a picture."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hocket.errors import UsageError
from hocket.lab.bench.bench_run import network, on_rig
from hocket.lab.rig import Rig

Row = dict[str, Any]
_NEAR = 10  # percent by which the algorithm that auto takes may be slower than the fastest


def measure_grid(hosts: str, rates: str | None, trunk: str | None, args: Sequence[str]) -> list[Row]:
    """Measure on a rig for each number of hosts and each rate; returns the rows of all.

    Args:
        hosts: Numbers of hosts, with commas.
        rates: Rates, with commas; ``unlimited``, or nothing, is no limit.
        trunk: The rate of the link between two sites, if there are to be two.
        args: What the benchmark is told.
    """
    rows: list[Row] = []
    for rate in (rates or "unlimited").split(","):
        limit = None if rate == "unlimited" else rate
        for count in _counts(hosts):
            with Rig.up(count, limit, name=f"bench{os.getpid()}", trunk=trunk) as rig:
                found = on_rig("collectives", rig, count, list(args))
            where = {"hosts": str(count), "network": network(limit, trunk)}
            rows += [where | row for row in found]
    return rows


def judge(rows: Sequence[Row]) -> list[str]:
    """What the rows say of ``auto``, and of the model."""
    taken = [row for row in rows if row["auto"]]
    near = [row for row in taken if row["over the fastest_%"] <= _NEAR]
    worst = max(taken, key=lambda row: row["over the fastest_%"])
    errors = [abs(row["error_%"]) for row in rows]
    return [
        f"auto took an algorithm within {_NEAR} % of the fastest in {len(near)} of {len(taken)} cells "
        f"({len(near) / len(taken):.0%}); at worst {worst['over the fastest_%']:.0f} % slower: {worst['algorithm']}, "
        f"{worst['hosts']} hosts, {worst['network']}, {worst['size_KiB']:,.0f} KiB.",
        f"Median error of the predicted times: {statistics.median(errors):.0f} %.",
    ]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw time against size, one panel for each rig; dotted lines are predictions."""
    import matplotlib.pyplot as plt

    names = _distinct(row["algorithm"] for row in rows)
    rigs = _distinct((row["hosts"], row["network"]) for row in rows)
    across = min(len(rigs), len({hosts for hosts, _ in rigs}), 5)
    down = -(-len(rigs) // across)
    figure, panels = plt.subplots(down, across, figsize=(3 + 4 * across, 0.5 + 4 * down), squeeze=False, sharex=True)
    for panel in panels.flat[len(rigs) :]:
        panel.set_visible(False)
    for (hosts, where), panel in zip(rigs, panels.flat, strict=False):
        for number, name in enumerate(names):
            own = [row for row in rows if (row["hosts"], row["network"], row["algorithm"]) == (hosts, where, name)]
            sizes = [row["size_KiB"] for row in own]
            panel.loglog(sizes, [row["measured_ms"] for row in own], "o-", color=f"C{number}", label=name)
            panel.loglog(sizes, [row["predicted_ms"] for row in own], ":", color=f"C{number}")
        panel.set(title=f"{hosts} hosts, {where}", xlabel="KiB", ylabel="ms (dotted: predicted)")
    panels.flat[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _counts(hosts: str) -> list[int]:
    counts = [int(each) if each.isdecimal() else 0 for each in hosts.split(",")]
    if min(counts) < 2:
        raise UsageError(f"--hosts {hosts}: numbers of hosts, from 2 on, with commas: --hosts 2,4")
    return counts


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
