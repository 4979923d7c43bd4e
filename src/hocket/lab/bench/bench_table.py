"""How the rows of a benchmark are printed."""

from __future__ import annotations

import json
import sys
from typing import Any

from hocket.launch import machine


def here() -> str:
    """This machine, in words."""
    return f"{machine.cores()} cores ({machine.cpu()})"


def print_json(rows: list[dict[str, Any]], **facts: object) -> None:
    """Print rows, and what they were measured on."""
    print(json.dumps({**facts, "cores": machine.cores(), "cpu": machine.cpu(), "rows": rows}, indent=1))


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows; the name of a column is in words up to the last underscore, and then a unit."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    columns = [key for key in rows[0] if not key.endswith("_ratio")]
    for key in columns:
        words, _, unit = key.rpartition("_")
        text = isinstance(rows[0][key], str)
        table.add_column(key if text else f"{words}\n{unit}", justify="left" if text else "right")
    for row in rows:
        table.add_row(*(cell(row, key) for key in columns))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if any(key.endswith("_ratio") for key in rows[0]):
        print("Medians over the rounds; × is how many times faster than PyTorch's own way, within a round.")


def cell(row: dict[str, Any], key: str) -> str:
    """A value with its ratio, if there is one."""
    if isinstance(row[key], str):
        return str(row[key])
    ratio = row.get(f"{key.rpartition('_')[0]}_ratio")
    return f"{row[key]:,.1f}" + (f" ({ratio:.2f}×)" if ratio else "")
