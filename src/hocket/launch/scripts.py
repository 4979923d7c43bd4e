"""The script or module that workers run: found here before anything starts, looked for and compared on other hosts."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket.errors import UsageError

# Prints the file of a module. Packages around it are imported only if it is not found without that.
_FIND = """
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec

def walk(name):
    before, _, last = name.rpartition(".")
    if not before:
        return find_spec(name)
    around = walk(before)
    where = around and around.submodule_search_locations
    return where and PathFinder.find_spec(name, where)

def look(name):
    try:
        found = walk(name)
    except Exception:
        found = None
    return found or find_spec(name)

spec = look(sys.argv[1])
if spec is None:
    raise SystemExit(3)
if spec.submodule_search_locations is not None:
    spec = look(sys.argv[1] + ".__main__") or spec
print("\\n" + (spec.origin if spec.has_location else ""))
"""


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
    """The file of the script or module; the working folder for a module without one, such as a namespace."""
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


def look_for(folder: str, command: list[str], base: Mapping[str, str]) -> dict[str, Any]:
    """Whether the working folder and the script or module are there, and what the latter contains.

    Args:
        folder: The working folder.
        command: The script, or ``-m`` and a module; arguments may follow.
        base: The environment in which a module is looked for.
    """
    if not Path(folder).is_dir():
        return {"folder": False}
    path = find_module(command[1], folder, base) if command[0] == "-m" else str(Path(folder, command[0]))
    return {"folder": True, "digest": None if path is None else digest(path)}


def find_module(name: str, folder: str, base: Mapping[str, str]) -> str | None:
    """The file of a module, or an empty text if it has none; None if it cannot be found."""
    try:
        found = subprocess.run(
            [sys.executable, "-c", _FIND, name], cwd=folder, env=base, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.splitlines()[-1]


def digest(path: str) -> str | None:
    """A digest of a file's contents; None if it cannot be read, empty where there is none."""
    if not path:
        return ""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None
