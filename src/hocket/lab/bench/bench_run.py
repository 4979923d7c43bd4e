"""How ``hocket bench`` runs a benchmark: on this machine, on a rig that is made for it, or on hosts by name."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hocket.errors import UsageError
from hocket.lab.bench.bench_table import here, print_json, print_table
from hocket.lab.rig import Rig
from hocket.launch import machine, remote, supervisor
from hocket.launch.engines.ssh import SshEngine
from hocket.launch.environment import Job
from hocket.launch.host_list import Host, Wishes
from hocket.observe.timeline import Timeline


def run_bench(
    name: str,
    workers: str,
    as_json: bool,
    *runs: list[str],
    rig: Rig | None = None,
    where: str = "one host",
    settings: dict[str, str] | None = None,
) -> None:
    """Run the benchmark once for each list of arguments, here or on all hosts of ``rig``, and print all their rows."""
    count = machine.worker_count(workers)
    hosts = None if rig is None else _wishes(rig, count)
    rows = [row for args in runs for row in measure(bench_job(name, count, **settings or {}), args, hosts)]
    if as_json:
        print_json(rows, workers=count, where=where)
    else:
        crew = f"{count} worker{'s' if count > 1 else ''}"
        place = "" if where == "one host" else f" ({where})"
        print_table(f"{name}, {crew}{place} on {here()}", rows)


def run_on(
    name: str,
    workers: str,
    hosts: int,
    rate: str | None,
    as_json: bool,
    args: list[str],
    trunk: str | None = None,
) -> None:
    """Run the benchmark on this machine or, with ``hosts``, on a rig that is made for it."""
    if rate is not None and not hosts:
        raise UsageError(f"--rate {rate} limits the hosts of a rig: say how many with --hosts 4")
    if not hosts:
        run_bench(name, workers or "2", as_json, args)
        return
    count = int(workers or "1") if (workers or "1").isdecimal() else 0
    if count < 1:
        raise UsageError(f"-n {workers}: with --hosts, the number of workers on each host, from 1")
    where = f"{hosts} hosts × {count}, {network(rate, trunk)}"
    with Rig.up(hosts, rate, name=f"bench{os.getpid()}", trunk=trunk) as rig:
        run_bench(name, str(count * hosts), as_json, args, rig=rig, where=where)


def network(rate: str | None, trunk: str | None) -> str:
    """What joins the hosts of a rig, in words."""
    sites = f", two sites with {trunk}/s between them" if trunk else ""
    return (f"{rate}/s" if rate else "unlimited") + sites


def on_rig(name: str, rig: Rig, workers: int, args: list[str]) -> list[dict[str, Any]]:
    """The rows of a benchmark on all hosts of ``rig``."""
    return measure(bench_job(name, workers), args, _wishes(rig, workers))


def run_under_mpi(name: str, workers: str, as_json: bool, args: list[str]) -> None:
    """Run the benchmark on this machine in processes of Open MPI, which are workers of Hocket, too."""
    if shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None:
        raise UsageError(
            "--mpi needs Open MPI and mpi4py: apt-get install openmpi-bin libopenmpi-dev, then pip install mpi4py"
        )
    count = machine.worker_count(workers)
    with tempfile.TemporaryDirectory(prefix="hocket-bench-") as folder, socket.create_server(("127.0.0.1", 0)) as free:
        result, port = Path(folder) / "rows.json", free.getsockname()[1]
        free.close()
        made = [sys.executable, "-m", "hocket.lab.bench.bench_worker", name, str(result), *args]
        command = ["mpirun", "-n", str(count), "--oversubscribe", "--bind-to", "none"]
        command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        threads = str(max(1, machine.cores() // count))
        told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": threads}
        status = subprocess.run([*command, *made], env=os.environ | told, check=False).returncode
        if status:
            sys.exit(status)
        rows = json.loads(result.read_text())
    if as_json:
        print_json(rows, workers=count, where="one host")
    else:
        print_table(f"{name}, {count} workers on {here()}", rows)


def bench_job(name: str, workers: int, **settings: str) -> Job:
    """Workers that run the benchmark of this name; without encryption unless that is asked for, as Gloo is."""
    settings = {"tls": os.environ.get("HOCKET_TLS", "off")} | settings
    return Job(("-m", "hocket.lab.bench.bench_worker", name), workers, settings)


def measure(
    job: Job, args: list[str], hosts: Wishes | None = None, timeline: Timeline | None = None
) -> list[dict[str, Any]]:
    """The rows that a job writes."""
    with tempfile.TemporaryDirectory(prefix="hocket-bench-") as folder:
        result = Path(folder) / "rows.json"
        job = dataclasses.replace(job, command=(*job.command, str(result), *args))
        if hosts is None:
            status = supervisor.run(job, None, summary=False, timeline=timeline)
        else:
            status = remote.run_on_hosts(job, hosts)
        if status:
            sys.exit(status)
        found: list[dict[str, Any]] = json.loads(result.read_text())
        return found


def _wishes(rig: Rig, workers: int) -> Wishes:
    """All hosts of the rig, which share this machine's cores, with equally many workers on each."""
    each = workers // len(rig.hosts)
    threads = {"OMP_NUM_THREADS": str(max(1, machine.cores() // workers)), "PYTHONPATH": os.pathsep.join(sys.path)}
    hosts = [Host(name, each) for name in rig.hosts]
    return Wishes(hosts, None, SshEngine(hosts, rig.ssh, None, threads), None, threads)
