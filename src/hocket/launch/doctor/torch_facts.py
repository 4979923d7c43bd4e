"""Imports torch and tries it out, in a process of its own that may crash; prints what it found as JSON."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings
from typing import Any


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
