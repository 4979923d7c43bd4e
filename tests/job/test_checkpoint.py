"""Checkpoints: a resumed training is the uninterrupted one, bit for bit, and every sample counts once."""

import hashlib
import json
import random
import threading
from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool import Pool
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)
from torch.utils.data import get_worker_info as worker_info

import hocket
from hocket.job.checkpoint.save_load_resume import _saver
from hocket.job.checkpoint.snapshot import Subjects
from hocket.job.worker import current


class Noisy(Dataset[Any]):
    """Samples with random numbers of all kinds added."""

    def __init__(self, count: int = 38) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(3) + random.random() + float(np.random.rand())
        return index, torch.full((3,), index / self.count) + noise / 10


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        order = list(range(38))
        random.shuffle(order)
        for index in order:
            yield (index, torch.full((3,), index / 38) + torch.rand(3) / 10)


class Dividing(Stream):
    def __iter__(self) -> Iterator[Any]:
        info = worker_info()
        mine = slice(info.id, None, info.num_workers) if info else slice(None)
        return iter(list(super().__iter__())[mine])


def make_loader(kind: str, processes: int) -> Any:
    options: dict[str, Any] = {"num_workers": processes}
    if kind == "generator":
        options["generator"] = torch.Generator().manual_seed(7)
    if kind in ("shuffled", "generator"):
        loader = DataLoader(Noisy(), 3, shuffle=True, **options)
    elif kind == "persistent":
        loader = DataLoader(Noisy(), 3, shuffle=True, persistent_workers=True, **options)
    elif kind == "weighted":
        loader = DataLoader(Noisy(), 3, sampler=WeightedRandomSampler(torch.rand(38), 38), **options)
    elif kind == "batches":
        loader = DataLoader(Noisy(), batch_sampler=BatchSampler(RandomSampler(range(38)), 3, False), **options)
    elif kind == "local":
        return hocket.distribute(
            loader=DataLoader(Noisy(14 + 9 * hocket.rank()), 3, shuffle=True, **options), data="local"
        )
    else:
        loader = DataLoader({"stream": Stream, "dividing": Dividing}[kind](), 3, **options)
    return hocket.distribute(loader=loader)


