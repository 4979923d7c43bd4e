"""What a user wants of a Ray cluster: places for workers and servers, and what Ray brings there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.errors import UsageError
from hocket.launch import machine

PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True)
class RayTexts:
    """What the user wants of the cluster, as flags say it.

    Attributes:
        workers: How many workers: a number, ``auto`` for all that there is room for, or a range.
        address: The address of the cluster; None is the one that this machine is in, or RAY_ADDRESS.
        per_worker: What Ray reserves for a worker, as JSON.
        per_server: What Ray reserves for a server, as JSON.
        placement: How Ray spreads them over nodes.
        runtime_env: What Ray brings to the nodes beside the working folder, as JSON or the name of a file with it.
        wait: Seconds to wait for places that the cluster does not have.
    """

    workers: str = "auto"
    address: str | None = None
    per_worker: str = '{"CPU": 1}'
    per_server: str = '{"CPU": 1}'
    placement: str = "PACK"
    runtime_env: str | None = None
    wait: float = 0.0


@dataclass(frozen=True)
class RayPlaces:
    """The same, read: with how many workers to begin, at least, and how many there may be; None is as many as fit."""

    least: int | None
    most: int | None
    servers: int
    address: str | None
    per_worker: dict[str, float]
    per_server: dict[str, float]
    placement: str
    runtime_env: dict[str, Any]
    wait: float


def read_places(texts: RayTexts, servers: int) -> RayPlaces:
    """What the flags mean; a UsageError says what is wrong with one."""
    bounds = machine.worker_bounds(texts.workers)
    least, most = bounds or (machine.number(texts.workers),) * 2
    if texts.placement not in PLACEMENTS:
        raise UsageError(f"--placement {texts.placement}: the choices are {', '.join(PLACEMENTS)}")
    if least != most and texts.placement.startswith("STRICT"):
        raise UsageError(
            f"--placement {texts.placement} needs one number of workers: write -n {most}, not -n {texts.workers}"
        )
    worker, server = _read_amounts("--per-worker", texts.per_worker), _read_amounts("--per-server", texts.per_server)
    brought = _read_runtime_env(texts.runtime_env)
    return RayPlaces(
        least, most, servers, texts.address, worker, server, texts.placement, brought, texts.wait
    )  # fmt: skip


def _read_amounts(flag: str, text: str) -> dict[str, float]:
    """What Ray is to reserve, from the text of ``flag``: a JSON object of numbers."""
    try:
        found = json.loads(text)
        amounts = {name: amount for name, amount in found.items() if isinstance(amount, (int, float))}
        if len(amounts) < max(1, len(found)) or any(amount <= 0 for amount in amounts.values()):
            raise ValueError
    except (ValueError, TypeError, AttributeError):
        raise UsageError(
            f"{flag} {text}: must be what Ray has in numbers, for example {flag} '{{\"CPU\": 2}}'"
        ) from None
    return amounts


def _read_runtime_env(text: str | None) -> dict[str, Any]:
    """The value of ``--runtime-env``: a JSON object, or a file with one."""
    if text is None:
        return {}
    try:
        found = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError
    except (OSError, ValueError):
        raise UsageError(
            f'--runtime-env {text}: must be a JSON object, or a file with one, for example \'{{"pip": ["einops"]}}\''
        ) from None
    return found
