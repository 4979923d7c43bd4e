"""A host that dies while a job trains over TCP: the others go on, with every sample once and equal parameters."""

import sys
from collections import Counter
from pathlib import Path

import pytest
from conftest import Rigs
from rig import jobs

EPOCHS, SAMPLES = 4, 90
SCRIPT = """
import sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, Dataset
import hocket
from hocket.job.worker import current

class Samples(Dataset):
    def __len__(self):
        return 90

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return index, torch.randn(3, generator=generator, dtype=torch.float64)

hocket.init()
folder, strategy = Path(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
model = torch.nn.Linear(3, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = hocket.distribute(
    model, optimizer, DataLoader(Samples(), 3, shuffle=True), strategy=strategy
)
(at_work,) = current().training.strategies
mine, steps = hocket.rank(), 0
with (folder / f"{mine}.counted").open("w", buffering=1) as counted:
    for epoch in range(4):
        for numbers, x in loader:
            print(at_work.exchanges, loader.weight, epoch, *numbers.tolist(), file=counted)
            (model(x).squeeze(1) - x.sum(1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            time.sleep(0.02)
            if mine == 0 and steps == 14:
                print("now", flush=True)
print("end", hocket.rank(), hocket.size(), *(p.flatten().tolist() for p in model.parameters()), flush=True)
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("hosts", "dead", "strategy"),
    [("h1:1,h2:1,h3:1", "h3", "mirrored"), ("h1:2,h2:2", "h2", "local_sgd(period=2)")],
)
def test_a_host_is_killed(rig: Rigs, tmp_path: Path, hosts: str, dead: str, strategy: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    made = rig(hosts.count(",") + 1)
    with jobs.on(made, tmp_path) as started:
        hocket = [sys.executable, "-m", "hocket.launch.cli", "run", "-H", hosts]
        job = started.start("h1", [*hocket, str(tmp_path / "train.py"), str(tmp_path), strategy])
        job.time_of("now")
        made.kill(dead)
        assert job.finish() == 0, job
        ends = [line.partition("end ")[2].split(maxsplit=2) for line in job.lines if "end " in line]
        assert sorted(rank for rank, _, _ in ends) == ["0", "1"] and {size for _, size, _ in ends} == {"2"}
        assert len({parameters for _, _, parameters in ends}) == 1
        started.wait_until_empty()
    check_samples(tmp_path, [path for path in tmp_path.glob("*.counted") if path.stem in lost(hosts, dead)])


def lost(hosts: str, dead: str) -> set[str]:
    """The ranks on a host."""
    of = [name for host in hosts.split(",") for name in [host.partition(":")[0]] * int(host.partition(":")[2])]
    return {str(rank) for rank, name in enumerate(of) if name == dead}


def check_samples(folder: Path, dead: list[Path]) -> None:
    """Whether each sample counts once in each epoch, whether or not the last exchange has had what the dead gave."""
    lines = {path: [line.split() for line in path.read_text().splitlines()] for path in folder.glob("*.counted")}
    most = max(int(line[0]) for path in dead for line in lines[path])
    found = []
    for exchanges in (most, most + 1):  # those before which the batches of the dead count
        counted: dict[str, Counter[int]] = {}
        for path, each in lines.items():
            for before, weight, epoch, *numbers in each:
                if float(weight) and (path not in dead or int(before) < exchanges):
                    counted.setdefault(epoch, Counter()).update(map(int, numbers))
        found.append([counted[str(epoch)] for epoch in range(EPOCHS)])
    assert [Counter(range(SAMPLES))] * EPOCHS in found, found
