"""The laws of elastic averaging: opposite amounts, alpha 0 is independent; and which model is seen and saved."""

import copy
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, RemoteError
from strategies.training import Case, make
from torch import nn

import hocket
from hocket.job.worker import current
from hocket.strategies.elastic import ElasticTraining

KINDS = [(2, 0, None), (3, 0, [2, 1]), (1, 1, None), (2, 1, None), (3, 2, None)]  # workers, servers, hosts


def training() -> ElasticTraining:
    found = current().training.strategies[0]
    assert isinstance(found, ElasticTraining)
    return found


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().clone().reshape(-1) for tensor in tensors])


def run(pool: Pool, kind: tuple[int, int, list[int] | None], function: Any, *args: Any, **settings: Any) -> list[Any]:
    workers, servers, hosts = kind
    return pool.run(workers, function, *args, servers=servers, **({"hosts": hosts} if hosts else {}), **settings)


def watched(case: Case, strategy: str) -> dict[str, Any]:
    """A training in which every pull is looked at."""
    model, optimizer, loader = hocket.distribute(*make(case, 1), strategy=strategy)
    train = training()
    own = train._members.parameters  # in the order of the centre
    start, pull, moved, errors = flat(own), train._pull, [], []

    def look() -> None:
        x = flat(own)
        centre = flat(train.centre) if hasattr(train, "centre") else None
        pull()
        moved.append(x - flat(own))
        if centre is not None:  # the equations of the paper, with the values from before
            everyone = hocket.allgather(x)
            expected = centre + train.alpha * (everyone - centre).sum(0)
            errors.append(float((flat(train.centre) - expected).abs().max()))
            errors.append(float((moved[-1] - train.alpha * (x - centre)).abs().max()))
            total = hocket.allreduce(flat(own), "sum") + flat(train.centre)
            errors.append(float((total - (everyone.sum(0) + centre)).abs().max()))

    train._pull = look  # type: ignore[method-assign]
    for _ in range(case.epochs):
        for x, y in loader:
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    total = torch.stack(moved).sum(0) if moved else torch.zeros_like(start)
    return {"start": start, "moved": total, "shown": flat(own), "errors": errors, "pulls": train.pulls}


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["easgd(period=2)", "easgd(period=3, alpha=0.4, momentum=0.9)"])
def test_workers_and_centre_move_by_opposite_amounts(pool: Pool, kind: Any, strategy: str) -> None:
    case = Case(samples=60, epochs=2, options={"lr": 0.02})
    many = run(pool, kind, watched, case, strategy)
    moved = sum(result["moved"] for result in many)
    for result in many:
        assert torch.equal(result["shown"], many[0]["shown"])  # the centre, on every rank
        assert torch.allclose(result["shown"] - result["start"], moved, rtol=1e-9, atol=1e-12)
        assert max(result["errors"], default=0.0) < 1e-12
    assert sum(result["pulls"] for result in many) > 3 and float(moved.abs().max()) > 1e-4


def independent(case: Case, strategy: str) -> bool:
    """Whether this worker's replica is, after every step, that of a plain script with the same batches."""
    model, optimizer, loader = hocket.distribute(*make(case, 1), strategy=strategy)
    plain = copy.deepcopy(model)
    options = {"momentum": 0.9, "nesterov": True} if "momentum" in strategy else {}
    own = torch.optim.SGD(plain.parameters(), **case.options, **options)
    same = True
    for _ in range(case.epochs):
        for x, y in loader:
            for each, steps in ((model, optimizer), (plain, own)):
                ((each(x) - y) ** 2).mean().backward()
                steps.step()
                steps.zero_grad()
            same &= torch.equal(flat(model.parameters()), flat(plain.parameters()))
        shown = flat(model.parameters())
        next(iter(loader))  # a glance at the data is no training loop
        assert torch.equal(shown, flat(model.parameters()))
        assert torch.equal(hocket.allgather(shown)[0], shown)
    return same


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_pull_workers_are_independent(pool: Pool, kind: Any) -> None:
    case = Case(samples=126, epochs=2)
    assert all(run(pool, kind, independent, case, "easgd(period=2, alpha=0.0)"))
    assert all(run(pool, kind, independent, case, "easgd(period=2, alpha=0.0, momentum=0.9)"))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


