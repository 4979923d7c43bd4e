"""Checkpoints over several hosts, whose folder they share or each has for itself. Here, all hosts are this machine.

A host has a folder of its own if its workers run in another directory and the path is relative.
"""

import contextlib
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from safetensors import safe_open
from torch import nn

import hocket
from hocket.job.checkpoint import reading
from hocket.job.worker import current
from hocket.launch.local_crew import reserve_port
from job.test_checkpoint import add, train

Hosts = tuple[int, ...]


def place(root: str, function: Callable[..., Any], separate: bool, *args: Any) -> Any:
    """Call ``function`` in the directory of this host; its result, and what was printed to stderr."""
    folder = Path(root) / ((current().config.host_name or "host0") if separate else "all")
    folder.mkdir(exist_ok=True)
    before, said = Path.cwd(), io.StringIO()
    os.chdir(folder)
    try:
        with contextlib.redirect_stderr(said):
            return function(*args), said.getvalue()
    finally:
        os.chdir(before)


def names(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def check_same(whole: list[Any], first: list[Any], rest: list[Any], begun: int) -> None:
    assert {result[0][2] for result in rest} == {begun}
    assert [result[0][1] for result in rest] == [result[1] for result in whole]
    for rank, result in enumerate(whole):
        batches = [[b for e in part[0][0] for b in e] for part in (first[rank], rest[rank])]
        assert batches[0][:begun] + batches[1] == [b for e in result[0] for b in e]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("kind", "strategy", "hosts"),
    [
        ("shuffled", "mirrored", (1, 1)),
        ("shuffled", "central", (1, 1)),
        ("shuffled", "mirrored", (2, 1)),
        ("shuffled", "central", (2, 1)),
        ("shuffled", "mirrored", (2, 2)),
        ("shuffled", "central", (2, 2)),
        ("generator", "central(fused=True)", (1, 2)),
        ("local", "mirrored", (2, 1)),
        ("dividing", "mirrored", (1, 1, 1)),
    ],
)
def test_a_resumed_training_is_the_uninterrupted_one(
    pool: Pool, tmp_path: Path, kind: str, strategy: str, hosts: Hosts
) -> None:
    size = sum(hosts)
    whole = pool.run(size, train, kind, 0, strategy, hosts=hosts)
    settings: dict[str, Any] = {"checkpoint": "saved", "checkpoint_every": 3, "hosts": hosts}
    for separate in (False, True):
        root = tmp_path / str(separate)
        root.mkdir()
        first = pool.run(size, place, str(root), train, separate, kind, 0, strategy, 6, **settings)
        rest = pool.run(size, place, str(root), train, separate, kind, 0, strategy, **settings)
        check_same(whole, first, rest, 3)
        assert ("is sent from host0: not found on host1" in rest[0][1]) == separate
        assert "going on from" in rest[0][1] and " on host0\n" in rest[0][1]
        home = root / ("host0" if separate else "all")
        assert all(not names(other) for other in root.iterdir() if other != home), "nothing is written there"
        assert sorted(path.name for path in root.iterdir()) == (
            [f"host{i}" for i in range(len(hosts))] if separate else ["all"]
        )
        newest = sorted((home / "saved").glob("0*"))[-1]
        assert names(newest) == ["checkpoint.json", *(f"part-{rank}.safetensors" for rank in range(size))]
        for rank in range(hosts[0], size):
            with safe_open(newest / f"part-{rank}.safetensors", "pt") as file:
                assert all(name.startswith(f"rank.{rank}.") for name in file.keys())  # noqa: SIM118