def train(kind: str, processes: int, strategy: str, stop: int | None = None, epochs: int = 3) -> Any:
    """Train with everything random; ``stop`` after so many steps. What was seen, and a digest of all state."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    norm = nn.LayerNorm if kind == "dividing" else nn.BatchNorm1d  # which needs two samples
    model = nn.Sequential(nn.Linear(3, 20), norm(20), nn.Dropout(0.3), nn.Linear(20, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    hocket.distribute(model, optimizer, strategy=strategy, scale_lr="linear", warmup=10)
    loader = make_loader(kind, processes)
    by_batch = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    counts = {"batches": 0}
    where = hocket.resume(model=model, optimizer=optimizer, scheduler=[by_batch, by_epoch], loader=loader, extra=counts)
    random.random(), torch.rand(1)  # the start-up may draw
    seen: list[list[list[int]]] = [[] for _ in range(epochs)]
    for epoch in range(where.epoch, epochs):
        for index, x in loader:
            if current().config.checkpoint:
                _saver(current())._last.wait()  # or the next one might be left out
            loss = (model(x) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            by_batch.step()
            counts["batches"] += 1
            hocket.report(loss=loss)
            seen[epoch].append(index.tolist() if loader.weight else [])
            if counts["batches"] == stop:
                return seen, None, where.step
        by_epoch.step()
    if current().config.checkpoint:
        _saver(current())._last.wait()
    digest = hashlib.sha256()
    for tensor in [*model.state_dict().values(), *_tensors(optimizer.state_dict()), torch.rand(4)]:
        digest.update(tensor.numpy().tobytes())
    digest.update(repr((by_batch.state_dict(), by_epoch.state_dict(), counts, random.random())).encode())
    training = current().training
    told = training.counts.step, training.counts.samples, training.counts.batches, sorted(training.metrics)
    digest.update(repr(told).encode())
    return seen, digest.hexdigest(), where.step


def _tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    return [value for values in state["state"].values() for value in values.values()]


def add(*parts: list[list[list[int]]]) -> list[list[int]]:
    """The samples of each epoch that several runs, or ranks, have seen, sorted."""
    return [sorted(s for part in parts for batch in part[epoch] for s in batch) for epoch in range(len(parts[0]))]


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("kind", "processes", "strategy", "size", "stop"),
    [
        ("shuffled", 0, "mirrored", 1, 8),
        ("shuffled", 0, "mirrored", 2, 8),
        ("shuffled", 0, "central", 2, 8),
        ("shuffled", 0, "central(fused=True)", 3, 6),
        ("generator", 0, "mirrored", 2, 10),
        ("generator", 1, "mirrored", 1, 16),
        ("persistent", 1, "mirrored", 2, 10),
        ("weighted", 0, "central", 3, 8),
        ("batches", 1, "mirrored", 2, 10),
        ("stream", 0, "mirrored", 2, 10),
        ("stream", 2, "central", 2, 10),
        ("dividing", 0, "mirrored", 2, 10),
        ("dividing", 2, "mirrored", 2, 10),
        ("local", 0, "mirrored", 2, 9),
        ("shuffled", 0, "mirrored", 2, 7),  # at the end of the first epoch
    ],
)
def test_a_resumed_training_is_the_uninterrupted_one(
    pool: Pool, tmp_path: Path, kind: str, processes: int, strategy: str, size: int, stop: int
) -> None:
    whole = pool.run(size, train, kind, processes, strategy)
    again = pool.run(size, train, kind, processes, strategy)
    assert whole == again, "the training itself is not reproducible"
    settings = {"checkpoint": str(tmp_path / "saved"), "checkpoint_every": 1 if stop == 7 else 3}
    first = pool.run(size, train, kind, processes, strategy, stop, **settings)
    rest = pool.run(size, train, kind, processes, strategy, **settings)
    assert rest[0][2] == (7 - 1 if stop == 7 else (stop - 1) // 3 * 3)
    assert [result[1] for result in rest] == [result[1] for result in whole]
    begun = rest[0][2]
    for rank in range(size):
        assert [b for e in first[rank][0] for b in e][:begun] + [b for e in rest[rank][0] for b in e] == [
            b for e in whole[rank][0] for b in e
        ]


@pytest.mark.few(4)
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize(("kind", "processes"), [("shuffled", 0), ("generator", 1), ("stream", 0)])
def test_another_number_of_workers_goes_on_without_losing_or_repeating_a_sample(
    pool: Pool, tmp_path: Path, kind: str, processes: int, before: int, after: int
) -> None:
    settings = {"checkpoint": str(tmp_path), "checkpoint_every": 2}
    first = pool.run(before, train, kind, processes, "mirrored", 5, **settings)
    rest = pool.run(after, train, kind, processes, "central" if after > 1 else "mirrored", **settings)
    saved = rest[0][2]
    assert saved == 4
    kept = [[epoch[: max(0, saved)] for epoch in result[0]] for result in first]
    assert add(*kept, *[result[0] for result in rest]) == [list(range(38))] * 3


def test_data_of_ones_own_needs_the_same_number_of_workers(pool: Pool, tmp_path: Path) -> None:
    settings = {"checkpoint": str(tmp_path), "checkpoint_every": 2}
    pool.run(2, train, "local", 0, "mirrored", 5, **settings)
    for outcome in pool.outcomes(3, train, "local", 0, "mirrored", **settings):
        assert outcome.kind == "CheckpointError" and "resume with -n 2" in outcome.message


def by_hand(folder: str, resumed: bool) -> Any:
    """Save at the end of the epochs of a script that evaluates and steps its scheduler there."""
    torch.manual_seed(1)
    model, other = nn.Linear(3, 4), nn.Linear(4, 4)
    other.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    hocket.distribute(model, optimizer, DataLoader(Noisy(), 3, shuffle=True))
    loader = hocket.distribute(loader=DataLoader(Noisy(), 3, shuffle=True))
    things = {
        "model": {"first": model, "second": other}, "optimizer": optimizer, "loader": loader, "scaler": scaler,
    }  # fmt: skip
    start, orders = 0, []
    if resumed:
        where = hocket.load(folder, **things)
        assert where.extra == {"name": "run", "best": [1.5, (2, None)], "nan": where.extra["nan"], 3: b"x"}
        assert where.extra["nan"] != where.extra["nan"] and where.metrics == {"accuracy": 0.5}
        start = where.epoch
        assert start == 2 and where.path is not None and where.path.parent == Path(folder)
    for epoch in range(start, 4):
        orders.append([i for index, x in loader for i in index.tolist()])
        if epoch < 2 and not resumed:
            scaler.scale(torch.ones(1))
            scaler.update(16.0 * (epoch + 1))
            hocket.report(accuracy=0.5)
            extra = {"name": "run", "best": [1.5, (2, None)], "nan": float("nan"), 3: b"x"}
            hocket.save(folder, **things, extra=extra, keep=2).wait()
    return orders[-2:], scaler.get_scale(), loader.epoch


def test_saving_by_hand_at_the_end_of_an_epoch(pool: Pool, tmp_path: Path) -> None:
    whole = pool.run(2, by_hand, str(tmp_path / "a"), False)
    rest = pool.run(2, by_hand, str(tmp_path / "a"), True)
    assert whole == rest
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [".lock", "000001-step-0", "000002-step-0"]


def fit(folder: str, width: int, what: str) -> None:
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
    if what == "more layers":
        model.append(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters() if what != "optimizer" else [model[0].weight], lr=0.1)
    hocket.distribute(model, optimizer)
    if what == "save":
        hocket.save(folder, model=model, optimizer=optimizer).wait()
    elif what == "missing":
        hocket.load(folder, model=model, ema=model)
    elif what == "no state":
        hocket.save(folder, model=model, ema=3)
    elif what == "not plain":
        hocket.save(folder, model=model, extra={"file": object()})
    elif what == "plain loader":
        hocket.save(folder, loader=DataLoader(Noisy()))
    else:
        hocket.load(folder, model=model, optimizer=optimizer)


@pytest.mark.parametrize("size", [1, 2])
def test_what_does_not_fit_is_named(pool: Pool, tmp_path: Path, size: int) -> None:
    pool.run(size, fit, str(tmp_path), 5, "save")

    def message(*args: Any) -> str:
        return "|".join({f"{o.kind}: {o.message}" for o in pool.outcomes(size, fit, str(tmp_path), *args)})

    assert "'0.weight' has shape [5, 3] there and [6, 3] here" in message(6, "load")
    assert "this one has '2.weight', and it does not" in message(5, "more layers")
    assert "CheckpointError: the checkpoint does not fit 'optimizer'" in message(5, "optimizer")
    assert "the checkpoint has no 'ema': it has model, optimizer" in message(5, "missing")
    assert "ema is a int, which has no state_dict()" in message(5, "no state")
    assert "extra.file is a builtins.object, which cannot be stored" in message(5, "not plain")
    assert "pass the loader that hocket.distribute() returned" in message(5, "plain loader")
    pool.run(size, fit, str(tmp_path), 5, "load")
    (tmp_path / "000002-step-1").mkdir()
    newer = json.dumps({"format": 99, "hocket": "9.9"})
    import zlib

    (tmp_path / "000002-step-1" / "checkpoint.json").write_text(
        json.dumps({"crc32": zlib.crc32(newer.encode())}) + "\n" + newer + "\n"
    )
    assert "was written by Hocket 9.9 (format 99)" in message(5, "load")
    assert "update Hocket" in message(5, "load")
    (tmp_path / "file").write_text("")
    outcome = pool.outcomes(size, fit, str(tmp_path / "file" / "x"), 5, "save")[0]
    assert outcome.kind == "CheckpointError" and "Not a directory; choose a folder" in outcome.message
    outcome = pool.outcomes(size, fit, str(tmp_path / "nowhere"), 5, "load")[0]
    assert outcome.kind == "CheckpointError" and "there is no checkpoint in" in outcome.message


def early(kind: str) -> Any:
    """Loops that stop asking before the loader is at its end."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hocket.distribute(model, optimizer)
    loader = hocket.distribute(loader=DataLoader(Noisy(), 3, shuffle=True, generator=torch.Generator().manual_seed(1)))
    where = hocket.resume(model=model, optimizer=optimizer, loader=loader)
    seen = []
    for _ in range(where.epoch, 4):
        for index, x in islice(loader, 4):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            seen.append(index.tolist())
            current().training.saver.settle()  # type: ignore[attr-defined]
        if kind == "stop" and current().training.counts.step == 8:
            next(iter(loader), None)  # asks for the first batch of the third epoch, where a checkpoint is due
            current().training.saver.settle()  # type: ignore[attr-defined]
            return seen
    return seen


