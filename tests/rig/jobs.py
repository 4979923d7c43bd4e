"""Jobs on the hosts of a rig, started in each of the ways that there are, with what they write and when it came."""

import itertools
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hocket.lab.rig import Rig

SCRIPT = str(Path(__file__).with_name("script.py"))
INTRUDE = """
import os, socket, sys, time
address, *ports = sys.argv[1:]
connections = []
for port in map(int, ports):
    for data in (b"", b"\\0", b"GET / HTTP/1.0\\r\\n\\r\\n", b"\\xff" * 4096, os.urandom(1 << 16)):
        try:
            connections.append(socket.create_connection((address, port), 5))
            connections[-1].settimeout(1)
            connections[-1].sendall(data)
        except OSError:
            pass
print("there", len(connections), flush=True)
time.sleep(600)
"""
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
        """End it, if it still runs."""
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
    """Starts jobs on one rig, in one folder.

    Attributes:
        running: All processes that were started.
    """

    def __init__(self, rig: Rig, folder: Path) -> None:
        self.rig, self.folder = rig, folder
        self.running: list[Running] = []
        self._ports = itertools.count(29500)

    def start(self, host: str, command: Sequence[str], **env: str) -> Running:
        """Start a command in a host."""
        process = self.rig.start(
            host, command, cwd=self.folder, env={**os.environ, "OMP_NUM_THREADS": "1", **env}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
        )  # fmt: skip
        self.running.append(Running(process))
        return self.running[-1]

    def launch(self, hosts: str, *args: str, flags: Sequence[str] = (), at: str = "h1", **env: str) -> Running:
        """``hocket run -H hosts`` of the script of these tests."""
        command = [sys.executable, "-m", "hocket.launch.cli", "run", "-H", hosts, *flags, SCRIPT, *args]
        return self.start(at, command, **env)

    def plain(
        self, hosts: Sequence[str], *args: str, port: int | None = None, only: Sequence[int] | None = None, **env: str
    ) -> list[Running]:
        """The script with nothing but the variables that torchrun would set, a worker for each of ``hosts``.

        Args:
            hosts: Where each rank is; rank 0 has the store, at ``port``.
            args: Of the script.
            port: MASTER_PORT.
            only: The ranks to start, if not all.
            env: More variables.
        """
        port = next(self._ports) if port is None else port
        return [
            self.start(
                host, [sys.executable, "-u", SCRIPT, *args], RANK=str(rank), WORLD_SIZE=str(len(hosts)),
                LOCAL_RANK=str(hosts[:rank].count(host)), LOCAL_WORLD_SIZE=str(hosts.count(host)),
                MASTER_ADDR=hosts[0], MASTER_PORT=str(port), **env,
            )
            for rank, host in enumerate(hosts)
            if only is None or rank in only
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

    def sockets(self, host: str) -> str:
        """All TCP sockets of the host, as the kernel lists them: local address, remote address, state."""
        return subprocess.check_output(self.rig.command(host, ["cat", "/proc/net/tcp", "/proc/net/tcp6"]), text=True)

    def ports(self, host: str) -> set[int]:
        """The ports on which something listens in the host, sshd left out."""
        rows = [line.split() for line in self.sockets(host).splitlines()]
        return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"} - {22}

    def intrude(self, host: str, ports: Iterable[int]) -> Running:
        """Strangers connect to the ports, from within the host: some send nonsense, some say nothing; all stay."""
        stranger = self.start(host, [sys.executable, "-c", INTRUDE, self.rig.hosts[host].address, *map(str, ports)])
        stranger.time_of("there")
        return stranger

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
        for running in self.running:
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
