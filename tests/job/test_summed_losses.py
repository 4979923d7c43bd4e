"""A loss that is a sum over the batch is told of in the first steps, where the graph shows it, and in no other case."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hocket
from hocket.capture import summed_losses
from hocket.job import forgotten
from hocket.job.simulated_job import SimulatedJob


@pytest.fixture(autouse=True)
def _no_other_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders that other tests of this process have left behind are told of in a line of their own."""
    monkeypatch.setattr(forgotten, "_iterates", lambda: False)


Loss = Callable[[torch.Tensor, nn.Module], torch.Tensor]
Y, CLASSES = torch.rand(4, 3), torch.tensor([0, 1, 2, 0])
SCALE = torch.tensor(0.25)


def bce(out: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy(out.sigmoid(), Y, reduction="sum")


def kl(out: torch.Tensor) -> torch.Tensor:
    return -0.5 * torch.sum(1 + out - out.pow(2) - out.exp())


SUMS: dict[str, tuple[str, Loss]] = {
    "mse": ("MseLoss", lambda out, _: F.mse_loss(out, Y, reduction="sum")),
    "cross entropy": ("NllLoss", lambda out, _: F.cross_entropy(out, CLASSES, reduction="sum")),
    "with logits": (
        "BinaryCrossEntropyWithLogits",
        lambda out, _: F.binary_cross_entropy_with_logits(out, Y, reduction="sum"),
    ),
    "vae": ("BinaryCrossEntropy", lambda out, _: bce(out) + kl(out)),
    "beta-vae": ("BinaryCrossEntropy", lambda out, _: bce(out) - 4 * torch.sum(out.exp())),
    "learned weight": ("MseLoss", lambda out, model: model.weight[0, 0].exp() * F.mse_loss(out, Y, reduction="sum")),
    "none, then sum": ("NllLoss", lambda out, _: F.cross_entropy(out, CLASSES, reduction="none").sum()),
    "in float64": ("MseLoss", lambda out, _: F.mse_loss(out, Y, reduction="sum").double() + 1),
}
OTHERS: dict[str, Loss] = {
    "mean": lambda out, _: F.mse_loss(out, Y),
    "mean of a class": lambda out, _: F.cross_entropy(out, CLASSES),
    "a quotient": lambda out, _: F.mse_loss(out, Y, reduction="sum") / len(out),
    "a quotient of all": lambda out, _: (bce(out) + kl(out)) / len(out),
    "a factor": lambda out, _: F.mse_loss(out, Y, reduction="sum") * (1 / len(out)),
    "a factor of the sum": lambda out, _: (bce(out) + kl(out)) * 0.25,
    "a tensor as a factor": lambda out, _: SCALE * F.mse_loss(out, Y, reduction="sum"),
    "a sum over classes": lambda out, _: F.mse_loss(out, Y, reduction="none").sum(1).mean(),
    "a weighted sum": lambda out, _: (F.mse_loss(out, Y, reduction="none") * SCALE).sum(),
    "a penalty": lambda _, model: (model.weight**2).sum(),
    "a mean and a penalty": lambda out, model: F.mse_loss(out, Y) + (model.weight**2).sum(),
    "a mean and the distance to a start": lambda out, model: (
        F.cross_entropy(out, CLASSES) + F.mse_loss(model.weight, torch.zeros(3, 3), reduction="sum")
    ),
    "many terms": lambda out, _: torch.stack([F.mse_loss(out, Y, reduction="sum")] * 2).sum(),
    "more than is looked at": lambda out, _: sum(  # type: ignore[return-value]
        (F.mse_loss(out, Y, reduction="sum") for _ in range(40)), start=torch.zeros(())
    ),
}


def look(loss: Loss) -> str | None:
    """What is found within the backward pass of ``loss``, when its first nodes have been freed."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    value = loss(model(torch.ones(4, 3)), model)
    found: list[str | None] = []
    assert value.grad_fn is not None
    roots = [value.grad_fn]
    model.weight.register_post_accumulate_grad_hook(lambda _: found.append(summed_losses.find_sum(roots)))
    value.backward()
    (only,) = found
    return only


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_found_and_named(name: str) -> None:
    kind, loss = SUMS[name]
    assert look(loss) == kind


@pytest.mark.parametrize("name", OTHERS)
def test_in_doubt_nothing_is_found(name: str) -> None:
    assert look(OTHERS[name]) is None


def job(loss: Loss, *, workers: int = 2, strategy: str = "mirrored", start: int = 0, **options: Any) -> None:
    def script() -> None:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        hocket.distribute(model, optimizer, **options)
        for number in range(4):
            optimizer.zero_grad()
            (loss if number >= start else OTHERS["mean"])(model(torch.ones(4, 3)), model).backward()
            optimizer.step()

    SimulatedJob(workers, strategy).run(script)


def test_rank_0_tells_once_of_it_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    job(SUMS["vae"][1], start=1)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "a sum over the batch (BinaryCrossEntropy with reduction='sum')" in said
    assert "1/2 of the sum" in said and "add reduction='sum' to hocket.distribute()" in said


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"strategy": "local_sgd(period=2)"}, 1), ({"reduction": "sum"}, 0), ({"workers": 1}, 0),
        ({"strategy": "hogwild"}, 0), ({"strategy": "full_batch"}, 0), ({"start": 2}, 0),
    ],
)  # fmt: skip
def test_it_is_told_in_the_first_steps_where_means_are_averaged(
    options: dict[str, Any], said: int, capsys: pytest.CaptureFixture[str]
) -> None:
    job(SUMS["mse"][1], **options)
    assert capsys.readouterr().err.count("a sum over the batch") == said


def test_gradients_that_are_given_to_backward_may_divide(capsys: pytest.CaptureFixture[str]) -> None:
    class Given(torch.Tensor):
        def backward(self, *_: Any) -> None:  # type: ignore[override]
            torch.autograd.backward(self.as_subclass(torch.Tensor), SCALE)

    job(lambda out, _: F.mse_loss(out, Y, reduction="sum").as_subclass(Given))
    assert capsys.readouterr().err == ""


def test_what_an_odd_graph_raises_does_not_end_the_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []

    def fail(roots: object) -> None:
        asked.append(roots)
        raise RuntimeError

    monkeypatch.setattr(summed_losses, "find_sum", fail)
    job(SUMS["mse"][1])
    assert len(asked) == 2 and capsys.readouterr().err == ""