def test_a_checkpoint_before_the_first_batch_of_an_epoch(pool: Pool, tmp_path: Path) -> None:
    whole = pool.run(2, early, "", checkpoint=str(tmp_path / "whole"), checkpoint_every=1000)
    settings = {"checkpoint": str(tmp_path / "saved"), "checkpoint_every": 8}
    first = pool.run(2, early, "stop", **settings)
    rest = pool.run(2, early, "", **settings)
    for rank in range(2):
        assert first[rank] + rest[rank] == whole[rank]


def odd_state(folder: str) -> None:
    """State that differs between ranks where it may."""
    torch.manual_seed(hocket.rank())
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hocket.distribute(model, optimizer)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    scheduler.step(1.0 + hocket.rank())
    model(torch.randn(8, 3) + hocket.rank())
    extra = {"history": torch.arange(5.0), "words": Counter(a=0, b=-1), "last": deque([1, 2], maxlen=2)}
    things = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "ema": average}
    mine = {name: b.clone() for name, b in [*model.named_buffers(), *average.named_buffers(prefix="ema")]}
    hocket.save(folder, **things, extra=extra if hocket.rank() == 0 else None).wait()
    for buffer in [*model.buffers(), *average.buffers()]:
        buffer.zero_()
    where = hocket.load(folder, **things)
    assert torch.equal(where.extra["history"], torch.arange(5.0)) and where.extra["words"] == Counter(a=0, b=-1)
    assert where.extra["words"]["b"] == -1 and where.extra["last"].maxlen == 2
    for name, buffer in [*model.named_buffers(), *average.named_buffers(prefix="ema")]:
        assert torch.equal(buffer, mine[name]), name