def saved(folder: str, strategy: str) -> dict[str, Any]:
    """An epoch, a save in the middle of the next, and a script that goes on from there."""
    _, _, loader = make(Case(samples=60), 1)
    torch.manual_seed(0)
    model = Normed().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=strategy)
    train, batches, at_save = training(), 0, {}
    for _ in range(2):
        for x, y in loader:
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            batches += 1
            if batches == 13:
                own = flat(model.state_dict().values())
                hocket.save(folder, model=model, optimizer=optimizer, loader=loader).wait()
                assert torch.equal(flat(model.state_dict().values()), own)  # this worker goes on with its own
                named = dict(zip(train._members.names, getattr(train, "centre", ()), strict=False))
                centre = flat([named.get(name, p) for name, p in model.named_parameters()])
                at_save = {"own": own, "centre": centre}
    hocket.barrier()
    other = Normed().double()
    hocket.load(folder, model=other)
    loaded = flat(other.parameters())
    model.load_state_dict(other.state_dict())
    started = []
    for x, y in loader:
        started.append(flat(model.parameters()))
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**at_save, "saved": loaded, "started": started[0] if started else loaded, "end": flat(model.parameters())}


@pytest.mark.parametrize(("workers", "servers"), [(2, 0), (1, 1)])  # with servers, one of several may get no batch
def test_the_centre_is_saved_and_what_is_loaded_counts(pool: Pool, tmp_path: Path, workers: int, servers: int) -> None:
    many = pool.run(workers, saved, str(tmp_path), "easgd(period=3)", servers=servers)
    for result in many:
        assert torch.equal(result["saved"], many[0]["saved"])
        assert torch.equal(result["end"], many[0]["end"])
        assert torch.equal(result["started"], result["saved"])
        assert not torch.equal(result["own"][:28], result["saved"][:28])
        assert servers or torch.equal(result["saved"], result["centre"])


def resumed(folder: str, again: bool) -> list[torch.Tensor]:
    """Workers that resume begin at the centre."""
    model, optimizer, loader = make(Case(samples=60), 1)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy="easgd(period=4)")
    if again:
        hocket.load(folder, model=model, optimizer=optimizer, loader=loader)
    first, is_saved = None, again
    for number, (x, y) in enumerate(loader):
        first = flat(model.parameters()) if first is None else first
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 4 and not again:
            hocket.save(folder, model=model, optimizer=optimizer, loader=loader).wait()
            is_saved = True
    if not is_saved:  # with servers, a worker may have got fewer batches
        hocket.save(folder, model=model, optimizer=optimizer, loader=loader).wait()
    return [flat(model.parameters()) if first is None else first, flat(model.parameters())]


@pytest.mark.parametrize("servers", [0, 2])
def test_a_resumption_begins_at_the_centre(pool: Pool, tmp_path: Path, servers: int) -> None:
    pool.run(2, resumed, str(tmp_path), False, servers=servers)
    (first, shown), (other, seen) = pool.run(2, resumed, str(tmp_path), True, servers=servers)
    assert torch.equal(shown, seen)
    assert servers or torch.equal(first, other)


def dying(strategy: str) -> tuple[int, torch.Tensor]:
    """Rank 1 is killed in the middle of the second epoch."""
    model, optimizer, loader = hocket.distribute(*make(Case(samples=90), 1), strategy=strategy)
    batches = 0
    for epoch in range(3):
        for x, y in loader:
            if epoch == 1 and hocket.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            batches += epoch == 2
        if epoch == 1 and hocket.rank() == 1:  # it has got no batch
            os.kill(os.getpid(), signal.SIGKILL)
    return batches, flat(model.parameters())


def test_others_go_on_when_a_worker_is_lost(pool: Pool) -> None:
    first, _, last = pool.outcomes_with_death(3, dying, 1, "easgd(period=2)", servers=1)
    assert not isinstance(first, RemoteError), first
    assert not isinstance(last, RemoteError), last
    assert first[0] + last[0] == 30 and torch.equal(first[1], last[1])


