"""A script for the tests of records: tells the launcher what a training would tell, without torch."""

import os
import signal
import sys
import time
from pathlib import Path

from hocket.events import FOLDER_BEGUN, FOLDER_DONE, Facts, Happening, Metrics, PipeSink, Progress, Replicas, Stage

descriptor, rank = int(os.environ["HOCKET_EVENTS"]), int(os.environ["RANK"])
sink, ledger = PipeSink(descriptor), PipeSink(int(os.environ["HOCKET_LEDGER"]))
os.set_blocking(descriptor, True)  # nothing is dropped, however slow the launcher is


def step(number: int, epoch: int = 1) -> None:
    sink.put(Progress(epoch, number, 100, 8 * number, number, 8 * number, 0.001 * number, 0.004 * number))


def train(steps: str = "10") -> None:
    sink.put(Facts({"strategy": "central", "parameters": 1234 + rank}))
    for number in range(1, int(steps) + 1):
        step(number)
        sink.put(Metrics(number, 8 * number, time.time(), {"loss": 1 / number, "accuracy": number / 100}))
    step(100)  # the last of an epoch is always sent


def forever() -> None:
    train()
    print("trained", flush=True)
    time.sleep(600)


def flood() -> None:
    for number in range(300):
        sink.put(Metrics(number, number, time.time(), {f"metric {i}": 0.1 * i for i in range(100)}))
    print("trained", flush=True)


def checkpoints(folder: str, end: str = "") -> None:
    for name in (".one", ".two", ".three", "keep"):
        (Path(folder) / name).mkdir(parents=True)
        ledger.put(Happening(FOLDER_BEGUN, {"folder": f"{folder}/{name}"}))
    ledger.put(Happening(FOLDER_DONE, {"folder": f"{folder}/.one"}))
    sink.put(Happening("checkpoint saved", {"folder": f"{folder}/.one", "path": f"{folder}/one"}))
    sink.put(Happening("checkpoint failed", {"folder": f"{folder}/.two", "reason": "test"}))
    if end == "raise":
        raise ValueError("broken on purpose")
    if end:
        os.kill(os.getppid(), getattr(signal, end))
        time.sleep(600)


def replicas(odd: str) -> None:
    sink.put(Replicas({"0.weight": 7, "0.bias": 8 + (str(rank) == odd)}))


def absent() -> None:
    if rank == 0:
        sink.put(Stage("joining"))
        time.sleep(600)


globals()[sys.argv[1]](*sys.argv[2:])
