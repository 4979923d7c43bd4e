"""Stands in for a parameter server: says what it was told, tells what a server would, and ends when it is asked to.

What else it does is told by the variable STANDIN.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from hocket.events import Happening, PipeSink, ServerReport

descriptor, number = int(os.environ["HOCKET_EVENTS"]), int(os.environ["HOCKET_SERVER"])
how = os.environ.get("STANDIN", "") if number == int(os.environ.get("STANDIN_NUMBER", "0")) else ""
sink = PipeSink(descriptor)
asked = threading.Event()


def served(updates: int) -> ServerReport:
    workers = {
        str(rank): {"pushes": 10 * updates + 1, "staleness": {"0": 1, str(rank + 2): 3}, "seconds": 2.0, "waited": 0.5,
                    "late": rank, "lost": False}
        for rank in range(int(os.environ["WORLD_SIZE"]))
    }  # fmt: skip
    return ServerReport(number, "here", 4.0, 1.0, updates, 3_100_000_000, 5_000, {"wrong secret": 1}, workers)


def main() -> None:
    secret = os.read(int(os.environ["HOCKET_SECRET_FD"]), 100)
    if place := os.environ.get("STANDIN_TELL"):
        about = {"secret": len(secret), "args": sys.argv[1:], "cwd": str(Path.cwd()), "input": sys.stdin.read()}
        Path(f".{number}").write_text(json.dumps({**os.environ, **about, "pid": os.getpid()}))
        Path(f".{number}").rename(f"{place}{number}")
    if how == "raise":
        raise ValueError("this server is broken")
    if how == "leave":
        return
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sink.put(Happening("shards placed", {"shards": 3}))
    sink.put(served(1))
    print("serving", flush=True)
    while not asked.wait(600):
        pass
    if how == "stubborn":
        time.sleep(600)
    sink.put(served(2))
    print("last words", file=sys.stderr, flush=True)
    sys.exit(3 if how == "fail at the end" else 0)


signal.signal(signal.SIGTERM, lambda *_: asked.set())
main()