def poisoned(strategy: str) -> tuple[int, torch.Tensor]:
    """One rank's gradients are not finite once; that step is left out, and rounds stay in step."""
    model, optimizer, loader = hocket.distribute(*make(Case(samples=60), 1), strategy=strategy, on_nan="skip")
    for number, (x, y) in enumerate(loader):
        factor = float("nan") if number == 3 and hocket.rank() == 1 else 1.0
        (((model(x) - y) ** 2).mean() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    return current().training.strategies[0].skipped, flat(model.parameters())


@pytest.mark.parametrize("strategy", ["easgd(period=2)", "diloco(period=3)", "diloco(period=3, fragments=2)"])
def test_a_step_that_is_left_out_does_not_shift_rounds(pool: Pool, strategy: str) -> None:
    (kept, mine), (left_out, theirs) = pool.run(2, poisoned, strategy)
    assert (kept, left_out) == (0, 1)
    assert torch.equal(mine, theirs) and bool(mine.isfinite().all())


def evaluated(strategy: str) -> bool:
    """A loop that only evaluates, gradients enabled when it begins, sees the centre; training goes on with the own."""
    model, optimizer, loader = hocket.distribute(*make(Case(samples=60), 1), strategy=strategy)
    _, _, other = make(Case(samples=60), 1)
    other = hocket.distribute(loader=other)
    for x, y in loader:
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    aside, shown = training()._aside, flat(model.parameters())
    assert aside is not None and torch.equal(hocket.allgather(shown)[0], shown)
    own = flat(aside)
    for x, _ in other:
        with torch.no_grad():
            model(x)
        assert torch.equal(flat(model.parameters()), shown)
    model.eval()
    for x, _ in other:
        model(x)
        assert torch.equal(flat(model.parameters()), shown)
    model.train()
    for x, _ in loader:
        penalty = sum(p.square().sum() for p in model.parameters())
        (model(x).mean() + penalty).backward()
        assert not torch.equal(own, shown)
        return torch.equal(flat(training()._members.parameters), own)
    return False


def test_a_loop_that_evaluates_sees_the_centre(pool: Pool) -> None:
    assert pool.run(2, evaluated, "easgd(period=4)") == [True, True]


def momenta(folder: str) -> list[float]:
    """The optimizer's momentum before, during and after easgd, and after a checkpoint without has been loaded."""
    seen: list[float] = []
    for strategy in (
        "mirrored -> easgd(momentum=0.9) @ step 3 -> mirrored @ step 6",
        "easgd(momentum=0.9) -> easgd(momentum=0.5) @ step 3",
    ):
        model, optimizer, loader = hocket.distribute(*make(Case(samples=54), 1), strategy=strategy)
        for x, y in loader:
            seen.append(optimizer.param_groups[0]["momentum"])
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        current().training.strategies.clear()
        if not folder:
            continue
        hocket.save(folder, model=model, optimizer=optimizer, loader=loader).wait()
        hocket.barrier()
        model, optimizer, loader = hocket.distribute(*make(Case(samples=54), 1), strategy="easgd(momentum=0.9)")
        hocket.load(folder, model=model, optimizer=optimizer)
        return [*seen, optimizer.param_groups[0]["momentum"]]
    return seen


def test_momentum_is_there_while_easgd_is_at_work(pool: Pool, tmp_path: Path) -> None:
    both = [0, 0, 0, 0.9, 0.9, 0.9, 0, 0, 0]
    assert pool.run(2, momenta, "") == [[*both, 0.9, 0.9, 0.9, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]] * 2
    assert pool.run(2, momenta, str(tmp_path)) == [[*both, 0.9]] * 2


def refused(optimizer: str, options: dict[str, Any], sparse: bool, strategy: str) -> None:
    model: nn.Module = nn.Embedding(5, 4, sparse=True) if sparse else nn.Linear(3, 1)
    made = getattr(torch.optim, optimizer)(model.parameters(), **options)
    hocket.distribute(model, made, strategy=strategy)


def test_refusals(pool: Pool) -> None:
    with pytest.raises(RemoteError, match=r"the script's optimizer is Adam: use torch\.optim\.SGD without momentum"):
        pool.run(2, refused, "Adam", {"lr": 0.1}, False, "easgd(momentum=0.9)")
    with pytest.raises(RemoteError, match="the script's optimizer is SGD with momentum: use"):
        pool.run(2, refused, "SGD", {"lr": 0.1, "momentum": 0.5}, False, "easgd(momentum=0.9)")
    with pytest.raises(RemoteError, match="has sparse gradients: make it with sparse=False"):
        pool.run(2, refused, "SGD", {"lr": 0.1}, True, "easgd", servers=1)
