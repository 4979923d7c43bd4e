"""What strategies with replicas of their own do beside their law: when they average, what is saved, what goes on."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, RemoteError
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.job.worker import current


def make(samples: int = 48, batch: int = 4, strategy: str = "local_sgd(period=4)", **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), **({"lr": 0.05, "momentum": 0.9} | options))
    x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, torch.sin(x.sum(1, keepdim=True))), batch)
    return hocket.distribute(model, optimizer, loader, strategy=strategy)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, skip: bool = False) -> None:
    ((model(batch[0]) - batch[1]) ** 2).mean().backward()
    if not skip:
        optimizer.step()
    optimizer.zero_grad()


def same_everywhere(model: nn.Module) -> bool:
    flat = torch.cat([t.detach().double().reshape(-1) for t in model.state_dict().values()])
    return bool((hocket.allgather(flat) == flat).all())


def rounds(strategy: str, skips: bool, epochs: int) -> tuple[list[bool], list[bool]]:
    """Whether replicas are equal at the beginning of each batch, and after each epoch; steps are left out on rank 1."""
    model, optimizer, loader = make(strategy=strategy)
    inside, after = [], []
    for _ in range(epochs):
        for number, batch in enumerate(loader):
            inside.append(same_everywhere(model))
            step(model, optimizer, batch, skip=skips and number % 3 == 1 and hocket.rank() == 1)
        after.append(same_everywhere(model))
    return inside, after


@pytest.mark.parametrize("skips", [False, True])
def test_rounds_are_counted_in_batches(pool: Pool, skips: bool) -> None:
    for inside, after in pool.run(2, rounds, "local_sgd(period=4)", skips, 2):
        assert inside == [number % 6 in (0, 4) for number in range(12)]  # 6 batches an epoch, which ends a round
        assert after == [True, True]


def test_the_period_grows(pool: Pool) -> None:
    strategy = "local_sgd(period=1, growth=2.0, every=2, most=3)"
    (inside, _), _ = pool.run(2, rounds, strategy, False, 1)
    assert inside == [True, True, True, False, True, False]  # averages after 1, 2 and 4 batches: 1, 1, 2, 3 …


def left_early() -> tuple[bool, bool, bool]:
    model, optimizer, loader = make()
    next(iter(loader))  # a glance
    for number, batch in enumerate(loader):
        step(model, optimizer, batch)
        if number == 1:
            before = same_everywhere(model)
            break
    hocket.barrier()  # the next call that all ranks make
    after = same_everywhere(model)
    for batch in loader:
        step(model, optimizer, batch)
        break
    hocket.barrier()
    return before, after, same_everywhere(model)


def test_a_loop_that_is_left_leaves_equal_replicas(pool: Pool) -> None:
    assert pool.run(3, left_early) == [(False, True, True)] * 3


def with_other_iterators(strategy: str) -> tuple[int, bool]:
    """One that was forgotten, a second loader beside the first, and an evaluation that keeps gradients."""
    model, optimizer, loader = make(strategy=strategy)
    beside = hocket.distribute(loader=DataLoader(TensorDataset(torch.zeros(48, 1)), 4))
    forgotten = iter(beside)
    next(forgotten)
    for _ in range(2):
        for batch, _ in zip(loader, beside, strict=True):
            step(model, optimizer, batch)
        before = [p.detach().clone() for p in model.parameters()]
        for x, _ in loader:
            model(x)
        assert all(map(torch.equal, before, model.parameters()))
    (trained,) = current().training.strategies
    return trained.batches, same_everywhere(model)


@pytest.mark.parametrize("strategy", ["local_sgd(period=4)", "diloco(period=4)"])
def test_batches_count_once_and_only_those_that_are_trained_on(pool: Pool, strategy: str) -> None:
    assert pool.run(2, with_other_iterators, strategy) == [(12, True)] * 2


def raising() -> None:
    model, optimizer, loader = make(strategy="local_sgd(period=60)")
    for number, batch in enumerate(loader):
        step(model, optimizer, batch)
        if number == 2 and hocket.rank() == 1:
            raise ZeroDivisionError
    hocket.barrier()


def test_an_exception_on_one_rank_is_heard_at_once(pool: Pool) -> None:
    found = pool.outcomes(2, raising)
    assert isinstance(found[1], RemoteError)
    assert found[1].kind == "ZeroDivisionError"
    assert isinstance(found[0], RemoteError)
    assert found[0].kind == "WorkerLost"


def skipping(folder: str) -> int:
    """Saves at the same batch on all ranks, of which one has skipped a step."""
    model, optimizer, loader = make()
    for number, (x, y) in enumerate(loader):
        step(model, optimizer, (x * float("nan") if number == 1 and hocket.rank() else x, y))
        if number == 2:
            hocket.save(folder, model=model, optimizer=optimizer, loader=loader).wait()
    return current().training.counts.common_step


def test_a_step_that_one_rank_skips_does_not_part_them(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, skipping, str(tmp_path), on_nan="skip") == [6, 6]


def without_loader() -> list[bool]:
    model, optimizer, _ = make()
    batch = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 1, dtype=torch.float64)
    equal = []
    for _ in range(8):
        step(model, optimizer, batch)
        parameters = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        equal.append(bool((hocket.allgather(parameters) == parameters).all()))
    return equal


def test_without_a_loader_steps_are_counted(pool: Pool) -> None:
    assert pool.run(2, without_loader) == [[False, False, False, True] * 2] * 2


def momenta(asked: bool) -> bool:
    model, optimizer, loader = make(strategy=f"local_sgd(period=3, optimizer_state={asked})")
    for batch in loader:
        step(model, optimizer, batch)
    flat = torch.cat([optimizer.state[p]["momentum_buffer"].reshape(-1) for p in model.parameters()])
    return bool((hocket.allgather(flat) == flat).all())


@pytest.mark.parametrize("asked", [False, True])
def test_the_state_of_optimizers_is_averaged_if_asked(pool: Pool, asked: bool) -> None:
    assert pool.run(2, momenta, asked) == [asked, asked]


def save(folder: str) -> tuple[Any, Any, Any, Any]:
    model, optimizer, loader = make()
    for number, batch in enumerate(loader):
        step(model, optimizer, batch)
        if number == 1:
            own = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
            hocket.save(folder, model=model, optimizer=optimizer, loader=loader).wait()
            after = copy.deepcopy(model.state_dict())
            break
    hocket.barrier()
    again, other, _ = make()
    hocket.load(folder, model=again, optimizer=other)
    return (*own, after, (again.state_dict(), other.state_dict()["state"]))


def test_a_checkpoint_has_the_average_and_nobody_is_changed(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(2, save, str(tmp_path))
    for own, _, after, _ in found:
        assert all(torch.equal(own[name], after[name]) for name in own)
    assert not torch.equal(found[0][0]["0.weight"], found[1][0]["0.weight"])
    for _, _, _, (loaded, state) in found:
        for name, value in loaded.items():
            mean = torch.stack([own[name].double() for own, _, _, _ in found]).mean(0)
            assert torch.allclose(value.double(), mean, rtol=1e-12), name
        for index, values in state.items():
            mean = torch.stack([momenta[index]["momentum_buffer"] for _, momenta, _, _ in found]).mean(0)
            assert torch.allclose(values["momentum_buffer"], mean, rtol=1e-12)


def interrupted(folder: str, strategy: str, stop: int | None, epochs: int) -> list[torch.Tensor]:
    """Saves every two batches, where all replicas are equal; ``stop`` ends it after so many."""
    model, optimizer, loader = make(strategy=strategy)
    position = hocket.resume(model=model, optimizer=optimizer, loader=loader)
    done = 0
    for _ in range(position.epoch, epochs):
        for batch in loader:
            step(model, optimizer, batch)
            done += 1
            if stop is not None and done > stop:
                return []
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("strategy", ["local_sgd(period=2, optimizer_state=True)", "local_sgd(time=1e-9)"])
def test_a_resumption_goes_on_as_if_nothing_had_happened(pool: Pool, tmp_path: Path, strategy: str) -> None:
    whole = pool.run(2, interrupted, "", strategy, None, 2)
    options: dict[str, Any] = {"checkpoint": str(tmp_path), "checkpoint_every": 2}
    pool.run(2, interrupted, str(tmp_path), strategy, 5, 2, **options)
    again = pool.run(2, interrupted, str(tmp_path), strategy, None, 2, **options)
    for mine, theirs in zip(whole, again, strict=True):
        assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(mine, theirs, strict=True))


def not_a_number(on_rank: int) -> int:
    model, optimizer, loader = make(strategy="local_sgd(period=2)")
    for number, (x, y) in enumerate(loader):
        if number == 1 and hocket.rank() == on_rank:
            x = x * float("nan")
        step(model, optimizer, (x, y))
    return sum(strategy.skipped for strategy in current().training.strategies)


def test_a_gradient_that_is_not_finite_is_this_workers_matter(pool: Pool) -> None:
    assert pool.run(2, not_a_number, 1, on_nan="skip") == [0, 1]
    outcomes = pool.outcomes(2, not_a_number, 1)
    assert isinstance(outcomes[1], RemoteError)
    assert outcomes[1].kind == "NonFiniteError"
    assert "rank 1" in outcomes[1].message


def sparse() -> bool:
    torch.manual_seed(0)
    model = nn.Embedding(20, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.arange(16)), 4)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy="local_sgd(period=2)")
    for (index,) in loader:
        model(index).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return same_everywhere(model)


def test_sparse_gradients_are_fine(pool: Pool) -> None:
    assert pool.run(2, sparse) == [True, True]


def closed(on_rank: int) -> tuple[int, bool]:
    model, optimizer, loader = make(strategy="local_sgd(period=2)")
    for number, (x, y) in enumerate(loader):
        factor = float("nan") if number == 1 and hocket.rank() == on_rank else 1.0

        def closure(x: torch.Tensor = x, y: torch.Tensor = y, factor: float = factor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = ((model(x) - y) ** 2).mean() * factor
            loss.backward()
            return loss

        optimizer.step(closure)
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    return current().training.strategies[0].skipped, finite


def test_gradients_of_closures_are_judged(pool: Pool) -> None:
    assert pool.run(2, closed, 1, on_nan="skip") == [(0, True), (1, True)]
    outcomes = pool.outcomes(2, closed, 1)
    assert isinstance(outcomes[1], RemoteError)
    assert outcomes[1].kind == "NonFiniteError"


def grown() -> int:
    model, optimizer, loader = make(strategy="local_sgd(period=1, growth=2.0, every=1, most=4)")
    strategy: Any = current().training.strategies[0]
    strategy.batches = 5000
    for batch in loader:
        step(model, optimizer, batch)
    return int(strategy.period)


def test_a_period_that_has_grown_for_long_is_still_a_number(pool: Pool) -> None:
    assert pool.run(2, grown) == [4, 4]


def saved_in_a_round(folder: str, strategy: str) -> None:
    model, optimizer, loader = make(strategy=strategy)
    for batch in loader:
        step(model, optimizer, batch)
        hocket.save(folder, model=model, optimizer=optimizer, loader=loader).wait()


def test_in_a_round_of_seconds_nothing_can_be_saved(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match=r"in the middle of a round of local_sgd\(time=…\).*: save after the loop"):
        pool.run(2, saved_in_a_round, str(tmp_path), "local_sgd(time=5.0)")
    assert not list(tmp_path.iterdir())


def stopped(folder: str, first: str, second: str) -> list[int]:
    """A save in the middle of a long round; then how many exchanges there were in a loop of another strategy."""
    model, optimizer, loader = make(samples=96, strategy=first)
    for number, batch in enumerate(loader):
        step(model, optimizer, batch)
        if number == 6:
            hocket.save(folder, model=model, optimizer=optimizer, loader=loader).wait()
            break
    hocket.barrier()
    model, optimizer, loader = make(samples=96, strategy=second)
    hocket.load(folder, model=model, optimizer=optimizer)
    sent = []
    for batch in loader:
        step(model, optimizer, batch)
        sent.append(current().training.strategies[-1].sent)
    return sent


@pytest.mark.parametrize("second", ["easgd(period=3)", "diloco(period=3)", "local_sgd(period=3)"])
def test_shorter_rounds_go_on_after_a_resumption(pool: Pool, tmp_path: Path, second: str) -> None:
    for sent in pool.run(2, stopped, str(tmp_path), "local_sgd(period=64)", second):
        assert len(set(sent)) >= 4, sent  # 12 batches


class Heavy(torch.optim.Optimizer):
    """Momentum that is another tensor after every step, and a number in its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state["heavy"] = state["heavy"] * 0.9 + parameter.grad if "heavy" in state else parameter.grad.clone()
                state["count"] = state.get("count", 0) + 1
                parameter.sub_(state["heavy"], alpha=0.05)


