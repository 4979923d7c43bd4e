"""Simulated workers are workers: what a script does on them, how long it takes, and what it is told."""

import random
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.errors import MismatchError, WorkerLost
from hocket.job.simulated_job import SimulatedJob
from hocket.transport.simulated import Speed

NUMBERS = 40
SOME = ["mirrored", "central", "delayed", "local_sgd(period=3)", "diloco(period=3)", "easgd(period=2)", "dmb(extra=1)",
        "local_sgd(time=0.5)"]  # fmt: skip
UNEVEN = [
    ("gossip", 0), ("gossip(asynchronous=True)", 0), ("hogwild", 0), ("hogwild(locked=True)", 0), ("asynchronous", 1),
    ("ssp(staleness=1)", 2), ("bsp", 1), ("easgd(period=2)", 1), ("downpour", 1),
]  # fmt: skip


def train(job: SimulatedJob, seconds: float = 0.1, epochs: int = 2, most: int | None = None) -> dict[str, object]:
    """What a script does: the samples that this worker has seen, its parameters, and how far it was."""
    hocket.init()
    torch.manual_seed(3)
    model = nn.Linear(1, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    data = TensorDataset(torch.arange(NUMBERS, dtype=torch.float64)[:, None])
    model, optimizer, loader = hocket.distribute(model, optimizer, DataLoader(data, 2, shuffle=True))
    seen: list[list[int]] = []
    for _ in range(epochs):
        seen.append([])
        for steps, (x,) in enumerate(loader, start=1):
            seen[-1] += x[:, 0].int().tolist()
            job.compute(seconds * (1 + hocket.rank() % 2))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if steps == most:
                break
    state = [parameter.detach().clone() for parameter in model.parameters()]
    return {"seen": seen, "state": state, "now": job.now(), "mean": hocket.mean(float(hocket.rank()))}


def run(workers: int, strategy: str, servers: int = 0, **options: object) -> list[dict[str, object]]:
    job = SimulatedJob(workers, strategy, servers=servers)
    return job.run(lambda: train(job, **options))  # type: ignore[arg-type]


def check(found: list[dict[str, object]], epochs: int = 2) -> None:
    for epoch in range(epochs):
        assert sorted(x for each in found for x in each["seen"][epoch]) == list(range(NUMBERS))  # type: ignore[index]
    for each in found:
        assert each["mean"] == (len(found) - 1) / 2
        for mine, first in zip(each["state"], found[0]["state"], strict=True):  # type: ignore[call-overload]
            assert torch.equal(mine, first)


@pytest.mark.few(4)
@pytest.mark.parametrize("strategy", SOME)
def test_every_sample_counts_once_and_all_see_one_model(strategy: str) -> None:
    check(run(4, strategy))


@pytest.mark.few(4)
@pytest.mark.parametrize(("strategy", "servers"), UNEVEN)
def test_the_same_where_workers_advance_unevenly(strategy: str, servers: int) -> None:
    found = run(4, strategy, servers)
    check(found)
    if strategy in ("hogwild", "asynchronous", "gossip(asynchronous=True)", "downpour"):  # who is faster has more
        counts = [sum(map(len, each["seen"])) for each in found]  # type: ignore[call-overload]
        assert min(counts[0], counts[2]) > max(counts[1], counts[3])


@pytest.mark.few(3)
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize(
    ("strategy", "servers"), [("asynchronous", 1), ("easgd(period=1)", 1), ("hogwild", 0), ("gossip", 0)]
)
def test_a_batch_is_for_others_unless_one_of_two_models_has_learned_from_it(
    strategy: str, servers: int, learns: bool
) -> None:
    job = SimulatedJob(2, strategy, servers=servers)

    def work() -> list[int]:
        hocket.init()
        models = [nn.Linear(1, 1).double() for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=1e-6) for model in models]
        data = TensorDataset(torch.arange(NUMBERS, dtype=torch.float64)[:, None])
        _, _, loader = hocket.distribute(models[0], optimizers[0], DataLoader(data, 1))
        hocket.distribute(models[1], optimizers[1])
        learned: list[int] = []
        for count, (x,) in enumerate(loader):
            job.compute(0.1)
            torch.stack([model(x).square().mean() for model in models]).sum().backward()
            leaves = hocket.rank() == 1 and count == 2
            if learns or not leaves:
                optimizers[0].step()
                learned.append(int(x))
            if leaves:
                break
            optimizers[1].step()
        return learned

    found = job.run(work)
    assert sorted(found[0] + found[1]) == list(range(NUMBERS)) and len(found[1]) == (3 if learns else 2)


