"""``hocket bench``: runs a benchmark on several workers and prints its table."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from hocket.errors import UsageError
from hocket.launch import machine, supervisor
from hocket.launch.environment import Job

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
    workers: _Workers = "2",
    rounds: _Rounds = 7,
    models: Annotated[
        str, typer.Option(help="Of cnn, mlp, narrow and transformer, those to measure.")
    ] = "cnn,mlp,narrow",
    optimizers: Annotated[str, typer.Option(help="Of sgd and adam, those to measure.")] = "sgd,adam",
    device: Annotated[str, typer.Option(help="cpu, or with -n 1 also cuda.")] = "cpu",
    as_json: _Json = False,
) -> None:
    """A training step against DistributedDataParallel; with -n 1, against the plain script."""
    _check_models(models)
    for name in optimizers.split(","):
        if name not in ("sgd", "adam"):
            raise UsageError(f"cannot measure {name!r}: the choices are sgd, adam")
    if device not in ("cpu", "cuda") or (device == "cuda" and workers != "1"):
        raise UsageError(f"--device {device}: cpu, or with -n 1 also cuda (DDP over Gloo is no match for NCCL)")
    _run("step", workers, as_json, [str(rounds), models, optimizers, device])


@app.command()
def memory(workers: _Workers = "2", as_json: _Json = False) -> None:
    """What a job takes for a 10M-parameter model with Adam: with a replica each, and with one copy."""
    _run("memory", workers, as_json, ["mirrored"], ["central"], ["central(fused=True)"])


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


def _check_models(models: str) -> None:
    for name in models.split(","):
        if name not in _MODELS:
            raise UsageError(f"cannot measure {name!r}: the choices are {', '.join(_MODELS)}")


def _run(name: str, workers: str, as_json: bool, *runs: list[str]) -> None:
    """Run the benchmark once for each list of arguments, and print all their rows."""
    count = machine.worker_count(workers)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="hocket-bench-") as folder:
        result = Path(folder) / "rows.json"
        for args in runs:
            status = supervisor.run(Job(("-m", f"hocket.bench.{name}", str(result), *args), count), None)
            if status:
                sys.exit(status)
            rows += json.loads(result.read_text())
    if as_json:
        print(json.dumps({"workers": count, "cores": machine.cores(), "cpu": machine.cpu(), "rows": rows}, indent=1))
    else:
        crew = f"{count} worker{'s' if count > 1 else ''}"
        _print_table(f"{name}, {crew} on {machine.cores()} cores ({machine.cpu()})", rows)


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
