"""A training with checkpoints for tests: ``RANK WHERE`` has a rank stop there while it writes the second one.

It says ``stopped`` and goes on when a line comes from stdin.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from hocket.job.checkpoint import saver
from hocket.job.checkpoint.tensor_file import Image
from launch import scripts


def stop_in(owner: Any, name: str) -> None:
    """Have the second call of ``owner.name`` stop when its work is done; a part is then cut in half."""
    real: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def stopping(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        result = real(*args)
        if calls == 2:
            if owner is Image:
                os.truncate(args[1], args[1].stat().st_size // 2)
            print("stopped", flush=True)
            sys.stdin.readline()
        return result

    setattr(owner, name, stopping)


if __name__ == "__main__":
    rank, where = (*sys.argv[1:], "", "")[:2]
    if os.environ["RANK"] == rank:
        stop_in(*{"part": (Image, "write"), "remote": (saver, "_write_for")}[where])
    scripts.resume()
