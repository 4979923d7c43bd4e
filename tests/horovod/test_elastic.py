"""Training that goes on when workers are lost, come or leave, from the last commit."""

import os
import signal
from typing import Any

import pytest
import torch
from pool import Pool, RemoteError
from torch import nn

import hocket.horovod.torch as hvd
from hocket.horovod import context

SAMPLES, BATCH, EPOCHS = 61, 4, 3


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return x, x @ torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)


def build() -> nn.Linear:
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    return model


def train(event: str = "", who: int = -1, comes: bool = False, every: int = 2) -> dict[str, Any]:
    """What happens in step 3 of epoch 1, the first time: the rank ``who`` is killed, fails, or is told to leave.

    If another ``comes`` in its place, the others wait for it.
    """
    hvd.init()
    model, (x, y) = build(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(x)
    resets: list[int] = []
    number, begun, is_new = hvd.rank(), hvd.size(), context.current().worker.config.newcomer

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.epoch < EPOCHS:
            while comes and resets and hvd.size() < state.begun:
                state.commit()
            left = list(sampler)
            for start in range(0, len(left), BATCH):
                chosen = left[start : start + BATCH]
                if state.epoch == 1 and state.step == 3 and state.number == who and not resets and not is_new:
                    if event == "killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    if event == "told to leave":
                        context.current().worker.notice.is_given = True
                if event == "fails" and state.epoch == 1 and state.step == 3 and not resets:
                    raise hvd.HorovodInternalError("somebody says so")
                optimizer.zero_grad()
                ((model(x[chosen]) - y[chosen]) ** 2).mean().backward()
                optimizer.step()
                whole = (sampler.remaining_indices * 2)[: sampler.total_size]
                size = hvd.size()
                state.log.append([whole[each::size][start : start + BATCH] for each in range(size)])
                assert state.log[-1][hvd.rank()] == chosen
                sampler.record_batch(start // BATCH, BATCH)
                state.step += 1
                if state.step % every == 0:
                    state.commit()
            state.epoch, state.step = state.epoch + 1, 0
            sampler.set_epoch(state.epoch)
            state.commit()

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0, log=[], begun=begun)
    state.number = number
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    loop(state)
    found = {"weights": model.weight.detach(), "log": state.log, "resets": resets, "size": hvd.size()}
    hvd.shutdown()
    return found


def check(found: list[dict[str, Any]]) -> None:
    """All have the same; the parameters are those of one process; and each sample was trained on in each epoch."""
    for each in found:
        assert torch.equal(each["weights"], found[0]["weights"]) and each["log"] == found[0]["log"]
    model, (x, y) = build(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batches in found[0]["log"]:
        optimizer.zero_grad()
        sum(((model(x[batch]) - y[batch]) ** 2).mean() / len(batches) for batch in batches).backward()
        optimizer.step()
    assert torch.allclose(model.weight, found[0]["weights"], rtol=0, atol=1e-9)
    seen: list[int] = []
    for batches in found[0]["log"]:
        seen += [index for batch in batches for index in batch]
    epochs, start = [set[int]()], 0
    for index, sample in enumerate(seen):
        epochs[-1].add(sample)
        if len(epochs[-1]) == SAMPLES and index + 1 < len(seen):
            epochs.append(set())
            start = index
    assert start < len(seen)
    assert sum(len(epoch) == SAMPLES for epoch in epochs) >= EPOCHS


def test_nothing_happens(pool: Pool) -> None:
    check(pool.run(2, train))
    check(pool.run(2, train, on_loss="continue"))


@pytest.mark.parametrize("who", [0, 1])
def test_a_killed_worker_is_done_without(pool: Pool, who: int) -> None:
    found = pool.outcomes_with_death(3, train, who, "killed", who, on_loss="continue")
    left = [each for each in found if each is not None]
    check(left)
    assert [each["size"] for each in left] == [2, 2] and left[0]["resets"] == [2]


def test_a_killed_worker_of_several_hosts_is_done_without(pool: Pool) -> None:
    where = {"hosts": (1, 2), "transport": "tcp"}
    found = pool.outcomes_with_death(3, train, 1, "killed", 1, on_loss="continue", **where)
    check([each for each in found if each is not None])


def test_one_worker_is_left(pool: Pool) -> None:
    found = pool.outcomes_with_death(2, train, 0, "killed", 0, on_loss="continue")
    check(found[1:])


def test_a_new_worker_takes_part(pool: Pool) -> None:
    found = pool.outcomes(3, train, "killed", 1, True, replaced=[1], on_loss="replace")
    if errors := [each for each in found if isinstance(each, RemoteError)]:
        raise errors[0]
    check(found)


def test_an_error_goes_back_to_the_last_commit(pool: Pool) -> None:
    found = pool.run(2, train, "fails", on_loss="continue")
    check(found)
    assert found[0]["resets"] == [2]


def test_a_worker_that_is_told_to_leave_loses_nothing(pool: Pool) -> None:
    found = pool.outcomes(3, train, "told to leave", 2, on_loss="continue")
    assert isinstance(found[2], RemoteError) and found[2].kind == "Left"
    check(found[:2])
    assert [each["size"] for each in found[:2]] == [2, 2]


def mismatches() -> None:
    hvd.init()
    calls = []

    @hvd.elastic.run
    def loop(state: Any) -> None:
        calls.append(1)
        hvd.allreduce(torch.ones(hvd.rank() + 1), name="x")

    with pytest.raises(hvd.HorovodInternalError, match="do not mean the same by 'x'"):
        loop(hvd.elastic.ObjectState())
    assert len(calls) == 1  # it would be the same again
    hvd.shutdown()


def test_a_difference_is_not_tried_again(pool: Pool) -> None:
    pool.run(2, mismatches, on_loss="continue")
