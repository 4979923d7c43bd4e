"""The process of a job's coordinator: ``python -m hocket.coordinator``, started by the launcher. It needs no torch."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys

from hocket import config as configuration
from hocket.coordinator.hosting import HostedCoordinator
from hocket.errors import HocketError
from hocket.events import NoSink, PipeSink, Sink, Stage
from hocket.transport.waiting import await_end, hold_sigterm


def main() -> int:
    """Serve until the launcher says that the job is over."""
    config = configuration.read()
    if config.secret_fd is None:
        print("hocket: the coordinator is started by hocket run", file=sys.stderr)
        return 2
    hold_sigterm()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    secret = os.read(config.secret_fd, 32)
    os.close(config.secret_fd)
    sink: Sink = PipeSink(config.events) if config.events is not None else NoSink()
    try:
        hosted = HostedCoordinator(config, secret)
    except HocketError as error:
        print(f"hocket: the coordinator: {error}", file=sys.stderr, flush=True)
        return 1
    hosted.service.say = lambda line: print(line, file=sys.stderr, flush=True)
    sink.put(Stage("joined"))
    await_end()
    hosted.close()
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of peers may still wait
