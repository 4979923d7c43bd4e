"""Training with ``hvd.DistributedOptimizer`` equals training one process on all samples, to 1e-9 in float64."""

from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn
from torch.nn import functional as F

import hocket.horovod.torch as hvd

STEPS, BATCH = 6, 4


def build(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def data(size: int, steps: int = STEPS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(steps, size, BATCH, 6, generator=generator, dtype=torch.float64),
        torch.randint(3, (steps, size, BATCH), generator=generator),
    )


def plain(size: int, passes: int = 1, scale: float = 1.0, clip: bool = False) -> list[torch.Tensor]:
    """One process, on all samples of each step."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = data(size)
    for step in range(STEPS):
        if step % passes == 0:
            optimizer.zero_grad()
        (F.cross_entropy(model(x[step].flatten(0, 1)), y[step].flatten()) * scale).backward()
        if step % passes == passes - 1 or step == STEPS - 1:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train(kind: str, options: dict[str, Any]) -> list[torch.Tensor]:
    hvd.init()
    try:
        return TRAININGS[kind](**options)
    finally:
        hvd.shutdown()


def distributed(passes: int = 1, clip: str = "", to_none: bool = True, **options: Any) -> list[torch.Tensor]:
    rank, size = hvd.rank(), hvd.size()
    model = build(rank)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(), backward_passes_per_step=passes, **options,
    )  # fmt: skip
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert isinstance(optimizer, torch.optim.SGD)
    x, y = data(size)
    for step in range(STEPS):
        if step % passes == 0:
            optimizer.zero_grad(set_to_none=to_none)
        F.cross_entropy(model(x[step, rank]), y[step, rank]).backward()
        if step % passes == passes - 1 or step == STEPS - 1:  # the last one may be too early
            if clip == "dance":
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                with optimizer.skip_synchronize():
                    optimizer.step()
                continue
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def two_at_once() -> list[torch.Tensor]:
    """Two optimizers over parameters of the same names, whose gradients are under way together."""
    rank, size = hvd.rank(), hvd.size()
    models = [build(), build()]
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters())
        for model in models
    ]
    x, y = data(size)
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for model in models if rank else reversed(models):
            F.cross_entropy(model(x[step, rank]), y[step, rank]).backward()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    return [parameter.detach() for parameter in models[0].parameters()]


def unused() -> list[torch.Tensor]:
    """Each rank uses another part of the model: what a rank has not computed counts as zero."""
    rank, size = hvd.rank(), hvd.size()
    layers = nn.ModuleList(nn.Linear(2, 1, bias=False) for _ in range(size)).double()
    for layer in layers:
        nn.init.zeros_(layer.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers.parameters(), lr=1.0), layers.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        layers[rank](torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        optimizer.step()
    for layer in layers:
        assert torch.allclose(layer.weight, torch.full((1, 2), -2.0 / size, dtype=torch.float64))
    return [layer.weight.detach() for layer in layers]


def by_steps() -> list[torch.Tensor]:
    """With Adasum the steps of all ranks are combined; of the same batch, as one process alone makes them."""
    model = build()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), op=hvd.Adasum
    )
    x, y = data(1)
    for step in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(x[step, 0]), y[step, 0]).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def sparse(as_dense: bool) -> list[torch.Tensor]:
    rank, size = hvd.rank(), hvd.size()
    table = nn.Embedding(size + 1, 2, sparse=True).double()
    nn.init.zeros_(table.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters(), sparse_as_dense=as_dense
    )
    for _ in range(2):
        optimizer.zero_grad()
        table(torch.tensor([rank, size])).sum().backward()
        optimizer.step()
    expected = torch.full((size + 1, 2), -2.0 / size, dtype=torch.float64)
    expected[size] *= size
    assert torch.allclose(table.weight, expected)
    return [table.weight.detach()]


def scaled(after_backward: bool) -> list[torch.Tensor]:
    """With a GradScaler, one rank of which finds an infinity: all skip that step."""
    rank, size = hvd.rank(), hvd.size()
    model = build()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(),
        after_backward=after_backward,
    )  # fmt: skip
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    x, y = data(size)
    for step in range(-1, STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[step, rank]), y[step, rank])
        scaler.scale(loss * float("inf") if step < 0 and rank == 1 else loss).backward()
        if after_backward:
            scaler.step(optimizer)
        else:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        scaler.update()
    return [parameter.detach() for parameter in model.parameters()]


TRAININGS: dict[str, Any] = {
    "distributed": distributed, "two": two_at_once, "unused": unused, "steps": by_steps, "sparse": sparse,
    "scaled": scaled,
}  # fmt: skip


def check(found: list[list[torch.Tensor]], expected: list[torch.Tensor] | None = None) -> None:
    for each in found[1:]:
        assert all(map(torch.equal, each, found[0]))
    if expected is not None:
        for one, other in zip(found[0], expected, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"to_none": False},
        {"num_groups": 2},
        {"groups": 1},
        {"gradient_predivide_factor": 2.0},
    ],
)
def test_the_average_is_that_of_one_process(pool: Pool, options: dict[str, Any]) -> None:
    found = pool.run(3 if not options else 2, train, "distributed", options)
    check(found, plain(len(found)))


@pytest.mark.parametrize("passes", [2, 4])
def test_accumulation_may_end_in_the_middle(pool: Pool, passes: int) -> None:
    check(pool.run(2, train, "distributed", {"passes": passes}), plain(2, passes))


@pytest.mark.parametrize("options", [{"clip": "dance"}, {"clip": "plainly", "after_backward": True}])
def test_clipping(pool: Pool, options: dict[str, Any]) -> None:
    check(pool.run(2, train, "distributed", options), plain(2, clip=True))


@pytest.mark.parametrize("after_backward", [False, True])
def test_grad_scaler(pool: Pool, after_backward: bool) -> None:
    check(pool.run(2, train, "scaled", {"after_backward": after_backward}), plain(2))


def test_a_sum_is_a_sum(pool: Pool) -> None:
    check(pool.run(2, train, "distributed", {"op": hvd.Sum}), plain(2, scale=2.0))


def test_two_optimizers_over_the_same_names(pool: Pool) -> None:
    check(pool.run(2, train, "two", {}), plain(2))


def test_parameters_that_some_ranks_do_not_use(pool: Pool) -> None:
    check(pool.run(3, train, "unused", {}))


def test_adasum_of_equal_steps_is_the_step(pool: Pool) -> None:
    check(pool.run(3, train, "steps", {}), plain(1))


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(pool: Pool, as_dense: bool) -> None:
    check(pool.run(2, train, "sparse", {"as_dense": as_dense}))


def wrong() -> None:
    hvd.init()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"not named: parameters of shapes \[3\]"):
        hvd.DistributedOptimizer(optimizer, list(model.named_parameters())[:-1])
    with pytest.raises(ValueError, match="must be unique"):
        hvd.DistributedOptimizer(optimizer, [("a", each) for each in model.parameters()])
    with pytest.raises(ValueError, match="sequence of tuples"):
        hvd.DistributedOptimizer(optimizer, model.parameters())  # type: ignore[arg-type]
    made = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    model(torch.ones(1, 6).double()).sum().backward()
    with pytest.raises(AssertionError, match="race condition"):
        made.zero_grad()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
        model(torch.ones(1, 6).double()).sum().backward()
    made.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        made.step()
    hvd.shutdown()


def test_wrong_use(pool: Pool) -> None:
    pool.run(2, wrong)


def of_state() -> dict[str, Any]:
    hvd.init()
    model = build()
    kind = torch.optim.Adam(model.parameters(), lr=0.1 * (hvd.rank() + 1), betas=(0.5, 0.6 + hvd.rank() / 10))
    if hvd.rank() == 0:
        model(torch.ones(1, 6).double()).sum().backward()
        kind.step()
    hvd.broadcast_optimizer_state(kind, root_rank=0)
    hvd.shutdown()
    return kind.state_dict()


def test_state_of_an_optimizer(pool: Pool) -> None:
    first, second = pool.run(2, of_state)
    assert first["param_groups"] == second["param_groups"] and second["param_groups"][0]["betas"] == (0.5, 0.6)
    for number, state in first["state"].items():
        for name, value in state.items():
            assert torch.equal(value, second["state"][number][name])
