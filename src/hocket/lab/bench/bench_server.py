"""The parameter server: round trips, several servers, stragglers, rows, for ``hocket bench server``.

Each part is a job of its own; what it compares is measured alternately in one run.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hocket.job.collectives import barrier
from hocket.job.distribute import distribute
from hocket.job.key_value import KeyValue
from hocket.job.worker import current, rank
from hocket.lab.bench.bench_worker import alternate, milliseconds, ratio, total
from hocket.server import rule
from hocket.server.copies import DenseCopy
from hocket.server.placement import place
from hocket.server.server_client import Client
from hocket.server.terms import Push, Terms
from hocket.transport.requests import WireLink

PARAMETERS = 10_000_000
_TABLE = (10_000_000, 16)
_ROWS = 512


def server(rounds: str, part: str) -> list[dict[str, Any]]:
    """One row of one part."""
    parts = {"round trip": _round_trips, "servers": _servers, "straggler": _straggler, "rows": _rows}
    return [parts[part](int(rounds))]


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _round_trips(rounds: int) -> dict[str, Any]:
    """Push + pull of one worker against a Ray actor that does the same, and against the copies alone."""
    store, gradient = KeyValue({"w": torch.zeros(PARAMETERS)}, _sgd), torch.randn(PARAMETERS)

    def hocket() -> object:
        store.push("w", gradient)
        return store.pull("w")

    ways: dict[str, Callable[[], object]] = {"hocket": hocket, "alone": _alone(gradient)}
    with _ray(gradient) as actors:
        times = alternate(ways | actors, rounds, 0.4)
    store.close()
    row: dict[str, Any] = {"what": current().communicator.way}
    row |= {f"{way}_ms": milliseconds(values) for way, values in times.items()}
    if "ray" in times:
        row["hocket_ratio"] = ratio(times, "ray", "hocket")
        row["ray arrays_ratio"] = ratio(times, "ray", "ray arrays")
    return row


def _alone(gradient: torch.Tensor) -> Callable[[], object]:
    """Copy in, step and copy out, in one process."""
    given, parameters, got = (torch.zeros(PARAMETERS) for _ in range(3))

    def way() -> object:
        given.copy_(gradient)
        parameters.add_(given, alpha=-0.1)
        return got.copy_(parameters)

    return way


@contextlib.contextmanager
def _ray(gradient: torch.Tensor) -> Any:
    """Round trips to a Ray actor, if Ray is installed: with tensors, and with arrays, which it does not copy."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        yield {}
        return
    warnings.filterwarnings("ignore", ".*not writable.*")
    array = gradient.numpy()

    class Server:
        def __init__(self, count: int) -> None:
            self.parameter = nn.Parameter(torch.zeros(count))
            self.optimizer = torch.optim.SGD([self.parameter], lr=0.1)

        def push_pull(self, given: Any) -> Any:
            is_array = not isinstance(given, torch.Tensor)
            self.parameter.grad = torch.from_numpy(given) if is_array else given
            self.optimizer.step()
            return self.parameter.detach().numpy() if is_array else self.parameter.detach()

    with contextlib.redirect_stderr(io.StringIO()):
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        actor = ray.remote(Server).remote(gradient.numel())
    try:
        got = torch.zeros_like(gradient)  # what Ray returns can only be read
        yield {
            "ray": lambda: got.copy_(ray.get(actor.push_pull.remote(gradient))),
            "ray arrays": lambda: got.copy_(torch.from_numpy(ray.get(actor.push_pull.remote(array)))),
        }
    finally:
        ray.shutdown()


def _servers(rounds: int) -> dict[str, Any]:
    """All workers push and pull at once, to the first server alone and to all of them."""
    client = current().client
    assert client is not None
    first = Client(client.rank, client.workers, client.link, client.links[:1])
    first.tables = 1000  # numbers that nobody else has
    ways = {"one server": _pushes(first), f"{len(client.links)} servers": _pushes(client)}
    times = alternate(ways, rounds, 1.0)
    names = list(ways)
    row: dict[str, Any] = {"what": f"{client.workers} workers, one server or {len(client.links)}"}
    row |= {f"{name}_ms": milliseconds(times[name]) for name in names}
    row[f"{names[1]}_ratio"] = ratio(times, *names)
    return row


def _pushes(client: Client) -> Callable[[], object]:
    parameter = nn.Parameter(torch.zeros(PARAMETERS))
    placement = place([parameter], [0], len(client.links), "partitioned", whole=False)
    copy = DenseCopy(client, placement, Terms(None, 0), rule.describe(_sgd([parameter])))
    gradient = torch.randn(PARAMETERS)
    barrier()

    def way() -> object:
        copy.gradients[0].copy_(gradient)
        return copy.push(Push())

    return way


def _straggler(rounds: int) -> dict[str, Any]:
    """Samples per second of all workers, of which the last sleeps four times its own step time in every step."""
    batch, speeds = 32, {}
    for strategy in ("bsp", "asynchronous"):
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = distribute(model, optimizer, strategy=strategy)
        x, y = torch.randn(batch, 256), torch.randint(0, 10, (batch,))

        def step(model: nn.Module = model, optimizer: Any = optimizer, x: Any = x, y: Any = y) -> float:
            begin = time.perf_counter()
            nn.functional.cross_entropy(model(x), y).backward()
            computed = time.perf_counter() - begin
            if rank() == current().config.size - 1:
                time.sleep(4 * computed)
            optimizer.step()
            optimizer.zero_grad()
            return computed

        speeds[strategy] = step
    found: dict[str, list[float]] = {strategy: [] for strategy in speeds}
    for _ in range(rounds):
        for strategy, step in speeds.items():
            found[strategy].append(_measure_speed(step, batch, in_step=strategy == "bsp"))
    row: dict[str, Any] = {"what": f"{current().config.size} workers, one of them slow"}
    row |= {f"{strategy}_samples/s": statistics.median(values) for strategy, values in found.items()}
    row["asynchronous_ratio"] = ratio(found, "asynchronous", "bsp")
    return row


def _measure_speed(step: Callable[[], float], batch: int, *, in_step: bool) -> float:
    """All workers together, over about two seconds; in bsp everyone takes as many steps."""
    barrier()
    begin, steps = time.perf_counter(), 0
    while time.perf_counter() - begin < 2.0 if not in_step else steps < 60:
        step()
        steps += 1
    return total(steps * batch / (time.perf_counter() - begin))


def _rows(rounds: int) -> dict[str, Any]:
    """Pushes and pulls of a few rows of a large table."""
    client = current().client
    assert client is not None
    link = client.first
    assert isinstance(link, WireLink)
    store = KeyValue({"table": torch.zeros(_TABLE)}, _sgd, rows=["table"])
    gradient, rows = torch.randn(_ROWS, _TABLE[1]), torch.randperm(_TABLE[0])[:_ROWS]

    def way() -> object:
        store.push("table", gradient, rows)
        return store.pull("table", rows)

    way()
    before = sum(link.traffic)
    way()
    nbytes = sum(link.traffic) - before
    times = alternate({"rows": way}, rounds, 0.5)
    store.close()
    dense = 2 * _TABLE[0] * _TABLE[1] * 4
    return {
        "what": f"{_ROWS} rows of {_TABLE[0]:,} × {_TABLE[1]}",
        "round trips_per s": 1e3 / milliseconds(times["rows"]),
        "travels_KB": nbytes / 1e3,
        "fewer than dense_×": dense / nbytes,
    }
