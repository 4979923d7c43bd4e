"""A table at work: what it does when an optimizer fails, a worker is lost or late, or nobody comes."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from server.serving import client, copy, gradient, links, serve, together, train, until

from hocket.errors import DeadlineExceeded, JobError, ServerLost
from hocket.server import rule
from hocket.server.dense import DenseShard
from hocket.server.table import Table
from hocket.server.terms import Definition, Push, PushOutcome, Slice, Terms


class Stubborn(torch.optim.SGD):
    """Fails in the steps in which its rate is negative, in a way that the script has chosen."""

    failure: type[BaseException] = RuntimeError

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.param_groups[0]["lr"] < 0:
            raise self.failure("no such rate")
        super().step(closure)


def stubborn(rate: float = 1.0) -> dict[str, Any]:
    optimizer = Stubborn([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer.param_groups[0]["lr"] = rate
    return rule.describe(optimizer)


def make(workers: int, terms: Terms, timeout: float = 5.0) -> Table:
    definition = Definition(0, workers, terms, stubborn(), (("float64", 8),), (Slice(0, 0, 0, 8, 0),))
    return Table(DenseShard(definition), threading.Condition(), timeout)


def ones(value: float = 1.0) -> list[torch.Tensor]:
    return [torch.full((8,), value, dtype=torch.float64)]


def push(table: Table, rank: int, value: float = 1.0, said: Push | None = None) -> bool:
    return bool(table.push(rank, said or Push(), ones(value), lambda *_: None, lambda: None))


def value(table: Table) -> float:
    return float(table.shard.flats[0][0])  # type: ignore[attr-defined]


def waits(table: Table, count: int = 1) -> Callable[[], bool]:
    return lambda: len(table._group.contributions) >= count


@pytest.mark.parametrize("failure", [RuntimeError, ValueError, KeyError, ZeroDivisionError, TypeError])
def test_a_failing_optimizer_is_told_to_all_whose_gradients_it_had(
    monkeypatch: pytest.MonkeyPatch, failure: type[BaseException]
) -> None:
    monkeypatch.setattr(Stubborn, "failure", failure)
    table = make(2, Terms())
    bad = Push(groups=stubborn(-1.0)["groups"])

    def work(rank: int) -> None:
        with pytest.raises(JobError, match=f"Stubborn failed on a server.*{failure.__name__}"):
            push(table, rank, said=bad)

    together(2, work)
    assert table.version == 0
    good = Push(groups=stubborn(0.5)["groups"])
    assert together(2, lambda rank: push(table, rank, said=good)) == [True, True]
    assert (table.version, value(table)) == (1, -0.5)


@pytest.mark.parametrize("end", ["lose", "leave"])
def test_a_failure_that_another_ones_end_brings_about_is_not_told_to_that_one(end: str) -> None:
    table = make(2, Terms())

    def work(rank: int) -> None:
        if rank == 0:
            with pytest.raises(JobError, match="no such rate"):
                push(table, 0, said=Push(groups=stubborn(-1.0)["groups"]))
            return
        until(waits(table))
        if end == "lose":
            table.lose(1)
        else:
            table.leave(1, 0)

    together(2, work)


def test_a_failure_on_arrival_wakes_others() -> None:
    table = make(2, Terms(staleness=0, groups=0))

    def work(rank: int) -> object:
        if rank == 0:
            return push(table, 0)
        until(lambda: table.version == 1)
        with pytest.raises(JobError):
            push(table, 1, said=Push(groups=stubborn(-1.0)["groups"]))
        return None

    assert together(2, work)[0] is True


def test_who_was_waited_for_in_vain_leaves_nothing_in_the_round() -> None:
    table = make(2, Terms(), timeout=0.05)
    with pytest.raises(DeadlineExceeded, match=r"rank 1 did not push a gradient within 0.05 s"):
        push(table, 0, 100.0)
    assert not table._group.contributions
    table._timeout = 5.0
    assert together(2, lambda rank: push(table, rank, 1.0)) == [True, True]
    assert value(table) == -1.0


def test_a_round_ends_without_who_is_lost() -> None:
    table = make(3, Terms())

    def work(rank: int) -> object:
        if rank == 2:
            until(waits(table, 2))
            return table.lose(2)
        return push(table, rank, rank + 1.0)

    assert together(3, work)[:2] == [True, True]
    assert (table.version, value(table)) == (1, -1.5)


def test_who_is_lost_while_it_waits_is_in_the_round_once() -> None:
    table = make(2, Terms())

    def work(rank: int) -> object:
        if rank == 0:
            return push(table, 0, 2.0)
        until(waits(table))
        table.lose(0)
        return push(table, 1, 4.0)

    assert together(2, work) == [True, True]
    assert (table.version, value(table)) == (1, -3.0)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_fault_leaves_out_the_gradients_of_all_and_is_told_to_all(is_lost: bool) -> None:
    table, done = make(3, Terms()), list[int]()

    def work(rank: int) -> object:
        if rank == 2:
            until(waits(table, 2))
            if is_lost:
                table.lose(1)
        said = Push(fault=7) if rank == 1 else Push()
        return table.push(rank, said, ones(), lambda *_: None, lambda: None, lambda: done.append(rank))

    assert together(3, work) == [PushOutcome(True, {1: 7})] * 3
    assert (table.version, value(table), sorted(done)) == (0, 0.0, [0, 1, 2])  # no batch is to be dealt again
    ranks = [0, 2] if is_lost else [0, 1, 2]
    assert together(len(ranks), lambda number: push(table, ranks[number])) == [True] * len(ranks)
    assert (table.version, value(table)) == (1, -1.0)


@pytest.mark.parametrize("terms", [Terms(patience=0.5), Terms(staleness=0, groups=0, patience=0.5)])
def test_who_is_stopped_is_not_waited_for_beyond_the_patience_and_is_late(terms: Terms) -> None:
    table = make(2, terms)
    for _ in range(3):
        assert push(table, 0)
    assert not push(table, 1, 1000.0)
    assert (table.tallies[1].late, table.tallies[1].pushes, table.version) == (1, 0, 3)
    assert value(table) == -3.0
    assert together(2, lambda rank: push(table, rank)) == [True, True]


def test_a_warm_start_is_waited_for_with_patience_or_without() -> None:
    table = make(2, Terms(staleness=None, groups=0, patience=0.02), timeout=0.2)
    with pytest.raises(DeadlineExceeded):
        table.await_version(1, lambda *_: None)
    assert push(table, 0)
    table.await_version(1, lambda *_: None)
    table.lose(0)
    table.lose(1)
    table.await_version(99, lambda *_: None)  # nobody is left who could


def test_a_norm_over_servers_of_which_one_has_died_is_told() -> None:
    """Without that, the round would wait for the lost one until the timeout."""
    with serve(1, servers=2) as served, client(links(served, 0), 0, 1) as made:
        found = copy(made, Terms(clip=1.0))
        served.fronts[1].close()
        with pytest.raises(ServerLost, match="server 1 has ended"):
            found.push(Push())


def test_a_norm_for_which_server_0_is_gone_is_told() -> None:
    with serve(1, servers=2) as served, client(links(served, 0), 0, 1) as made:
        found = copy(made, Terms(clip=1.0))
        served.fronts[0].close()
        with pytest.raises(ServerLost, match="server 0 has ended"):
            found.push(Push())


def test_failing_optimizers_do_not_harm_other_updates() -> None:
    """Over a connection: the error comes once, and the next step is as if nothing had been."""
    with serve(1) as served, client(links(served, 0), 0, 1) as made:
        train(made, Terms(staleness=None, groups=0), 1)
        found = copy(made, Terms(staleness=None, groups=0), stubborn())
        flat = found.gradients[0]
        with pytest.raises(JobError, match="Stubborn failed on a server, see its output: RuntimeError: no such rate"):
            found.push(Push(groups=stubborn(-1.0)["groups"]))
        before = found.parameters[0].clone()
        flat.copy_(gradient(0, 1, flat.numel()))
        assert found.push(Push(groups=stubborn(1.0)["groups"]))
        assert torch.allclose(found.parameters[0], before - gradient(0, 1, flat.numel()))
        assert served.services[0].tables[1].version == 1
        assert served.refused == {}
