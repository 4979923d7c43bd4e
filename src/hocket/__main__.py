"""The command ``hocket``, also ``python -m hocket``: ends quietly if interrupted before all of it is imported."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Import the command line, then hand over to it."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # in the background of a shell it is ignored, and stays so
        signal.signal(signal.SIGINT, _leave)
    from hocket.launch import cli

    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, handler)
    cli.main()


def _leave(number: int, _: FrameType | None) -> None:
    """Nothing has begun yet; an exception would go through the imports of others, who may report or swallow it."""
    os._exit(128 + number)


if __name__ == "__main__":
    main()
