"""What it costs to lose workers and get others: real jobs whose workers are killed, or told to leave, again and again.

``python -m hocket.lab.bench.bench_churn MODEL SAMPLES`` is the script of these jobs; with ``ddp`` after them it is what
torchrun restarts, with PyTorch's DistributedDataParallel and checkpoints. Each of its workers has a file ``PID.steps``
in the working folder, with a record for each step; all clocks are the host's monotonic one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import statistics
import struct
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hocket import specs
from hocket.errors import JobError

Row = dict[str, Any]
TORCHRUN = "torchrun"
SECONDS = 20.0  # between two kills, where speeds are compared
_BATCH = 32
_STEPS = 128  # of an epoch of all workers with which a job begins: after each, workers agree on whether it ends
_WARM = 20  # steps of each worker before anything is done to one, and between
_PATIENCE = 120.0  # seconds without a step after which a job is stuck
_SAVED = 10  # steps between two checkpoints of the script that torchrun restarts
_RECORD = struct.Struct("<dqqqq")


class Step(NamedTuple):
    """One step of one worker."""

    end: float
    size: int  # how many workers there were
    exchanges: int  # before it
    epoch: int
    samples: int  # of this worker that count


class Event(NamedTuple):
    """Something that was done to a worker."""

    time: float
    process: int


def train(model: str, samples: int) -> None:
    """The script: train until there is a file ``over``, and write down each step."""
    import hocket
    from hocket.job.worker import current

    hocket.init()
    net, optimizer, data = _build(model, samples)
    loader: Any = DataLoader(data, _BATCH, collate_fn=lambda batch: batch)
    Path(f"{os.getpid()}.ready").touch()
    hocket.rank()  # a spare waits here
    net, optimizer, loader = hocket.distribute(net, optimizer, loader)
    place = hocket.resume(model=net, optimizer=optimizer, loader=loader)
    (at_work,) = current().training.strategies
    file, epoch, is_over = os.open(f"{os.getpid()}.steps", os.O_CREAT | os.O_WRONLY | os.O_APPEND), place.epoch, False
    while not is_over:
        for x, y in loader:
            before, counted = at_work.exchanges, int(bool(loader.weight)) * len(x)
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            os.write(file, _RECORD.pack(time.monotonic(), hocket.size(), before, epoch, counted))
        epoch += 1
        is_over = bool(hocket.allreduce(torch.tensor(int(Path("over").exists())), "max"))


def train_plainly(model: str, samples: int) -> None:
    """The same without Hocket: a plain script for torchrun, which goes on from its last checkpoint."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    size, saved, begin = dist.get_world_size(), Path("saved.pt"), 0
    net, optimizer, data = _build(model, samples)
    if saved.exists():
        known = torch.load(saved)
        net.load_state_dict(known["net"])
        optimizer.load_state_dict(known["optimizer"])
        begin = known["steps"]
    together = nn.parallel.DistributedDataParallel(net)
    file = os.open(f"{os.getpid()}.steps", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for step in itertools.count(begin):
        if step % _STEPS == 0:
            is_over = torch.tensor(int(Path("over").exists()))
            dist.all_reduce(is_over)
            if is_over:
                break
        first = (step * size + dist.get_rank()) * _BATCH % samples
        x, y = data.__getitems__(list(range(first, first + _BATCH)))
        nn.functional.cross_entropy(together(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        os.write(file, _RECORD.pack(time.monotonic(), size, step, 0, _BATCH))
        if step % _SAVED == _SAVED - 1 and dist.get_rank() == 0:
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "steps": step + 1}, "new.pt")
            Path("new.pt").rename(saved)


def _build(model: str, samples: int) -> tuple[nn.Module, torch.optim.Optimizer, _Data]:
    from hocket.lab.bench.bench_training import MODELS

    torch.manual_seed(0)
    make, shape = {**MODELS, "small": (_small, (20,))}[model]
    net = make()
    return net, torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9), _Data(samples, shape)


