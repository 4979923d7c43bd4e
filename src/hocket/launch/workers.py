"""Starts the workers of one host: fresh interpreters, their environment and their pipes."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO

from hocket import config
from hocket.launch import leftovers, machine


@dataclass(frozen=True)
class Job:
    """What to start.

    Attributes:
        command: The script (or ``-m`` and the module) and its arguments.
        size: How many workers.
        settings: Values for the ``HOCKET_*`` variables, by setting.
    """

    command: tuple[str, ...]
    size: int
    settings: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: secrets.token_hex(16))


@dataclass(eq=False)
class Worker:
    """A process of the job and the ends of its pipes."""

    rank: int
    process: subprocess.Popen[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]
    events: int
    stage: str = ""  # the last that it has told (see hocket.events.Stage)
    status: int = 0  # with which it says that it will end
    events_rest: bytes = b""


def start(job: Job) -> tuple[list[Worker], socket.socket]:
    """Start all workers of ``job`` at once.

    Returns:
        The workers, and a socket that reserves MASTER_PORT for a script that uses torch.distributed by itself.
    """
    port = reserve_port()
    arrange = leftovers.die_with_parent()
    return [_start_one(job, rank, port, arrange) for rank in range(job.size)], port


def reserve_port() -> socket.socket:
    """Bind a free port without listening: nobody else is given it, and a worker may still listen on it."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


def environment(job: Job, rank: int, port: int) -> dict[str, str]:
    """The environment of worker ``rank``, as torchrun sets it, and Hocket's own variables."""
    env = config.environment()
    if not env.get("OMP_NUM_THREADS"):
        env["OMP_NUM_THREADS"] = str(max(1, machine.cores() // job.size))
    env.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        ROLE_RANK=str(rank),
        WORLD_SIZE=str(job.size),
        LOCAL_WORLD_SIZE=str(job.size),
        ROLE_WORLD_SIZE=str(job.size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        PYTHONUNBUFFERED="1",
        HOCKET_RENDEZVOUS=f"hocket-{job.mark}",
    )
    env[leftovers.VARIABLE] = job.mark
    for name, value in job.settings.items():
        env[config.SETTINGS[name].variable] = value
    return env


def _start_one(job: Job, rank: int, port: socket.socket, arrange: Callable[[], None]) -> Worker:
    env = environment(job, rank, port.getsockname()[1])
    reader, writer = os.pipe()
    env["HOCKET_EVENTS"] = str(writer)
    process = subprocess.Popen(
        [sys.executable, *job.command],
        env=env,
        stdin=None if rank == 0 else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(writer,),
        start_new_session=True,
        preexec_fn=arrange,  # noqa: PLW1509 - the launcher has one thread
        bufsize=0,
    )
    os.close(writer)
    assert process.stdout is not None and process.stderr is not None
    for descriptor in (process.stdout.fileno(), process.stderr.fileno(), reader):
        os.set_blocking(descriptor, False)
    return Worker(rank, process, process.stdout, process.stderr, reader)
