"""The process of a parameter server: ``python -m hocket.server [folder of the script]``, started by the launcher."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys

from hocket import config as configuration
from hocket import spans
from hocket.errors import HocketError
from hocket.events import NoSink, PipeSink, Sink, Stage
from hocket.server.front import Front
from hocket.server.server_service import Service
from hocket.transport.waiting import await_end, hold_sigterm

_REPORT = 1.0  # seconds between two reports to the launcher


def main() -> int:
    """Serve until the launcher says that all workers have ended."""
    config = configuration.read()
    if config.server is None or config.secret_fd is None:
        print("hocket: servers are started by hocket run --servers N", file=sys.stderr)
        return 2
    hold_sigterm()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    if len(sys.argv) > 1 and sys.argv[1]:
        sys.path.insert(0, sys.argv[1])  # an optimizer of the user's own may be beside the script
    secret = os.read(config.secret_fd, 32)
    os.close(config.secret_fd)
    sink: Sink = PipeSink(config.events) if config.events is not None else NoSink()
    if config.timeline:
        spans.start(sink)
    sink.put(Stage("joining"))
    host = config.host_name or os.uname().nodename
    service = Service(config.server, config.size, config.timeout, host)
    try:
        front = Front(config, secret, service)
    except HocketError as error:
        print(f"hocket: server {config.server}: {error}", file=sys.stderr, flush=True)
        return 1
    sink.put(Stage("joined"))
    while not await_end(_REPORT):
        sink.put(service.report())
    sink.put(service.report())
    front.close()
    spans.stop()
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of peers may be at work in torch
