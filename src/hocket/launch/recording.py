"""Opens the record of a run, with all that is known before its workers start."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket import __version__, config
from hocket.errors import RecordError, UsageError
from hocket.launch import machine
from hocket.launch.environment import Job
from hocket.observe import folders, scalars
from hocket.observe.reader import process_start
from hocket.observe.recorder import Recorder


def start(
    job: Job, settings: Mapping[str, str], *, tensorboard: bool, hosts: Mapping[str, Any] | None = None
) -> Recorder | None:
    """Make the folder of a new run and begin its record.

    Args:
        job: What is going to be started.
        settings: What the user has set, by flag or environment.
        tensorboard: Whether curves are also written for TensorBoard.
        hosts: What is known of the hosts of a job over several, by name.

    Returns:
        The record; or None, after a line on stderr, if nobody has asked for one and the folder cannot be written.
    """
    if tensorboard:
        scalars.check_installed()
    parent = settings.get("run-dir") or config.SETTINGS["run-dir"].default
    folder = None
    try:
        folder = folders.make(Path(parent), _script(job))
        return Recorder(folder.absolute(), describe(job, settings, hosts), tensorboard=tensorboard)
    except RecordError as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if "run-dir" in settings or tensorboard:
            raise UsageError(
                f"--run-dir {parent}: {error}; name a folder that can be written to, or leave the record out "
                "with --no-record"
            ) from None
        print(
            f"hocket: this run is not recorded: {Path(parent).absolute()}: {error} "
            "(--run-dir names another folder, --no-record asks for this)",
            file=sys.stderr,
            flush=True,
        )
        return None


def describe(
    job: Job, settings: Mapping[str, str], hosts: Mapping[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """What a record says of a run before it starts, by section and name."""
    return {
        "run": {
            "command": ["hocket", *sys.argv[1:]],
            "script": _script(job),
            "directory": str(Path.cwd()),
            "git commit": _git_commit(),
            "workers": job.size,
            "started": time.time(),
            "pid": os.getpid(),
            "pid_started": process_start(os.getpid()),
        },
        "settings": {name: settings.get(name, setting.default) for name, setting in config.SETTINGS.items()},
        "versions": {
            "hocket": __version__,
            "python": platform.python_version(),
            "torch": machine.version("torch"),
            "system": f"{platform.system()} {platform.release()}",
        },
        "host": {
            "name": socket.gethostname(),
            "cpu": machine.cpu(),
            "cores": machine.cores(),
            "memory": machine.memory(),
        },
        **({"hosts": dict(hosts)} if hosts else {}),
    }


def _script(job: Job) -> str:
    """The script's name without folders and ending, or the module's last part."""
    if job.command[0] == "-m":
        return job.command[1].rpartition(".")[2]
    return Path(job.command[0]).stem


def _git_commit() -> str | None:
    """The commit that is checked out in the working directory, if git answers at once."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1, check=True)
        return done.stdout.strip()
    return None
