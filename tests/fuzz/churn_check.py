"""What must be true of a job after ``churn.py``: every sample counted once, all workers equal, and nothing left."""

from __future__ import annotations

import itertools
import json
import re
import sqlite3
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from fuzz.churn_script import BATCH, SAMPLES, Numbered, build

AT_ONCE = ("mirrored", "central", "central(fused=True)")  # strategies whose steps are those of one process
SERVED = ("asynchronous", "ssp", "bsp", "softsync", "downpour")  # those that need a server
QUEUED = (
    *("asynchronous", "ssp", "bsp", "softsync(n=2)", "downpour(fetch=2, push=3)", "easgd(period=4) --servers 1"),
    *("gossip", "gossip(push_sum=True)", "gossip(asynchronous=True)", "hogwild"),
)
# Those whose marks do not tell which samples have counted in an exchange.
_UNMARKED = ("easgd", "delayed", "dmb", "diloco(period=4, fragments")
# The last batches of a dead worker that may have been dealt again, if not 1.
_UNSURE = {"gossip": 4, "hogwild": 16, "downpour": 4, "easgd": 5}
_MOMENTUM, _RATE = 0.9, 0.7  # of diloco's outer step


@dataclass
class Batch:
    """What one worker has begun to learn from."""

    exchanges: int  # before it
    epoch: int
    numbers: list[int]


@dataclass
class Life:
    """What a worker has written down."""

    name: str
    batches: list[Batch] = field(default_factory=list)
    end: list[str] | None = None  # rank, size, epochs and digests, if it came to the end
    has_left: bool = False
    kept: int = 0  # how many of its batches all others have had from it when they came: it was alone then

    @property
    def is_certain(self) -> bool:
        """Whether all that it has begun has counted."""
        return self.end is not None or self.has_left

    @property
    def last(self) -> int:
        """How many exchanges were before its last batch."""
        return max((batch.exchanges for batch in self.batches), default=-1)


def read(folder: Path) -> list[Life]:
    lives = []
    for path in folder.glob("*.log"):
        life = Life(path.stem)
        for line in path.read_text().splitlines():
            _, what, *words = line.split(" ")
            if what == "batch":
                exchanges, weight, epoch, *numbers = words
                if float(weight):  # else only to be in step
                    life.batches.append(Batch(int(exchanges), int(epoch), list(map(int, numbers))))
            elif what == "change" and " [] " in line:  # nobody was lost
                others = 0 if words[4:] == ["[]"] else len(words[4:])
                life.kept = len(life.batches) if int(words[2]) == 1 + others else life.kept
            elif what == "end":
                life.end = words
            elif what == "left":
                life.has_left = True
        lives.append(life)
    return lives


def check_job(folder: Path, strategy: str, *, ahead: bool = False) -> str:
    """Check all but what is left; a line that says what has happened.

    Args:
        folder: Of the job.
        strategy: How its workers trained.
        ahead: Whether the script asks for each batch before it trains on the one before: then what a worker had that
            is lost in the last step of an epoch may be missing, and the record has to say so.
    """
    lives = read(folder)
    ends = [life.end for life in lives if life.end is not None]
    assert len({tuple(end[1:4]) for end in ends}) == 1, f"workers differ at the end: {ends}"
    epochs = int(ends[0][2])
    short: dict[int, int] = {}
    if is_queued(strategy):
        check_queue(lives, epochs, _UNSURE.get(strategy.partition("(")[0], 1))
    else:
        short = check_group(folder, lives, strategy, ends, epochs, ahead=ahead)
    check_record(folder, epochs, short, is_queued=is_queued(strategy))
    errors = (folder / "err").read_text()
    lost, joined = errors.count(" was killed by "), errors.count(" has joined after ")
    left = len(re.findall(r"\S has left ", errors))
    changes = max(
        int(generation)
        for path in folder.glob("*.log")
        for generation in [0, *re.findall(r" change (\d+) ", path.read_text())]
    )
    return f"{epochs} epochs, {lost} lost, {left} left, {joined} joined, {changes} generations"


def check_group(
    folder: Path, lives: list[Life], strategy: str, ends: list[list[str]], epochs: int, *, ahead: bool
) -> dict[int, int]:
    """Check a job whose workers are a group, which is told of all changes; see ``check_epochs``."""
    assert sorted(int(end[0]) for end in ends) == list(range(int(ends[0][1]))), f"not all workers are there: {ends}"
    if strategy in AT_ONCE:
        assert len({end[4] for end in ends}) == 1, f"optimizers differ at the end: {ends}"
    counted: dict[int, list[int]] | None = None
    if keeps_marks(strategy):
        counted = find_marked(folder, lives, strategy)
    short = check_epochs(lives, epochs, counted, ahead=ahead)
    if strategy in AT_ONCE:
        assert counted is not None
        check_law(folder, lives, counted)
    return short


