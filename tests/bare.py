"""Every strategy once, with what ``pip install .`` brings and nothing else: no extras, no numpy, no pytest.

``make test-bare`` runs it in a virtual environment of that kind.
"""

import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from pool import Pool, needs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.job.function import function_worker
from hocket.specs.registry import BUILT_IN

SERVED = {"ps(staleness=1)", "bsp", "ssp(staleness=1)", "asynchronous", "softsync", "downpour", "gossip", "hogwild"}
ALONE = {
    "mirrored", "central", "delayed", "dmb(extra=1)", "full_batch", "local_sgd(period=2)", "diloco(period=2)",
    "easgd(period=2)",
}  # fmt: skip
NEEDED_BY_NONE = ("numpy", "sklearn", "matplotlib", "tensorboard", "pytest")


def train(strategy: str, folder: str) -> float:
    torch.manual_seed(0)
    x = torch.randn(24, 3)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if strategy == "full_batch":
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=3)
    hocket.distribute(model, optimizer, strategy=strategy)
    loader = hocket.distribute(loader=loader)
    where = hocket.resume(model=model, optimizer=optimizer, loader=loader)
    for _ in range(where.epoch, 2):
        for inputs, targets in loader:

            def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                return loss

            optimizer.step(closure)
    hocket.save(Path(folder) / "by-hand", model=model, optimizer=optimizer).wait()
    return hocket.mean(float(next(model.parameters()).detach().sum()))


def main() -> None:
    found = [name for name in NEEDED_BY_NONE if importlib.util.find_spec(name) is not None]
    if found:
        sys.exit(f"this environment is not bare, it has {', '.join(found)}: run `make test-bare`")
    known = {text.partition("(")[0] for text in SERVED | ALONE}
    assert known == set(BUILT_IN), f"say here how to run {', '.join(known ^ set(BUILT_IN))}"
    pool = Pool()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number, strategy in enumerate(sorted(SERVED | ALONE)):
                place = Path(folder) / str(number)
                settings: dict[str, Any] = {"checkpoint": str(place / "kept"), "checkpoint_every": 3}
                if strategy in SERVED - {"hogwild"}:
                    settings["transport"] = "gloo"  # bytes of tensors go through sockets
                first, second = pool.run(2, train, strategy, str(place), **needs(strategy), **settings)
                assert first == second, (strategy, first, second)
                print(f"{strategy}: {first:.6f}", flush=True)
            function_worker.write_parcel(Path(folder), "sent", [1], {"a": torch.ones(2, 3).t(), "b": torch.tensor(1.5)})
            content, tensors = function_worker.read_parcel(Path(folder), "sent")
            assert content == [1] and tensors["a"].shape == (3, 2) and tensors["b"] == 1.5
    finally:
        pool.close()


if __name__ == "__main__":
    main()