def skipped_first(strategy: str, skips: int) -> tuple[bool, bool]:
    """Rank 1's first steps are left out, so that its optimizer has no state when others have."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1).double()
    optimizer: Any = Heavy(model.parameters())
    data = torch.randn(48, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loader: Any = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), 4)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=strategy, on_nan="skip")
    for number, (x, y) in enumerate(loader):
        step(model, optimizer, (x, y * float("nan") if number < skips and hocket.rank() == 1 else y))
        if number == 1:
            before = list(optimizer.state)
            with current().training.strategies[0].merged():
                assert not optimizer.state  # not all have any
            assert list(optimizer.state) == before
    state = [optimizer.state[p] for p in model.parameters()]
    flat = torch.cat([s["heavy"].reshape(-1) for s in state] + [torch.tensor([s["count"]]) for s in state])
    return same_everywhere(model), bool((hocket.allgather(flat) == flat).all())


@pytest.mark.parametrize(
    ("strategy", "skips", "equal"),
    [
        ("local_sgd(period=2, optimizer_state=True)", 3, False),  # numbers are nobody else's
        ("local_sgd(period=2) -> mirrored @ step 3", 2, True),
        ("local_sgd(period=2) -> mirrored @ step 3", 3, True),
        ("easgd(period=2) -> mirrored @ step 3", 3, True),
    ],
)
def test_ranks_whose_optimizers_have_other_state(pool: Pool, strategy: str, skips: int, equal: bool) -> None:
    assert pool.run(3, skipped_first, strategy, skips) == [(True, equal)] * 3


class Replacing(nn.Module):
    """Its buffer is another tensor after every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            self.mean = self.mean * 0.5 + x.detach().mean(0) * 0.5
        return self.linear(x)


