"""Trainings that laws are tested on, as one process does them and as many do.

A case is plain data, so that it can travel to the workers.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket

Result = dict[str, Any]


class Tied(nn.Module):
    """Two layers share a weight; one parameter is frozen, one never used, one has no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(6, 300)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(torch.tanh(self.second(torch.tanh(self.first(x)))) * self.scale))


class Sometimes(nn.Module):
    """A branch that only some samples take, so that its gradient exists on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 40)
        self.branch = nn.Linear(6, 40)
        self.late = nn.Linear(6, 40)
        self.head = nn.Linear(40, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.body(x)
        chosen = x[:, 0] > 0.8
        if chosen.any():
            hidden = hidden + chosen[:, None] * self.branch(x)
        if self.calls > 2:  # the same on all ranks, but not from the beginning
            hidden = hidden + self.late(x)
        return self.head(torch.tanh(hidden))


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 2, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 2), nn.Tanh())
        self.head = nn.Linear(8 * 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x.view(-1, 3, 1, 2)).flatten(1))


class Checkpointed(nn.Module):
    """All parameters are in checkpointed blocks."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)])
        self.blocks[1].weight = self.blocks[0].weight  # arrives in parts
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = checkpoint(lambda v, b=block: torch.tanh(b(v)), x, use_reentrant=self.reentrant)
        return x


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "tied":
        return Tied()
    if name == "sometimes":
        return Sometimes()
    if name == "channels_last":
        return Convolutional().to(memory_format=torch.channels_last)
    if name.startswith("checkpointed"):
        return Checkpointed(reentrant=name.endswith("reentrant"))
    if name == "matrices":
        return nn.Sequential(nn.Linear(6, 20, bias=False), nn.Tanh(), nn.Linear(20, 1, bias=False))
    return nn.Sequential(nn.Linear(6, 150), nn.Tanh(), nn.Linear(150, 150), nn.Tanh(), nn.Linear(150, 1))


@dataclass(frozen=True)
class Case:
    model: str = "mlp"
    optimizer: str = "SGD"
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.05})
    samples: int = 47
    batch: int = 3  # of one worker
    epochs: int = 2
    dtype: str = "float64"
    groups: bool = False
    clip: float | None = None
    accumulate: int = 1
    schedule: bool = False
    compile: bool = False
    drop_last: bool = False
    zero: bool = False  # zero gradients instead of setting them to None
    device: str = "cpu"


def make(case: Case, workers: int) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    dtype = getattr(torch, case.dtype)
    model = make_model(case.model).to(case.device, dtype)
    parameters: Any = list(model.parameters())
    if case.groups:
        parameters = [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:]}]
    optimizer = getattr(torch.optim, case.optimizer)(parameters, **case.options)
    random = torch.Generator().manual_seed(1)
    x = torch.randn(case.samples, 6, generator=random, dtype=torch.float64)
    y = torch.sin(x.sum(1, keepdim=True))
    loader = DataLoader(
        TensorDataset(x.to(dtype), y.to(dtype)), case.batch * workers, shuffle=True, drop_last=case.drop_last,
        generator=torch.Generator().manual_seed(2),
    )  # fmt: skip
    return model, optimizer, loader


def loop(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, held: Any) -> Result:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5) if case.schedule else None
    forward = torch.compile(model, backend="aot_eager") if case.compile else model
    norms = []
    for _ in range(case.epochs):
        for step, (cpu_x, cpu_y) in enumerate(loader, start=1):
            x, y = cpu_x.to(case.device), cpu_y.to(case.device)
            loss = ((forward(x) - y) ** 2).mean()
            if case.accumulate > 1 and step % case.accumulate and step < len(loader):
                with held():
                    loss.backward()
                continue
            loss.backward()
            if case.clip is not None:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.clip)))
            optimizer.step()
            optimizer.zero_grad(set_to_none=not case.zero)
            if scheduler is not None:
                scheduler.step()
    return {
        "parameters": [p.detach().clone().cpu() for p in model.parameters()],
        "state": torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, optimizer.state_dict()),
        "norms": norms,
        "strides": [p.stride() for p in model.parameters()],
    }


def alone(case: Case, workers: int) -> Result:
    """One plain process with the batch of all workers."""
    import contextlib

    return loop(case, *make(case, workers), held=contextlib.nullcontext)


def together(case: Case, strategy: str) -> Result:
    """On every worker: other initial weights on other ranks, the same result."""
    model, optimizer, loader = make(case, 1)
    if hocket.rank():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(hocket.rank())
    generator = loader.generator
    assert generator is not None
    generator.manual_seed(2 + hocket.rank())
    return loop(case, *hocket.distribute(model, optimizer, loader, strategy=strategy), held=hocket.accumulate)


def assert_equal(one: Result, many: list[Result], tolerance: float = 1e-9) -> None:
    for rank, result in enumerate(many):
        for mine, theirs in zip(one["parameters"], result["parameters"], strict=True):
            assert torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance), (rank, (mine - theirs).abs().max())
        for mine, theirs in zip(many[0]["parameters"], result["parameters"], strict=True):
            assert torch.equal(mine, theirs), f"replicas of rank 0 and {rank} differ"
        for mine, theirs in zip(one["norms"], result["norms"], strict=True):
            assert abs(mine - theirs) <= tolerance * max(1, abs(mine))
        assert result["strides"] == one["strides"]
        assert_same_state(one["state"], result["state"], tolerance)


def with_mean_state(many: list[Result]) -> list[Result]:
    """Results of replicas whose optimizers have states of their own, with the means of these."""
    mean: Any = copy.deepcopy(many[0]["state"])
    for index, values in mean["state"].items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                values[key] = torch.stack([result["state"]["state"][index][key] for result in many]).mean(0)
    return [{**result, "state": mean} for result in many]


def assert_same_state(one: Any, other: Any, tolerance: float) -> None:
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for index, values in one["state"].items():
        assert values.keys() == other["state"][index].keys()
        for key, value in values.items():
            found = other["state"][index][key]
            if isinstance(value, torch.Tensor):
                assert value.shape == found.shape
                assert torch.allclose(value, found, rtol=tolerance, atol=tolerance), key
            else:
                assert value == found, key