@pytest.mark.few(9)
@pytest.mark.parametrize(("strategy", "servers"), [*((each, 0) for each in SOME), *UNEVEN])
def test_a_loop_that_is_left_shows_the_model_of_the_strategy(strategy: str, servers: int) -> None:
    found = run(3, strategy, servers, most=3, epochs=1)
    for each in found:
        for mine, first in zip(each["state"], found[0]["state"], strict=True):  # type: ignore[call-overload]
            assert torch.equal(mine, first)


@pytest.mark.few(2)
@pytest.mark.parametrize(("strategy", "servers"), [("mirrored", 0), ("gossip(asynchronous=True)", 0), ("hogwild", 0),
                                                   ("asynchronous", 2), ("local_sgd(time=0.5)", 0)])  # fmt: skip
def test_a_run_is_the_same_every_time(strategy: str, servers: int) -> None:
    one, other = run(5, strategy, servers), run(5, strategy, servers)
    for mine, theirs in zip(one, other, strict=True):
        assert mine["seen"] == theirs["seen"] and mine["now"] == theirs["now"]
        assert all(map(torch.equal, mine["state"], theirs["state"]))  # type: ignore[arg-type]


def test_the_slowest_sets_the_pace_of_workers_in_step_and_the_network_takes_its_time() -> None:
    latency, steps = 0.01, 10
    job = SimulatedJob(4, "mirrored", speed=Speed(latency=latency))
    times: list[float] = []

    def script() -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = hocket.distribute(model, optimizer)
        hocket.barrier()
        begin = job.now()
        for _ in range(steps):
            job.compute(0.1 if hocket.rank() == 2 else 0.02)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        times.append(job.now() - begin)

    job.run(script)
    assert times == pytest.approx([steps * (0.1 + 2 * 3 * latency)] * 4, rel=1e-9)


def test_delayed_gradients_travel_while_others_are_computed() -> None:
    def seconds(strategy: str) -> float:
        job = SimulatedJob(4, strategy, speed=Speed(latency=0.01))
        return max(float(each["now"]) for each in job.run(lambda: train(job)))  # type: ignore[arg-type]

    assert seconds("delayed") < seconds("mirrored") - 0.4  # of 10 exchanges of 0.06 s


def draw() -> tuple[float, float, list[float]]:
    torch.manual_seed(7)
    random.seed(7)
    first = float(torch.rand(1))
    hocket.barrier()
    return first, random.random(), torch.rand(3).tolist()


def test_random_numbers_of_workers_are_their_own() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    found = SimulatedJob(3).run(draw)
    assert found[0] == found[1] == found[2] == draw_alone()
    torch.set_rng_state(before)
    SimulatedJob(2).run(lambda: torch.rand(3))
    assert torch.equal(torch.get_rng_state(), before)


def draw_alone() -> tuple[float, float, list[float]]:
    torch.manual_seed(7)
    random.seed(7)
    return float(torch.rand(1)), random.random(), torch.rand(3).tolist()


def test_collectives_by_hand() -> None:
    def script() -> list[object]:
        rank = hocket.rank()
        own = torch.tensor([rank, 10.0])
        return [
            hocket.allreduce(own.clone(), "sum").tolist(),
            hocket.allgather(own).tolist(),
            hocket.broadcast(own.clone(), 2).tolist(),
            (hocket.size(), hocket.local_rank()),
        ]

    found = SimulatedJob(3).run(script)
    assert all(each[:3] == [[3, 30], [[0, 10], [1, 10], [2, 10]], [2, 10]] for each in found)
    assert [each[3] for each in found] == [(3, 0), (3, 1), (3, 2)]


def test_ranks_that_do_not_do_the_same_are_told() -> None:
    def script() -> None:
        if hocket.rank() == 1:
            hocket.barrier()
        else:
            hocket.mean(1.0)

    with pytest.raises(MismatchError, match=r"the ranks do not do the same: .*rank"):
        SimulatedJob(3).run(script)


def test_who_waits_for_a_rank_that_has_finished_is_told() -> None:
    def script() -> None:
        if hocket.rank():
            hocket.barrier()

    with pytest.raises(WorkerLost, match=r"rank 1 waits in hocket.barrier\(\), but rank 0 finished the script"):
        SimulatedJob(3).run(script)


def test_the_first_error_is_raised_and_no_thread_is_left() -> None:
    def script() -> None:
        if hocket.rank() == 1:
            raise ZeroDivisionError("of the script")
        hocket.barrier()

    with pytest.raises(ZeroDivisionError, match="of the script"):
        SimulatedJob(3).run(script)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("simulated")]