def find_marked(folder: Path, lives: list[Life], strategy: str) -> dict[int, list[int]]:
    """The samples that have counted in each exchange, as the marks of all workers tell, which must be equal."""
    marks: dict[int, bytes] = {}
    size = 8 * (SAMPLES + 1)
    for path in folder.glob("*.marks"):
        data = path.read_bytes()
        for at in range(0, len(data) - size + 1, size):
            number = int(torch.frombuffer(bytearray(data[at : at + 8]), dtype=torch.float64))
            known = marks.setdefault(number, data[at + 8 : at + size])
            assert known == data[at + 8 : at + size], f"workers differ after exchange {number}"
    assert sorted(marks) == list(range(1, len(marks) + 1)), f"of {max(marks)} exchanges {len(marks)} are known"
    before, outer = torch.zeros(SAMPLES, dtype=torch.float64), torch.zeros(SAMPLES, dtype=torch.float64)
    counted = {}
    for number in sorted(marks):
        now = torch.frombuffer(bytearray(marks[number]), dtype=torch.float64)
        moved = before - now
        if strategy.startswith("diloco"):  # undo Nesterov's step
            moved = (moved / _RATE - _MOMENTUM**2 * outer) / (1 + _MOMENTUM)
            outer = _MOMENTUM * outer + moved
        found = (moved.abs() > 1e-7).nonzero().flatten().tolist()
        if strategy in AT_ONCE:
            expected = torch.full((len(found),), 1 / len(found), dtype=torch.float64)
            assert torch.allclose(moved[found], expected), f"exchange {number}: not the mean over its samples"
        counted[number - 1], before = found, now
    return counted


def check_epochs(
    lives: list[Life], epochs: int, counted: dict[int, list[int]] | None, *, ahead: bool = False
) -> dict[int, int]:
    """Whether every sample has counted once in each epoch; how many are missing in which, where some may be.

    What a dead worker had begun since its last exchange has counted wholly or not at all: ``counted`` tells; where that
    is not known, it must be such that every sample has counted once.
    """
    sure: dict[int, list[int]] = defaultdict(list)
    unsure: dict[int, list[tuple[Life, int, list[int]]]] = defaultdict(list)
    by_exchange: dict[int, list[int]] = defaultdict(list)
    for life in lives:
        numbered = enumerate(life.batches)
        for epoch, of_epoch in itertools.groupby(numbered, key=lambda each: each[1].epoch):
            last: list[int] = []
            for index, batch in of_epoch:
                if life.is_certain or batch.exchanges < life.last or index < life.kept:
                    sure[epoch] += batch.numbers
                    by_exchange[batch.exchanges] += batch.numbers
                else:
                    last += batch.numbers
            if last:
                unsure[epoch].append((life, life.last, last))
    short: dict[int, int] = {}
    for epoch in range(epochs):
        missing = set(range(SAMPLES)) - set(sure[epoch])
        for life, exchange, numbers in unsure[epoch]:
            has_counted = missing >= set(numbers)
            if counted is not None:
                there = set(numbers) & set(counted[exchange]) if exchange in counted else set()
                # Others may have had the same samples in the same round, if they were dealt again within it.
                again = set(numbers) & set(by_exchange[exchange])
                assert not there - again or there == set(numbers), f"half of what {life.name} had in {exchange} counts"
                has_counted = bool(there - again)
            if has_counted:
                sure[epoch] += numbers
                by_exchange[exchange] += numbers
                missing -= set(numbers)
        twice = sorted({n for n in sure[epoch] if sure[epoch].count(n) > 1}) if len(sure[epoch]) > SAMPLES else []
        assert not twice, f"epoch {epoch}: counted more than once: {twice}"
        if ahead and missing:
            end = max(batch.exchanges for life in lives for batch in life.batches if batch.epoch == epoch)
            last = {number for _, exchange, numbers in unsure[epoch] if exchange == end for number in numbers}
            dead = any(not life.is_certain and life.last == end - 1 for life in lives)  # and had not written it down
            if missing <= last or (dead and len(missing - last) <= 2 * BATCH):
                short[epoch] = len(missing)
                continue
        assert sorted(sure[epoch]) == list(range(SAMPLES)), f"epoch {epoch}: not counted: {sorted(missing)}"
    if counted is not None:
        for number in by_exchange.keys() | counted.keys():
            expected, found = sorted(set(by_exchange.get(number, []))), counted.get(number, [])
            assert expected == found, f"exchange {number}: {expected} were brought, and {found} have counted"
    return short


