"""``hocket run --on ray`` and ``hocket.ray.run``, on a real cluster of several nodes on this machine."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import conftest
import pytest
import torch

import hocket
from hocket.errors import JobError, UsageError
from hocket.launch.engines import ray_engine
from hocket.launch.engines.ray_places import RayTexts
from hocket.launch.environment import Job
from launch.test_newcomers import BEGIN, REPLACE
from launch.test_run import HOCKET

pytestmark = pytest.mark.keeps_ports
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install -c constraints.txt ray"
)
HERE = ("--runtime-env", json.dumps({"working_dir": None}))  # nodes that share a folder with the launcher
LAW = """
import json, os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import hocket

hocket.init()
torch.manual_seed(hocket.rank())
model = nn.Linear(3, 1).double()
x = torch.randn(32, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
with torch.no_grad():
    for number, parameter in enumerate(model.parameters()):
        parameter.fill_(0.5 + number + hocket.rank())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 2)
model, optimizer, loader = hocket.distribute(model, optimizer, loader)
for _ in range(2):
    for inputs, targets in loader:
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
hosts = hocket.allgather(torch.tensor([int(os.environ["GROUP_RANK"])])).view(-1).tolist()
if hocket.rank() == 0:
    told = [hosts, os.environ["OMP_NUM_THREADS"], os.getcwd(), sys.argv[1:]]
    print(json.dumps([[p.view(-1).tolist() for p in model.parameters()], *told]), flush=True)
