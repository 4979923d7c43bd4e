"""``hocket runs``: lists the runs that were recorded, shows one, compares two."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hocket import config
from hocket.errors import RecordError
from hocket.launch.flags import flag
from hocket.observe import run_records, show
from hocket.observe.reader import RecordedRun, read

app = typer.Typer()

_RunDir = Annotated[str | None, flag("run-dir")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
_Id = Annotated[str, typer.Argument(help="A run's id, a part that no other id has, or: last.", show_default=False)]


@app.callback(invoke_without_command=True)
def runs(context: typer.Context, run_dir: _RunDir = None, as_json: _Json = False) -> None:
    """List the runs that were recorded, the newest last; show one; compare two."""
    if context.invoked_subcommand is not None:
        context.obj = run_dir
        return
    parent = _parent(run_dir)
    found = []
    for folder in run_records.all_in(parent):
        try:
            found.append(read(folder))
        except RecordError as error:
            print(f"hocket: left out: {error}", file=sys.stderr)
    if as_json:
        _print_json([_brief(run) for run in found])
    elif not found:
        print(f"No runs in {parent}. Each hocket run adds one; --run-dir names another folder.")
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(*show.table(found, width), sep="\n")


@app.command("show")
def show_one(context: typer.Context, run: _Id = "last", run_dir: _RunDir = None, as_json: _Json = False) -> None:
    """Everything about one run: its facts, speed, metrics, events and end."""
    found = read(run_records.find(_parent(run_dir or context.obj), run))
    if as_json:
        _print_json(_whole(found))
    else:
        print(*show.details(found), sep="\n")


@app.command()
def compare(context: typer.Context, first: _Id, second: _Id, run_dir: _RunDir = None, as_json: _Json = False) -> None:
    """Two runs side by side: what differs in configuration, then speed, then metrics."""
    parent = _parent(run_dir or context.obj)
    a, b = read(run_records.find(parent, first)), read(run_records.find(parent, second))
    if as_json:
        different = {name: {"a": ours, "b": theirs} for name, ours, theirs in show.differences(a, b)}
        _print_json({"differences": different, "a": _whole(a), "b": _whole(b)})
    else:
        print(*show.compare(a, b), sep="\n")


def _parent(run_dir: str | None) -> Path:
    return Path(run_dir or config.told().get("run-dir") or config.SETTINGS["run-dir"].default)


def _brief(run: RecordedRun) -> dict[str, Any]:
    return {
        "id": run.id,
        "started": run.fact("run", "started"),
        "script": run.fact("run", "script"),
        "workers": run.fact("run", "workers"),
        "strategy": run.strategy,
        "seconds": run.seconds,
        "state": run.state,
        "status": run.status,
        "metrics": {name: metric.last for name, metric in run.metrics.items()},
    }


def _whole(run: RecordedRun) -> dict[str, Any]:
    metrics = {
        name: {**dataclasses.asdict(metric), "best": show.best(name, metric)} for name, metric in run.metrics.items()
    }
    more = {"reason": run.reason, "folder": str(run.folder), "facts": run.facts, "ranks": run.ranks}
    return {**_brief(run), **more, "speed": dataclasses.asdict(run.speed), "metrics": metrics, "events": run.events}


def _print_json(value: Any) -> None:
    print(json.dumps(_finite(value), indent=1))


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity; null takes their place."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list) else value