def test_workers_that_share_no_memory(pool: Pool, tmp_path: Path) -> None:
    def run(*args: Any, **settings: Any) -> list[Any]:
        # A port of its own: the store of the last job may still be there, as the pool's processes go on.
        with reserve_port() as reserved:
            return pool.run(2, *args, transport="gloo", port=reserved.getsockname()[1], **settings)

    whole = run(train, "shuffled", 0, "mirrored")
    settings: dict[str, Any] = {"checkpoint": "saved", "checkpoint_every": 3}
    first = run(place, str(tmp_path), train, False, "shuffled", 0, "mirrored", 6, **settings)
    rest = run(place, str(tmp_path), train, False, "shuffled", 0, "mirrored", **settings)
    check_same(whole, first, rest, 3)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("before", "after"),
    [((2, 1), (1, 1)), ((1, 1), (2, 2)), ((1, 1), None), (None, (2, 1)), ((2, 1), (1, 2)), ((1, 1, 1), (3,))],
)
@pytest.mark.parametrize("separate", [False, True])
def test_other_hosts_go_on_without_losing_or_repeating_a_sample(
    pool: Pool, tmp_path: Path, before: Hosts | None, after: Hosts | None, separate: bool
) -> None:
    settings = {"checkpoint": "saved", "checkpoint_every": 2}

    def run(hosts: Hosts | None, *args: Any) -> list[Any]:
        size = sum(hosts) if hosts is not None else 3
        results = pool.run(size, place, str(tmp_path), train, separate, *args, hosts=hosts, **settings)
        return [result for result, _ in results]

    first = run(before, "shuffled", 0, "mirrored", 4)
    rest = run(after, "shuffled", 0, "central")
    assert rest[0][2] == 2
    kept = [[epoch[:2] if number == 0 else [] for number, epoch in enumerate(result[0])] for result in first]
    assert add(*kept, *[result[0] for result in rest]) == [list(range(38))] * 3


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    hocket.distribute(model, optimizer)
    return model, optimizer


def save(extra: Any, keep: int = 1) -> bool:
    model, optimizer = make()
    saving = hocket.save("saved", model=model, optimizer=optimizer, extra=extra, keep=keep)
    has_thread = saving._thread is not None
    saving.wait()
    hocket.barrier()  # rank 0 has waited for all of it
    return has_thread


def load(path: str = "saved") -> Any:
    model, optimizer = make()
    way = type(reading.find(current(), Path(path).absolute())[1]).__name__
    return way, hocket.load(path, model=model, optimizer=optimizer).extra


def load_another() -> None:
    hocket.load("saved", model=nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))


def test_hosts_that_have_the_same_checkpoint_read_it_and_others_get_it(pool: Pool, tmp_path: Path) -> None:
    hosts = (2, 1, 1)

    def ways(expected: Any) -> set[str]:
        results = [result for result, _ in pool.run(4, place, str(tmp_path), load, True, hosts=hosts)]
        assert all(extra == expected for _, extra in results)
        return {way for way, _ in results}

    assert pool.run(4, place, str(tmp_path), save, True, "one", hosts=hosts) == [
        (True, ""), (True, ""), (False, ""), (False, ""),
    ]  # fmt: skip
    assert ways("one") == {"SentCheckpoint"}
    shutil.copytree(tmp_path / "host0/saved", tmp_path / "host1/saved")
    assert ways("one") == {"SentCheckpoint"}, "one host still has none"
    shutil.copytree(tmp_path / "host0/saved", tmp_path / "host2/saved")
    assert ways("one") == {"Files"}, "a copy is as good as a shared folder"
    part = tmp_path / "host2/saved/000001-step-0/part-1.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    assert ways("one") == {"SentCheckpoint"}, "one is damaged"
    shutil.rmtree(tmp_path / "host0/saved")
    pool.run(4, place, str(tmp_path), save, True, "two", hosts=hosts)
    assert ways("two") == {"SentCheckpoint"}, "the others have one of the same name"


