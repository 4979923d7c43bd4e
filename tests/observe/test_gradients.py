"""The summary of gradients, without a job."""

import itertools
import random
from pathlib import Path

import pytest

from hocket.events import Gradients, RecordDecoder, encode
from hocket.observe.gradients import GradientSummary, number
from observe.test_runs import hocket, runs


def records(
    workers: int,
    scatter: float,
    signal: float,
    looks: int = 40,
    share: float = 16.0,
    *,
    known: bool = True,
    loss: float = 1.0,
) -> list[Gradients]:
    """What ``workers`` tell whose gradients have that variance (of a sample), and that squared mean."""
    own = [signal + scatter / share * (1 + 0.1 * (-1) ** i) for i in range(looks)]
    average = [signal + scatter / share / workers * (1 + 0.1 * (-1) ** i) for i in range(looks)]
    blocks = {}
    for i, (g, mean) in enumerate(zip(own, average, strict=True)):
        size = loss if i >= looks // 2 else 1.0
        blocks[str(i)] = [1, share, g * size, mean * size, g * share * size, mean * share * size]
    return [Gradients(0, workers, 1000, 4 * looks, known, 4, blocks) for _ in range(workers)]


def summary(told: list[Gradients]) -> GradientSummary:
    made = GradientSummary()
    for rank, record in enumerate(told):
        again = RecordDecoder().feed(encode(record))[0]
        assert isinstance(again, Gradients)
        made.take(rank, again)
    return made


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("loss", [1.0, 2.0**20])
def test_noise_scale_and_diversity(workers: int, loss: float) -> None:
    scatter, signal, share = 640.0, 2.0, 16.0
    facts = summary(records(workers, scatter, signal, loss=loss)).facts()
    assert facts["noise scale"] == pytest.approx(320, rel=0.02)
    assert facts["noise scale, low"] < 320 < facts["noise scale, high"]
    expected = (signal + scatter / share) / (workers * signal + scatter / share)
    assert facts["diversity"] == pytest.approx(expected, rel=0.02)
    assert facts["samples in a step"] == share * workers
    assert (facts["measured steps"], facts["steps"]) == (40, 160)


def test_lines() -> None:
    first, second = summary(records(2, 3400.0, 1.0, share=128.0)).lines()
    assert first.startswith("hocket: gradient noise scale about 3,400 samples (3,")
    assert first.endswith(
        "; a step has 256): more workers help, up to about 27 with 128 samples each; twice as many would need about "
        "53% of the steps."
    )
    assert second == (
        "hocket: gradient diversity of the workers 0.97 (0.5: all gradients are the same, 1: at right angles), "
        "from 40 of 160 steps"
    )
    words = summary(records(4, 25.0, 1.0, share=16.0)).lines()[0]
    assert "more workers help little, twice as many would still need about 86% of the steps" in words
    assert "half as many would need about 28% more steps" in words


def test_without_a_loader_the_unit_is_batches() -> None:
    made = summary(records(2, 10.0, 1.0, share=1.0, known=False))
    assert made.facts()["samples in a step"] is None
    assert made.facts()["unit"] == "batches of a worker"
    assert "about 10 batches of a worker" in made.lines()[0]


def test_nothing_is_said_from_few_looks() -> None:
    made = summary(records(2, 10.0, 1.0, looks=5))
    assert made.lines() == []
    assert made.facts()["noise scale"] is None
    assert "only 5 of 20 steps" in made.facts()["says"]
    assert GradientSummary().facts() == {}
    assert GradientSummary().lines() == []
    assert GradientSummary().windows() == {}


def test_all_ranks_are_needed_and_the_largest_model_counts() -> None:
    told = records(3, 320.0, 1.0)
    assert summary(told[:2]).facts() == {}
    made = summary(told)
    for rank, record in enumerate(records(3, 999.0, 1.0)):
        made.take(rank, Gradients(1, 3, 10, record.steps, True, 4, record.blocks))
    assert made.facts()["noise scale"] == pytest.approx(320, rel=0.02)


def test_gradients_that_are_noise_alone() -> None:
    """The mean is too small to be seen: a bound is all that can be said."""
    draw = random.Random(0)
    told = records(2, 160.0, 0.0)
    for record in told:
        for sums in record.blocks.values():
            sums[3] = sums[2] / 2 * (1 + draw.gauss(0, 0.05))
            sums[5] = 16 * sums[3]
    facts = summary(told).facts()
    assert facts["noise scale"] is None
    assert facts["noise scale, high"] is None
    assert facts["noise scale, low"] > 32
    assert "more workers help, up to" in facts["says"]
    assert "at least" in facts["says"]


def test_gradients_that_are_all_the_same() -> None:
    facts = summary(records(4, 0.0, 1.0)).facts()
    assert facts["noise scale"] is None
    assert facts["diversity"] == pytest.approx(0.25)
    assert "cannot be told" in facts["says"]


def test_blocks_of_different_lengths_and_ranks_that_missed_some() -> None:
    told = records(2, 320.0, 1.0, looks=64)
    wide: dict[str, list[float]] = {}
    for place, sums in told[1].blocks.items():
        key = str(int(place) // 2)
        wide[key] = [a + b for a, b in zip(wide.get(key, [0.0] * 6), sums, strict=True)]
    del wide["3"]
    made = summary([told[0], Gradients(0, 2, 1000, 256, True, 8, wide)])
    assert made.facts()["noise scale"] == pytest.approx(320, rel=0.02)
    assert made.facts()["measured steps"] == 62


def test_windows_show_how_it_grew() -> None:
    told = records(2, 320.0, 1.0, looks=32)
    for sums in (sums for record in told for place, sums in record.blocks.items() if int(place) >= 16):
        sums[2:] = [0.5 + 20 * 2, 0.5 + 20, 16 * (0.5 + 20 * 2), 16 * (0.5 + 20)]
    found = list(summary(told).windows().values())
    assert len(found) == 8
    assert all(value is not None for value in found)
    assert all(a <= b * 1.3 for a, b in itertools.pairwise(v for v in found if v is not None))
    assert found[-1] == pytest.approx(40 * 16 / 0.5, rel=0.01)


def test_numbers() -> None:
    assert [number(value) for value in (0.0, 0.04, 2.81, 8.0, 9.97, 61.2, 3449.0, 123456.0)] == [
        "0", "0", "2.8", "8", "10", "61", "3,400", "120,000",
    ]  # fmt: skip


TRAINING = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import hocket

hocket.init()
torch.manual_seed(0)
model = torch.nn.Linear(20, 1)
x = torch.randn(1024, 20)
data = TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(1024, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
model, optimizer, loader = hocket.distribute(model, optimizer, DataLoader(data, 8))
for _ in range(24):
    for inputs, targets in loader:
        ((model(inputs) - targets) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_run_tells_its_noise_scale(folder: Path) -> None:
    (folder / "train.py").write_text(TRAINING)
    done = hocket("run", "-n", "2", "train.py")
    assert done.returncode == 0, done.stderr
    scale, diversity = done.stderr.splitlines()[-2:]
    facts = runs("show", "last")["facts"]["gradients"]
    assert scale == f"hocket: {facts['says']}."
    assert "a step has 16" in scale
    assert diversity.startswith(f"hocket: gradient diversity of the workers {facts['diversity']:.2f} (0.5: all")
    assert (facts["samples in a step"], facts["steps"], facts["unit"]) == (16, 1536, "samples")
    assert facts["measured steps"] >= 8
    shown = hocket("runs", "show", "last").stdout
    assert "\nGradients\n  noise scale " in shown
    assert facts["says"] in shown
