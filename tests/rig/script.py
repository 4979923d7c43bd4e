"""A script for jobs on a rig: what it does is told by its first argument."""

import atexit
import ctypes
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from strategies.training import Case, together
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.comm import communicator as comm_communicator
from hocket.comm import several_hosts as comm_hosts
from hocket.comm.bucket_layout import Limits
from hocket.config import Config
from hocket.job import introductions
from hocket.job.introductions import Introductions
from hocket.job.worker import current
from hocket.transport.process_group import Store

ADAM = {"lr": 0.01}
MEBIBYTE = 1 << 20


def say(*words: object) -> None:
    print(*words, flush=True)


def law(name: str, *strategies: str) -> None:
    """Train with each of the strategies, in many buckets; the results are in a file for each rank."""
    comm_communicator.bucket_limits = lambda _: Limits(64, 512)
    results = {strategy: together(Case(optimizer="Adam", options=ADAM), strategy) for strategy in strategies}
    torch.save(results, f"{name}-{hocket.rank()}.pt")


def big(mebibytes: str, steps: str, strategy: str = "mirrored") -> None:
    """Training whose exchanges are large; after the second one, it waits for the file ``go``."""
    wide = int(mebibytes) * MEBIBYTE // 4 // 1024
    model = nn.Linear(1024, wide, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = hocket.distribute(model, optimizer, strategy=strategy)
    x = torch.full((1, 1024), 1.0 + hocket.rank())  # so the average is the same everywhere, and known
    for step in range(int(steps)):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            say("ready")
            while not Path("go").exists():
                time.sleep(0.05)
    say("done", hocket.rank(), model.weight.unique().tolist())


def stuck(rank: str) -> None:
    """One rank does not come to the start of a group, in which no exchange is under way yet."""
    if hocket.rank() == int(rank):
        comm_hosts.HostsCommunicator._new_column = lambda _: (say("ready"), time.sleep(600))
    Small()


class Small:
    """A small training."""

    def __init__(self, rate: float = 0.05, steps: int = 6) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        loader = DataLoader(TensorDataset(torch.randn(4 * steps * hocket.size(), 8, dtype=torch.float64)), 4)
        self.model, self.optimizer, self.loader = hocket.distribute(model, optimizer, loader)

    def step(self, x: torch.Tensor) -> None:
        (self.model(x) ** 2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def busy(how: str, rank: str, seconds: str) -> None:
    """One rank is busy for long, once: asleep in Python, or in a call that lets no other thread of it run."""
    training = Small()
    for step, (x,) in enumerate(training.loader):
        if step == 2 and hocket.rank() == int(rank):
            say("busy")
            if how == "asleep":
                time.sleep(float(seconds))
            else:
                ctypes.PyDLL(None).usleep(int(float(seconds) * 1e6))
        training.step(x)
    say("done", hocket.rank())


def slow(rank: str, factor: str) -> None:
    """One rank takes ``factor`` times as long as the others for everything that it computes."""
    training = Small(steps=10)
    for x, *_ in training.loader:
        time.sleep(0.05 * (int(factor) if hocket.rank() == int(rank) else 1))
        training.step(x)
    say("done", hocket.rank())


def differ(how: str, ranks: str) -> None:
    """Some ranks do something else than the others."""
    odd = str(hocket.rank()) in ranks
    if how == "other rate at the start":
        Small(rate=0.1 if odd else 0.05)
    training = Small()
    for step, (x,) in enumerate(training.loader):
        if step == 2:
            say("differs now")
            if how == "other shape":
                hocket.allreduce(torch.zeros(3 if odd else 2))
            if odd and how == "other collective":
                hocket.allreduce(torch.zeros(1000, 1000))
            if odd and how == "early end":
                return
            if odd and how == "other rate":
                training.optimizer.param_groups[0]["lr"] = 0.25
        training.step(x)
    say("done", hocket.rank())


def late(rank: str, seconds: str) -> None:
    """One rank does not come, for which the others wait so long; to begin may take them longer."""
    training = Small()
    for step, (x,) in enumerate(training.loader):
        if step == 2:
            communicator: Any = current().communicator
            communicator._watch._timeout = float(seconds)
            if communicator.on_host.size > 1:
                communicator.on_host.transport.gate.timeout = float(seconds)
            if hocket.rank() == int(rank):
                time.sleep(600)
        training.step(x)


def cases(*each: str) -> None:
    """For each case, which is words with the ranks that differ at the end, a new job, of processes that are warm.

    In the case of an interface, which is named there, none does.
    """
    importlib.import_module("torch._dynamo")  # as the first optimizer would
    for number, case in enumerate(each):
        how, _, ranks = case.rpartition(" ")
        say("case", case)
        child = os.fork()
        if not child:
            os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1 + number)
            if how == "interface":
                os.environ["HOCKET_INTERFACE"], ranks = ranks, ""
            _run_to_the_end(lambda how=how, ranks=ranks: differ(how, ranks))
        _, status = os.waitpid(child, 0)
        say("ended with", os.waitstatus_to_exitcode(status))


def _run_to_the_end(work: Callable[[], None]) -> NoReturn:
    """As Python does it, except that it does not tidy up all modules, which takes longer than all else."""
    status = 0
    try:
        hocket.init()
        work()
    except Exception:
        sys.excepthook(*sys.exc_info())
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)


def keep(name: str) -> None:
    """Keep the job's secret in a file, train until there is the file ``stop``, then train another model."""
    original = introductions.meet

    def meet(config: Config, store: Store, *, shares: bool) -> Introductions:
        met = original(config, store, shares=shares)
        Path(f"{name}-{config.rank}").write_bytes(met.secret)
        return met

    def job_secret(config: Config) -> bytes | None:
        if (found := secret_of(config)) is not None:
            Path(f"{name}-{config.rank}").write_bytes(found)
        return found

    secret_of, introductions.job_secret = introductions.job_secret, job_secret
    introductions.meet = meet
    hocket.init()
    training = Small()
    say("ready")
    while not hocket.allreduce(torch.tensor(float(Path("stop").exists())), "max"):
        for (x,) in training.loader:
            training.step(x)
    training = Small()
    for (x,) in training.loader:
        training.step(x)
    say("done", hocket.rank())


def main() -> None:
    what, *args = sys.argv[1:]
    if what not in ("cases", "keep"):
        hocket.init()
    globals()[what](*args)


main()
