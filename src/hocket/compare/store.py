"""A comparison as plain JSON, in a file that is always whole."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket.compare.results import Comparison, Entry, Point, Result, Target
from hocket.errors import UsageError

RESULTS = "results.json"
VERSION = 1


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Numbers, texts, lists and dictionaries alone; NaN and infinities, which JSON has not, become null."""
    found = _plain({"version": VERSION, **dataclasses.asdict(comparison)})
    assert isinstance(found, dict)
    return found


def from_json(found: Mapping[str, Any]) -> Comparison:
    """The comparison that ``to_json`` has written.

    Raises:
        UsageError: That is none, or of another version.
    """
    if found.get("version") != VERSION:
        raise UsageError(f"version {found.get('version')} of a comparison, but this Hocket reads version {VERSION}")
    values = {key: value for key, value in found.items() if key != "version"}
    entries = tuple(
        Entry(entry["strategy"], entry["workers"], tuple(result_from_json(result) for result in entry["results"]))
        for entry in values["entries"]
    )
    target = Target(**values["target"]) if values["target"] else None
    parts = {"entries": entries, "target": target}
    return Comparison(**{**values, **parts, "arguments": tuple(values["arguments"]), "notes": tuple(values["notes"])})


def result_from_json(found: Mapping[str, Any]) -> Result:
    """One run of it."""
    parts = {
        "staleness": {int(late): count for late, count in found["staleness"].items()},
        "curves": {name: [_point(point) for point in points] for name, points in found["curves"].items()},
        "reached": _point(found["reached"]) if found["reached"] else None,
    }
    return Result(**{**found, **parts})


def save(comparison: Comparison, folder: Path) -> Path:
    """``results.json`` of ``folder``, the old one or the new one at any time."""
    return write(folder / RESULTS, to_json(comparison))


def load(folder: Path) -> Comparison:
    """What ``save`` has written there.

    Raises:
        UsageError: That is no comparison.
    """
    try:
        return from_json(read(folder / RESULTS))
    except (KeyError, TypeError, AttributeError, ValueError):
        raise UsageError(f"{folder / RESULTS} is no comparison; remove it, or choose another folder") from None


def write(path: Path, value: Mapping[str, Any]) -> Path:
    """Replace a file by this JSON, at once: whoever is killed here leaves the old one.

    Raises:
        UsageError: It cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(_plain(value), indent=1, allow_nan=False) + "\n")
        beside.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}; make room there, or choose another folder") from None
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
    return path


def read(path: Path) -> dict[str, Any]:
    """The other way.

    Raises:
        UsageError: The file cannot be read, or is no JSON object.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}; remove it, or choose another folder with --out") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} is no comparison; remove it, or choose another folder with --out")
    return found


def _point(found: Mapping[str, Any]) -> Point:
    value = found["value"]
    return Point(found["seconds"], found["samples"], math.nan if value is None else value)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
