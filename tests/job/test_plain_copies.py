"""Copies of a distributed model, and files of it, are those of a plain one."""

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, needs
from torch import nn
from torch.nn.utils import parametrizations

import hocket

ALONE = ["mirrored", "central", "central(fused=True)", "local_sgd(period=2)", "diloco(period=2)", "easgd(period=2)"]
SERVED = ["bsp", "asynchronous", "downpour(warmup=1)", "gossip", "hogwild"]
LOAD = """
import sys
sys.modules["hocket"] = None  # importing it fails
import torch
model, optimizer = torch.load(sys.argv[1], weights_only=False)
assert not any(name.startswith("hocket") for name in sys.modules if sys.modules[name] is not None)
x = torch.ones(3, 4, dtype=torch.int64)
for _ in range(2):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
assert model[5].weight is model[3].weight
"""


def make() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 8), nn.Flatten(), nn.Linear(32, 8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    model.append(nn.Linear(8, 8))
    model[5].weight = model[3].weight  # tied
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def users_own(module: nn.Module, *_: Any) -> None:
    module.calls += 1  # type: ignore[operator]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(12).view(3, 4) % 9).square().mean().backward()
    optimizer.step()


def check_plain(twin: Any, model: Any, *, calls: int) -> None:
    assert twin.tag == ["mine"] and twin.calls == calls
    assert twin[5].weight is twin[3].weight
    for module, own in zip(twin.modules(), model.modules(), strict=True):
        assert type(module) is type(own) and vars(module).keys() == vars(own).keys() - {"__reduce_ex__"}
        for name, value in vars(module).items():
            if "_hooks" in name and value:
                assert list(value.values()) in ([users_own], [True]), name
    pointers = {p.data_ptr() for p in model.parameters()}
    for (name, p), (_, mine) in zip(twin.named_parameters(), model.named_parameters(), strict=True):
        assert type(p) is nn.Parameter and torch.equal(p, mine) and p.data_ptr() not in pointers, name
        assert not p._backward_hooks and not p._post_accumulate_grad_hooks, name


def momenta(optimizer: Any) -> list[torch.Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [optimizer.state[p]["momentum_buffer"] for p in parameters if "momentum_buffer" in optimizer.state[p]]


def copy_it(strategy: str, folder: str) -> None:
    model, optimizer = make()
    model.tag = ["mine"]
    model.calls = 0
    handle = model.register_forward_hook(users_own)
    hocket.distribute(model, optimizer, strategy=strategy)
    # Without a loader, strategies of uneven speed end no rounds; rank 0 alone has copies.
    for _ in range(2):
        step(model, optimizer)
    hocket.barrier()
    before = [p.detach().clone() for p in model.parameters()]
    if hocket.rank() == 0:
        twin, trainer = copy.deepcopy((model, optimizer))
        check_plain(twin, model, calls=model.calls)
        for protocol in (2, pickle.HIGHEST_PROTOCOL):
            check_plain(pickle.loads(pickle.dumps(model, protocol)), model, calls=model.calls)
        file = io.BytesIO()
        torch.save([model, optimizer], file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        check_plain(loaded[0], model, calls=model.calls)
        part = copy.deepcopy(model[2])
        assert not part._load_state_dict_pre_hooks and "__reduce_ex__" not in vars(part)
        known = optimizer.state_dict()["state"]
        for copied in (trainer, loaded[1]):
            assert type(copied) is torch.optim.SGD and copied.param_groups[0]["lr"] == 0.01
            if not strategy.startswith("downpour"):  # whose rule is another one
                kept = [known[i]["momentum_buffer"] for i in sorted(known)]
                assert kept and all(torch.equal(a, b) for a, b in zip(momenta(copied), kept, strict=True))
        assert {id(p) for p in twin.parameters()} == {id(p) for g in trainer.param_groups for p in g["params"]}
        if strategy != "downpour(warmup=1)":
            for _ in range(2):
                step(twin, trainer)  # by itself
            assert not torch.equal(twin[2].weight, model[2].weight)
        handle.remove()  # this module is not to be found where the file is loaded
        torch.save([model, optimizer], Path(folder) / "whole.pt")
    hocket.barrier()
    if strategy not in ("hogwild", "gossip"):
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    if strategy not in SERVED:
        step(model, optimizer)
        hocket.barrier()


@pytest.mark.few(4)
@pytest.mark.parametrize("strategy", ALONE + SERVED)
def test_copies_and_files_are_plain(pool: Pool, strategy: str, tmp_path: Path) -> None:
    pool.run(2, copy_it, strategy, str(tmp_path), **needs(strategy))
    if strategy in ("central", "bsp"):
        subprocess.run([sys.executable, "-c", LOAD, tmp_path / "whole.pt"], check=True)


def copy_special() -> None:
    """Modules that copy themselves, batch norm that was made common, embeddings of which only some rows are here."""
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4), nn.Linear(4, 1))
    hocket.sync_batchnorm(model)
    assert isinstance(copy.deepcopy(model)[1], hocket.SyncBatchNorm)  # before it is distributed
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hocket.distribute(model, optimizer)
    twin = copy.deepcopy(model)  # is synchronised as well: averaged models need the statistics of all
    assert isinstance(twin[1], hocket.SyncBatchNorm) and isinstance(model[1], hocket.SyncBatchNorm)
    assert not any(name.startswith("__") for module in twin.modules() for name in vars(module))
    twin(torch.randn(3, 4)).sum().backward()
    for each in (model, twin):
        loaded = pickle.loads(pickle.dumps(each[1]))
        assert type(loaded) is nn.BatchNorm1d and "converted_from" not in vars(loaded)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()


def copy_rows() -> None:
    model = nn.Sequential(nn.Embedding(6, 2, sparse=True), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hocket.distribute(model, optimizer, strategy="bsp")
    model(torch.tensor([hocket.rank()])).sum().backward()
    optimizer.step()
    hocket.barrier()
    if hocket.rank() == 0:
        first, second = copy.deepcopy(model)[0].weight, pickle.loads(pickle.dumps(model))[0].weight
        assert torch.equal(first, model.state_dict()["0.weight"]) and torch.equal(first, second)
    hocket.barrier()


def test_what_copies_itself(pool: Pool) -> None:
    pool.run(2, copy_special)
    pool.run(2, copy_rows, servers=1)
