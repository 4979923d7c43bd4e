"""Hogwild: one worker is plain, and nothing is lost under a lock."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, RemoteError
from server.serving import until
from strategies.test_laws import OPTIMIZERS
from strategies.test_served_queue import check, leaving_early, train
from strategies.training import Case, alone, make, together
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hocket
from hocket.job.checkpoint.saver import Saver
from hocket.job.worker import current

KINDS = ["hogwild", "hogwild(locked=True)"]


@pytest.mark.few(6)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_is_plain_to_the_bit(pool: Pool, name: str) -> None:
    optimizer, options = OPTIMIZERS[name]
    case = Case(optimizer=optimizer, options=options, groups=True, clip=0.5)
    plain = alone(case, 1)
    for kind in KINDS:
        found = pool.run(1, together, case, kind, coordinated=True)[0]
        assert all(map(torch.equal, plain["parameters"], found["parameters"])), kind
        assert plain["norms"] == found["norms"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_counts_once_and_all_have_one_model(pool: Pool, kind: str) -> None:
    for processes in (0, 2) if kind == "hogwild" else (0,):
        check(pool.run(3, train, kind, processes, coordinated=True))


@pytest.mark.parametrize(("kind", "dies"), [(KINDS[0], 0), (KINDS[1], 2)])
def test_what_a_dead_worker_had_taken_is_done_by_others(pool: Pool, tmp_path: Path, kind: str, dies: int) -> None:
    found = pool.outcomes_with_death(3, train, dies, kind, 0, dies, tmp_path / "died", coordinated=True)
    check([result for rank, result in enumerate(found) if rank != dies])


@pytest.mark.parametrize("kind", KINDS)
def test_who_leaves_a_loop_early_holds_back_nobody(pool: Pool, kind: str) -> None:
    assert pool.run(2, leaving_early, kind, coordinated=True) == [40, 40]


def close_late(kind: str) -> None:
    """At the end of an interpreter loops are closed that an error has left, after goodbyes were said."""
    loader = hocket.distribute(loader=DataLoader(TensorDataset(torch.zeros(40, 1)), batch_size=2))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hocket.distribute(model, optimizer, strategy=kind)
    batches = iter(loader)
    for _ in range(2):
        (x,) = next(batches)
        model(x).sum().backward()
        optimizer.step()
    hocket.barrier()
    worker = current()
    worker.has_left = True
    worker.communicator.leave(True)
    batches.close()


@pytest.mark.parametrize("kind", KINDS[:1])
def test_a_loop_that_is_closed_after_the_goodbye_says_nothing(pool: Pool, kind: str) -> None:
    pool.run(2, close_late, kind, coordinated=True)


class Stream(IterableDataset[Any]):
    """Rank 1 has fewer samples than the others."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(4 if hocket.rank() == 1 else 20):
            yield torch.full((6,), float(number), dtype=torch.float64)


