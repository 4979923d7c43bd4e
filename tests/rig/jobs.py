"""Jobs on the hosts of a rig, started in each of the ways that there are, with what they write and when it came."""

import itertools
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hocket.rig import Rig

SCRIPT = str(Path(__file__).with_name("script.py"))
PATIENCE = 90.0  # seconds for what should take a few, on a machine that others share


class Running:
    """A process in a host. A thread collects its lines.

    Attributes:
        lines: What it has written so far, to either stream.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._times: list[float] = []
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def time_of(self, pattern: str, seconds: float = PATIENCE, count: int = 1) -> float:
        """When the ``count``-th line came in which ``pattern`` is found; waits for it."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                found = [when for line, when in zip(self.lines, self._times, strict=True) if re.search(pattern, line)]
                if len(found) >= count:
                    return found[count - 1]
                left = deadline - time.monotonic()
                assert left > 0 and self._thread.is_alive(), f"no {pattern!r} in\n{self}"
                self._changed.wait(min(left, 0.5))

    def between(self, first: str, last: str) -> str:
        """What it has written from the line ``first`` up to the next one that begins with ``last``."""
        start = self.lines.index(first)
        end = next(number for number, line in enumerate(self.lines) if number > start and line.startswith(last))
        return "\n".join(self.lines[start : end + 1])

    def finish(self, seconds: float = PATIENCE) -> int:
        """Wait for its end; its status."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self}") from None
        self._thread.join(10)
        return status

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._times.append(time.monotonic())
                self._changed.notify_all()


class Jobs:
    """Starts jobs on one rig, in one folder."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        self.rig, self.folder = rig, folder
        self._running: list[Running] = []
        self._ports = itertools.count(29500)

    def start(self, host: str, command: Sequence[str], **env: str) -> Running:
        """Start a command in a host."""
        process = self.rig.start(
            host, command, cwd=self.folder, env={**os.environ, "OMP_NUM_THREADS": "1", **env}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
        )  # fmt: skip
        self._running.append(Running(process))
        return self._running[-1]

    def launch(self, hosts: str, *args: str, flags: Sequence[str] = (), at: str = "h1", **env: str) -> Running:
        """``hocket run -H hosts`` of the script of these tests."""
        command = [sys.executable, "-m", "hocket.launch.cli", "run", "-H", hosts, *flags, SCRIPT, *args]
        return self.start(at, command, **env)

    def plain(self, hosts: Sequence[str], *args: str, **env: str) -> list[Running]:
        """The script with nothing but the variables that torchrun would set, a worker for each of ``hosts``."""
        port = str(next(self._ports))
        return [
            self.start(
                host, [sys.executable, "-u", SCRIPT, *args], RANK=str(rank), WORLD_SIZE=str(len(hosts)),
                LOCAL_RANK=str(hosts[:rank].count(host)), LOCAL_WORLD_SIZE=str(hosts.count(host)),
                MASTER_ADDR=hosts[0], MASTER_PORT=port, **env,
            )
            for rank, host in enumerate(hosts)
        ]  # fmt: skip

    def torchrun(self, hosts: dict[str, int], *args: str, **env: str) -> list[Running]:
        """The script under torchrun, with so many workers on each host."""
        port, first = str(next(self._ports)), next(iter(hosts))
        module = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(hosts))]
        where = ["--master-addr", first, "--master-port", port]
        return [
            self.start(
                host, [*module, "--node-rank", str(number), "--nproc-per-node", str(count), *where, SCRIPT, *args],
                **env,
            )
            for number, (host, count) in enumerate(hosts.items())
        ]  # fmt: skip

    def wait_until_sent(self, host: str, count: int) -> None:
        """Until the host has sent ``count`` more bytes."""
        start = self._sent(host)
        deadline = time.monotonic() + PATIENCE
        while self._sent(host) - start < count:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def wait_until_empty(self, *hosts: str, seconds: float = 5.0) -> None:
        """Until nothing of a job is left in ``hosts``, in all if none is named; sshd may wait for its client longer."""
        deadline = time.monotonic() + seconds
        while left := [
            command
            for host in hosts or self.rig.hosts
            for pid in self.rig.processes(host)
            if not (command := cmdline(pid)).startswith("sshd")
        ]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    def close(self) -> None:
        for running in self._running:
            running.close()

    def _sent(self, host: str) -> int:
        interface = self.rig.hosts[host].interface
        path = f"/sys/class/net/{interface}/statistics/tx_bytes"
        return int(subprocess.check_output(self.rig.command(host, ["cat", path])))


@contextmanager
def on(rig: Rig, folder: Path) -> Iterator[Jobs]:
    """Jobs on ``rig``, all of which have ended afterwards."""
    jobs = Jobs(rig, folder)
    try:
        yield jobs
    finally:
        jobs.close()


def cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def connect(rig: Rig, host: str, port: int, data: bytes) -> subprocess.Popen[str]:
    """A stranger in the same host, who sends ``data`` to a port and then stays."""
    code = (
        "import socket, sys, time\n"
        f"connection = socket.create_connection(({rig.hosts[host].address!r}, {port}))\n"
        f"connection.sendall({data!r})\nprint('there', flush=True)\nconnection.recv(1 << 20)\ntime.sleep(600)\n"
    )
    return rig.start(host, [sys.executable, "-c", code], text=True, stdout=subprocess.PIPE)


__all__ = ["PATIENCE", "Jobs", "Running", "cmdline", "connect", "on", "socket"]
