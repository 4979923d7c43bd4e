"""Checks of what is installed: Python, Hocket, the packages that it needs, torch with its backends, and the GPUs.

Run as a program, this module imports torch, tries it out and prints what it found as JSON: an import may crash.
"""

from __future__ import annotations

import contextlib
import io
import json
import platform
import re
import shutil
import signal
import subprocess
import sys
import warnings
from typing import Any

from hocket import __version__, config
from hocket.lab.doctor.findings import Finding, note, ok, wrong
from hocket.launch import leftovers, machine

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 10)
_NEEDED = {  # packages that Hocket depends on, the oldest that will do, and what they are for
    "safetensors": ((0, 4), "checkpoints"),
    "typer": ((0, 12), "the command line"),
    "rich": ((13,), "progress and tables on a terminal"),
    "cryptography": ((42,), "TLS between workers and servers"),
}
_EXTRAS = {"matplotlib": "plots", "tensorboard": "--tensorboard"}
_INSTALL = f"pip install 'torch>={'.'.join(map(str, OLDEST_TORCH))}'"


def packages() -> list[Finding]:
    """Python, Hocket and the packages that it needs, without importing them."""
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


class TorchImport:
    """The process that imports torch; it runs while other things are looked at, and is killed with this one."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hocket.lab.doctor.software_check"], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            preexec_fn=leftovers.die_with_parent(),  # noqa: PLW1509 - one thread
        )  # fmt: skip

    def facts(self, seconds: float) -> dict[str, Any] | str:
        """What it found, or why it did not; waits at most so long, and ends it."""
        try:
            out, said = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return f"its import took more than {seconds:.0f} s"
        last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
        status = self._process.returncode
        if status < 0:
            return f"its import ended by {signal.Signals(-status).name}" + (f" ({last})" if last else "")
        try:
            facts = json.loads(out.splitlines()[-1])
        except (ValueError, IndexError):
            return last or f"its import ended with status {status}"
        return facts if isinstance(facts, dict) else "its import gave no answer"


def judge_torch(facts: dict[str, Any] | str) -> list[Finding]:
    """What to say about torch, Gloo, NCCL and GPUs."""
    if isinstance(facts, str):
        return [_failed(facts), *_gpu_without_torch()]
    return [_torch(facts), *_broken_parts(facts), _gloo(facts), _nccl(facts), _gpus(facts)]


def _failed(reason: str) -> Finding:
    installed = machine.version("torch")
    if installed is None:
        return wrong("torch", f"not installed for {sys.executable} ({reason})", _INSTALL)
    if "took more than" in reason:
        remedy = "import torch by hand; a slow network disk? install it on a local one"
    else:
        remedy = f"see what python -c 'import torch' says; install it anew: {_INSTALL} --force-reinstall"
    return wrong("torch", f"{installed} is installed, but cannot be used: {reason}", remedy)


def _torch(facts: dict[str, Any]) -> Finding:
    version = str(facts["version"])
    build = next((f"{way} {facts[key]}" for way, key in (("CUDA", "cuda build"), ("ROCm", "rocm build")) if facts[key]),
                 "CPU")  # fmt: skip
    seen = f"{version}, {build} build"
    if numbers(version) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return wrong("torch", f"{seen}, and Hocket needs {oldest} or newer", _INSTALL)
    if facts["sum"] != 64.0**3:
        return wrong("torch", f"{seen}; a product of matrices came out wrong", f"install it anew: {_INSTALL}")
    return ok("torch", seen)


def _broken_parts(facts: dict[str, Any]) -> list[Finding]:
    return [
        wrong(name, f"is installed, but cannot be imported: {facts[name]}", f"pip install --force-reinstall {name}")
        for name in ("safetensors", "cryptography")
        if facts.get(name)
    ]


def _gloo(facts: dict[str, Any]) -> Finding:
    if facts["gloo"]:
        return ok("gloo", "there")
    return wrong("gloo", "this build of torch is without it: no job over several hosts",
                 f"use an official build: {_INSTALL}")  # fmt: skip


def _nccl(facts: dict[str, Any]) -> Finding:
    if facts["nccl"]:
        return ok("nccl", f"there{', ' + facts['nccl version'] if facts.get('nccl version') else ''}")
    if not facts["gpus"]:
        return ok("nccl", "not there, and not needed without GPUs")
    return note("nccl", "this build of torch is without it: GPUs exchange through the processor's memory",
                "use an official build of torch for CUDA")  # fmt: skip


def _gpus(facts: dict[str, Any]) -> Finding:
    there, visible = machine.gpus(), list(facts["gpus"])
    if facts["gpu trouble"] and (there or visible):
        return wrong("gpu", f"{there or len(visible)} there, but torch says: {facts['gpu trouble']}",
                     "see nvidia-smi; update the driver, or install a torch built for it")  # fmt: skip
    if visible:
        kinds = {name: visible.count(name) for name in visible}
        return ok("gpu", ", ".join(f"{count} × {name}" for name, count in kinds.items()))
    if there:
        return note("gpu", f"{there} there, but torch is built for the CPU alone",
                    "install the CUDA build of torch to use them (pytorch.org, Get started)")  # fmt: skip
    why = "CUDA_VISIBLE_DEVICES lets none be seen" if config.visible_gpus() == [] else "none"
    return next(iter(_gpu_without_torch()), ok("gpu", f"{why}: training runs on the processor"))


def _gpu_without_torch() -> list[Finding]:
    """A driver that is installed and does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, "-L"], capture_output=True, text=True, errors="replace", timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = "no answer within 10 s" if isinstance(error, subprocess.TimeoutExpired) else str(error)
    else:
        if done.returncode == 0:
            return []
        said = (done.stdout + done.stderr).split("\n")
        reason = next((line.strip() for line in said if line.strip()), f"status {done.returncode}")
    remedy = "load or install the NVIDIA driver anew (after an update of the kernel: restart the machine)"
    return [wrong("gpu", f"{program} failed: {reason}", remedy)]


