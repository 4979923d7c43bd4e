"""Runs as text for a person: the list, one of them, and two side by side."""

from __future__ import annotations

import math
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from hocket.events import WORKERS_CHANGED
from hocket.observe.reader import Metric, RecordedRun
from hocket.observe.summaries import SampleCount, size

_CONFIGURATION = ("workers", "command", "directory", "git commit")  # the facts of section run that a user chose
_MOST_METRICS, _MOST_EVENTS = 4, 20  # in a line of the list, and of one run
_STATES = {
    "killed": "killed: the launcher is gone without having said how the run ended",
    "unknown": "unknown: the launcher is on another host, and has not said how the run ended",
}
_HIGHER = ("acc", "f1", "auc", "precision", "recall", "score", "bleu", "reward", "iou", "psnr")
_LOWER = ("loss", "err", "perplexity", "ppl", "nll", "mse", "mae")


def table(runs: Iterable[RecordedRun], width: int | None) -> list[str]:
    """All runs, one line each, cut at ``width`` if there is one."""
    rows = [("run", "workers", "strategy", "took", "state", "last metrics")]
    for run in runs:
        last = ", ".join(f"{name} {number(metric.last)}" for name, metric in list(run.metrics.items())[:_MOST_METRICS])
        last += f" and {len(run.metrics) - _MOST_METRICS} more" if len(run.metrics) > _MOST_METRICS else ""
        workers = str(run.fact("run", "workers") or "?")
        rows.append((run.id, workers, run.strategy, span(run.seconds), run.state, last or "-"))
    return [line[:width] for line in align(rows)]


def details(run: RecordedRun) -> list[str]:
    """Everything about one run."""
    about = run.facts.get("run", {})
    end = f"{run.state}: {run.reason}" if run.reason and run.status else _STATES.get(run.state, run.state)
    rows = [("run", run.id), ("state", end), ("took", span(run.seconds))]
    rows += [("started", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(about.get("started", 0))))]
    rows += [("command", shlex.join(about.get("command", []))), ("directory", about.get("directory", "?"))]
    rows += [(name, str(about[name])) for name in ("git commit",) if about.get(name)]
    rows += [("workers", str(about.get("workers", "?"))), ("strategy", run.strategy), ("folder", str(run.folder))]
    lines = align(rows)
    lines += _section("Speed", align(_speed(run)))
    metrics = [(name, *_metric(name, metric)) for name, metric in run.metrics.items()]
    if metrics:
        lines += _section("Metrics", align([("", "first", "best", "last", "at step", "reported"), *metrics]))
    lines += _section("Workers", _changes(run))
    lines += _section("Samples", SampleCount.lines(run.facts.get("samples", {})))
    lines += _section("Gradients", align(_gradients(run.facts.get("gradients", {}))))
    sections = {"servers": "Servers", "told": "Told by the workers", "settings": "Settings", "versions": "Versions"}
    for section, title in sections.items():
        known = {name: value for name, value in run.facts.get(section, {}).items() if name != "strategy"}
        lines += _section(title, align([(name, _plain(value)) for name, value in known.items()]))
    lines += _section("Host", align([(name, _host(name, value)) for name, value in run.facts.get("host", {}).items()]))
    lines += _section("Hosts", align([(name, _place(value)) for name, value in run.facts.get("hosts", {}).items()]))
    return lines + _section("Events", _events(run))


def compare(first: RecordedRun, second: RecordedRun) -> list[str]:
    """Two runs side by side: what differs in configuration, then speed, then metrics."""
    both = [("", "A", "B"), ("run", first.id, second.id), ("state", first.state, second.state)]
    lines = align([*both, ("took", span(first.seconds), span(second.seconds))])
    different = [(name, _plain(a), _plain(b)) for name, a, b in differences(first, second)]
    lines += _section("What differs", align(different) if different else ["nothing that is recorded"])
    speed = [("", "A", "B", "B to A")]
    theirs = dict(_speed(second))
    for name, value in _speed(first):
        if name in theirs:
            speed.append((name, value, theirs[name], _ratio(first, second) if name == "samples/s" else ""))
    lines += _section("Speed", align(speed) if len(speed) > 1 else [])
    metrics = []
    for name in dict.fromkeys([*first.metrics, *second.metrics]):
        a, b = first.metrics.get(name), second.metrics.get(name)
        for kind, index in (("first", 0), ("best", 1), ("last", 2)):
            values = [_metric(name, metric)[index] if metric else "-" for metric in (a, b)]
            if values != ["-", "-"]:
                metrics.append((f"{name}, {kind}", *values))
    return lines + _section("Metrics", align([("", "A", "B"), *metrics]) if metrics else [])


def differences(first: RecordedRun, second: RecordedRun) -> list[tuple[str, Any, Any]]:
    """Facts that are not the same in both: their name and the two values."""
    found: list[tuple[str, Any, Any]] = []
    if first.strategy != second.strategy:
        found.append(("strategy", first.strategy, second.strategy))
    for section in ("run", "settings", "told", "versions", "host"):
        ours, theirs = first.facts.get(section, {}), second.facts.get(section, {})
        for name in _CONFIGURATION if section == "run" else dict.fromkeys([*ours, *theirs]):
            if ours.get(name) != theirs.get(name) and name != "strategy":
                found.append((name, ours.get(name), theirs.get(name)))
    return found


