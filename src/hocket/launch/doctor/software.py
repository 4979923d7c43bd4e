"""Checks of what is installed, without importing it: Python, Hocket and the packages that it needs."""

from __future__ import annotations

import platform
import re
import sys

from hocket import __version__
from hocket.launch import machine
from hocket.launch.doctor.finding import Finding, note, ok, wrong

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 10)
_NEEDED = {  # packages that Hocket depends on, the oldest that will do, and what they are for
    "safetensors": ((0, 4), "checkpoints"),
    "typer": ((0, 12), "the command line"),
    "rich": ((13,), "progress and tables on a terminal"),
    "cryptography": ((42,), "TLS between workers and servers"),
}
_EXTRAS = {"matplotlib": "plots", "tensorboard": "--tensorboard"}


def check() -> list[Finding]:
    """All of them."""
    needed = [_package(name, oldest, purpose) for name, (oldest, purpose) in _NEEDED.items()]
    return [_python(), ok("hocket", __version__), *needed, *(_extra(name) for name in _EXTRAS)]


def numbers(version: str) -> tuple[int, ...]:
    """The numbers with which a version begins: ``2.13.0+cpu`` is 2, 13, 0."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _python() -> Finding:
    version, oldest = platform.python_version(), ".".join(map(str, OLDEST_PYTHON))
    place = f"in the virtual environment {sys.prefix}" if sys.prefix != sys.base_prefix else f"of {sys.prefix}"
    seen = f"{version} {place}" + ("" if sys.prefix != sys.base_prefix else ", no virtual environment")
    if sys.version_info[:2] < OLDEST_PYTHON:
        return wrong("python", seen, f"install Python {oldest} or newer, and Hocket for it")
    if sys.implementation.name != "cpython":
        return wrong("python", f"{seen} ({sys.implementation.name})", "use CPython: PyTorch is made for it alone")
    return ok("python", seen)


def _package(name: str, oldest: tuple[int, ...], purpose: str) -> Finding:
    version, least = machine.version(name), ".".join(map(str, oldest))
    remedy = f"pip install '{name}>={least}'"
    if version is None:
        return wrong(name, f"not installed, and needed for {purpose}", remedy)
    if numbers(version) < oldest:
        return wrong(name, f"{version}, and {purpose} needs {least} or newer", remedy)
    return ok(name, version)


def _extra(name: str) -> Finding:
    version = machine.version(name)
    if version is None:
        return note(name, "not installed", f"pip install {name}, if you want {_EXTRAS[name]}")
    return ok(name, version)
