"""Training from inside Ray: ``hocket.ray.run(train, n=4)`` in a driver, a notebook or a task."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hocket.launch.function import launch_elsewhere, take_settings
from hocket.specs import Spec


def run(
    fn: Callable[..., Any],
    *args: Any,
    n: int | str = "auto",
    address: str | None = None,
    per_worker: Mapping[str, float] | None = None,
    per_server: Mapping[str, float] | None = None,
    placement: str = "PACK",
    runtime_env: Mapping[str, Any] | None = None,
    wait: float = 0.0,
    strategy: str | Spec | None = None,
    **options: Any,
) -> Any:
    """Call ``fn(*args)`` on ``n`` workers on the nodes of a Ray cluster, and return what it returns on rank 0.

    Blocks until the job has ended; what workers print appears meanwhile, with the rank before each line. Functions,
    classes and plain data of the script or notebook go along; modules have to be on the nodes, or in ``runtime_env``.

    Args:
        fn: See ``hocket.launch``.
        *args: See ``hocket.launch``.
        n: How many workers; ``"auto"``, as many as there is room for; or ``"2..8"``, as many as the cluster allows.
        address: The cluster; by default the one to which this process is connected, or that of this machine.
        per_worker: What Ray reserves for each worker: ``{"CPU": 2, "GPU": 1}``; one CPU by default.
        per_server: The same for each parameter server.
        placement: ``"PACK"``, ``"SPREAD"``, ``"STRICT_PACK"`` or ``"STRICT_SPREAD"``.
        runtime_env: What Ray brings to the nodes: ``{"py_modules": ["mine"], "pip": […]}``.
        wait: Seconds to wait for places that the cluster does not have.
        strategy: See ``hocket.launch``.
        **options: See ``hocket.launch``.

    Raises:
        UsageError: see ``hocket.launch``.
        JobError: a worker has failed, or the cluster has no room; the message is what ``hocket run`` would show.
    """
    settings = take_settings(strategy, options)

    def flags(folder: Path) -> list[str]:
        brought = {**(runtime_env or {}), "working_dir": str(folder)}
        given = {
            "--address": address or _connected(),
            "--per-worker": json.dumps(dict(per_worker)) if per_worker is not None else None,
            "--per-server": json.dumps(dict(per_server)) if per_server is not None else None,
            "--placement": placement,
            "--runtime-env": json.dumps(brought),
            "--wait": str(wait),
        }
        pairs = [(flag, text) for flag, text in given.items() if text is not None]
        return ["--on", "ray", *(part for pair in pairs for part in pair)]

    return launch_elsewhere(fn, args, options, str(n), settings, flags)


def _connected() -> str | None:
    """The address of the cluster to which this process is connected, if it is."""
    try:
        import ray
    except ImportError:
        return None  # the launcher says so
    return str(ray.get_runtime_context().gcs_address) if ray.is_initialized() else None
