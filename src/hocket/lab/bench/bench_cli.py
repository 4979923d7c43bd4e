"""``hocket bench``: runs a benchmark on several workers and prints its table."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from hocket import specs
from hocket.errors import UsageError
from hocket.lab.rig import Rig
from hocket.launch import machine, remote, supervisor
from hocket.launch.environment import Job
from hocket.launch.host_list import Host, Wishes
from hocket.observe.timeline import Timeline

app = typer.Typer(no_args_is_help=True, help="Measure Hocket against PyTorch's Gloo and DDP, alternately in one run.")

_MODELS = ("cnn", "mlp", "narrow", "transformer")
_Workers = Annotated[str, typer.Option("-n", "--workers", help="How many workers, or auto: one per core.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
_Rounds = Annotated[int, typer.Option(min=1, help="How often all ways are measured in turn; medians are shown.")]


@app.command()
def allreduce(workers: _Workers = "2", rounds: _Rounds = 7, as_json: _Json = False) -> None:
    """All-reduce of ordinary tensors, and of data already in shared memory, against Gloo."""
    _run("allreduce", workers, as_json, [str(rounds)])


@app.command()
def step(
    workers: Annotated[
        str, typer.Option("-n", "--workers", help="How many workers (2), on each host (1) of --hosts; or auto.")
    ] = "",
    rounds: _Rounds = 7,
    models: Annotated[
        str, typer.Option(help="Of cnn, mlp, narrow and transformer, those to measure.")
    ] = "cnn,mlp,narrow",
    optimizers: Annotated[str, typer.Option(help="Of sgd and adam, those to measure.")] = "sgd,adam",
    device: Annotated[str, typer.Option(help="cpu, or with -n 1 also cuda.")] = "cpu",
    hosts: Annotated[
        int, typer.Option(help="On a rig of so many hosts, made for this, with -n workers on each (see hocket rig).")
    ] = 0,
    rate: Annotated[str | None, typer.Option(help="What each of these hosts can send: 1gbit. Else unlimited.")] = None,
    as_json: _Json = False,
) -> None:
    """A training step against DistributedDataParallel; with -n 1, against the plain script."""
    _check_models(models)
    for name in optimizers.split(","):
        if name not in ("sgd", "adam"):
            raise UsageError(f"cannot measure {name!r}: the choices are sgd, adam")
    workers = workers or ("1" if hosts else "2")
    if device not in ("cpu", "cuda") or (device == "cuda" and workers != "1"):
        raise UsageError(f"--device {device}: cpu, or with -n 1 also cuda (DDP over Gloo is no match for NCCL)")
    if rate is not None and not hosts:
        raise UsageError(f"--rate {rate} limits the hosts of a rig: say how many with --hosts 4")
    arguments = [str(rounds), models, optimizers, device]
    if not hosts:
        _run("step", workers, as_json, arguments)
        return
    count = int(workers) if workers.isdecimal() else 0
    if count < 1:
        raise UsageError(f"-n {workers}: with --hosts, the number of workers on each host, from 1")
    network = f"{rate}/s" if rate else "unlimited"
    with Rig.up(hosts, rate, name=f"bench{os.getpid()}") as rig:
        _run("step", str(count * hosts), as_json, arguments, rig=rig, where=f"{hosts} hosts × {count}, {network}")


@app.command()
def local(
    rounds: _Rounds = 3,
    hosts: Annotated[int, typer.Option(min=2, help="On a rig of so many hosts, made for this.")] = 4,
    rate: Annotated[str | None, typer.Option(help="What each of these hosts can send.")] = "100mbit",
    as_json: _Json = False,
) -> None:
    """Local steps over slow links: samples per second of local_sgd and diloco against DistributedDataParallel."""
    with Rig.up(hosts, rate, name=f"bench{os.getpid()}") as rig:
        _run("local", str(hosts), as_json, [str(rounds)], rig=rig, where=f"{hosts} hosts, {rate or 'unlimited'}/s")


@app.command()
def straggler(
    workers: _Workers = "4",
    rounds: _Rounds = 3,
    seconds: Annotated[float, typer.Option(help="How long each job is measured.")] = 4.0,
    strategies: Annotated[
        str, typer.Option(help="With ; between them; the first is what the others are compared with.")
    ] = "mirrored; gossip(topology='pairs', asynchronous=True); local_sgd(time=0.5)",
    as_json: _Json = False,
) -> None:
    """Workers of which one sleeps four times its own step time: samples per second of several strategies."""
    count, names = machine.worker_count(workers), [name.strip() for name in strategies.split(";")]
    jobs = {}
    for name in names:
        spec = specs.parse(name)
        servers = int(spec.servers == "needed")
        jobs[name] = _job("straggler", count, strategy=name, servers=str(servers))
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, job in jobs.items():
            found[name].append(_measure(job, [str(seconds)])[0]["samples/s"])
    rows: list[dict[str, Any]] = []
    for name, speeds in found.items():
        ratios = [speed / first for speed, first in zip(speeds, found[names[0]], strict=True)]
        middle = statistics.median(speeds)
        rows.append({"strategy": name, "speed_samples/s": middle, "speed_ratio": statistics.median(ratios)})
    if as_json:
        _print_json(rows, workers=count)
        return
    print(f"straggler, {count} workers on {_here()}")
    for row in rows:
        print(f"  {row['strategy']:<48} {_cell(row, 'speed_samples/s')} samples/s")
    print(f"Medians over the rounds; × compares with {names[0]}, within a round.")


@app.command()
def memory(workers: _Workers = "2", as_json: _Json = False) -> None:
    """What a job takes for a 10M-parameter model with Adam: with a replica each, and with one copy."""
    _run("memory", workers, as_json, ["mirrored"], ["central"], ["central(fused=True)"])


@app.command()
def noise(
    workers: _Workers = "2",
    rounds: _Rounds = 9,
    models: Annotated[
        str, typer.Option(help="Of cnn, mlp, narrow and transformer, those to measure.")
    ] = "cnn,mlp,narrow",
    as_json: _Json = False,
) -> None:
    """What it costs to measure gradient noise: steps with and without it."""
    _check_models(models)
    _run("noise", workers, as_json, [str(rounds), models])


@app.command()
def checkpoint(
    workers: _Workers = "2",
    rounds: _Rounds = 9,
    models: Annotated[str, typer.Option(help="Of cnn, mlp and narrow, those to measure.")] = "cnn,mlp,narrow",
    folder: Annotated[Path | None, typer.Option(help="A folder on the disk to write to; removed afterwards.")] = None,
    as_json: _Json = False,
) -> None:
    """What a checkpoint every 10 steps costs: times of 10 steps with Adam, with and without it."""
    _check_models(models)
    with tempfile.TemporaryDirectory(prefix="hocket-bench-", dir=folder) as place:
        _run("checkpoint", workers, as_json, [str(rounds), models, place])


@app.command("timeline")
def timelines(
    workers: _Workers = "2",
    rounds: _Rounds = 15,
    models: Annotated[str, typer.Option(help="Of cnn, mlp and narrow, those to measure.")] = "cnn,mlp,narrow",
    as_json: _Json = False,
) -> None:
    """What --timeline costs: times of 10 steps with it and without."""
    _check_models(models)
    with tempfile.TemporaryDirectory(prefix="hocket-bench-") as place:
        count, path = machine.worker_count(workers), Path(place) / "timeline.json"
        job = _job("timeline", count, timeline=str(path))
        rows = _measure(job, [str(rounds), models], timeline=Timeline(path))
    if as_json:
        _print_json(rows, workers=count)
    else:
        _print_table(f"timeline, {count} workers on {_here()}", rows)


@app.command()
def server(
    rounds: _Rounds = 7,
    parts: Annotated[
        str, typer.Option(help="Of shared, tcp, tls, servers, straggler and rows, those to measure.")
    ] = "shared,tcp,tls,servers,straggler,rows",
    as_json: _Json = False,
) -> None:
    """The parameter server: round trips of 10M parameters against a Ray actor, more servers, a slow worker, rows."""
    rows: list[dict[str, Any]] = []
    for name in parts.split(","):
        if name not in _SERVER_PARTS:
            raise UsageError(f"cannot measure {name!r}: the choices are {', '.join(_SERVER_PARTS)}")
    for name in parts.split(","):
        part, workers, servers, settings = _SERVER_PARTS[name]
        job = _job("server", workers, **settings, servers=str(servers))
        rows.append({"part": name, **_measure(job, [str(rounds), part])[0]})
    if as_json:
        _print_json(rows)
        return
    print(f"server, on {_here()}")
    for row in rows:
        found = [_cell(row, key) + " " + key.replace("_", " ") for key in row if key not in ("part", "what")]
        print(f"  {row['part']:<10} {row['what']:<34} " + ", ".join(f for f in found if not f.endswith("ratio")))
    print("Medians over the rounds; × compares with ray, one server or bsp, within a round.")


@app.command()
def hogwild(
    workers: _Workers = "2",
    rounds: _Rounds = 5,
    samples: Annotated[int, typer.Option(min=1000, help="Of one pass; each has 100 of a million features.")] = 200_000,
    as_json: _Json = False,
) -> None:
    """Sparse logistic regression without locks, and with one, against one plain process."""
    count = machine.worker_count(workers)
    row = _measure(_job("hogwild", count, strategy="hogwild"), [str(rounds), str(samples)])[0]
    if as_json:
        _print_json([row])
        return
    print(f"hogwild, on {_here()}: {row['what']}")
    for name in ("plain", "hogwild", "locked"):
        speed, cpu = _cell(row, f"{name}_samples/s"), row[f"{name} CPU_µs/sample"]
        print(f"  {name:<8} {speed} samples/s, {cpu:.1f} µs of processor time each, loss {row[f'{name}_loss']:.5f}")
    print(f"Medians over the rounds; × is against plain. Without a lock {row['than locked_×']:.2f}× as fast as with.")


@app.command()
def simulated(
    workers: Annotated[int, typer.Option("-n", "--workers", min=2, help="How many simulated workers.")] = 1000,
    steps: Annotated[int, typer.Option(min=2, help="Of each worker.")] = 4,
    strategies: Annotated[
        str, typer.Option(help="With ; between them.")
    ] = "mirrored; local_sgd(period=2); gossip(topology='exponential'); asynchronous",
    as_json: _Json = False,
) -> None:
    """Whole simulated workers in one process: how long a step takes, on their virtual clock and in fact."""
    from hocket.lab.bench import bench_simulated

    rows = []
    for name in (each.strip() for each in strategies.split(";")):
        spec = specs.parse(name)
        rows.append(bench_simulated.measure(workers, name, int(spec.servers == "needed"), steps))
    if as_json:
        _print_json(rows, workers=workers)
        return
    _print_table(f"simulated, {workers} workers on {_here()}", rows)
    print("A batch takes 10 virtual ms, and the network between any two workers has 10 Gbit/s and 50 µs.")


_SERVER_PARTS: dict[str, tuple[str, int, int, dict[str, str]]] = {
    "shared": ("round trip", 1, 1, {}),
    "tcp": ("round trip", 1, 1, {"transport": "gloo"}),
    "tls": ("round trip", 1, 1, {"transport": "gloo", "tls": "on"}),
    "servers": ("servers", 4, 2, {}),
    "straggler": ("straggler", 4, 1, {}),
    "rows": ("rows", 1, 1, {}),
}


def _check_models(models: str) -> None:
    for name in models.split(","):
        if name not in _MODELS:
            raise UsageError(f"cannot measure {name!r}: the choices are {', '.join(_MODELS)}")


def _run(
    name: str, workers: str, as_json: bool, *runs: list[str], rig: Rig | None = None, where: str = "one host"
) -> None:
    """Run the benchmark once for each list of arguments, here or on all hosts of ``rig``, and print all their rows."""
    count = machine.worker_count(workers)
    hosts = None if rig is None else _on_rig(rig, count)
    rows = [row for args in runs for row in _measure(_job(name, count), args, hosts)]
    if as_json:
        _print_json(rows, workers=count, where=where)
    else:
        crew = f"{count} worker{'s' if count > 1 else ''}"
        place = "" if rig is None else f" ({where})"
        _print_table(f"{name}, {crew}{place} on {_here()}", rows)


def _job(name: str, workers: int, **settings: str) -> Job:
    """Workers that run the benchmark of this name."""
    return Job(("-m", "hocket.lab.bench.bench_worker", name), workers, settings)


def _here() -> str:
    return f"{machine.cores()} cores ({machine.cpu()})"


def _print_json(rows: list[dict[str, Any]], **facts: object) -> None:
    print(json.dumps({**facts, "cores": machine.cores(), "cpu": machine.cpu(), "rows": rows}, indent=1))


def _measure(
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


def _on_rig(rig: Rig, workers: int) -> Wishes:
    """All hosts of the rig, which share this machine's cores, with equally many workers on each."""
    each = workers // len(rig.hosts)
    threads = {"OMP_NUM_THREADS": str(max(1, machine.cores() // workers)), "PYTHONPATH": os.pathsep.join(sys.path)}
    return Wishes([Host(name, each) for name in rig.hosts], None, rig.ssh, None, None, threads)


def _print_table(title: str, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    columns = [key for key in rows[0] if not key.endswith("_ratio")]
    for key in columns:
        words, _, unit = key.rpartition("_")
        text = isinstance(rows[0][key], str)
        table.add_column(key if text else f"{words}\n{unit}", justify="left" if text else "right")
    for row in rows:
        table.add_row(*(_cell(row, key) for key in columns))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if any(key.endswith("_ratio") for key in rows[0]):
        print("Medians over the rounds; × is how many times faster than PyTorch's own way, within a round.")


def _cell(row: dict[str, Any], key: str) -> str:
    if isinstance(row[key], str):
        return str(row[key])
    ratio = row.get(f"{key.rpartition('_')[0]}_ratio")
    return f"{row[key]:,.1f}" + (f" ({ratio:.2f}×)" if ratio else "")
