"""The law of full batches when a worker is killed: one process with all of the data takes the same steps."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pool import Pool
from products import product
from strategies.test_full_batch import PLAIN, WOLFE, over_all_data, train
from strategies.training import Case, make

import hocket
from hocket.job.worker import current
from hocket.strategies.full_batch import FullBatchTraining


class Deadly:
    """A loader whose user dies when it has a batch."""

    def __init__(self, loader: Any, batch: int) -> None:
        self._loader, self._left = loader, batch

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1
            yield batch


def together(case: Case, form: str, dead: int, where: str, number: int) -> Any:
    """As in ``test_full_batch``; one worker dies with a batch, or where a number of closures have been called."""
    model, optimizer, loader = make(case, 1)
    strategy = "full_batch(reduction='sum')" if "sum" in form else "full_batch"
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=strategy)
    if hocket.rank() == dead and where == "batch":
        return train(case, model, optimizer, Deadly(loader, number), form)
    owner: Any = FullBatchTraining
    real = getattr(owner, where, None)

    def die(this: Any, *args: Any) -> Any:
        if current().training.strategies[0].steps >= number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(this, *args)

    if hocket.rank() == dead:
        setattr(owner, where, die)
    return train(case, model, optimizer, loader, form)


@pytest.mark.few(2)
@product(
    where=[("batch", 0), ("batch", 4), ("_exchange_sum", 2), ("_reduce", 3)],
    who=[(3, 1), (2, 0), (3, 0)],
    how=[(WOLFE, "tensors", 49), (PLAIN, "sum, floats", 49), (WOLFE, "one backward", 48)],
)
def test_the_others_repeat_the_closure(
    pool: Pool, where: tuple[str, int], who: tuple[int, int], how: tuple[Any, str, int]
) -> None:
    (place, number), (size, dead), (options, form, samples) = where, who, how
    case = Case(model="matrices", optimizer="LBFGS", options=options, samples=samples, batch=8)
    parameters, losses, _ = over_all_data(case, form)
    arguments = case, form, dead, place, number
    found = pool.outcomes_with_death(size, together, dead, *arguments, on_loss="continue", timeout=50.0)
    left = [each for rank, each in enumerate(found) if rank != dead]
    for each in left:
        assert not isinstance(each, Exception), each
        for mine, theirs in zip(parameters, each[0], strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9), (mine - theirs).abs().max()
        assert all(map(torch.equal, left[0][0], each[0]))
        assert each[1] == pytest.approx(losses, rel=1e-9)


def fixed_parts(dead: int) -> None:
    """Each worker has taken its part of the data once, and another one could not take it over."""
    model, optimizer, loader = make(Case(optimizer="LBFGS", options=PLAIN), 1)
    hocket.distribute(model, optimizer, strategy="full_batch")
    x, y = (tensor[hocket.share(len(tensor))] for tensor in loader.dataset.tensors)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        return loss

    for step in range(3):
        if (hocket.rank(), step) == (dead, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step(closure)


def test_data_that_only_the_lost_worker_had_ends_the_job(pool: Pool) -> None:
    found = pool.outcomes_with_death(2, fixed_parts, 1, 1, on_loss="continue", timeout=50.0)
    assert "data that did not come from the loader" in str(found[0])


@pytest.mark.parametrize("form", ["no closure"])
def test_what_cannot_be_repeated_ends_the_job(pool: Pool, form: str) -> None:
    case = Case(model="matrices", optimizer="SGD", options={"lr": 0.1}, samples=49, batch=8)
    arguments = case, form, 1, "batch", 1
    found = pool.outcomes_with_death(2, together, 1, *arguments, on_loss="continue", timeout=50.0)
    assert "without a closure" in str(found[0])
