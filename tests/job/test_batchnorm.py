"""The law of SyncBatchNorm: P workers with batch B are one process with batch P·B and torch's batch norm."""

import contextlib
import copy
import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.errors import UsageError

STRATEGIES = ["mirrored", "central", "central(fused=True)"]
SHAPES: dict[str, tuple[int, ...]] = {"2-D": (), "3-D": (5,), "4-D": (3, 2), "5-D": (2, 2, 2), "channels_last": (3, 2)}


@dataclass(frozen=True)
class Case:
    shape: str = "2-D"
    options: dict[str, Any] = field(default_factory=dict)
    samples: int = 23
    batch: int = 3  # of one worker
    epochs: int = 2
    dtype: str = "float64"
    first: bool = False  # batch norm comes first, so that its input needs no gradient
    compile: bool = False
    checkpoint: bool = False
    accumulate: bool = False
    offset: float = 0.0
    autocast: bool = False


def layer(case: Case) -> nn.Module:
    kind = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[len(SHAPES[case.shape])]
    return kind(4, **case.options)


def make(case: Case, workers: int) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    dtype, shape = getattr(torch, case.dtype), SHAPES[case.shape]
    mixes = [{0: nn.Linear, 1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(shape)] for _ in range(2)]
    first, second = (mix(4, 4) if mix is nn.Linear else mix(4, 4, 1) for mix in mixes)
    body = [layer(case), second] if case.first else [first, layer(case), nn.Tanh(), second, layer(case)]
    model = nn.Sequential(*body, nn.Flatten(), nn.Linear(4 * torch.Size(shape).numel(), 1)).to(dtype)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, std=0.5)  # not the ones and zeros that batch norm starts with
    random = torch.Generator().manual_seed(1)
    x = torch.randn(case.samples, 4, *shape, generator=random, dtype=torch.float64) + case.offset
    y = torch.sin(x.flatten(1).sum(1, keepdim=True))
    if case.shape == "channels_last":
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(
        TensorDataset(x.to(dtype), y.to(dtype)), case.batch * workers, shuffle=True,
        generator=torch.Generator().manual_seed(2),
    )  # fmt: skip
    return model, optimizer, loader


def loop(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, held: Any) -> dict[str, Any]:
    forward: Any = torch.compile(model, backend="aot_eager") if case.compile else model
    if case.checkpoint:  # the statistics are computed again in the backward pass
        forward = functools.partial(checkpoint, model, use_reentrant=False)
    for _ in range(case.epochs):
        for step, (x, y) in enumerate(loader, start=1):
            if case.shape == "channels_last":
                x = x.contiguous(memory_format=torch.channels_last)
            with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                loss = ((forward(x) - y) ** 2).mean()
            if case.accumulate and step % 2 and step < len(loader):
                with held():
                    loss.backward()
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def together(case: Case, strategy: str) -> dict[str, Any]:
    model, optimizer, loader = make(case, 1)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    assert hocket.sync_batchnorm(model) is model
    assert sum(isinstance(m, hocket.SyncBatchNorm) for m in model.modules()) == (1 if case.first else 2)
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    return loop(case, *hocket.distribute(model, optimizer, loader, strategy=strategy), held=hocket.accumulate)


def check(pool: Pool, case: Case, workers: int, strategies: list[str] = STRATEGIES, tolerance: float = 1e-9) -> None:
    one = loop(case, *make(case, workers), held=contextlib.nullcontext)
    for strategy in strategies:
        many = pool.run(workers, together, case, strategy)
        for rank, result in enumerate(many):
            assert result.keys() == one.keys()
            for key, value in one.items():
                close = torch.allclose(value.double(), result[key].double(), rtol=tolerance, atol=tolerance)
                assert close, (strategy, rank, key, value, result[key])
                assert torch.equal(result[key], many[0][key]), f"{key} of rank 0 and {rank} differ"


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_many_workers_are_one(pool: Pool, workers: int) -> None:
    check(pool, Case(), workers)


@pytest.mark.few(2)
@pytest.mark.parametrize("samples", [26, 27, 29, 31, 34])
def test_last_batches_that_are_smaller(pool: Pool, samples: int) -> None:
    """With 4 workers and batches of 3, 24 samples are even; 26 and 27 leave ranks without a sample of their own."""
    check(pool, Case(samples=samples), 4)


OPTIONS: list[dict[str, Any]] = [
    {"affine": False}, {"momentum": None}, {"track_running_stats": False}, {"bias": False},
    {"eps": 0.1, "momentum": 0.7}, {"affine": False, "track_running_stats": False},
]  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option(pool: Pool, options: dict[str, Any]) -> None:
    check(pool, Case(options=options), 3)