def gather() -> dict[str, Any]:
    """What torch is and can do here; imports it."""
    import torch

    facts: dict[str, Any] = {
        "version": torch.__version__,
        "cuda build": torch.version.cuda,
        "rocm build": torch.version.hip,
        "threads": torch.get_num_threads(),
        "gloo": False,
        "nccl": False,
        "sum": float((torch.ones(64, 64) @ torch.ones(64, 64)).sum()),
        "gpus": [],
        "gpu trouble": "",
    }
    distributed = torch.distributed
    if distributed.is_available():
        facts["gloo"], facts["nccl"] = distributed.is_gloo_available(), distributed.is_nccl_available()
    if torch.version.cuda or torch.version.hip:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            _look_at_gpus(torch, facts)
        if not facts["gpus"] and not facts["gpu trouble"] and heard:
            facts["gpu trouble"] = str(heard[-1].message)
    facts["safetensors"] = _import_error("safetensors.torch")
    facts["cryptography"] = _import_error("cryptography.x509")
    return facts


def _look_at_gpus(torch: Any, facts: dict[str, Any]) -> None:
    if not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            facts["gpu trouble"] = _first_line(error)
        return
    if facts["nccl"]:
        facts["nccl version"] = ".".join(map(str, torch.cuda.nccl.version()))
    for number in range(torch.cuda.device_count()):
        facts["gpus"].append(torch.cuda.get_device_name(number))
        try:
            assert float(torch.ones(1000, device=f"cuda:{number}").sum()) == 1000.0, "a sum on it was wrong"
        except (RuntimeError, AssertionError) as error:
            facts["gpu trouble"] = f"GPU {number}: {_first_line(error)}"


def _import_error(name: str) -> str:
    """Why a module cannot be imported; empty if it can, or is not there at all."""
    try:
        __import__(name)
    except ModuleNotFoundError:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {_first_line(error)}"
    return ""


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):  # whatever libraries print is no part of the answer
        found = gather()
    sys.stdout.write("\n" + json.dumps(found) + "\n")
