"""The launcher of ``hocket.launch()``: ``hocket run``, but it ends when the process that called it does.

Run as ``python -m hocket.launch.called PARENT FOLDER WORKERS``. It is a process of its own because a launcher takes
over signals and ends every process below it, which nobody wants inside a notebook.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys

from hocket.launch import guardian, leftovers


def main() -> None:
    """Launch the function in FOLDER; if the caller ends meanwhile, end too, and remove FOLDER for it."""
    parent, folder, count = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)  # until the supervisor has handlers of its own
    guardian.begin(folder)
    try:
        leftovers.end_with_parent(int(parent))
        from hocket.launch import cli

        report = os.path.join(folder, "report.txt")  # noqa: PTH118
        sys.argv = ["hocket", "run", "-n", count, "--report", report, "-m", "hocket.job.function.worker", folder]
        cli.main()
    finally:
        guardian.end()
        if os.getppid() != int(parent):
            shutil.rmtree(folder, ignore_errors=True)


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