def test_what_is_wrong_is_raised_on_all_ranks_with_the_name_of_the_host(pool: Pool, tmp_path: Path) -> None:
    hosts = (1, 2)

    def messages(function: Callable[..., Any], *args: Any) -> set[str]:
        outcomes = pool.outcomes(3, place, str(tmp_path), function, True, *args, hosts=hosts)
        assert all(outcome.kind == "CheckpointError" for outcome in outcomes), outcomes
        return {outcome.message for outcome in outcomes}

    home = tmp_path / "host0/saved"
    assert messages(load) == {f"on host0: there is no checkpoint in {home}: check the path"}
    pool.run(3, place, str(tmp_path), save, True, "one", hosts=hosts)
    shutil.copytree(home, tmp_path / "host1/saved")
    (message,) = messages(load_another)
    assert "the checkpoint is of another model: '0.weight' has shape [4, 3] there and [5, 3] here" in message
    shutil.rmtree(tmp_path / "host1/saved")
    assert messages(load_another) == {message}
    part = home / "000001-step-0/part-2.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    assert messages(load) == {f"on host0: none of the 1 checkpoints in {home} is intact: see above"}
    (message,) = messages(load, "saved/000001-step-0")
    assert message.startswith("on host0: checkpoint ") and "part-2.safetensors was altered" in message
    shutil.rmtree(home)
    home.write_text("no folder")
    (message,) = messages(save, "one")
    assert message.startswith(f"on host0: cannot write checkpoints to {home}:")


def continue_training() -> int:
    model, optimizer = make()
    return hocket.resume(model=model, optimizer=optimizer).step


def test_a_newer_checkpoint_elsewhere_is_told(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "host1/saved/000007-step-70").mkdir(parents=True)
    results = pool.run(2, place, str(tmp_path), continue_training, True, hosts=(1, 1), checkpoint="saved")
    assert results[0][0] == 0 and "host1 has a newer checkpoint in" in results[0][1]
    assert "(000007-step-70) than host0, where rank 0 is: to go on from it, list host1 first" in results[0][1]
    assert results[1] == (0, "")


def big() -> dict[str, Any]:
    random = torch.Generator().manual_seed(1)
    value = {str(i): torch.randn(1 + i % 7, generator=random) for i in range(500)}
    kinds = (torch.bfloat16, torch.bool, torch.complex64, torch.float8_e5m2, torch.uint16, torch.float64)
    value |= {str(kind): torch.randn(3, 5, generator=random).to(kind) for kind in kinds}
    value |= {f"big {i}": torch.randn(700 + i, 1000, generator=random) for i in (0, 900, 1)}
    return value | {"none": torch.empty(0, 3), "scalar": torch.tensor(3)}


def all_kinds() -> Any:
    model, _ = make()
    hocket.save("saved", model=model, extra=big() if hocket.rank() == 0 else None).wait()
    communicator = current().communicator
    broadcast, sent = communicator.broadcast, []

    def counted(tensor: torch.Tensor, root: int) -> None:
        sent.append(tensor.nbytes)
        broadcast(tensor, root)

    communicator.broadcast = counted  # type: ignore[method-assign]
    extra = hocket.load("saved", model=model).extra
    for name, tensor in big().items():
        bits = [each.contiguous().view(-1).view(torch.uint8) for each in (tensor, extra[name])]
        assert extra[name].dtype == tensor.dtype and extra[name].shape == tensor.shape and torch.equal(*bits), name
    return sent


def test_tensors_of_all_kinds_and_sizes_travel(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(3, place, str(tmp_path), all_kinds, True, hosts=(2, 1))
    for sent, _ in results:
        tensors = sent[2:]  # after the manifest
        assert sorted(tensors)[-1] == 1600 * 1000 * 4 and len(tensors) <= 8, "small ones together, large ones alone"


def disagree() -> None:
    model = nn.Linear(3, 4 + (hocket.rank() == 2))
    hocket.save("saved", model=model)


def elsewhere() -> None:
    hocket.save(f"saved-{hocket.rank()}", model=nn.Linear(3, 4)).wait()


def test_ranks_that_save_different_things(pool: Pool, tmp_path: Path) -> None:
    for outcome in pool.outcomes(3, place, str(tmp_path), disagree, True, hosts=(2, 1)):
        assert outcome.kind == "MismatchError" and "model.weight torch.float32[5, 3] on rank 2" in outcome.message
    for outcome in pool.outcomes(3, place, str(tmp_path), elsewhere, True, hosts=(2, 1)):
        assert outcome.kind == "MismatchError" and "host0/saved-1 on rank 1" in outcome.message
    assert names(tmp_path) == ["host0", "host1"]
