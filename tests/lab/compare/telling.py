"""A script for the tests of comparisons: tells the launcher what a training would tell, without torch."""

import math
import os
import sys
import time
from pathlib import Path

from hocket.events import Facts, Happening, Metrics, PipeSink, Progress, Sent

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
strategy, seed = os.environ["HOCKET_STRATEGY"], os.environ.get("HOCKET_SEED")
sink = PipeSink(int(os.environ["HOCKET_EVENTS"]))
what, *more = sys.argv[1:]
STEPS, EPOCHS = 4, 5

if (what == "fail" and strategy == more[0]) or (what == "fail alone" and size == 1):
    raise ValueError(f"{strategy} is broken on purpose")
if what == "fail while" and size > 1:
    if Path(more[0]).exists():
        raise ValueError(f"{more[0]} is there")
    print("it stays", flush=True)
    time.sleep(600)
sink.put(Facts({"strategy": strategy, "optimizer": "SGD", "device": "cpu", "threads": 3 - size, "seed": seed}))
if rank == 0:
    sink.put(Happening("training began", {"samples of a pass": 32}))
for epoch in range(1, EPOCHS + 1):
    for step in range(1, STEPS + 1):
        done = (epoch - 1) * STEPS + step
        sink.put(Progress(epoch, step, STEPS, 8 * step, done, 8 * done, 0.0, 0.0))
    if rank == 0 and what not in ("silent", "silent forever"):
        metrics = {"loss": 1 / epoch, "accuracy": epoch / 10}
        if what == "lost":
            metrics["q"] = math.nan
        sink.put(Metrics(epoch * STEPS, 32 * epoch, time.time(), metrics, 200 * size * epoch))
sink.put(Sent(1000 * size))
print("trained", more, os.environ.get("OF_THE_SCRIPT", ""), flush=True)
while what == "silent forever":
    done += 1
    sink.put(Progress(1 + done // STEPS, 1 + done % STEPS, STEPS, 8, done, 8 * done, 0.0, 0.0))
    time.sleep(0.1)
if (what == "stay" and size > 1) or what == "forever":
    time.sleep(600)
