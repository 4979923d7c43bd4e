"""What an agent answers before workers start: what its host is, what is there, and whom it reaches."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket import __version__, config
from hocket.launch import machine
from hocket.launch.local import reserve_port
from hocket.transport import interfaces

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


def hello() -> dict[str, Any]:
    """What this host is."""
    return {
        "hocket": __version__,
        "python": platform.python_version(),
        "torch": machine.version("torch"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "hostname": socket.gethostname(),
        "cores": machine.cores(),
        "gpus": machine.gpus(),
        "free memory": machine.free_memory(),
        "time": time.time(),
        "network": _network(),
        "ssh address": config.ssh_address(),
    }


def check(folder: str, command: list[str], base: Mapping[str, str]) -> dict[str, Any]:
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


class Reaching:
    """This host's part in finding out which addresses lead where."""

    def __init__(self, secret: bytes, number: int) -> None:
        self._secret = secret
        self._listener: interfaces.Listener | None = interfaces.Listener(secret, str(number))
        self._reserved: socket.socket | None = None

    def addresses(self, interface: str | None) -> dict[str, Any]:
        """Where this host can perhaps be reached."""
        assert self._listener is not None
        known = list(dict.fromkeys(name for name, _ in interfaces.addresses()))
        return {"addresses": interfaces.addresses(interface), "interfaces": known, "port": self._listener.port}

    def reach(self, targets: list[list[Any]], seconds: float) -> dict[str, Any]:
        """Try all of ``targets`` (number of the host, address, port); those that lead there."""
        wanted = [interfaces.Target(str(number), str(address), int(port)) for number, address, port in targets]
        found = interfaces.try_addresses(wanted, self._secret, seconds)
        return {"found": [[int(target.identity), target.address] for target in found]}

    def reserve(self, address: str) -> dict[str, Any]:
        """A port on this host for MASTER_PORT, kept until ``close``."""
        self._reserved = reserve_port(address)
        return {"port": self._reserved.getsockname()[1]}

    def stop_listening(self) -> None:
        """Others have tried; threads have ended then, so that workers may be started."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def close(self) -> None:
        """Let go of the ports."""
        self.stop_listening()
        if self._reserved is not None:
            self._reserved.close()


def _network() -> str:
    """The same on hosts that share one network stack: names of one machine, say."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.stat('/proc/self/ns/net').st_ino}"  # noqa: PTH116
    except OSError:
        return socket.gethostname()