def one_of_them(folder: str) -> list[list[float]]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    hocket.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    random_before = torch.get_rng_state()
    hocket.load(folder, model=model)
    assert current().training.counts.step == 0 and torch.equal(torch.get_rng_state(), random_before), (
        "only the weights were asked for"
    )
    return [model[1].running_mean.tolist(), model[1].running_var.tolist()]


def test_what_differs_between_ranks_is_kept_for_each(pool: Pool, tmp_path: Path) -> None:
    pool.run(3, odd_state, str(tmp_path))
    newest = tmp_path / "000001-step-0"
    saved = {k: v for part in newest.glob("*.safetensors") for k, v in load_file(part).items()}
    assert pool.run(1, one_of_them, str(tmp_path))[0] == [
        saved["model.1.running_mean"].tolist(), saved["model.1.running_var"].tolist(),
    ]  # fmt: skip
    first = load_file(newest / "part-0.safetensors")
    assert torch.equal(saved["model.1.running_mean"], first["rank.0.buffers.model.1.running_mean"])
    assert torch.equal(saved["model.1.running_var"], first["rank.0.buffers.model.1.running_var"])


def disagree(folder: str) -> None:
    model = nn.Linear(3, 4 + hocket.rank())
    hocket.save(folder, model=model)


def unknown_type(folder: str) -> None:
    model = nn.Linear(3, 4)
    model.register_buffer("odd", torch.zeros(1, dtype=torch.complex128))
    hocket.save(folder, model=model)


def test_ranks_that_save_different_things_and_types_nobody_knows(pool: Pool, tmp_path: Path) -> None:
    for outcome in pool.outcomes(2, disagree, str(tmp_path)):
        assert outcome.kind == "MismatchError" and "model.weight torch.float32[5, 3] on rank 1" in outcome.message
    for outcome in pool.outcomes(2, unknown_type, str(tmp_path)):
        assert outcome.kind == "UsageError" and "model.odd has type torch.complex128" in outcome.message
    assert list(tmp_path.iterdir()) == [], "nothing was begun"


def changes_in_between(folder: str) -> None:
    """A checkpoint that was left out must not be remembered as written."""
    model = nn.Linear(3, 4)
    saver = _saver(current())
    for width in (2, 5, 5, 1):
        things = Subjects(model, None, None, None, {"x": torch.full((width,), float(width))}, {})
        saver._last._thread = threading.current_thread() if width == 1 else saver._last._thread  # still at work
        saver.save(Path(folder), things, 9, patient=width == 5)
        if width == 1:
            saver._last._thread = None
            assert saver.save(Path(folder), things, 9, patient=True)
        saver.settle()
        assert hocket.load(folder, model=model).extra["x"].tolist() == [float(width)] * width


def test_a_checkpoint_that_was_left_out_is_not_remembered(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, changes_in_between, str(tmp_path))