def replaced(strategy: str) -> list[bool]:
    torch.manual_seed(0)
    model = Replacing().double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    loader: Any = DataLoader(TensorDataset(torch.randn(48, 6).double(), torch.ones(48, 1).double()), 4)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=strategy)
    equal = []
    for batch in loader:
        equal.append(same_everywhere(model))
        step(model, optimizer, batch)
    return equal


@pytest.mark.parametrize("strategy", ["local_sgd(period=2)", "diloco(period=2)"])
def test_buffers_that_are_replaced_are_averaged(pool: Pool, strategy: str) -> None:
    assert pool.run(2, replaced, strategy) == [[True, False] * 3] * 2


def merged() -> list[bool]:
    """Whether what is saved is bit for bit what all replicas are; in a round it is not."""
    model, optimizer, loader = make(samples=72)
    same = []

    def look() -> None:
        before = [tensor.clone() for tensor in model.state_dict().values()]
        with current().training.strategies[0].merged():
            same.append(all(map(torch.equal, before, model.state_dict().values())))

    for number, batch in enumerate(loader):
        if number == 4:
            look()  # at the end of a round
        step(model, optimizer, batch)
        if number == 4:
            look()
    look()
    return same


def test_equal_replicas_are_saved_as_they_are(pool: Pool) -> None:
    assert pool.run(3, merged) == [[True, False, True]] * 3
