"""NVIDIA's MPS, which lets processes that share a GPU compute side by side, for ``--share-gpus``.

MPS is a daemon and a server that it starts. One that runs already is used and left alone; else a daemon is started for
the job of this host, in a folder of its own, and ended with the job.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from hocket import config
from hocket.launch import leftovers

PROGRAM = "nvidia-cuda-mps-control"
_PURPOSE = "--share-gpus is for trials and tests: the workers on a GPU share its compute and memory"
_PATIENCE = 3.0  # seconds for each thing that the program is asked to do; launchers hear of agents every 10 s
_LONGEST = 40  # letters of a folder for temporary files; the path of a socket in it has at most 107


class Mps(NamedTuple):
    """MPS for the workers of one host.

    Attributes:
        line: What it means for them, in words for the user.
        variables: What their environment must have, so that they find it.
        folder: Where the daemon is that was started for this job; empty if none was.
    """

    line: str
    variables: Mapping[str, str] = {}
    folder: str = ""


def begin(mark: str, base: Mapping[str, str], protect: Callable[[str], None]) -> Mps:
    """Use the daemon that runs on this host, or start one.

    Args:
        mark: The job's mark on this host.
        base: The environment of the job's processes.
        protect: Is told of the folder of a daemon before that is started.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        return without(f"there is no {PROGRAM} on the PATH")
    if _ask(program, "get_server_list", base):
        return Mps(_with("runs already"))
    place = tempfile.gettempdir()
    folder = Path(place if len(place) <= _LONGEST else "/tmp", f"hocket-mps-{mark}")
    protect(str(folder))
    variables = _variables(str(folder))
    env = {**base, **variables, leftovers.VARIABLE: _mark(mark), leftovers.LAUNCHER: leftovers.identity()}
    env.pop("CUDA_VISIBLE_DEVICES", None)  # workers would have to count their GPUs among those of the daemon
    try:
        folder.mkdir(mode=0o700)
        with (folder / "start.log").open("wb") as log:  # no pipe: the daemon would hold it open
            status = subprocess.run(
                [program, "-d"], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                timeout=_PATIENCE, check=False,
            ).returncode  # fmt: skip
        deadline = time.monotonic() + _PATIENCE
        while status == 0 and time.monotonic() < deadline:
            if _ask(program, "get_server_list", env):
                return Mps(_with("was started for this job"), variables, str(folder))
            time.sleep(0.02)
        why = (folder / "start.log").read_text(errors="replace").strip().rpartition("\n")[2] or f"status {status}"
    except (OSError, subprocess.SubprocessError) as error:
        why = str(error)
    end(mark, str(folder))
    return without(f"{PROGRAM} -d: {why}")


def end(mark: str, folder: str) -> None:
    """End the daemon that was started for a job, its server too, and remove its folder; the workers are gone."""
    program, mine = shutil.which(PROGRAM), _mark(mark)
    if program is not None and _ask(program, "quit", {**config.environment(), **_variables(folder)}):
        deadline = time.monotonic() + _PATIENCE
        while leftovers.find(mine) and time.monotonic() < deadline:
            time.sleep(0.02)
    leftovers.kill(mine)
    shutil.rmtree(folder, ignore_errors=True)


def processes(mark: str) -> list[int]:
    """The daemon of a job, and its server."""
    return leftovers.find(_mark(mark))


def is_running() -> bool:
    """Whether MPS serves processes with the environment of this one."""
    program = shutil.which(PROGRAM)
    return program is not None and _ask(program, "get_server_list", config.environment())


def _with(how: str) -> str:
    return f"{_PURPOSE}. NVIDIA's MPS {how}: they compute side by side."


def without(why: str) -> Mps:
    """No MPS, for a reason in words."""
    return Mps(
        f"{_PURPOSE}. NVIDIA's MPS does not run ({why}): they take turns, and an exchange waits for each of them."
    )


def _mark(mark: str) -> str:
    """What the daemon carries in place of the job's mark, by which it would be killed before it is asked to end."""
    return f"{mark}-mps"


def _variables(folder: str) -> dict[str, str]:
    return {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}


def _ask(program: str, words: str, env: Mapping[str, str]) -> bool:
    """Give the daemon an order; whether there is one that took it."""
    try:
        done = subprocess.run(
            [program], env=env, input=f"{words}\n", capture_output=True, text=True, timeout=_PATIENCE, check=False,
            start_new_session=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0 and "cannot find" not in (done.stdout + done.stderr).lower()