class _Data(Dataset[Any]):
    """As many samples as wanted, of which 1024 are different; read a batch at a time, which costs little."""

    def __init__(self, samples: int, shape: tuple[int, ...]) -> None:
        self._samples, self._x, self._y = samples, torch.randn(1024, *shape), torch.randint(0, 10, (1024,))

    def __len__(self) -> int:
        return self._samples

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        there = torch.tensor(indices) % 1024
        return self._x[there], self._y[there]


def _small() -> nn.Module:
    """5,600 parameters."""
    return nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 10))


class BenchJob:
    """A running job of the script.

    Args:
        folder: An empty folder for it.
        workers: How many workers it has.
        model: What they train.
        flags: Of ``hocket run``; None for a job of torchrun.
    """

    def __init__(self, folder: Path, workers: int, model: str, flags: Mapping[str, str] | None) -> None:
        self.folder, self.workers, self.begin = folder, workers, time.monotonic()
        script = ["-m", "hocket.lab.bench.bench_churn", model, str(_STEPS * workers * _BATCH)]
        if flags is None:
            how = ["--standalone", f"--nproc-per-node={workers}", f"--max-restarts={10**6}", "--monitor-interval=0.1"]
            command = ["-m", "torch.distributed.run", *how, *script, "ddp"]
        else:
            words = [word for name, value in flags.items() for word in (f"--{name}", value)]
            command = ["-m", "hocket.launch.cli", "run", "-n", str(workers), *words, *script]
        with (folder / "err").open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=folder, env={**os.environ, "HOCKET_RUN_DIR": str(folder / "runs")}, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=err,
            )  # fmt: skip

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds, as long as the job runs."""
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                text = (self.folder / "err").read_text()[-2000:]
                raise JobError(f"a job of the benchmark has ended, or does not go on: {text}")
            time.sleep(0.01)

    def wait_for_workers(self, since: float, *, spare: bool = False) -> None:
        """Wait until all workers are there and have had some steps, and a spare, if one is wanted, stands by."""
        self.wait_until(lambda: self._are_all_here(since) and (not spare or bool(self._waiting())))

    def disturb(self, number: int, chance: random.Random) -> Event:
        """Send a signal to one of the workers."""
        victim = chance.choice(self._running())
        now = time.monotonic()
        os.kill(victim, number)
        return Event(now, victim)

    def finish(self) -> dict[int, list[Step]]:
        """Let the job end; the steps of each process."""
        (self.folder / "over").touch()
        self.wait_until(lambda: self.process.poll() is not None or self.process.returncode is not None)
        if self.process.returncode:
            raise JobError(f"a job of the benchmark has failed: {(self.folder / 'err').read_text()[-2000:]}")
        return self.steps()

    def steps(self) -> dict[int, list[Step]]:
        """The steps so far."""
        found = {}
        for path in self.folder.glob("*.steps"):
            data = path.read_bytes()
            whole = data[: len(data) // _RECORD.size * _RECORD.size]
            found[int(path.stem)] = [Step(*fields) for fields in _RECORD.iter_unpack(whole)]
        return found

    def _running(self) -> list[int]:
        return [int(path.stem) for path in self.folder.glob("*.steps") if Path("/proc", path.stem).exists()]

    def _waiting(self) -> list[str]:
        ready = [path.stem for path in self.folder.glob("*.ready") if Path("/proc", path.stem).exists()]
        return [process for process in ready if not (self.folder / f"{process}.steps").exists()]

    def _are_all_here(self, since: float) -> bool:
        running = self._running()
        if len(running) != self.workers:
            return False
        steps = self.steps()
        recent = [[s for s in steps[process] if s.end > since and s.size == self.workers] for process in running]
        return all(len(each) >= _WARM for each in recent)


@contextmanager
def bench_job(workers: int, model: str, of_torchrun: bool = False, /, **flags: object) -> Iterator[BenchJob]:
    """A job of the script, which has ended afterwards."""
    with TemporaryDirectory(prefix="hocket-bench-") as place:
        told = {name.replace("_", "-"): str(value) for name, value in flags.items()}
        job = BenchJob(Path(place), workers, model, None if of_torchrun else told)
        try:
            yield job
        finally:
            if job.process.poll() is None:
                job.process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.process.wait(10)
            job.process.kill()
            job.process.wait()


def recover(kills: int) -> list[Row]:
    """How long the others wait after a kill, and how long it takes until another worker is there in its place."""
    found: dict[int, list[tuple[float, float]]] = {1: [], 0: []}
    chance, half = random.Random(0), (kills + 1) // 2
    for _ in range(2):
        for spares, rows in found.items():
            with bench_job(3, "small", on_loss="replace", spares=spares, max_losses=10**6) as job:
                events = disturb_all(job, half, signal.SIGKILL, chance, spare=bool(spares))
                rows += [recovery(job.finish(), event, 3) for event in events]
    waits = [wait for rows in found.values() for wait, _ in rows]
    return [
        spread("from SIGKILL to the next step of the others, 3 workers", waits, "s"),
        spread("from SIGKILL to the first step of the new worker, a spare", [there for _, there in found[1]], "s"),
        spread("the same without a spare", [there for _, there in found[0]], "s"),
    ]


def disturb_all(job: BenchJob, times: int, number: int, chance: random.Random, *, spare: bool) -> list[Event]:
    """Do the same to a worker several times, always when all are there again."""
    events, since = [], 0.0
    for _ in range(times):
        job.wait_for_workers(since, spare=spare)
        time.sleep(chance.uniform(0.0, 0.1))
        events.append(job.disturb(number, chance))
        since = events[-1].time
    job.wait_for_workers(since)
    return events


def recovery(steps: dict[int, list[Step]], event: Event, workers: int) -> tuple[float, float]:
    """Seconds until the last of the others has had a step without the victim, and until the new one had its first."""
    others, new = [], []
    for process, found in steps.items():
        after = [step for step in found if step.end > event.time]
        if process == event.process or not after:
            continue
        if found[0].end > event.time:
            new.append(found[0].end - event.time)
        elif fewer := [step.end for step in after if step.size < workers]:
            others.append(fewer[0] - event.time)
    return max(others), min(new)


def leave(times: int) -> list[Row]:
    """What the others lose, and how long they wait, when a worker leaves on notice; how long when one is killed."""
    rows = []
    for words, number in (("leaves on notice", signal.SIGTERM), ("is killed", signal.SIGKILL)):
        with bench_job(3, "small", on_loss="replace", spares=1, max_losses=10**6) as job:
            events = disturb_all(job, times, number, random.Random(1), spare=True)
            steps = job.finish()
        if number == signal.SIGTERM:  # a worker that is killed may not have written down its last step
            lost = _smaller_steps(steps) / times
            rows.append({"what": f"steps that others lose when one {words}", "value": lost, "unit": "steps"})
        rows.append(
            spread(f"longest time between two steps of the others when one {words}", _pauses(steps, events), "ms")
        )
    return rows


def _smaller_steps(steps: dict[int, list[Step]]) -> int:
    """How many steps had fewer samples than the others of their epoch, but for the last one of each."""
    samples: dict[tuple[int, int], int] = defaultdict(int)
    for each in steps.values():
        for step in each:
            samples[step.epoch, step.exchanges] += step.samples
    last = dict(sorted(samples))
    whole = max(samples.values())
    return sum(found < whole for (epoch, at), found in samples.items() if at != last[epoch])


def _pauses(steps: dict[int, list[Step]], events: list[Event]) -> list[float]:
    """By event, the longest time in ms between two steps of a survivor until the group was smaller."""
    found = []
    for event in events:
        longest = 0.0
        for process, each in steps.items():
            if process == event.process or each[0].end > event.time:
                continue
            for before, after in itertools.pairwise(each):
                if after.end > event.time:
                    longest = max(longest, after.end - before.end)
                    if after.size < before.size:
                        break
        found.append(longest * 1e3)
    return found


def go_on(seconds: float, strategies: list[str]) -> list[Row]:
    """Samples per second of two workers with a kill now and then, and without; ``torchrun`` is one of the ways."""
    rows = []
    for strategy in strategies:
        speeds = [_speed(strategy, seconds, kills) for kills in (False, True)]
        kept = speeds[1] / speeds[0]
        rows += [
            {"what": f"{strategy}, undisturbed", "value": speeds[0], "unit": "samples/s"},
            {"what": f"{strategy}, a kill every {SECONDS:g} s", "value": speeds[1], "unit": "samples/s"},
            {"what": f"{strategy}, of what it is undisturbed", "value": 100 * kept, "unit": "%"},
            {"what": f"{strategy}, time lost by each kill", "value": SECONDS * (1 - kept), "unit": "s"},
        ]
    return rows


def _speed(strategy: str, seconds: float, kills: bool) -> float:
    chance, plain = random.Random(2), strategy == TORCHRUN
    served = {"servers": 1} if not plain and specs.parse(strategy).servers == "needed" else {}
    with bench_job(2, "cnn", plain, on_loss="replace", spares=1, max_losses=10**6, strategy=strategy, **served) as job:
        job.wait_for_workers(0.0, spare=not plain)
        begin = time.monotonic()
        at = begin + SECONDS / 2
        while at < begin + seconds:
            job.wait_until(lambda until=at: time.monotonic() > until)  # type: ignore[misc]
            if kills:
                job.disturb(signal.SIGKILL, chance)
            at += SECONDS
        job.wait_until(lambda: time.monotonic() > begin + seconds)
        running = job._running()
        steps = job.finish()
    if plain:  # steps after the last checkpoint are done again, and count once
        ends = [
            max(s.exchanges for each in steps.values() for s in each if s.end <= t) for t in (begin, begin + seconds)
        ]
        return (ends[1] - ends[0]) * 2 * _BATCH / seconds
    counted = 0
    for process, each in steps.items():
        last = each[-1].exchanges if process not in running else -1  # what a killed worker had not brought is lost
        counted += sum(s.samples for s in each if begin < s.end <= begin + seconds and s.exchanges != last)
    return counted / seconds


def step(rounds: int, seconds: float) -> list[Row]:
    """A step where nobody is lost, with and without workers that could be replaced; jobs of both kinds alternate."""
    found: dict[str, list[float]] = {"--on-loss end": [], "--on-loss replace --spares 0": []}
    for _ in range(rounds):
        for words, times in found.items():
            how = words.split()[1]
            with bench_job(2, "small", on_loss=how, **({"spares": 0} if how == "replace" else {})) as job:
                job.wait_for_workers(0.0)
                begin = time.monotonic()
                job.wait_until(lambda begin=begin: time.monotonic() > begin + seconds)  # type: ignore[misc]
                steps = job.finish()
            spent = [b.end - a.end for each in steps.values() for a, b in itertools.pairwise(each)]
            times.append(statistics.median(spent) * 1e6)
    return [
        {"what": f"a step, {words}", "value": min(times), "unit": "µs", "least": min(times), "most": max(times)}
        for words, times in found.items()
    ]


def spread(what: str, values: list[float], unit: str) -> Row:
    """A row of the table."""
    value = statistics.median(values)
    return {"what": what, "value": value, "unit": unit, "least": min(values), "most": max(values), "of": len(values)}


if __name__ == "__main__":
    (train_plainly if sys.argv[3:] == ["ddp"] else train)(sys.argv[1], int(sys.argv[2]))
