"""The laws of DiLoCo: plain, it is local SGD; its outer step is torch's; every parameter goes once a period."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool, RemoteError
from strategies.training import Case, loop, make, together

import hocket
from hocket.errors import StrategyError
from hocket.job.worker import current
from hocket.strategies.diloco import DiLoCoTraining
from hocket.strategies.fragments import divide

PLACES: list[tuple[int, list[int] | None]] = [(2, None), (3, None), (3, [2, 1])]
MOMENTUM = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}


def training() -> DiLoCoTraining:
    found = current().training.strategies[0]
    assert isinstance(found, DiLoCoTraining)
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize(("workers", "hosts"), PLACES)
@pytest.mark.parametrize("model", ["tied", "channels_last"])
def test_plain_it_is_local_sgd(pool: Pool, model: str, workers: int, hosts: list[int] | None) -> None:
    case = Case(model=model, options=MOMENTUM, epochs=3)  # 8 or 6 batches an epoch: the last round is short
    one = pool.run(workers, together, case, "local_sgd(period=3)", hosts=hosts)
    many = pool.run(workers, together, case, "diloco(period=3, outer_lr=1.0, outer_momentum=0.0)", hosts=hosts)
    for mine, theirs in zip(one, many, strict=True):
        for left, right in zip(mine["parameters"], theirs["parameters"], strict=True):
            assert torch.allclose(left, right, rtol=1e-9, atol=1e-9)
        for left, right in zip(many[0]["parameters"], theirs["parameters"], strict=True):
            assert torch.equal(left, right)


def by_hand(case: Case, period: int, rate: float, momentum: float) -> list[torch.Tensor]:
    """Every worker on its own data, between outer steps that torch's SGD takes on the averaged displacement."""
    model, optimizer, loader = make(case, 1)
    outer = copy.deepcopy(model)
    steps = torch.optim.SGD(outer.parameters(), lr=rate, momentum=momentum, nesterov=momentum > 0)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy="local_sgd(period=100000)")

    def end_round() -> None:
        for mine, theirs in zip(outer.parameters(), model.parameters(), strict=True):
            mine.grad = hocket.allreduce(mine.detach() - theirs.detach(), "mean")
        steps.step()
        with torch.no_grad():
            for mine, theirs in zip(outer.parameters(), model.parameters(), strict=True):
                theirs.copy_(mine)

    for _ in range(case.epochs):
        for number, (x, y) in enumerate(loader, start=1):
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % period == 0 or number == len(loader):
                end_round()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(("rate", "momentum"), [(0.7, 0.9), (0.5, 0.0)])
def test_the_outer_step_is_that_of_torch(pool: Pool, rate: float, momentum: float) -> None:
    case = Case(optimizer="AdamW", options={"lr": 0.003}, epochs=3)
    one = pool.run(2, by_hand, case, 3, rate, momentum)
    many = pool.run(2, together, case, f"diloco(period=3, outer_lr={rate}, outer_momentum={momentum})")
    for mine, theirs in zip(one[0], many[1]["parameters"], strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9)


def stream(case: Case, strategy: str) -> dict[str, Any]:
    """How often each tensor was handed over, after which batches, and what was sent before the loop ended."""
    model, optimizer, loader = hocket.distribute(*make(case, 1), strategy=strategy)
    train, begun = training(), []
    original = train._begin

    def note(fragment: Any, *, waits: bool) -> None:
        begun.append((train.batches, tuple(fragment.names)))
        original(fragment, waits=waits)

    train._begin = note  # type: ignore[method-assign]
    sent: list[int] = []
    settle = train._make_equal
    train._make_equal = lambda: (sent.append(train.sent), settle())[1]  # type: ignore[func-returns-value, method-assign]
    result = loop(case, model, optimizer, loader, held=None)
    return {**result, "begun": begun, "sent": sent, "bytes": sum(p.nbytes for p in model.parameters())}


@pytest.mark.few(6)
@pytest.mark.parametrize(("workers", "hosts"), [(2, None), (2, [1, 1]), (4, [2, 2]), (3, None)])
@pytest.mark.parametrize("delay", [0, 1, 4, None])
def test_streaming(pool: Pool, delay: int | None, workers: int, hosts: list[int] | None) -> None:
    case = Case(samples=3 * 12 * workers, epochs=1)
    strategy = f"diloco(period=4, fragments=3, delay={delay})"
    many = pool.run(workers, stream, case, strategy, hosts=hosts)
    for result in many:
        for mine, theirs in zip(many[0]["parameters"], result["parameters"], strict=True):
            assert torch.equal(mine, theirs) and bool(mine.isfinite().all())
        assert result["begun"] == many[0]["begun"]
        in_time = result["begun"][:9]
        assert [batch for batch, _ in in_time] == [1, 2, 4, 5, 6, 8, 9, 10, 12]  # offsets are spread over the period
        for first in (0, 3, 6):
            names = [name for _, part in in_time[first : first + 3] for name in part]
            assert len(names) == len(set(names)) == len(result["parameters"])
        assert result["sent"] == [3 * result["bytes"]]  # of 12 steps in which mirrored sends all


def test_streaming_keeps_local_steps(pool: Pool) -> None:
    """With a plain outer step, an exchange only replaces a displacement by its average: the mean over workers stays."""
    many = pool.run(2, watch_mean, "diloco(period=4, fragments=2, outer_lr=1.0, outer_momentum=0.0, delay=2)")
    assert max(many[0]) < 1e-12 and len(many[0]) == 14


