"""``hocket trace``: what a timeline says, in a few lines; repairs one that was cut off, and draws one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hocket.errors import RecordError, UsageError
from hocket.lab.trace import trace_file as traces
from hocket.lab.trace import trace_view


def trace(
    file: Annotated[Path, typer.Argument(help="What hocket run --timeline has made.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    png: Annotated[
        Path | None, typer.Option("--png", help="Draw a few batches into this file (needs matplotlib).")
    ] = None,
    begin: Annotated[
        float | None, typer.Option("--from", help="Where the drawing begins, in seconds. [default: in the middle]")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", min=1e-6, help="How much of it is drawn. [default: three batches]")
    ] = None,
) -> None:
    """Say what was hidden, who waited for whom, which rank is the slowest, and where the largest gaps are.

    A timeline that was cut off, because the launcher was killed, is repaired.
    """
    if png is None and (begin is not None or seconds is not None):
        raise UsageError("--from and --seconds are for drawing: add --png timeline.png")
    found = traces.read(file)
    if found.is_being_written:
        print(f"hocket: {file} is still being written: this is what there is so far", file=sys.stderr)
    elif found.was_cut:
        try:
            traces.repair(file, found)
            print(f"hocket: {file} was cut off, and is repaired: {len(found.events):,} events", file=sys.stderr)
        except RecordError as error:
            print(f"hocket: {error}", file=sys.stderr)
    if png is not None:
        trace_view.draw(found, png, begin, seconds)
    if as_json:
        print(json.dumps(trace_view.numbers(found), indent=1))
    else:
        print(*trace_view.lines(found, file), sep="\n")
        if png is not None:
            print(f"\nDrawn: {png}")