"""


class Nodes:
    """The cluster, and what is there of a job."""

    def __init__(self) -> None:
        env = {name: value for name, value in os.environ.items() if name != "HOCKET_TEST_SESSION"}
        env |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("ray_nodes.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=env, start_new_session=True,
        )  # fmt: skip
        conftest.KEPT.add(self.process.pid)
        self.address, self.head = self._read().split()

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)
        return self._read()

    def _read(self) -> str:
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline()) and " INFO " in line:
            continue
        assert line, "the Ray cluster has ended"
        return line.strip()

    def left(self) -> list[str]:
        """What still runs of a job."""
        found = []
        for pid in conftest._children(self.process.pid):
            command = conftest._read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode()
            if "dialing" in command or b"HOCKET_JOB=" in conftest._read(f"/proc/{pid}/environ"):
                found.append(command)
        return found

    def await_end(self) -> None:
        """Five seconds after a job nothing of it is there."""
        deadline = time.monotonic() + 5
        while left := self.left():
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        below = conftest._children(self.process.pid)
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        conftest.KEPT.discard(self.process.pid)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    cluster = Nodes()
    cluster.ask("add 2")
    yield cluster
    cluster.close()


def command(nodes: Nodes, *flags: str) -> list[str]:
    return [*HOCKET, "run", "--on", "ray", "--address", nodes.address, *flags]


def run(nodes: Nodes, folder: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        command(nodes, *flags), cwd=folder, capture_output=True, text=True, timeout=120, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    nodes.await_end()
    return done


def plain() -> list[list[float]]:
    """One process with the batch of three workers."""
    model = torch.nn.Linear(3, 1).double()
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(0.5 + number)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for inputs in x.split(6):
            optimizer.zero_grad()
            (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    return [p.detach().view(-1).tolist() for p in model.parameters()]


@needs_ray
@pytest.mark.parametrize("flags", [(), ("--strategy", "ps(staleness=0)", "--servers", "1")])
def test_the_laws_of_mirrored_and_of_a_parameter_server(nodes: Nodes, tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "law.py").write_text(LAW)
    done = run(nodes, tmp_path, "-n", "3", "--placement", "SPREAD", *flags, "law.py", "--some", "words")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("[0] [[")]
    parameters, found, threads, folder, words = json.loads(line.removeprefix("[0] "))
    for mine, theirs in zip(plain(), parameters, strict=True):
        assert torch.allclose(torch.tensor(mine), torch.tensor(theirs), rtol=1e-9, atol=1e-9)
    assert set(found) == {0, 1} and threads == "1" and words == ["--some", "words"]
    assert folder != str(tmp_path) and "working_dir" in folder  # Ray has brought the script along


@needs_ray
def test_one_line_for_what_the_cluster_does_not_have(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "law.py").write_text("")
    for flags, words in [
        (("-n", "9"), """-n 9 with --per-worker '{"CPU": 1}' needs 9 CPU, and the Ray cluster has 4 (4 free): use"""),
        (("-n", "1", "--per-worker", '{"GPU": 1}'), "needs 1 GPU, and the Ray cluster has 0 (0 free)"),
        (("-n", "3", "--placement", "STRICT_PACK"), "3 workers do not fit into the 2 nodes of the Ray cluster with"),
    ]:
        done = run(nodes, tmp_path, *flags, "law.py")
        last = done.stderr.splitlines()[-1]
        assert done.returncode == 2 and last.startswith("hocket: ") and words in last, done.stderr
        assert len([line for line in done.stderr.splitlines() if "waiting" not in line]) == 1


@needs_ray
def test_nobody_answers_at_the_address(tmp_path: Path, free_port: int) -> None:
    (tmp_path / "law.py").write_text("")
    where = f"127.0.0.1:{free_port}"
    done = subprocess.run(
        [*HOCKET, "run", "--on", "ray", "--address", where, "law.py"], cwd=tmp_path, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (
        2,
        f"hocket: --on ray: no Ray cluster answers at {where} (Connection refused): check --address\n",
    )


@contextmanager
def started(nodes: Nodes, folder: Path, text: str, *flags: str) -> Iterator["subprocess.Popen[str]"]:
    """A job of a script without torch; its errors go to the file ``err``."""
    (folder / "script.py").write_text(BEGIN + text)
    with (folder / "err").open("w") as err:
        job = subprocess.Popen(
            command(nodes, *HERE, *flags, "script.py"), cwd=folder, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=err,
        )  # fmt: skip
        try:
            yield job
        finally:
            job.kill()
            job.communicate()
            nodes.await_end()


def until(folder: Path, *words: str) -> str:
    """Wait for words among the errors of a job."""
    deadline = time.monotonic() + 60
    while not all(re.search(word, (folder / "err").read_text()) for word in words):
        assert time.monotonic() < deadline, (folder / "err").read_text()
        time.sleep(0.02)
    return (folder / "err").read_text()


def await_files(folder: Path, *names: str) -> None:
    deadline = time.monotonic() + 60
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < deadline, sorted(path.name for path in folder.iterdir())
        time.sleep(0.02)


@needs_ray
def test_a_killed_worker_is_replaced(nodes: Nodes, tmp_path: Path) -> None:
    text = """
join()
if rank == 1 and tries == 1:
    die()
until("joined1-2", said("has joined"))
"""
    with started(nodes, tmp_path, text, "-n", "3", *REPLACE) as job:
        job.communicate(timeout=90)
    err = (tmp_path / "err").read_text()
    assert job.returncode == 0, err
    assert re.search(r"rank 1 on \S+ was killed by SIGKILL .*; the others go on, and a new worker takes its", err), err


@needs_ray
def test_nodes_come_and_go(nodes: Nodes, tmp_path: Path) -> None:
    """A job grows with the cluster; a node that is drained leaves on notice, and one that is removed is a loss."""
    text = """