def watch_mean(strategy: str) -> list[float]:
    """By how much the mean over the workers moves in each exchange."""
    case = Case(samples=3 * 14 * 2, epochs=1)
    model, optimizer, loader = hocket.distribute(*make(case, 1), strategy=strategy)
    train, moved = training(), []
    exchange = train._exchange

    def mean() -> torch.Tensor:
        return hocket.allreduce(torch.cat([p.detach().reshape(-1) for p in model.parameters()]), "mean")

    def watched(batches: int, samples: int) -> None:
        before = mean()
        exchange(batches, samples)
        moved.append(float((mean() - before).abs().max()))

    train._exchange = watched  # type: ignore[method-assign]
    loop(case, model, optimizer, loader, held=None)
    return moved


def interrupted(case: Case, strategy: str, folder: str, after: int, resumed: bool) -> list[torch.Tensor]:
    """Two epochs; saved after a batch of the first, or resumed from there."""
    model, optimizer, loader = hocket.distribute(*make(case, 1), strategy=strategy)
    if resumed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        hocket.load(folder, model=model, optimizer=optimizer, loader=loader)
    done = after if resumed else 0
    for _ in range(2):
        for x, y in loader:
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == after and not resumed:
                hocket.save(folder, model=model, optimizer=optimizer, loader=loader).wait()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("strategy", ["diloco(period=4)", "diloco(period=4, fragments=2, delay=1)"])
def test_a_resumption_is_exact_at_the_end_of_a_round(pool: Pool, tmp_path: Path, strategy: str) -> None:
    case = Case(samples=3 * 7 * 2)
    one = pool.run(2, interrupted, case, strategy, str(tmp_path), 4, False)
    many = pool.run(2, interrupted, case, strategy, str(tmp_path), 4, True)
    exact = "fragments" not in strategy
    for mine, theirs, other in zip(one[0], many[0], many[1], strict=True):
        assert torch.equal(theirs, other)
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9) or not exact
        assert torch.allclose(mine, theirs, atol=0.05)


def test_a_save_changes_nothing_and_has_the_mean(pool: Pool, tmp_path: Path) -> None:
    case = Case(samples=3 * 7 * 2)
    for strategy in ("diloco(period=4)", "diloco(period=4, fragments=3)"):
        saved = pool.run(2, interrupted, case, strategy, str(tmp_path), 2, False)
        plain = pool.run(2, interrupted, case, strategy, str(tmp_path), -1, False)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(saved[0], plain[0], strict=True))
        again = pool.run(2, interrupted, case, strategy, str(tmp_path), 2, True)
        assert all(torch.allclose(mine, theirs, atol=0.05) for mine, theirs in zip(saved[0], again[0], strict=True))


def break_off(strategy: str) -> list[torch.Tensor]:
    """Loops that are left right after a step."""
    case = Case()
    model, optimizer, loader = hocket.distribute(*make(case, 1), strategy=strategy)
    for _ in range(2):
        for x, y in loader:
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            break
    hocket.barrier()  # the next call that all ranks make
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("strategy", ["local_sgd(period=1)", "diloco(period=5)", "diloco(period=5, fragments=2)"])
def test_all_are_equal_when_a_loop_was_left(pool: Pool, strategy: str) -> None:
    first, second = pool.run(2, break_off, strategy)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))


@given(sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=30), parts=st.integers(1, 30))
def test_fragments_have_every_tensor_once(sizes: list[int], parts: int) -> None:
    if parts > len(sizes):
        with pytest.raises(StrategyError, match=f"use fragments={len(sizes)} or less"):
            divide(sizes, parts)
        return
    divided = divide(sizes, parts)
    assert sorted(index for part in divided for index in part) == list(range(len(sizes))) and all(divided)
    totals = [sum(sizes[index] for index in part) for part in divided]
    assert max(totals) - min(totals) <= max(sizes)


def test_more_fragments_than_tensors(pool: Pool) -> None:
    with pytest.raises(RemoteError, match="fragments=9, but the model has 6 tensors of parameters"):
        pool.run(2, together, Case(), "diloco(period=20, fragments=9)")


def count_bytes(strategy: str) -> int:
    """What a worker has handed over in twelve steps."""
    case = Case(samples=3 * 12 * 2, epochs=1)
    loop(case, *hocket.distribute(*make(case, 1), strategy=strategy), held=None)
    return sum(each.sent for each in current().training.strategies)


def test_what_is_sent_in_every_step_is_counted_alike(pool: Pool) -> None:
    every_step = sum(pool.run(2, count_bytes, "mirrored"))
    assert every_step > 0
    for strategy, servers in (("central", 0), ("central(fused=True)", 0), ("bsp", 1), ("asynchronous", 1)):
        assert sum(pool.run(2, count_bytes, strategy, servers=servers)) == every_step, strategy


def test_a_period_divides_what_is_sent(pool: Pool) -> None:
    every_step = pool.run(2, count_bytes, "mirrored")
    for strategy in ("local_sgd(period=4)", "diloco(period=4)", "easgd(period=4)"):
        assert [4 * sent for sent in pool.run(2, count_bytes, strategy)] == every_step
