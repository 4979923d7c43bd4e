"""A script for the launcher's tests: what it does is told by its first argument."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket


def die(how: str) -> None:
    if how == "closed streams":
        for number in (1, 2):
            os.close(number)
        raise ValueError("this rank is broken")
    if how == "raise":
        raise ValueError("this rank is broken")
    if how == "exit":
        sys.exit(7)
    if how == "hard exit":
        os._exit(9)
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(60)


class Trap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, how):  # type: ignore[no-untyped-def]
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        die(ctx.how)
        return gradient, None


def train(phase: str = "", how: str = "", count: str = "20") -> None:
    """Train; rank 1 ends in the third step, in ``phase``, in the way ``how``."""
    if phase == "import" and os.environ["RANK"] == "1":
        die(how)
    if phase == "while others join" and os.environ["RANK"] == "1":
        while "@" + os.environ["HOCKET_RENDEZVOUS"] not in Path("/proc/net/unix").read_text():
            pass  # until rank 0 is in hocket.init()
        die(how)
    hocket.init()
    me, steps = hocket.rank() == 1, int(count)
    if phase == "before distribute" and me:
        die(how)
    model = nn.Sequential(nn.Linear(4, 200), nn.Tanh(), nn.Linear(200, 200), nn.Linear(200, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(4 * steps * hocket.size(), 4))
    processes = int(os.environ.get("TEST_PROCESSES", "0"))
    loader = DataLoader(data, 4, num_workers=processes)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader)
    for step, (x,) in enumerate(loader):
        now = me and step == 2
        if phase == "forward" and now:
            die(how)
        out = model[:2](x)
        if phase == "backward" and now:
            out = Trap.apply(out, how)
        optimizer.zero_grad()
        (model[2:](out) ** 2).mean().backward()
        if phase == "between" and now:
            die(how)
        if phase == "step" and now:
            optimizer.register_step_pre_hook(lambda *_: die(how))
        optimizer.step()
        if phase == "after" and now:
            die(how)
        if phase == "slow":
            print(f"step {step}", flush=True)
            time.sleep(0.2)
            while step == 2 and "TEST_WAIT" in os.environ and Path(os.environ["TEST_WAIT"]).exists():
                time.sleep(0.01)
    if phase == "end" and me:
        die(how)
    print("finished", hocket.rank(), flush=True)


def resume(stop: str = "", how: str = "") -> None:
    """Train with checkpoints; at step ``stop`` wait to be killed, or let rank 1 die."""
    import hashlib

    from hocket.job.worker import current

    hocket.init()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 100), nn.BatchNorm1d(100), nn.Dropout(0.2), nn.Linear(100, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(120, 4)), 5, shuffle=True)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs=3, steps_per_epoch=len(loader))
    where = hocket.resume(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    print(f"from {where.step}", flush=True)
    step = where.step
    for epoch in range(where.epoch, 3):
        for (x,) in loader:
            optimizer.zero_grad()
            (model(x) ** 2).mean().backward()
            optimizer.step()
            scheduler.step()
            step += 1
            hocket.report(loss=1 / step)
            current().training.saver.settle()  # or the next checkpoint might be left out
            if str(step) == stop:
                if how == "wait":
                    print("waiting", flush=True)
                    time.sleep(600)
                elif hocket.rank() == 1:
                    die(how)
        hocket.report(epoch=epoch)
    state = [*model.state_dict().values(), *(v for s in optimizer.state_dict()["state"].values() for v in s.values())]
    print("digest", hashlib.sha256(b"".join(t.numpy().tobytes() for t in state)).hexdigest(), flush=True)


def main() -> None:
    what, *args = sys.argv[1:]
    if what == "train":
        train(*args)
    elif what == "resume":
        resume(*args)
    elif what == "fewer steps":
        hocket.init()
        for _ in range(2 if hocket.rank() == 1 else 4):
            hocket.barrier()
    elif what == "stuck":
        hocket.init()
        if hocket.rank() == 1:
            time.sleep(600)
        hocket.barrier()
    elif what == "distributed":
        import torch.distributed as dist

        if args == ["first"]:
            dist.init_process_group("gloo")
            hocket.init()
        else:
            hocket.init()
            dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        print("sum", int(total), int(hocket.allreduce(torch.ones(1), "sum")), flush=True)
        dist.destroy_process_group()
    elif what == "no init":
        hocket.rank()
    elif what == "logged error":
        import traceback

        hocket.init()
        try:
            raise KeyError("only logged")
        except KeyError:
            traceback.print_exc()
        print("going on", flush=True)
    elif what == "slow rank":
        from hocket.transport import waiting

        waiting.NOTICE = 0.3
        hocket.init()
        while hocket.rank() == 1 and "ranks 0, 2 waited" not in Path(*args).read_text():
            time.sleep(0.02)
        hocket.barrier()
    elif what == "other machine":
        from hocket.transport import futex

        futex.supported = lambda: False
        train()
    elif what == "absent":
        if os.environ["RANK"] == "1":
            sys.exit(0)
        hocket.init()
    elif what == "thread":
        import threading

        hocket.init()
        if hocket.rank() == 1:
            threading.Thread(target=time.sleep, args=(60,)).start()
            raise ValueError("this rank is broken")
        hocket.barrier()
    elif what == "chatter":
        hocket.init()
        if hocket.rank() == 1:
            die("exit")
        while True:
            print("x" * 1000)
    elif what == "spawn":
        loader = DataLoader(TensorDataset(torch.arange(8)), 2, num_workers=1, multiprocessing_context="spawn")
        print("batches", sum(1 for _ in hocket.distribute(loader=loader)), flush=True)
    elif what == "orphan":
        import subprocess

        hocket.init()
        subprocess.Popen(["/bin/sleep", *args], env={}, start_new_session=True)
    elif what == "tee":
        sys.stderr = type("Tee", (), {"write": lambda *_: None, "flush": lambda *_: None})()
        hocket.init()
    elif what == "interrupt":
        hocket.init()
        raise KeyboardInterrupt
    elif what == "daemon":
        hocket.init()
        if os.fork() == 0:  # leaves the session, as daemons do
            os.setsid()
            time.sleep(600)
        hocket.barrier()


if sys.argv[1:2] == ["spawn"]:
    hocket.init()  # at the top level, so again in every process that data loaders spawn

if __name__ == "__main__":
    main()
