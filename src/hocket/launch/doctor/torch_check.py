"""Checks of torch, its backends and the GPUs, from what a child process that imports it has found."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from typing import Any

from hocket import config
from hocket.launch import leftovers, machine
from hocket.launch.doctor.finding import Finding, note, ok, wrong
from hocket.launch.doctor.software import OLDEST_TORCH, numbers

_INSTALL = f"pip install 'torch>={'.'.join(map(str, OLDEST_TORCH))}'"


class Child:
    """The process that imports torch; it runs while other things are looked at, and is killed with this one."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hocket.launch.doctor.torch_facts"], stdin=subprocess.DEVNULL,
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


def judge(facts: dict[str, Any] | str) -> list[Finding]:
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
