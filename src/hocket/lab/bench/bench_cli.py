"""``hocket bench``: runs a benchmark on several workers and prints its table."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from hocket import specs
from hocket.errors import UsageError
from hocket.lab.bench import bench_grid, bench_start
from hocket.lab.bench.bench_run import bench_job, measure, run_bench, run_on, run_under_mpi
from hocket.lab.bench.bench_table import cell, here, print_json, print_table
from hocket.lab.rig import Rig
from hocket.launch import machine
from hocket.observe.timeline import Timeline

app = typer.Typer(no_args_is_help=True, help="Measure Hocket against PyTorch's Gloo and DDP, alternately in one run.")

_MODELS = ("cnn", "mlp", "narrow", "transformer")
_GPU_MODELS = ("cnn", "gpt", "small")
_Workers = Annotated[str, typer.Option("-n", "--workers", help="How many workers, or auto: one per core.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
_Rounds = Annotated[int, typer.Option(min=1, help="How often all ways are measured in turn; medians are shown.")]
_Hosts = Annotated[
    int, typer.Option(help="On a rig of so many hosts, made for this, with -n workers on each (see hocket rig).")
]
_Trunk = Annotated[
    str | None, typer.Option(help="Two sites with half of the hosts each, joined by one link of this rate.")
]
_Rate = Annotated[str | None, typer.Option(help="What each of these hosts can send: 1gbit. Else unlimited.")]


@app.command()
def allreduce(
    workers: _Workers = "",
    rounds: _Rounds = 7,
    sizes: Annotated[str, typer.Option(help="Bytes of the sums, in KiB, with commas.")] = "4,1024,65536",
    mpi: Annotated[bool, typer.Option("--mpi", help="Open MPI beside them, on this machine (needs mpi4py).")] = False,
    hosts: _Hosts = 0,
    rate: _Rate = None,
    as_json: _Json = False,
) -> None:
    """All-reduce of ordinary tensors, and of data as an exchange has it, against Gloo; between hosts with TLS, too."""
    if not mpi:
        run_on("allreduce", workers, hosts, rate, as_json, [str(rounds), sizes])
    elif hosts or rate:
        raise UsageError("--mpi compares on this machine: leave out --hosts and --rate")
    else:
        run_under_mpi("allreduce", workers or "2", as_json, [str(rounds), sizes])


@app.command()
def links(hosts: _Hosts = 4, rate: _Rate = None, trunk: _Trunk = None, as_json: _Json = False) -> None:
    """Latency and bandwidth between hosts, as --algorithm auto measures them."""
    run_on("links", "", hosts, rate, as_json, [], trunk)


@app.command()
def start(
    workers: Annotated[int, typer.Option("-n", "--workers", min=1, help="How many workers.")] = 4,
    rounds: _Rounds = 7,
    address: Annotated[str | None, typer.Option(help="The Ray cluster. [default: that of this machine]")] = None,
    as_json: _Json = False,
) -> None:
    """The start of a job, until all workers are there: on this machine, and on a Ray cluster that is warm."""
    rows = bench_start.measure(workers, rounds, address)
    print_json(rows) if as_json else print_table(f"start on {here()}", rows)


@app.command("collectives")
def all_collectives(
    hosts: Annotated[str, typer.Option(help="Hosts of the rigs, with commas: 2,4.")] = "4",
    rate: Annotated[
        str | None, typer.Option(help="What each of these hosts can send, with commas: unlimited,1gbit.")
    ] = None,
    trunk: _Trunk = None,
    rounds: _Rounds = 3,
    algorithms: Annotated[str, typer.Option(help="With commas; else all, as long as they are not far behind.")] = "",
    sizes: Annotated[str, typer.Option(help="Bytes of the sums, in KiB, with commas.")] = "4,64,1024,16384,65536",
    plot: Annotated[Path | None, typer.Option(help="A picture of time against size (the extra report).")] = None,
    as_json: _Json = False,
) -> None:
    """All-reduce between hosts by each algorithm: measured time against what the model of the links predicts."""
    rows = bench_grid.measure_grid(hosts, rate, trunk, [str(rounds), sizes, algorithms])
    if plot is not None:
        bench_grid.draw(rows, plot)
    if as_json:
        print_json(rows)
        return
    print_table(f"collectives on {here()}", rows)
    for line in bench_grid.judge(rows):
        print(line)


@app.command()
def step(
    workers: Annotated[
        str, typer.Option("-n", "--workers", help="How many workers (2), on each host (1) of --hosts; or auto.")
    ] = "",
    rounds: _Rounds = 7,
    models: Annotated[
        str,
        typer.Option(
            help="Those to measure: of cnn, mlp, narrow and transformer (cnn,mlp,narrow); of several workers on GPUs, "
            "of cnn, gpt and small (all)."
        ),
    ] = "",
    optimizers: Annotated[
        str, typer.Option(help="Of sgd and adam, those to measure; several workers on GPUs take AdamW.")
    ] = "sgd,adam",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    share_gpus: Annotated[
        bool, typer.Option("--share-gpus", help="Several workers on each GPU, if there are more than GPUs.")
    ] = False,
    hosts: _Hosts = 0,
    rate: _Rate = None,
    as_json: _Json = False,
) -> None:
    """A training step against DistributedDataParallel; with -n 1, against the plain script."""
    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device {device}: the choices are cpu, cuda")
    if device == "cuda" and workers != "1":
        _step_on_gpus(workers or "2", rounds, models, share_gpus, hosts, as_json)
        return
    models = models or "cnn,mlp,narrow"
    _check_models(models, _MODELS)
    for name in optimizers.split(","):
        if name not in ("sgd", "adam"):
            raise UsageError(f"cannot measure {name!r}: the choices are sgd, adam")
    run_on("step", workers, hosts, rate, as_json, [str(rounds), models, optimizers, device])


def _step_on_gpus(workers: str, rounds: int, models: str, share_gpus: bool, hosts: int, as_json: bool) -> None:
    """A step of several workers on GPUs, each model in a job of its own."""
    if hosts:
        raise UsageError("--device cuda and --hosts: the hosts of a rig have no GPUs of their own; leave one out")
    models = models or ",".join(_GPU_MODELS)
    _check_models(models, _GPU_MODELS)
    settings = {"share-gpus": "on"} if share_gpus else {}
    where = "one host, GPUs shared, see above whether under MPS" if share_gpus else "one host, one GPU each"
    runs = [[str(rounds), model] for model in models.split(",")]
    run_bench("gpu", workers, as_json, *runs, where=where, settings=settings)


@app.command()
def local(
    rounds: _Rounds = 3,
    hosts: Annotated[int, typer.Option(min=2, help="On a rig of so many hosts, made for this.")] = 4,
    rate: Annotated[str | None, typer.Option(help="What each of these hosts can send.")] = "100mbit",
    as_json: _Json = False,
) -> None:
    """Local steps over slow links: samples per second of local_sgd and diloco against DistributedDataParallel."""
    with Rig.up(hosts, rate, name=f"bench{os.getpid()}") as rig:
        run_bench("local", str(hosts), as_json, [str(rounds)], rig=rig, where=f"{hosts} hosts, {rate or 'unlimited'}/s")


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
        jobs[name] = bench_job("straggler", count, strategy=name, servers=str(servers))
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, job in jobs.items():
            found[name].append(measure(job, [str(seconds)])[0]["samples/s"])
    rows: list[dict[str, Any]] = []
    for name, speeds in found.items():
        ratios = [speed / first for speed, first in zip(speeds, found[names[0]], strict=True)]
        middle = statistics.median(speeds)
        rows.append({"strategy": name, "speed_samples/s": middle, "speed_ratio": statistics.median(ratios)})
    if as_json:
        print_json(rows, workers=count)
        return
    print(f"straggler, {count} workers on {here()}")
    for row in rows:
        print(f"  {row['strategy']:<48} {cell(row, 'speed_samples/s')} samples/s")
    print(f"Medians over the rounds; × compares with {names[0]}, within a round.")


@app.command()
def memory(workers: _Workers = "2", as_json: _Json = False) -> None:
    """What a job takes for a 10M-parameter model with Adam: with a replica each, and with one copy."""
    run_bench("memory", workers, as_json, ["mirrored"], ["central"], ["central(fused=True)"])


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
    run_bench("noise", workers, as_json, [str(rounds), models])


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
        run_bench("checkpoint", workers, as_json, [str(rounds), models, place])


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
        made = bench_job("timeline", count, timeline=str(path))
        rows = measure(made, [str(rounds), models], timeline=Timeline(path))
    if as_json:
        print_json(rows, workers=count)
    else:
        print_table(f"timeline, {count} workers on {here()}", rows)


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
        job = bench_job("server", workers, **settings, servers=str(servers))
        rows.append({"part": name, **measure(job, [str(rounds), part])[0]})
    if as_json:
        print_json(rows)
        return
    print(f"server, on {here()}")
    for row in rows:
        found = [cell(row, key) + " " + key.replace("_", " ") for key in row if key not in ("part", "what")]
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
    row = measure(bench_job("hogwild", count, strategy="hogwild"), [str(rounds), str(samples)])[0]
    if as_json:
        print_json([row])
        return
    print(f"hogwild, on {here()}: {row['what']}")
    for name in ("plain", "hogwild", "locked"):
        speed, cpu = cell(row, f"{name}_samples/s"), row[f"{name} CPU_µs/sample"]
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
        print_json(rows, workers=workers)
        return
    print_table(f"simulated, {workers} workers on {here()}", rows)
    print("A batch takes 10 virtual ms, and the network between any two workers has 10 Gbit/s and 50 µs.")


@app.command()
def churn(
    parts: Annotated[
        str, typer.Option(help="Of recover, leave, go_on, step and (on a rig) hosts, those to measure.")
    ] = "recover,leave,go_on,step",
    kills: Annotated[int, typer.Option(min=2, help="How many workers are killed, or told to leave, in a part.")] = 20,
    seconds: Annotated[float, typer.Option(min=20, help="How long each job of go_on is measured.")] = 180.0,
    strategies: Annotated[
        str, typer.Option(help="Of go_on, with ; between them; torchrun is one that restarts from checkpoints.")
    ] = "mirrored; local_sgd(period=16); asynchronous; torchrun",
    rounds: Annotated[int, typer.Option(min=1, help="Jobs of step, of each kind.")] = 5,
    as_json: _Json = False,
) -> None:
    """Workers that are killed and replaced: how long the others wait, samples per second, and a step without losses."""
    from hocket.lab.bench import bench_churn, bench_churn_hosts

    names = [each.strip() for each in strategies.split(";")]
    known: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "recover": lambda: bench_churn.recover(kills),
        "hosts": lambda: bench_churn_hosts.recover(kills),
        "leave": lambda: bench_churn.leave(kills),
        "go_on": lambda: bench_churn.go_on(seconds, names),
        "step": lambda: bench_churn.step(rounds, 5.0),
    }
    for name in parts.split(","):
        if name not in known:
            raise UsageError(f"cannot measure {name!r}: the choices are {', '.join(known)}")
    rows = []
    if not as_json:
        print(f"churn, on {here()}")
    for name in parts.split(","):
        found = known[name]()
        rows += [{"part": name, **row} for row in found]
        for row in [] if as_json else found:
            spread = f"  ({row['least']:,.3f} to {row['most']:,.3f})" if "least" in row else ""
            print(f"  {row['what']:<68} {row['value']:>10,.3f} {row['unit']}{spread}", flush=True)
    if as_json:
        print_json(rows)
    else:
        print("Medians, of --kills; for a step the least of the jobs' medians. Jobs of go_on and of step alternate.")


_SERVER_PARTS: dict[str, tuple[str, int, int, dict[str, str]]] = {
    "shared": ("round trip", 1, 1, {}),
    "tcp": ("round trip", 1, 1, {"transport": "gloo"}),
    "tls": ("round trip", 1, 1, {"transport": "gloo", "tls": "on"}),
    "servers": ("servers", 4, 2, {}),
    "straggler": ("straggler", 4, 1, {}),
    "rows": ("rows", 1, 1, {}),
}


def _check_models(models: str, choices: tuple[str, ...] = _MODELS) -> None:
    for name in models.split(","):
        if name not in choices:
            raise UsageError(f"cannot measure {name!r}: the choices are {', '.join(choices)}")