def from_streams(kind: str) -> tuple[int, list[torch.Tensor]]:
    """Every worker has data of its own, and two passes make a step."""
    model, optimizer, _ = make(Case(), 1)
    loader: Any = DataLoader(Stream(), 2)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=kind, data="local")
    taken = 0
    for x in loader:
        taken += 1
        if taken % 2:
            with hocket.accumulate():
                (model(x) ** 2).mean().backward()
            continue
        (model(x) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return taken, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_data_of_one_s_own_may_differ_in_length(pool: Pool, kind: str) -> None:
    found = pool.run(3, from_streams, kind, coordinated=True)
    assert [taken for taken, _ in found] == [10, 2, 10]
    for _, parameters in found:  # when the loop is over, it is over for everybody
        assert all(map(torch.equal, found[0][1], parameters))


def add_up(kind: str) -> torch.Tensor:
    """The gradient of every batch is its sum, whatever the weights are."""
    model = nn.Linear(5000, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    x = torch.arange(400 * 5000, dtype=torch.float64).view(400, 5000)
    model, optimizer, loader = hocket.distribute(
        model, torch.optim.SGD(model.parameters(), lr=1.0), DataLoader(TensorDataset(x), 2), strategy=kind
    )
    for (batch,) in loader:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach().clone()


def test_no_update_is_lost_under_a_lock(pool: Pool) -> None:
    whole = -torch.arange(400 * 5000, dtype=torch.float64).view(400, 5000).sum(0, keepdim=True)
    for weight in pool.run(3, add_up, KINDS[1], coordinated=True):
        assert torch.allclose(weight, whole, rtol=1e-12, atol=0)


def sparse(optimizer: str, options: dict[str, Any], kind: str | None) -> tuple[torch.Tensor, int]:
    """No two batches have a feature in common, so that workers cannot be in each other's way."""
    features, batches = 4000, 60
    torch.manual_seed(0)
    model: Any = nn.EmbeddingBag(features, 3, mode="sum", sparse=True, dtype=torch.float64)
    made: Any = getattr(torch.optim, optimizer)(model.parameters(), **options)
    x = torch.randperm(features, generator=torch.Generator().manual_seed(1))[: batches * 4 * 7].view(-1, 7)
    loader: Any = DataLoader(TensorDataset(x), 4)
    if kind is not None:
        model, made, loader = hocket.distribute(model, made, loader, strategy=kind)
    largest = 0
    for (batch,) in loader:
        (model(batch).sin() ** 2).mean().backward()
        largest = max(largest, model.weight.grad._nnz())
        assert model.weight.grad.is_sparse
        made.step()
        made.zero_grad()
    return model.weight.detach().clone(), largest


@pytest.mark.parametrize(("optimizer", "options"), [("SGD", {"lr": 0.5}), ("Adagrad", {"lr": 0.1})])
def test_only_rows_that_a_batch_touches_are_changed(pool: Pool, optimizer: str, options: dict[str, Any]) -> None:
    plain, _ = sparse(optimizer, options, None)
    for weight, largest in pool.run(3, sparse, optimizer, options, "hogwild", coordinated=True):
        assert torch.allclose(weight, plain, rtol=1e-12, atol=1e-12)
        assert largest == 4 * 7


def resumed(stop: int | None, kind: str) -> tuple[int, int, torch.Tensor]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 1)).double()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1)).double()
    loader: Any = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4, shuffle=True)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=kind)
    position = hocket.resume(model=model, optimizer=optimizer, loader=loader)
    taken = 0
    for _ in range(position.epoch, 2):
        for a, b in loader:
            saver = current().training.saver
            if isinstance(saver, Saver):
                saver.settle()  # else the next checkpoint is left out on a busy machine
            ((model(a) - b) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            taken += 1
            if stop is not None and taken == stop:
                break
        if stop is not None:
            break
    return position.step, taken, model[0].weight.detach().clone()


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_goes_on(pool: Pool, tmp_path: Any, kind: str) -> None:
    settings: dict[str, Any] = {"checkpoint": str(tmp_path), "checkpoint_every": 4, "coordinated": True}
    whole = pool.run(1, resumed, None, kind, coordinated=True, checkpoint=str(tmp_path / "whole"))[0]
    pool.run(1, resumed, 9, kind, **settings)
    step, taken, weight = pool.run(1, resumed, None, kind, **settings)[0]
    assert step == 8 and taken == 48 - 8
    assert torch.allclose(weight, whole[2], rtol=1e-9, atol=1e-9)
    pool.run(2, resumed, 9, kind, coordinated=True, checkpoint=str(tmp_path / "two"), checkpoint_every=4)
    found = pool.run(3, resumed, None, kind, coordinated=True, checkpoint=str(tmp_path / "two"), checkpoint_every=4)
    assert 48 - 2 * 9 <= sum(result[1] for result in found) <= 48 - 4
    assert all(torch.equal(found[0][2], result[2]) for result in found)


def start(strategy: str) -> None:
    hocket.distribute(*make(Case(), 1), strategy=strategy)


def leave_the_copy(how: str) -> None:
    model, optimizer, loader = hocket.distribute(*make(Case(), 1), strategy="hogwild")
    if how == "assign":
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    elif how == "type":
        model.float()
    for x, y in loader:
        dtype = next(model.parameters()).dtype
        ((model(x.to(dtype)) - y.to(dtype)) ** 2).mean().backward()
        optimizer.step()


def test_bad_input_is_told_in_one_line(pool: Pool) -> None:
    for settings, text in (
        ({"hosts": [1, 1], "coordinated": True, "transport": "gloo"}, "the workers are on 2 hosts"),
        ({"coordinated": True, "transport": "gloo"}, "leave out --transport gloo"),
        ({"servers": 2}, "leave out --servers 2"),
        ({}, "say --strategy hogwild to hocket run"),
    ):
        with pytest.raises(RemoteError, match=text):
            pool.run(2, start, "hogwild", **settings)
    for how in ("assign", "type"):
        with pytest.raises(RemoteError, match=r"replaced or changed|has left the copy"):
            pool.run(1, leave_the_copy, how, coordinated=True)


def load_something() -> list[torch.Tensor]:
    model, optimizer, loader = hocket.distribute(*make(Case(), 1), strategy="hogwild(locked=True)")
    model.load_state_dict({name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()})
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for x, y in loader:
        (0 * (model(x) - y)).mean().backward()
        optimizer.step()
    return before + [parameter.detach().clone() for parameter in model.parameters()]


def test_what_is_loaded_is_shared(pool: Pool) -> None:
    for values in pool.run(2, load_something, coordinated=True):
        assert all(bool((value == 0.5).all()) for value in values)


def load_a_part() -> list[float]:
    """Both ranks have changed what is not loaded."""
    model: Any = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Sequential(nn.Linear(1, 1, bias=False))).double()
    nn.init.zeros_(model[0].weight)
    nn.init.ones_(model[1][0].weight)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    loader: Any = DataLoader(TensorDataset(torch.ones(2, 1).double()), 1)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy="hogwild(locked=True)")
    hocket.barrier()
    for _ in range(2):
        model[0].weight.grad = torch.ones_like(model[0].weight)
        optimizer.step()
    hocket.barrier()
    model.load_state_dict({"1.0.weight": torch.full((1, 1), 7.0).double()}, strict=False)
    first = [parameter.item() for parameter in model.parameters()]
    model[1].load_state_dict({"0.weight": torch.full((1, 1), 8.0).double()})
    return first + [parameter.item() for parameter in model.parameters()]


def test_what_is_not_loaded_stays_as_it_is(pool: Pool) -> None:
    assert pool.run(2, load_a_part, coordinated=True) == [[-4.0, 7.0, -4.0, 8.0]] * 2


def without_rank_0(died: Path) -> str:
    model, optimizer, loader = hocket.distribute(*make(Case(), 1), strategy="hogwild")
    for count, (x, y) in enumerate(loader):
        if count == 2 and hocket.rank() == 0:
            died.touch()
            os._exit(1)
        if count == 2:  # or these two could take all batches before rank 0 has its third one
            until(died.exists, 30)
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    hocket.distribute(loader=loader.original)  # needs a seed that all share
    return str(hocket.mean(1.0))


def test_collectives_without_rank_0(pool: Pool, tmp_path: Path) -> None:
    found = pool.outcomes_with_death(3, without_rank_0, 0, tmp_path / "died", coordinated=True)
    assert found[1:] == ["1.0", "1.0"]
