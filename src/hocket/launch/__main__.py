"""The launcher of ``hocket.launch()``: ``hocket run``, but it ends when the process that called it does.

Run as ``python -m hocket.launch PARENT FOLDER WORKERS [FLAGS]``. It is a process of its own because a launcher takes
over signals and ends every process below it, which nobody wants inside a notebook.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys

from hocket.launch import guardian, leftovers

_ASKING = (signal.SIGINT, signal.SIGTERM)


def main() -> None:
    """Launch the function in FOLDER; if the caller ends meanwhile, end too, and remove FOLDER for it."""
    parent, folder, count, *flags = sys.argv[1:]
    for number in _ASKING:
        signal.signal(number, _leave)  # until the supervisor has handlers of its own, and after it
    guardian.begin(folder)
    try:
        leftovers.end_with_parent(int(parent))
        from hocket.launch import cli

        report = os.path.join(folder, "report.txt")  # noqa: PTH118
        worker = "hocket.job.function.function_worker"
        sys.argv = ["hocket", "run", "-n", count, "--report", report, *flags, "-m", worker]
        sys.argv.append("." if flags else folder)  # elsewhere, the folder was brought along
        cli.main()
    finally:
        try:
            _ignore_signals()
        finally:  # nothing interrupts this: a signal that came before has had all others ignored
            guardian.end()
            if os.getppid() != int(parent) or leftovers.is_ending(int(parent)):
                shutil.rmtree(folder, ignore_errors=True)


def _leave(number: int, _: object) -> None:
    _ignore_signals()  # the kernel sends one SIGTERM for each thread of the caller that ends, and these may take long
    raise SystemExit(128 + number)


def _ignore_signals() -> None:
    for number in _ASKING:
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