def is_queued(strategy: str) -> bool:
    """Whether workers take their batches from a queue as they get ready, and each goes on by itself."""
    return _name_of(strategy) in map(_name_of, QUEUED)


def _name_of(strategy: str) -> tuple[str, bool]:
    return strategy.partition("(")[0], " --servers " in strategy


def keeps_marks(strategy: str) -> bool:
    """Whether the marks tell which samples have counted in each exchange."""
    phases = strategy.split(" -> ")
    unmarked = _UNMARKED if len(phases) == 1 else (*_UNMARKED, "diloco")
    return not is_queued(strategy) and not any(phase.startswith(unmarked) for phase in phases)


def check_queue(lives: list[Life], epochs: int, unsure: int) -> None:
    """Whether every sample was done once in each epoch; each of the last batches of a dead worker may have been."""
    done: dict[int, Counter[int]] = defaultdict(Counter)
    perhaps: list[Batch] = []
    for life in lives:
        sure = len(life.batches) if life.is_certain else max(0, len(life.batches) - unsure)
        for batch in life.batches[:sure]:
            done[batch.epoch].update(batch.numbers)
        perhaps += life.batches[sure:]
    for batch in perhaps:
        if not any(done[batch.epoch][number] for number in batch.numbers):
            done[batch.epoch].update(batch.numbers)
    for epoch in range(epochs):
        twice = sorted(number for number, times in done[epoch].items() if times > 1)
        missing = sorted(set(range(SAMPLES)) - set(done[epoch]))
        assert not twice and not missing, f"epoch {epoch}: counted more than once: {twice}, not counted: {missing}"


def check_law(folder: Path, lives: list[Life], counted: dict[int, list[int]]) -> None:
    """Whether the parameters are those of one process with the same samples in each step."""
    epoch_of = {batch.exchanges: batch.epoch for life in lives for batch in life.batches}
    model, optimizer, scheduler = build()
    data, epoch = Numbered(), 0
    for number, numbers in sorted(counted.items()):
        while epoch < epoch_of[number]:
            scheduler.step()
            epoch += 1
        optimizer.zero_grad()
        model(data.x[numbers], data.y[numbers], torch.tensor(numbers)).backward()
        optimizer.step()
    found = torch.load(folder / "parameters.pt")
    expected = nn.utils.parameters_to_vector(model.net.parameters())
    actual = torch.cat([value.flatten() for name, value in found.items() if name != "marks"])
    assert torch.allclose(actual, expected, rtol=1e-6, atol=1e-8), "not what one process would have learned"


def check_record(folder: Path, epochs: int, short: dict[int, int], *, is_queued: bool) -> None:
    """Whether the record has each sample of each epoch once, but for ``short``; of a queue only at an epoch's end."""
    (database,) = (folder / "runs").glob("*/*.sqlite")
    with sqlite3.connect(database) as record:
        order = "time" if is_queued else "seen"
        (seen,) = record.execute(f"SELECT seen FROM steps ORDER BY {order} DESC LIMIT 1").fetchone()
        told = dict(record.execute("SELECT name, value FROM facts WHERE section = 'samples'"))
    record.close()
    samples = {name: json.loads(value) for name, value in told.items()}
    wrong = {str(epoch + 1): [SAMPLES - count, SAMPLES] for epoch, count in short.items()}
    assert is_queued or (samples["epochs"], samples["epochs that differ"]) == (epochs, wrong), samples
    assert seen == epochs * SAMPLES - sum(short.values()), (
        f"the record has {seen} samples, and there were {epochs} epochs of {SAMPLES}"
    )


def check_nothing_is_left(folder: Path, mark: str) -> None:
    """Whether processes, shared memory, sockets or temporary files of the job are left."""
    left = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                left.append(f"process {entry.name}: {(entry / 'cmdline').read_text()}")
        except OSError:
            continue
    ours = {path.stem for path in folder.glob("*.log")}
    for path in Path("/dev/shm").iterdir():
        owner = re.match(r"torch_(\d+)_", path.name)
        if mark in path.name or (owner and owner[1] in ours and not Path("/proc", owner[1]).exists()):
            left.append(str(path))
    left += [line for line in Path("/proc/net/unix").read_text().splitlines() if mark[:6] in line.split("@")[-1]]
    caches = ("torchinductor", "pymp-")  # of torch, and of multiprocessing, which nobody removes for a killed process
    left += [str(path) for path in (folder / "temporary").iterdir() if not path.name.startswith(caches)]
    assert not left, f"left behind: {left}"
