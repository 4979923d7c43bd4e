"""The script that a user names, or the module: found before anything starts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from hocket.errors import UsageError


def command(script: str, args: list[str], module: bool) -> tuple[str, ...]:
    """What a worker runs: the script, or ``-m`` and the module, and its arguments."""
    if module:
        if find(script, module) is None:
            raise UsageError(f"no module named {script!r} can be found from {Path.cwd()}: check its name")
        return ("-m", script, *args)
    if not Path(script).is_file():
        raise UsageError(f"no script {script!r} in {Path.cwd()}: check its path (or use -m for a module)")
    return (script, *args)


def find(script: str, module: bool) -> Path | None:
    """Its file; of a module that has none, such as a namespace, the working folder."""
    if not module:
        return Path(script)
    sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(script)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    return Path(spec.origin) if spec.has_location and spec.origin else Path.cwd()
