"""What real scripts do at the edges: each of these once gave a wrong number."""

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from pool import Pool, RemoteError
from strategies.training import Case, make, make_model
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hocket
from hocket.job.simulated_job import SimulatedJob
from hocket.job.worker import current

STRATEGIES = ["mirrored", "central", "central(fused=True)"]


def data(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Four samples of each rank; all of them for a single process."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4 * size, 6, generator=generator, dtype=torch.float64)
    y = torch.sin(x.sum(1, keepdim=True))
    return x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]


@dataclass
class Output:
    value: torch.Tensor


class Wrapped(nn.Module):
    """Returns a dataclass, and everything in it comes from one reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 3000), nn.Tanh(), nn.Linear(3000, 1))

    def forward(self, x: torch.Tensor) -> Output:
        return Output(checkpoint(self.net, x.clone().requires_grad_(), use_reentrant=True))


class Methods(nn.Module):
    """Is never called by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 20), nn.Linear(20, 1)
        self.first.requires_grad_(False)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.last(torch.tanh(self.first(x))), y)


class Centralized(torch.optim.SGD):
    """Treats matrices differently from vectors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.dim() > 1:
                    p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
        return super().step(closure)


class Mixed(torch.optim.Optimizer):
    """Element-wise in one group, by whole tensors in the other."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1, "norm": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / p.grad.norm() if group["norm"] else p.grad, alpha=-group["lr"])


