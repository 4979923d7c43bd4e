"""The actor that has an agent on a node of a Ray cluster; it travels as a definition, so Ray needs no Hocket there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def make_actor(
    ray: Any,
    bundles: Sequence[tuple[Any, int]],
    call: bytes,
    environment: dict[str, str],
    gpus: float,
    files: Sequence[str],
) -> tuple[Any, Any]:
    """Start an actor in the first of ``bundles``, and in it an agent; waits for nothing.

    Args:
        ray: Ray, connected.
        bundles: The placement groups, and the numbers of the bundles there, that the job has on the node.
        call: What the agent reads: whom to dial.
        environment: Variables for the agent and its workers; PYTHONPATH comes after Ray's own.
        gpus: What Ray reserves for each worker; the workers see those GPUs alone.
        files: Names of files that are wanted from the working folder when the agent has ended.

    Returns:
        The actor, and what it gives when the agent has ended: the agent's last words, and files by name.
    """
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    class HocketAgent:
        def gpus(self) -> list[int]:
            import ray

            return list(ray.get_gpu_ids())

        def run(
            self, call: bytes, environment: dict[str, str], files: Sequence[str], *gpus: list[int]
        ) -> tuple[str, dict[str, bytes]]:
            """Have an agent, which ends with this process; its last words, and the files that it has left."""
            import os
            import subprocess
            import sys
            from pathlib import Path

            own = {**os.environ, **environment}
            paths = (os.environ.get("PYTHONPATH"), environment["PYTHONPATH"])
            own["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            if gpus:
                own["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(str(gpu) for each in gpus for gpu in each))
            begin = (
                "import signal; from hocket.launch import dialing, leftovers; "
                f"leftovers.end_with_parent({os.getpid()}, signal.SIGKILL); dialing.main()"
            )
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", begin], env=own, stdin=subprocess.PIPE, stderr=subprocess.PIPE
            )
            words = process.communicate(call)[1].decode(errors="replace")[-2000:]
            return words, {name: Path(name).read_bytes() for name in files if Path(name).exists()}

    def start(group: Any, bundle: int) -> Any:
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        return ray.remote(HocketAgent).options(num_cpus=0, num_gpus=gpus, scheduling_strategy=place).remote()

    actor = start(*bundles[0])
    others = [start(*bundle) for bundle in bundles[1:]] if gpus else []  # each has GPUs of its own
    seen = [each.gpus.remote() for each in (actor, *others)] if gpus else []
    return actor, actor.run.remote(call, environment, tuple(files), *seen)
