"""A real job: two workers here, or one on every host, that all-reduce a little and see whether the result is right.

``run`` starts it and judges what comes of it, without torch. Run as a program, this module is what each worker does.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hocket import config
from hocket.lab.doctor.findings import Finding, note, ok, wrong
from hocket.launch import leftovers, machine
from hocket.launch.engines.ssh import SshEngine
from hocket.launch.host_list import Host, Wishes
from hocket.launch.signals import Signals

_SECONDS = 60.0  # seconds for the whole job; most of it is the import of torch
_SLOW = 5e6  # bytes per second below which 4 MiB take too long to be tried
_MARK = "hocket-trial"  # before the result, in a line of the output
_TIMES = 20
_ENOUGH = 0.5  # seconds for one size, except that each is done twice
_KEPT = {"transport"}  # settings of the user's that the trial has too
_NAME = "all-reduce"


def run(wishes: Wishes, fit: Sequence[Host], rate: float, signals: Signals, *, alone: bool) -> Finding:
    """Run it to its end, and say what came of it; nothing is left of it afterwards.

    Args:
        wishes: The hosts.
        fit: Those of them that can take part.
        rate: Bytes per second of the slowest link.
        signals: Collects those that ask for the end.
        alone: Whether it is this machine alone.
    """
    if len(fit) < len(wishes.hosts):
        what = "here" if alone else f"for {len(wishes.hosts) - len(fit)} of the hosts cannot take part"
        return note(_NAME, f"not tried {what}", "put right what is wrong above, then try again")
    free = machine.most_workers(machine.free_memory())
    if alone and free is not None and free < 2:
        return note(_NAME, "not tried, for there is no memory for two workers", "end other programs, then try again")
    begun = time.monotonic()
    status, out, said = _finish(_start(_command(wishes, alone, rate)), signals)
    workers = "2 workers here" if alone else f"a worker on each of {len(fit)} hosts"
    if status is None:
        seen = f"{workers} did not finish within {_SECONDS:.0f} s{_last(said)}"
        return wrong(_NAME, seen, "see where they hang: hocket run -n 2 of a script that calls hocket.init()")
    line = next((line for line in out.splitlines() if _MARK in line), "")
    if status or not line:
        return wrong(_NAME, f"{workers} failed with status {status}{_last(said)}",
                     "put right what is wrong above; else see what hocket run of a script of yours says")  # fmt: skip
    seconds: dict[str, float] = json.loads(line.partition(_MARK)[2])["seconds"]
    times = ", ".join(f"{_size(int(size))} in {value * 1e3:.2f} ms" for size, value in seconds.items())
    return ok(_NAME, f"right on {workers}: {times} ({time.monotonic() - begun:.1f} s with their start)")


def _command(wishes: Wishes, alone: bool, rate: float) -> list[str]:
    flags = ["-n", "2"]
    engine = wishes.engine
    if not alone and isinstance(engine, SshEngine):
        flags = ["-H", ",".join(_slot(host) for host in wishes.hosts), "--ssh", engine.ssh]
        flags += ["--python", engine.python] if engine.python else []
        flags += ["--interface", wishes.interface] if wishes.interface else []
    most = 1 << (22 if rate > _SLOW else 16)
    job = ["-m", "hocket.lab.doctor.small_allreduce", str(1 << 12), str(most)]
    return [sys.executable, "-P", "-m", "hocket.launch.cli", "run", "--no-record", *flags, *job]


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def _slot(host: Host) -> str:
    return f"[{host.name}]:1" if ":" in host.name and "@" not in host.name else f"{host.name}:1"


def _start(command: list[str]) -> subprocess.Popen[str]:
    """In a folder that every host has, with nothing of the user's settings that has no place in a trial."""
    own = {setting.variable for name, setting in config.SETTINGS.items() if name not in _KEPT}
    env = {name: value for name, value in config.environment().items() if name not in own}
    env.update(PWD="/", HOCKET_TIMEOUT=f"{_SECONDS / 2:.0f}")
    if env.get("PYTHONPATH"):
        env["PYTHONPATH"] = os.pathsep.join(str(Path(p).absolute()) for p in env["PYTHONPATH"].split(os.pathsep) if p)
    return subprocess.Popen(
        command, cwd="/", env=env, text=True, errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=leftovers.die_with_parent(),  # noqa: PLW1509 - one thread
    )  # fmt: skip


def _finish(process: subprocess.Popen[str], signals: Signals) -> tuple[int | None, str, str]:
    """Its status (None if it had to be ended), and what it wrote to each stream."""
    deadline, asked = time.monotonic() + _SECONDS, 0.0
    while True:
        try:
            out, said = process.communicate(timeout=0.2)
            return None if asked else process.returncode, out, said
        except subprocess.TimeoutExpired:
            now = time.monotonic()
            if not asked and (signals.received or now > deadline):
                asked = now
                process.send_signal(signal.SIGTERM)  # the launcher ends its workers
            elif asked and now > asked + 8:
                process.kill()  # its guardian ends them then


def _last(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return f": {lines[-1].removeprefix('hocket: ')}" if lines else ""


def main() -> None:
    """Each argument is a size in bytes; rank 0 prints the median time of each."""
    from hocket.job.worker import init, rank, size

    init()
    found = {argument: _measure(int(argument)) for argument in sys.argv[1:]}
    if rank() == 0:
        print(_MARK, json.dumps({"size": size(), "seconds": found}))


def _measure(nbytes: int) -> float:
    import torch

    from hocket.job.collectives import allreduce, barrier
    from hocket.job.worker import rank, size

    base = torch.arange(nbytes // 4, dtype=torch.float32) % 97
    expected = size() * base + size() * (size() - 1) / 2
    taken: list[float] = []
    more = True
    while len(taken) < 2 or (more and len(taken) < _TIMES):
        barrier()
        begun = time.perf_counter()
        total = allreduce(base + rank(), "sum")
        taken.append(time.perf_counter() - begun)
        if not torch.equal(total, expected):
            first = int((total != expected).nonzero()[0])
            raise SystemExit(f"the sum of {nbytes:,} bytes is {total[first]} instead of {expected[first]} at {first}")
        more = float(allreduce(torch.tensor(sum(taken)), "max")) < _ENOUGH  # all have to agree
    return statistics.median(taken[1:])  # the first one makes buffers


if __name__ == "__main__":
    main()