class Bootstrap(Sampler[int]):
    """Draws as it goes."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(38):
            yield int(torch.randint(38, ()))

    def __len__(self) -> int:
        return 38


class Counting(Sampler[int]):
    """Has state of its own, which it shows as it is."""

    def __init__(self) -> None:
        self.seen = torch.zeros(38, dtype=torch.int64)

    def __iter__(self) -> Iterator[int]:
        for index in torch.argsort(self.seen, stable=True).tolist():
            self.seen[index] += 1 + index % 3
            yield index

    def __len__(self) -> int:
        return 38

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.copy_(state["seen"])


def forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def look_around(kind: str, loader: Any, model: nn.Module) -> None:
    """What scripts do with their training loader besides training."""
    if kind == "glance":
        next(iter(loader))
    elif kind == "accuracy":
        model.eval()
        with torch.no_grad():
            for _, x in loader:
                model(x)
        model.train()


def odd_script(kind: str, stop: int | None = None) -> Any:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    model = nn.Sequential(nn.Linear(3, 20), nn.BatchNorm1d(20), nn.Dropout(0.3), nn.Linear(20, 1))
    model.register_buffer("passing", torch.ones(1), persistent=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    hocket.distribute(model, optimizer)
    sampler = {"bootstrap": Bootstrap, "counting": Counting}.get(kind, lambda: RandomSampler(range(38)))()
    processes = {"num_workers": 1, "persistent_workers": True} if kind == "persistent" else {}
    data = "local" if kind in ("bootstrap", "first") else "global"
    loader = hocket.distribute(loader=DataLoader(Noisy(), 3, sampler=sampler, **processes), data=data)
    other = hocket.distribute(loader=DataLoader(Noisy(), 4, shuffle=True))
    if kind == "glance":
        next(iter(loader))
    where = hocket.resume(model=model, optimizer=optimizer, loader=[loader, other])
    seen, more = [], forever(other)
    for _ in range(where.epoch, 3):
        look_around(kind, loader, model)
        for index, x in loader:
            u = next(more)[1] if kind in ("forever", "first") else x
            if current().training.counts.step % 6 == 3:
                look_around("accuracy" if kind == "nested" else "", loader, model)
            optimizer.zero_grad()
            (model(x).mean() + model(u).abs().mean()).backward()
            optimizer.step()
            seen.append(index.tolist() if loader.weight else [])
            current().training.saver.settle()  # type: ignore[attr-defined]
            if current().training.counts.step == stop:
                return seen, None, where.step
        look_around(kind, loader, model)
    digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in [*model.state_dict().values(), torch.rand(4)]))
    return seen, digest.hexdigest(), where.step


@pytest.mark.parametrize(
    "kind", ["plain", "glance", "accuracy", "nested", "bootstrap", "counting", "forever", "persistent", "first"]
)
def test_scripts_that_do_odd_things_with_their_loaders(pool: Pool, tmp_path: Path, kind: str) -> None:
    whole = pool.run(2, odd_script, kind, checkpoint=str(tmp_path / "whole"), checkpoint_every=1000)
    settings = {"checkpoint": str(tmp_path / "saved"), "checkpoint_every": 5}
    first = pool.run(2, odd_script, kind, 12, **settings)
    rest = pool.run(2, odd_script, kind, **settings)
    assert rest[0][2] == 10
    for rank in range(2):
        assert first[rank][0][:10] + rest[rank][0] == whole[rank][0]
        assert rest[rank][1] == whole[rank][1]


def end_of_epoch(folder: str, resumed: bool) -> Any:
    """By hand, with processes that persist."""
    torch.manual_seed(5)
    loader = DataLoader(Noisy(), 3, shuffle=True, num_workers=1, persistent_workers=True)
    model, loader = hocket.distribute(nn.Linear(3, 1), loader=loader)
    start = hocket.load(folder, model=model, loader=loader).epoch if resumed else 0
    seen = []
    for epoch in range(start, 3):
        seen = [i for index, _ in loader for i in index.tolist()]
        if epoch == 0 and not resumed:
            hocket.save(folder, model=model, loader=loader).wait()
    return seen, torch.rand(3).tolist()


def test_saving_between_epochs_of_processes_that_persist(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, end_of_epoch, str(tmp_path), False) == pool.run(2, end_of_epoch, str(tmp_path), True)


def save_again(folder: str) -> list[list[int]]:
    """What is loaded and saved at once, without a step in between, is the same."""
    torch.manual_seed(5)
    loader = hocket.distribute(loader=DataLoader(Noisy(), 3, shuffle=True))
    rest = []
    for number, (index, _) in enumerate(loader):
        if number == 2:
            hocket.save(folder, loader=loader).wait()
        elif number > 2:
            rest.append(index.tolist())
    hocket.barrier()
    for source, target in (("", "-2"), ("-2", "-3")):
        loader = hocket.distribute(loader=DataLoader(Noisy(), 3, shuffle=True))
        hocket.load(folder + source, loader=loader)
        hocket.save(folder + target, loader=loader).wait()
    assert [index.tolist() for index, _ in loader] == rest
    return rest


def test_a_checkpoint_can_be_saved_again(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_again, str(tmp_path / "saved"))
