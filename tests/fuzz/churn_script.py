"""The training script of ``churn.py``: writes down all that happens, and ends itself where it is ordered to.

Every worker has a file ``PID.log`` (on one of several hosts, ``HOST-PID.log``) with a line for each thing that happens,
and, with most strategies, a file ``PID.marks``. The model has a mark for every sample, which nothing but
the gradient of that sample moves, so that the marks after each exchange tell which samples have counted in it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SAMPLES, BATCH = 240, 4
PAUSE = 0.005  # seconds that a batch takes, so that less is written


class Numbered(Dataset[Any]):
    """Samples that know their numbers; the process of the worker ``owner`` may have to end when one is read."""

    def __init__(self, owner: int = 0) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
        self.y = self.x.sum(1, keepdim=True) + torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64)
        self._owner = owner

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        if self._owner and take_order(self._owner, "reading") is not None:
            os.kill(self._owner, signal.SIGKILL)
        return index, self.x[index], self.y[index]


class Marked(nn.Module):
    """A small network, and a mark for each sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.marks = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))

    def forward(self, x: torch.Tensor, y: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = ((self.net(x) - y) ** 2).mean() + self.marks[numbers].mean()
        return loss


def build() -> tuple[Marked, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    model = Marked()
    groups = [{"params": model.net.parameters(), "momentum": 0.9}, {"params": [model.marks], "lr": 1.0}]
    optimizer = torch.optim.SGD(groups, lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda epoch: 1.0 - 0.5 * (epoch % 2), lambda _: 1.0])
    return model, optimizer, scheduler


def name_of(process: int) -> str:
    """What files of a process of this host are called: on several hosts, processes may have the same number."""
    host = "" if "CHURN_SEES_ALL" in os.environ else os.environ.get("HOCKET_HOST_NAME")
    return f"{host}-{process}" if host else str(process)


def take_order(process: int, phase: str) -> float | None:
    """Take the order to end ``process`` in ``phase``, if there is one: after how many seconds."""
    order = Path(f"order.{name_of(process) if process > 1 else process}")
    try:
        wanted, _, seconds = order.read_text().partition(" ")
    except FileNotFoundError:
        return None
    if wanted != phase:
        return None
    order.unlink(missing_ok=True)
    return float(seconds)


class Diary:
    """What this worker does, in files that outlive it."""

    def __init__(self) -> None:
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        self._log, self._marks = (os.open(f"{name_of(os.getpid())}.{kind}", flags) for kind in ("log", "marks"))
        self._known: int | None = None

    def write(self, *words: object) -> None:
        os.write(self._log, f"{time.monotonic():.4f} {' '.join(map(str, words))}\n".encode())

    def mark(self, exchanges: int, marks: torch.Tensor) -> None:
        """Keep the marks after an exchange; those with which a newcomer begins may be of the middle of a round."""
        before, self._known = self._known, exchanges
        if before not in (None, exchanges):
            number = torch.tensor([exchanges], dtype=torch.float64)
            os.write(self._marks, bytes(torch.cat([number, marks.detach()]).view(torch.uint8).tolist()))


def perhaps(diary: Diary, phase: str, order: int | None = None) -> None:
    """End here, or a little later, if that is ordered."""
    seconds = take_order(order or os.getpid(), phase)
    if seconds is None:
        return
    diary.write("ordered", phase, seconds)
    if phase == "leaving":
        os.kill(os.getpid(), signal.SIGTERM)
    if not seconds:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM is not caught: it ends the process wherever it is then


@contextmanager
def leaving(diary: Diary) -> Iterator[None]:
    try:
        yield
    except SystemExit:
        diary.write("left")
        raise


def take_ahead(loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of a loader, each of which is asked for before the one before it is trained on."""
    iterator = iter(loader)
    following = next(iterator, None)
    while following is not None:
        batch, following = following, next(iterator, None)
        yield batch


def evaluate(epoch: int, seconds: float) -> None:
    """Be busy now and then, while others wait in the next call that all make."""
    if epoch % 25 == 3 and (epoch == 3 or seconds < 10):
        time.sleep(seconds)


def train(processes: int, keeps_marks: bool, takes: Callable[[Any], Iterable[Any]], calls: int, seconds: float) -> None:
    import hocket
    from hocket.comm import communicator
    from hocket.comm.bucket_layout import Limits
    from hocket.job.worker import current

    communicator.bucket_limits = lambda _: Limits(64, 512)  # several buckets between hosts, of a model that is small
    hocket.init()
    is_new = "HOCKET_NEWCOMER" in os.environ
    mine = hocket.rank()  # a spare waits here until it is needed
    diary = Diary()
    diary.write("began", mine, "new" if is_new else "old")
    if is_new:
        perhaps(diary, "joining", 1)
    model, optimizer, scheduler = build()
    loader = DataLoader(Numbered(os.getpid()), BATCH, shuffle=True, num_workers=processes)
    made = model
    for number in range(calls // 2):
        assert int(hocket.allreduce(torch.tensor(number), "max")) == number
    model, optimizer, loader = hocket.distribute(model, optimizer, loader)
    place = hocket.resume(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    for number in range(calls - calls // 2):
        assert int(hocket.allreduce(torch.tensor(number), "max")) == number
    (at_work,) = current().training.strategies

    def exchanges() -> int:
        """How many exchanges there were; if marks tell what has counted in each, also before this worker came."""
        return int(getattr(at_work, "rounds", at_work.exchanges) if keeps_marks else at_work.exchanges)

    def tell(change: Any) -> None:
        diary.write("change", change.generation, change.rank, change.size, change.lost, change.joined)

    hocket.on_change(tell)
    diary.write("in", hocket.rank(), hocket.size(), place.epoch)
    epoch = place.epoch
    with leaving(diary):
        while True:
            for numbers, x, y in takes(loader):
                if keeps_marks:
                    diary.mark(exchanges(), made.marks)
                perhaps(diary, "before")
                perhaps(diary, "leaving")
                time.sleep(PAUSE)
                loss = model(x, y, numbers)
                perhaps(diary, "forward")
                if take_order(os.getpid(), "backward") is not None:
                    loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
                diary.write("batch", exchanges(), loader.weight, epoch, *numbers.tolist())
                perhaps(diary, "exchange")
                loss.backward()
                perhaps(diary, "step")
                optimizer.step()
                optimizer.zero_grad()
                perhaps(diary, "between")
                perhaps(diary, "next")
            if keeps_marks:
                diary.mark(exchanges(), made.marks)
            scheduler.step()
            epoch += 1
            is_over = torch.tensor([int(Path("over").exists())])  # from then on nobody is killed
            if hocket.rank() == 0:
                evaluate(epoch, seconds)
            perhaps(diary, "collective")
            if int(hocket.allreduce(is_over, "max")):
                break
    state = [value for each in optimizer.state.values() for value in each.values() if torch.is_tensor(value)]
    every = torch.cat([tensor.detach().flatten() for tensor in [*made.parameters(), *state]])
    digests = [hashlib.sha1(bytes(t.detach().view(torch.uint8).flatten().tolist())).hexdigest() for t in (
        nn.utils.parameters_to_vector(made.parameters()), every)]  # fmt: skip
    diary.write("end", hocket.rank(), hocket.size(), epoch, *digests)
    if hocket.rank() == 0:
        torch.save(made.state_dict(), "parameters.pt")


if __name__ == "__main__":
    order, calls, seconds = sys.argv[3:] or ("one by one", "0", "0")
    takes = take_ahead if order == "ahead" else iter
    train(int(sys.argv[1]), sys.argv[2] == "marks", takes, int(calls), float(seconds))