join()
signal.signal(signal.SIGTERM, lambda *_: leave())
until("over")
"""
    with started(nodes, tmp_path, text, "-n", "2..8", *REPLACE) as job:
        await_files(tmp_path, *(f"joined{rank}-1" for rank in range(4)))
        third = nodes.ask("add 1")
        await_files(tmp_path, "joined4-1")
        drain = [
            Path(sys.executable).with_name("ray"), "drain-node", "--address", nodes.address, "--node-id", third,
            "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot",
            "--deadline-remaining-seconds", "60",
        ]  # fmt: skip
        subprocess.run(drain, check=True, capture_output=True, timeout=60)
        until(tmp_path, rf"-{third[:6]} has to leave: Ray drains its node; its workers finish their batch")
        nodes.ask(f"remove {third}")
        fourth = nodes.ask("add 1")
        until(tmp_path, rf"-{fourth[:6]} has joined")
        nodes.ask(f"remove {fourth}")
        until(tmp_path, rf"host \S+-{fourth[:6]} \(rank 4\) was lost after .*; the others go on")
        (tmp_path / "over").touch()
        job.communicate(timeout=60)
    assert job.returncode == 0, (tmp_path / "err").read_text()


@needs_ray
def test_workers_see_the_gpus_that_ray_gives_them(nodes: Nodes, tmp_path: Path) -> None:
    text = """
join()
print("sees", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
"""
    node = nodes.ask("add 2 4")  # Ray believes in them
    with started(nodes, tmp_path, text, "-n", "2", "--per-worker", '{"CPU": 1, "GPU": 1}') as job:
        out, _ = job.communicate(timeout=90)
    assert job.returncode == 0, (tmp_path / "err").read_text()
    (seen,) = set(re.findall(r"sees ([\d,]+)", out))
    assert len(set(seen.split(","))) == 2
    nodes.ask(f"remove {node}")


@needs_ray
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_launcher_ends(nodes: Nodes, tmp_path: Path, number: signal.Signals) -> None:
    with started(nodes, tmp_path, "join()\nuntil('never')\n", "-n", "2", "--on-loss", "end") as job:
        await_files(tmp_path, "joined0-1", "joined1-1")
        job.send_signal(number)
        job.communicate(timeout=60)
    assert job.returncode == (130 if number == signal.SIGINT else -number)


def train(scale: float) -> tuple[torch.Tensor, str]:
    return torch.full((2,), scale * hocket.size()), "ok"


def fail() -> None:
    raise ValueError("no such thing")


@needs_ray
def test_a_function_runs_from_a_driver(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "mine.py"
    module.write_text(
        "import torch, hocket\n\n\ndef train(scale):\n    return torch.full((2,), scale * hocket.size()), 'ok'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import mine  # type: ignore[import-not-found]

    brought = {"py_modules": [str(module)]}
    for scale in (2.0, 3.0):  # what was returned before is not taken for the result
        result = hocket.ray.run(mine.train, scale, n=2, address=nodes.address, runtime_env=brought)
        assert torch.equal(result[0], torch.full((2,), scale * 2)) and result[1] == "ok"
    with pytest.raises(JobError, match="the launcher ended with status 2"):
        hocket.ray.run(mine.train, 1.0, n=99, address=nodes.address)
    nodes.await_end()


def texts(**given: Any) -> RayTexts:
    return RayTexts(**given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"per_worker": "2"}, "--per-worker 2: must be what Ray has in numbers, for example --per-worker '{"),
        ({"per_worker": '{"CPU": 0}'}, "must be what Ray has in numbers"),
        ({"per_server": '{"CPU": "x"}'}, "--per-server"),
        ({"placement": "TIGHT"}, "--placement TIGHT: the choices are PACK, SPREAD, STRICT_PACK, STRICT_SPREAD"),
        ({"workers": "2..4", "placement": "STRICT_SPREAD"}, "needs one number of workers: write -n 4, not -n 2..4"),
        ({"workers": "no"}, "-n no: must be a number of workers"),
        ({"runtime_env": "nowhere.json"}, "--runtime-env nowhere.json: must be a JSON object, or a file with one"),
    ],
)
def test_words_that_make_no_sense_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        ray_engine.make(texts(**given), Job(("x.py",), 0), {}, {}, None, None)
    assert words in str(caught.value)


def test_ray_is_not_there_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError("ray")

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UsageError, match=r"needs Ray, which is not installed here: pip install 'hocket\[ray\]'"):
        ray_engine._connect(None, {})
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.9.3")
    with pytest.raises(UsageError, match=r"Ray 2.9.3 is too old: install 2.40 or later, here and on all nodes"):
        ray_engine._connect(None, {})