def best(name: str, metric: Metric) -> float | None:
    """The highest or the lowest value, as the metric's name suggests; None where it suggests nothing."""
    up = rises(name)
    return None if up is None else metric.highest if up else metric.lowest


def rises(name: str) -> bool | None:
    """Whether higher values of a metric are better, as its name suggests; None where it suggests nothing."""
    if any(part in name.lower() for part in _LOWER):
        return False
    return True if any(part in name.lower() for part in _HIGHER) else None


def span(seconds: float) -> str:
    """``3.2 s``, ``2 min 5 s`` or ``3 h 12 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def number(value: float) -> str:
    """Four digits that matter."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}"


def _speed(run: RecordedRun) -> list[tuple[str, str]]:
    speed, rows = run.speed, []
    if speed.samples_per_second is not None:
        rows.append(("samples/s", f"{speed.samples_per_second:,.0f}"))
    if speed.step_seconds is not None:
        rows.append(("a step takes", f"{speed.step_seconds * 1000:,.2f} ms"))
    if speed.waiting is not None and any(rank["exchanging"] for rank in run.ranks.values()):
        rows.append(("waiting", f"{speed.waiting:.1%} of the time"))
        rows.append(("communication", f"{speed.communication:.1%} of the time"))
    if speed.total is not None:
        rows.append(("steps", f"{speed.total:,} in {speed.epoch} epoch{'s' if speed.epoch != 1 else ''}"))
        rows.append(("samples", f"{speed.seen:,}"))
    if sent := run.facts.get("sent"):
        rows.append(("handed to exchanges", f"{size(sum(sent.values()))} by all workers"))
    for rank, totals in run.ranks.items():
        if totals["exchanging"]:
            communicated = max(0.0, totals["exchanging"] - totals["waited"])
            rows.append((f"rank {rank}", f"waited {span(totals['waited'])}, communicated {span(communicated)}"))
    return rows


def _gradients(facts: dict[str, Any]) -> list[tuple[str, str]]:
    return [(name, number(v) if isinstance(v, float) else _plain(v)) for name, v in facts.items()]


def _changes(run: RecordedRun) -> list[str]:
    """How workers came and went; nothing if all stayed."""
    counts = Counter(event["name"] for event in run.events)
    found = [(counts["worker lost"], "lost"), (counts["worker left"], "left"), (counts["newcomer joined"], "joined")]
    told = [f"{count} {what}" for count, what in found if count]
    changes = [event["details"] for event in run.events if event["name"] == WORKERS_CHANGED]
    if changes:
        told += [f"{changes[-1]['workers']} in the last of {changes[-1]['generation'] + 1} generations"]
    return [", ".join([f"{run.fact('run', 'workers')} at the start", *told])] if told else []


def _ratio(first: RecordedRun, second: RecordedRun) -> str:
    a, b = first.speed.samples_per_second, second.speed.samples_per_second
    return f"{b / a:.2f}×" if a and b else ""


def _metric(name: str, metric: Metric) -> tuple[str, str, str, str, str]:
    top = best(name, metric)
    shown = "-" if top is None else number(top)
    return number(metric.first), shown, number(metric.last), str(metric.last_step), f"{metric.count}×"


def _events(run: RecordedRun) -> list[str]:
    events = [event for event in run.events if event["name"] != "checkpoint begun"]  # it was saved, or it failed
    left_out = max(0, len(events) - _MOST_EVENTS)
    lines = [f"({left_out} earlier ones: --json has them)"] if left_out else []
    for event in events[left_out:]:
        when = event["time"] - run.fact("run", "started")
        told = {name: value for name, value in event["details"].items() if name not in ("report", "folder")}
        who = f"rank {event['rank']}"
        if event["rank"] is None:
            who = f"server {told.pop('server')}" if "server" in told else "launcher"
        words = ", ".join(f"{name} {_plain(value)}" for name, value in told.items())
        lines.append(f"after {span(when)}, {who}: {event['name']}{': ' if words else ''}{words}")
        lines += [f"  {line}" for line in event["details"].get("report", ())]
    return lines


def _host(name: str, value: Any) -> str:
    return f"{value / 2**30:.1f} GiB" if name == "memory" and value else _plain(value)


def _place(facts: dict[str, Any]) -> str:
    """One of several hosts, in a line."""
    gpus = f", {facts['gpus']} GPUs" if facts.get("gpus") else ""
    servers = f"servers {facts['servers']}, " if facts.get("servers") else ""
    ranks = f"ranks {facts['ranks']}, " if facts.get("ranks") else ""
    return (
        f"{ranks}{servers}at {facts.get('address')} ({facts.get('interface')}), "
        f"{facts.get('hostname')}, {facts.get('cores')} cores{gpus}"
    )


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return shlex.join(map(str, value))
    return "-" if value in (None, "") else str(value)


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", title, *(f"  {line}" for line in lines)] if lines else []


def align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows of a table as lines, each column as wide as it must be."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