def train(what: str, model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """One and the same for a plain process and for workers."""
    forward: Any = torch.compile(model, backend="aot_eager") if what == "unfreeze compiled" else model
    if what == "clip in a hook":
        optimizer.register_step_pre_hook(
            lambda opt, *_: nn.utils.clip_grad_norm_([p for g in opt.param_groups for p in g["params"]], 0.05) and None
        )
    for turn in range(4):
        if turn == 2 and what.startswith("unfreeze"):
            model.requires_grad_(True)
        if turn == 2 and what == "clear state":
            optimizer.state.clear()
        if turn == 2 and what == "load a part":
            model[0].load_state_dict({k: v * 0.5 for k, v in model[0].state_dict().items()})  # type: ignore[index, operator]
        optimizer.zero_grad()
        if isinstance(model, Methods):
            loss = model.loss(x, y)
        elif isinstance(model, Wrapped):
            loss = F.mse_loss(model(x).value, y)
        else:
            loss = F.mse_loss(forward(x), y)
        loss.backward()
        optimizer.step()
        if what == "gradients of inputs":
            for _ in range(1 + turn % 2 if not hocket_is_alone() and hocket.rank() == 0 else 0):
                probe = x.clone().requires_grad_()
                torch.autograd.grad(model(probe).sum(), probe)


def hocket_is_alone() -> bool:
    from hocket.job import worker

    return worker.find() is None


def build(what: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    if what == "reentrant dataclass":
        model: nn.Module = Wrapped()
    elif what == "unfreeze methods":
        model = Methods()
    else:
        model = make_model("mlp")
        if what == "unfreeze compiled":
            model[0].requires_grad_(False)  # type: ignore[index]
    model = model.double()
    if what == "centralized":
        return model, Centralized(model.parameters(), lr=0.1)
    if what == "mixed":
        biases, matrices = ([p for p in model.parameters() if p.dim() == dim] for dim in (1, 2))
        return model, Mixed([{"params": biases}, {"params": matrices, "norm": True}])
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def together(what: str, strategy: str) -> list[torch.Tensor]:
    model, optimizer = build(what)
    hocket.distribute(model, optimizer, strategy=strategy)
    train(what, model, optimizer, *data(hocket.rank(), hocket.size()))
    return [p.detach().clone() for p in model.parameters()]


CASES = [
    "gradients of inputs", "unfreeze methods", "unfreeze compiled", "reentrant dataclass", "clip in a hook",
    "centralized", "mixed", "clear state", "load a part",
]  # fmt: skip


@pytest.mark.few(9)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", CASES)
def test_the_same_as_one_process(pool: Pool, what: str, strategy: str) -> None:
    if what == "clip in a hook" and "fused" in strategy:
        assert pool.outcomes(2, together, what, strategy)[0].kind == "StrategyError"
        return
    model, optimizer = build(what)
    train(what, model, optimizer, *(torch.cat(parts) for parts in zip(data(0, 2), data(1, 2), strict=True)))
    for result in pool.run(2, together, what, strategy):
        for one, many in zip(model.parameters(), result, strict=True):
            assert torch.allclose(one, many, rtol=1e-9, atol=1e-9), (one - many).abs().max()


def spoil(what: str, strategy: str) -> None:
    model, optimizer = build("")
    hocket.distribute(model, optimizer, strategy=strategy)
    x, y = data(hocket.rank(), hocket.size())
    for turn in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        if what == "data of gradients":
            next(model.parameters()).grad.data.clamp_(-1, 1)  # type: ignore[union-attr]
        if what == "transposed gradient":
            next(model.parameters()).grad.T  # type: ignore[union-attr]  # noqa: B018
        optimizer.step()
        if what == "data of parameters":
            for p in model.parameters():
                p.data.mul_(0.9)
        if what == "rates":
            optimizer.param_groups[0]["lr"] *= 0.5 if hocket.rank() == 1 and turn == 0 else 1
        if what == "load on one rank" and hocket.rank() == 0:
            model.load_state_dict(model.state_dict())


@pytest.mark.parametrize(
    ("what", "strategy", "kind", "message"),
    [
        ("data of parameters", "central", "SharedCopyError", "was written to in place"),
        ("data of gradients", "central(fused=True)", "StrategyError", "data needs the averaged gradient"),
        ("transposed gradient", "central(fused=True)", "StrategyError", "T needs the averaged gradient"),
        ("rates", "mirrored", "MismatchError", "with learning rate 0.05"),
        ("rates", "central(fused=True)", "MismatchError", "with learning rate 0.05"),
        ("load on one rank", "central", "MismatchError", "which every rank must call"),
    ],
)
def test_what_would_be_wrong_is_refused(pool: Pool, what: str, strategy: str, kind: str, message: str) -> None:
    for outcome in pool.outcomes(2, spoil, what, strategy):
        assert isinstance(outcome, RemoteError) and outcome.kind == kind and message in outcome.message


def other_optimizer(what: str) -> None:
    model, _, _ = make(Case(), 1)
    rate = 0.2 if what == "rate" and hocket.rank() == 1 else 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    if what == "state" and hocket.rank() == 0:
        model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
        optimizer.step()
    hocket.distribute(model, optimizer)


@pytest.mark.parametrize(
    ("what", "message"),
    [("rate", "in group 0, lr is 0.1 on rank 0 and 0.2 on rank 1"), ("state", "momentum_buffer is a tensor [150, 6]")],
)
def test_optimizers_that_differ_are_named(pool: Pool, what: str, message: str) -> None:
    for outcome in pool.outcomes(2, other_optimizer, what):
        assert outcome.kind == "MismatchError" and message in outcome.message


def thrown_away(none: bool) -> float:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    hocket.distribute(nn.ParameterList([parameter]), optimizer)
    with hocket.accumulate(mean=True):
        parameter.sum().backward()
        parameter.sum().backward()
    optimizer.zero_grad(set_to_none=none)
    with hocket.accumulate(mean=True):
        parameter.sum().backward()
    parameter.sum().backward()
    optimizer.step()
    return float(parameter.detach())


@pytest.mark.parametrize("none", [True, False])
def test_accumulated_gradients_that_were_thrown_away_do_not_count(pool: Pool, none: bool) -> None:
    assert pool.run(2, thrown_away, none) == [-1.0, -1.0]


def scale_fused(strategy: str) -> list[float]:
    model = make_model("mlp").float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    hocket.distribute(model, optimizer, strategy=strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scales = []
    for turn in range(3):
        x = torch.full((2, 6), float("inf") if turn == 1 and hocket.rank() == 0 else 1.0)
        optimizer.zero_grad()
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    return scales


def test_a_scaler_whose_optimizer_skips_by_itself(pool: Pool) -> None:
    assert pool.run(2, scale_fused, "mirrored") == [[4.0, 2.0, 2.0]] * 2


def line_search() -> list[torch.Tensor]:
    model, _, _ = make(Case(), 1)
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", max_iter=8)
    hocket.distribute(model, optimizer)
    x, y = data(hocket.rank(), hocket.size())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    return [p.detach().clone() for p in model.parameters()]


def test_a_line_search_sees_the_loss_of_all(pool: Pool) -> None:
    results = pool.run(2, line_search)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def shuffled(kind: str) -> list[int]:
    import numpy as np
    from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

    random.seed(hocket.rank())
    np.random.seed(hocket.rank())

    class Mine(Sampler[int]):
        def __len__(self) -> int:
            return 16

        def __iter__(self) -> Any:
            if kind == "eager":
                return iter(torch.randperm(16).tolist())
            return (int(i) for i in np.random.permutation(16))

    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Any:
            order = list(range(16))
            random.shuffle(order)
            return iter(torch.tensor(order))

    if kind.startswith("stream"):
        processes = {"num_workers": 1} if kind.endswith("process") else {}
        loader = DataLoader(Stream(), 3, **processes)
        return [int(i) for _ in range(2) for batch in watch(hocket.distribute(loader=loader)) for i in batch]
    dataset = TensorDataset(torch.arange(16))
    batches = hocket.distribute(loader=DataLoader(dataset, 3, sampler=Mine()))
    return [int(i) for _ in range(2) for (batch,) in watch(batches) for i in batch]


def watch(loader: Any) -> Any:
    for batch in loader:
        if loader.weight:
            yield batch


@pytest.mark.parametrize("kind", ["eager", "numpy", "stream", "stream in a process"])
def test_what_samplers_and_streams_draw_is_the_same_everywhere(pool: Pool, kind: str) -> None:
    seen = [i for part in pool.run(2, shuffled, kind) for i in part]
    assert sorted(seen) == sorted([*range(16)] * 2)


def tensor_batches() -> list[float]:
    from torch.utils.data import DataLoader, TensorDataset

    batches: Any = [torch.tensor([0, 1, 2, 3, 4, 5]), torch.tensor([6, 7])]
    loader = hocket.distribute(loader=DataLoader(TensorDataset(torch.arange(8)), batch_sampler=batches))
    return [loader.weight for _ in loader]


def test_batches_of_tensors_are_weighed(pool: Pool) -> None:
    assert pool.run(2, tensor_batches) == [[1.5], [0.5]]


def nested() -> int:
    from torch.utils.data import DataLoader, TensorDataset

    loader = hocket.distribute(loader=DataLoader(TensorDataset(torch.arange(12)), 2, num_workers=1))
    return sum(1 for _ in loader for _ in loader)


def test_a_loader_may_be_iterated_inside_itself(pool: Pool) -> None:
    assert pool.run(2, nested) == [9, 9]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("strategy", "servers"),
    [
        ("mirrored", 0), ("central", 0), ("bsp", 1), ("local_sgd(period=2)", 0), ("delayed", 0), ("dmb(extra=1)", 0),
        ("gossip", 0), ("full_batch", 0),
    ],
)  # fmt: skip
def test_a_step_that_is_left_out_counts_nothing_with_a_closure_either(strategy: str, servers: int) -> None:
    def script(*, closes: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(6, 1).double()
        optimizer, steps = torch.optim.Adam(model.parameters(), lr=0.01), list[int]()
        hocket.distribute(model, optimizer, strategy=strategy, on_nan="skip")
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        x, y = data(hocket.rank(), hocket.size())
        for number in range(4):

            def closure(factor: float = float("nan") if number == hocket.rank() == 1 else 1.0) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y) * factor
                loss.backward()
                return loss

            optimizer.step(closure) if closes else (closure(), optimizer.step())
        hocket.settle()
        counts = current().training.counts
        return [counts.step, counts.counters[0].steps, len(steps), model.weight.tolist()]

    plain, closed = (
        SimulatedJob(2, strategy, servers=servers).run(partial(script, closes=closes)) for closes in (False, True)
    )
    assert closed == plain
