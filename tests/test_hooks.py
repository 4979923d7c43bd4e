"""Monitored training: the numbers of the plain loop, and what happens at each of its ends."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, RemoteError, needs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket import hooks
from hocket.comm.alone import AloneCommunicator
from hocket.config import Config
from hocket.errors import NonFiniteError, UsageError
from hocket.events import Metrics
from hocket.job.simulated_job import SimulatedJob
from hocket.job.worker import Worker, acting_as, current

STRATEGIES = ["mirrored", "central", "local_sgd(period=3)", "delayed", "easgd(period=2)"]


class Told(hooks.Hook):
    """Writes down what it is called for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin(self, run: hooks.Monitored) -> None:
        self.calls.append("begin")

    def before_step(self, run: hooks.Monitored) -> None:
        self.calls.append(f"before {run.step}")

    def after_step(self, run: hooks.Monitored) -> None:
        self.calls.append(f"after {run.step} {sorted(run.values)}")

    def end(self, run: hooks.Monitored) -> None:
        self.calls.append("end")


class StopAlone(hooks.Hook):
    """One rank wants to stop after a step; the others do not know."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.at = rank, step

    def after_step(self, run: hooks.Monitored) -> None:
        if hocket.rank() == self.rank and run.step == self.at:
            run.stop()


def make(samples: int = 26) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(
        TensorDataset(x, x.sum(1, keepdim=True)), 3, shuffle=True, generator=torch.Generator().manual_seed(2)
    )
    return hocket.distribute(model, optimizer, loader)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def plain(epochs: int = 2, most: int = 10**9) -> list[torch.Tensor]:
    model, optimizer, loader = make()
    count = 0
    for _ in range(epochs):
        for x, y in loader:
            step(model, optimizer, x, y)
            count += 1
            if count == most:
                break
        if count == most:
            break
    hocket.settle()
    return weights(model)


def monitored(*others: hooks.Hook, epochs: int = 2, **options: Any) -> tuple[list[torch.Tensor], list[str], int]:
    model, optimizer, loader = make()
    told = Told()
    with hooks.Monitored(
        [*others, told], model=model, optimizer=optimizer, loader=loader, epochs=epochs, **options
    ) as run:
        for x, y in run:
            run.tell(loss=step(model, optimizer, x, y))
    return weights(model), told.calls, run.step


def batches(strategy: str, steps: int) -> int:
    """After how many batches so many steps were taken: ``delayed`` applies a gradient one batch later."""
    return steps + (strategy == "delayed")


def all_hooks() -> list[hooks.Hook]:
    return [hooks.StopAtStep(1000), hooks.Summaries(every=3), hooks.StopOnNaN()]


def assert_same(many: list[list[torch.Tensor]], others: list[list[torch.Tensor]]) -> None:
    for mine, theirs in zip(many, others, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.few(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_numbers_are_those_of_the_plain_loop(strategy: str) -> None:
    job = SimulatedJob(3, strategy)
    found = job.run(lambda: monitored(*all_hooks()))
    assert_same([each[0] for each in found], SimulatedJob(3, strategy).run(plain))
    assert found[0][1][:2] == ["begin", "before 0"] and found[0][1][-1] == "end"


def test_so_they_are_with_servers(pool: Pool) -> None:
    for function in (with_servers, plain_with_servers):
        results = pool.run(2, function, strategy="bsp", **needs("bsp"))
        if function is with_servers:
            found = [each[0] for each in results]
    assert_same(found, results)


def with_servers() -> Any:
    return monitored(*all_hooks())


def plain_with_servers() -> Any:
    return plain()


@pytest.mark.few(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_at_which_all_stop_is_a_break_of_the_plain_loop(strategy: str) -> None:
    found = SimulatedJob(3, strategy).run(lambda: monitored(hooks.StopAtStep(4)))
    assert_same([each[0] for each in found], SimulatedJob(3, strategy).run(lambda: plain(most=batches(strategy, 4))))
    assert [each[2] for each in found] == [batches(strategy, 4)] * 3  # the last gradient is settled


@pytest.mark.few(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_where_one_rank_wants_to_stop_all_stop_after_the_same_step(strategy: str) -> None:
    found = SimulatedJob(3, strategy).run(lambda: monitored(StopAlone(2, 3)))
    assert_same([each[0] for each in found], SimulatedJob(3, strategy).run(lambda: plain(most=batches(strategy, 3))))
    late = SimulatedJob(3, strategy).run(lambda: monitored(StopAlone(2, 1), agree_every=2))
    assert_same([each[0] for each in late], SimulatedJob(3, strategy).run(lambda: plain(most=batches(strategy, 2))))


@pytest.mark.parametrize("strategy", ["gossip", "hogwild", "asynchronous"])
def test_where_workers_are_not_in_step_one_stops_and_the_others_do_the_rest(pool: Pool, strategy: str) -> None:
    found = pool.run(2, stop_alone, strategy=strategy, **needs(strategy))
    assert all(calls[-1] == "end" for _, calls, _ in found)
    assert sum("before" in call for call in found[1][1]) == 2 < sum("before" in call for call in found[0][1])
    assert_same([found[0][0]], [found[1][0]])


def stop_alone() -> Any:
    return monitored(StopAlone(1, 2))


def test_rounds_of_seconds_end_together_or_not_at_all(pool: Pool) -> None:
    rounds = "local_sgd(time=0.01)"
    found = pool.run(2, stop_together, strategy=rounds)
    assert all(calls[-1] == "end" for _, calls, _ in found)
    assert_same([found[0][0]], [found[1][0]])
    with pytest.raises(RemoteError, match=r"stop\(\) on one rank in a round of local_sgd"):
        pool.run(2, stop_alone, strategy=rounds)


def stop_together() -> Any:
    return monitored(hooks.StopAtStep(8), epochs=8)


@pytest.fixture
def alone() -> Iterator[Worker]:
    with acting_as(Worker(Config(), AloneCommunicator())) as worker:
        yield worker


def test_hooks_are_called_around_each_step(alone: Worker) -> None:
    assert monitored(hooks.StopAtStep(2))[1] == [
        "begin", "before 0", "after 1 ['loss']", "before 1", "after 2 ['loss']", "end"
    ]  # fmt: skip


def test_a_break_after_the_step_is_an_end_and_one_before_it_is_no_step(alone: Worker) -> None:
    model, optimizer, loader = make()
    for trains, words in ((True, ["before 0", "after 1 []"]), (False, ["before 1"])):
        told = Told()
        with hooks.Monitored([told], model=model, optimizer=optimizer, loader=loader) as run:
            for x, y in run:
                if trains:
                    step(model, optimizer, x, y)
                break
        assert told.calls == ["begin", *words, "end"]


def test_an_exception_of_the_script_comes_out_and_no_end_is_called(alone: Worker) -> None:
    model, optimizer, loader = make()
    told = Told()
    with (
        pytest.raises(ZeroDivisionError),
        hooks.Monitored([told], model=model, optimizer=optimizer, loader=loader) as run,
    ):
        for x, y in run:
            step(model, optimizer, x, y)
            raise ZeroDivisionError
    assert told.calls == ["begin", "before 0"]


def test_a_hook_that_raises_ends_the_training(alone: Worker) -> None:
    class Broken(hooks.Hook):
        def after_step(self, run: hooks.Monitored) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        monitored(Broken())


def test_without_a_loader_steps_are_counted_until_a_hook_stops(alone: Worker) -> None:
    model, optimizer, _ = make()
    x, seen = torch.ones(2, 3, dtype=torch.float64), []
    with hooks.Monitored([hooks.StopAtStep(3)], model=model, optimizer=optimizer) as run:
        for number in run:
            step(model, optimizer, x, x[:, :1])
            seen.append(number)
    assert seen == [0, 1, 2]


def test_summaries_report_what_was_told_last(alone: Worker) -> None:
    put: list[Any] = []
    alone.sink.put = put.append  # type: ignore[method-assign]
    monitored(hooks.Summaries(every=4))
    reported = [each for each in put if isinstance(each, Metrics)]
    assert [each.step for each in reported] == [4, 8, 12, 16]
    assert all(list(each.values) == ["loss"] for each in reported)


def poisoned(*, fails: bool, gradient: bool) -> Any:
    """The third batch of rank 1 has a loss that is NaN, and perhaps a gradient."""
    model, optimizer, loader = make()
    told, before = Told(), weights(model)
    run = hooks.Monitored([hooks.StopOnNaN(fails=fails), told], model=model, optimizer=optimizer, loader=loader)
    with run:
        for number, (x, y) in enumerate(run):
            before = weights(model)
            bad = number == 2 and hocket.rank() == 1
            loss = step(model, optimizer, x * math.nan if bad and gradient else x, y)
            run.tell(loss=math.nan if bad else loss)
    same = all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    return run.step, same, told.calls[-1]


def test_a_gradient_that_is_nan_ends_the_training_in_order_with_the_parameters_before_it() -> None:
    found = SimulatedJob(2, "mirrored").run(lambda: poisoned(fails=False, gradient=True))
    assert found == [(2, True, "end")] * 2


def test_a_loss_that_is_nan_on_one_rank_ends_the_training_of_all() -> None:
    found = SimulatedJob(2, "mirrored").run(lambda: poisoned(fails=False, gradient=False))
    assert found == [(3, False, "end")] * 2


def test_it_fails_if_nothing_else_is_said() -> None:
    with pytest.raises(NonFiniteError, match="loss is nan at step 3: lower"):
        SimulatedJob(2, "mirrored").run(lambda: poisoned(fails=True, gradient=False))


def test_where_workers_take_their_steps_alone_a_gradient_that_is_nan_ends_the_job() -> None:
    with pytest.raises(NonFiniteError, match="a gradient is NaN"):
        SimulatedJob(2, "local_sgd(period=4)").run(lambda: poisoned(fails=False, gradient=True))


def test_a_training_that_is_stopped_goes_on_from_its_checkpoint(pool: Pool, tmp_path: Path) -> None:
    whole = pool.run(2, monitored_for, 12)
    folder = str(tmp_path / "saved")
    first = pool.run(2, monitored_for, 5, checkpoint=folder, checkpoint_every=3)
    second = pool.run(2, monitored_for, 12, checkpoint=folder, checkpoint_every=3)
    assert [each[2] for each in first] == [5] * 2 and [each[2] for each in second] == [12] * 2
    assert_same([each[0] for each in second], [each[0] for each in whole])
    assert second[0][1][1] == "before 5"
    again = pool.run(2, monitored_for, 12, checkpoint=folder, checkpoint_every=3)  # there is nothing left to do
    assert again[0][1] == ["begin", "end"]
    assert_same([each[0] for each in again], [each[0] for each in whole])


def monitored_for(steps: int) -> Any:
    return monitored(hooks.StopAtStep(steps), epochs=4)


def test_words_that_make_no_sense_are_refused(alone: Worker) -> None:
    with pytest.raises(UsageError, match=r"Monitored\(agree_every=0\)"):
        hooks.Monitored(agree_every=0)
    with pytest.raises(UsageError, match="loss is a tensor of shape"):
        hooks.Monitored().tell(loss=torch.ones(2))
    assert current() is alone