@pytest.mark.few(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(pool: Pool, shape: str) -> None:
    check(pool, Case(shape=shape, samples=14), 4)


@pytest.mark.few(2)
@pytest.mark.parametrize("what", ["first", "compile", "accumulate", "checkpoint"])
def test_every_use(pool: Pool, what: str) -> None:
    check(pool, Case(**{what: True}), 2)


def test_one_sample_for_each_worker(pool: Pool) -> None:
    """What torch's batch norm refuses on one process is fine as long as there are others."""
    check(pool, Case(batch=1, samples=12), 3, ["mirrored"])


def test_large_means_do_not_cancel(pool: Pool) -> None:
    check(pool, Case(first=True, dtype="float32", offset=1000.0, epochs=1), 3, ["mirrored"], tolerance=2e-3)


@pytest.mark.parametrize(
    "case",
    [Case(dtype="bfloat16", epochs=1), Case(dtype="float32", autocast=True, epochs=1)],
    ids=["plain", "autocast"],
)
def test_bfloat16(pool: Pool, case: Case) -> None:
    check(pool, case, 3, ["mirrored"], tolerance=0.1)


def test_over_gloo(pool: Pool, free_port: int) -> None:
    case = Case()
    one = loop(case, *make(case, 2), held=None)
    for result in pool.run(2, together, case, "mirrored", transport="gloo", port=free_port):
        assert all(torch.allclose(one[k].double(), result[k].double(), rtol=1e-9, atol=1e-9) for k in one)


def narrow_statistics() -> tuple[torch.dtype, torch.Tensor]:
    norm = hocket.SyncBatchNorm(2)
    x = torch.full((64, 2), 1.0 + hocket.rank(), dtype=torch.bfloat16)
    x[0] += 2**-6
    y = norm(x)
    assert norm.running_mean is not None
    return y.dtype, norm.running_mean


def test_statistics_of_bfloat16_are_float32(pool: Pool) -> None:
    for dtype, mean in pool.run(2, narrow_statistics):
        assert dtype == torch.bfloat16
        assert torch.allclose(mean, torch.full((2,), 0.1 * (1.5 + 2**-6 / 64)), rtol=1e-6)


def too_few(samples: int) -> None:
    model = nn.Sequential(hocket.SyncBatchNorm(3))
    loader = hocket.distribute(loader=DataLoader(TensorDataset(torch.randn(samples, 3)), 1))
    for (x,) in loader:
        model(x)


def test_one_value_per_channel_is_refused_as_by_torch(pool: Pool) -> None:
    for outcome in pool.outcomes(2, too_few, 1):
        assert outcome.kind == "ValueError" and "more than 1 value per channel" in outcome.message
    pool.run(2, too_few, 4)


def evaluate_on_one_rank() -> None:
    plain = nn.BatchNorm1d(3)
    nn.init.normal_(plain.running_mean)  # type: ignore[arg-type]
    norm = hocket.sync_batchnorm(copy.deepcopy(plain))
    norm.eval()
    plain.eval()
    if hocket.rank() == 0:
        x = torch.randn(5, 3)
        assert torch.equal(norm(x), plain(x))


def test_evaluation_does_not_communicate(pool: Pool) -> None:
    pool.run(2, evaluate_on_one_rank)


def a_repeated_sample_is_not_seen() -> list[float]:
    """A rank without a sample of its own gets NaN, and nobody notices."""
    model = hocket.sync_batchnorm(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(torch.arange(6.0).view(2, 3)), 1)
    loader = hocket.distribute(model, optimizer, data)[2]
    for (x,) in loader:
        bad = x * float("nan") if loader.weight == 0 else x
        (model(bad) ** 2).mean().backward()
        optimizer.step()
    return [float(t.double().sum()) for t in model.state_dict().values()]


def test_weight_0_counts_nothing(pool: Pool) -> None:
    results = pool.run(3, a_repeated_sample_is_not_seen)
    assert results[0] == results[1] == results[2] and all(value == value for value in results[0])


def convert() -> None:
    shared = nn.BatchNorm2d(3, eps=0.5, momentum=None)
    pair = nn.Sequential(shared, nn.SyncBatchNorm(3))
    model = nn.ModuleDict({"a": nn.BatchNorm1d(3).eval(), "b": pair, "c": shared, "d": nn.Linear(1, 1)})
    calls = []
    shared.register_forward_hook(lambda *_: calls.append(1))
    buffers = list(model.buffers())
    hocket.sync_batchnorm(model)
    assert isinstance(model["a"], hocket.SyncBatchNorm) and not model["a"].training and shared.training
    assert model["c"] is shared and isinstance(shared, hocket.SyncBatchNorm) and shared.eps == 0.5
    assert all(a is b for a, b in zip(model.buffers(), buffers, strict=True))
    assert isinstance(model["b"][1], hocket.SyncBatchNorm) and not isinstance(model["d"], hocket.SyncBatchNorm)
    shared(torch.randn(2, 3, 1, 1))
    assert calls == [1]
    hocket.sync_batchnorm(model)  # a second time changes nothing
    root = nn.BatchNorm3d(2)
    assert hocket.sync_batchnorm(root) is root and isinstance(root, hocket.SyncBatchNorm)
    nn.BatchNorm2d(3).load_state_dict(shared.state_dict())
    copied = copy.deepcopy(shared)
    assert isinstance(copied, hocket.SyncBatchNorm)


def test_conversion_keeps_every_object(pool: Pool) -> None:
    pool.run(1, convert)
    pool.run(2, convert)


class Own(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(input))


def refuse(what: str) -> str:
    model = nn.Sequential(nn.BatchNorm1d(2), {"own": Own(2), "lazy": nn.LazyBatchNorm1d()}.get(what, nn.Identity()))
    if what == "late":
        hocket.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError) as caught:
        hocket.sync_batchnorm(model[0] if what == "late" else model)
    assert type(model[0]) is nn.BatchNorm1d, "nothing is changed"
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("late", "before hocket.distribute()"),
        ("own", "'1' (Own) has a forward pass or a parametrization of its own"),
        ("lazy", "'1' (LazyBatchNorm1d) has no shape yet: run the model once"),
    ],
)
def test_what_cannot_be_converted_is_refused(pool: Pool, what: str, message: str) -> None:
    assert message in pool.run(1, refuse, what)[0]
    assert message in pool.run(2, refuse, what)[1]


def wrong_shape() -> None:
    hocket.SyncBatchNorm(3)(torch.randn(3))


def test_inputs_of_other_dimensions_are_refused(pool: Pool) -> None:
    for workers in (1, 2):
        assert "2 to 5 dimensions, not 1: [3]" in pool.outcomes(workers, wrong_shape)[0].message
