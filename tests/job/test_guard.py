"""Wrappers that exchange gradients are refused around and in a distributed model; trainers may see one process."""

import os
from pathlib import Path

import pytest
import torch
from pool import Pool
from torch import nn

import hocket
from launch.test_run import hocket as command


def wrap(kind: str, after: bool) -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if after:
            hocket.distribute(model, optimizer, strategy="local_sgd")
        if kind == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        elif kind == "fsdp":
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        else:
            fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
            optimizer = optimizer if after else torch.optim.SGD(model.parameters(), lr=0.1)
        if not after:
            hocket.distribute(nn.Sequential(model), optimizer)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        return ""
    except hocket.errors.UsageError as error:
        return str(error)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.few(2)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fully_shard"])
def test_wrappers_are_refused_before_and_after(pool: Pool, kind: str, after: bool) -> None:
    for said in pool.run(2, wrap, kind, after):
        if kind == "fully_shard" and after:  # it replaces all parameters
            assert "leave out fully_shard(), which exchanges gradients by itself" in said
        else:
            assert "would both exchange the gradients" in said and "--hide-torch-env" in said


TRAINER = """
import os
import torch
import hocket
from torch import nn

class State:  # as accelerate looks at it
    def __init__(self):
        self.processes = int(os.environ.get("WORLD_SIZE", "1"))
        self.is_several = int(os.environ.get("LOCAL_RANK", -1)) != -1 or "RANK" in os.environ or self.processes > 1

    def prepare(self, model):
        if self.is_several:
            torch.distributed.init_process_group("gloo")
            return nn.parallel.DistributedDataParallel(model)
        return model

hocket.init()
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hocket.distribute(model, optimizer)
state = State()
prepared = state.prepare(model)
prepared(torch.full((2, 3), 1.0 + hocket.rank())).sum().backward()
optimizer.step()
print(hocket.rank(), hocket.size(), hocket.local_rank(), state.processes, model.weight.grad.tolist())
"""


def test_a_trainer_sees_one_process_and_hocket_all(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    done = command("run", "-n", "2", "--hide-torch-env", str(tmp_path / "trainer.py"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {rank} 2 {rank} 1 [[3.0, 3.0, 3.0]]" for rank in range(2)]
    done = command("run", "-n", "2", str(tmp_path / "trainer.py"))
    assert done.returncode == 1 and "add --hide-torch-env to hocket run" in done.stderr.splitlines()[-1]


def test_hidden_variables_do_not_reach_another_job() -> None:
    from hocket import config
    from hocket.launch.crew import CrewMember
    from hocket.launch.environment import Job, Ports, variables

    hiding, open_job = Job(("x",), 2, {"hide-torch-env": "on"}), Job(("x",), 3, {"hide-torch-env": "off"})
    outer = variables(hiding, CrewMember(1, "a"), Ports(1234, 1235), base=dict(os.environ))
    assert not set(config.OF_TORCHRUN) & set(outer)
    assert (config.read(outer).rank, config.read(outer).size, config.read(outer).port) == (1, 2, 1234)
    inner = variables(open_job, CrewMember(0, "a"), Ports(5678, 5679), base=outer)
    assert (config.read(inner).rank, config.read(inner).size, inner["RANK"]) == (0, 3, "0")
