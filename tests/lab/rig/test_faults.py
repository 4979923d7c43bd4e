"""What a rig can do to its hosts: slow them down, cut them off, kill what runs there."""

import shlex
import signal
import subprocess
import sys

import pytest
from conftest import Rigs
from lab.rig.test_rig import sleeping

from hocket.lab.rig import Rig

SERVE = """
import socket, sys, time
with socket.create_server(("", 7000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    buffer, count, end = bytearray(1 << 20), 0, time.monotonic() + 1
    while time.monotonic() < end:
        count += connection.recv_into(buffer)
print(count)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000)) as connection:
    try:
        while True:
            connection.sendall(bytes(1 << 20))
    except OSError:
        pass
"""
ECHO = """
import socket
with socket.create_server(("", 7000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    while data := connection.recv(100):
        connection.sendall(data)
"""
ASK = """
import socket, sys
connection = socket.create_connection(("h2", 7000))
asked = False
for line in sys.stdin:
    connection.settimeout(float(line))
    try:
        if not asked:
            connection.sendall(b"?")
        asked = not connection.recv(1)
        print("answer", flush=True)
    except TimeoutError:
        asked = True
        print("silence", flush=True)
"""


def moved(rig: Rig, sender: str, receiver: str) -> int:
    """How many bytes arrive within a second."""
    with rig.start(receiver, [sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None and serving.stdout.readline() == "ready\n"
        with rig.start(sender, [sys.executable, "-c", SEND, receiver]) as sending:
            count = int(serving.stdout.readline())
        assert sending.returncode == 0
    return count


@pytest.mark.all_combinations
def test_the_rate_is_limited_in_both_directions(rig: Rigs) -> None:
    made = rig(2, "20mbit")
    made.set_rate("h1", None)  # so what follows is due to h2 alone
    limited = [moved(made, "h1", "h2"), moved(made, "h2", "h1")]
    made.set_rate("h2", None)
    unlimited = [moved(made, "h1", "h2"), moved(made, "h2", "h1")]
    made.set_rate("h1", "20mbit")
    limited += [moved(made, "h1", "h2"), moved(made, "h2", "h1")]
    assert max(limited) < min(unlimited) / 4, (limited, unlimited)
    assert min(limited) > 10_000, "but something moves"


def test_a_host_that_is_cut_off_notices_only_silence(rig: Rigs) -> None:
    made = rig(3)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with made.start("h2", [sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True) as echo:
        assert echo.stdout is not None and echo.stdout.readline() == "ready\n"
        with made.start("h1", [sys.executable, "-c", ASK], **pipes) as asking:

            def ask(seconds: float) -> str:
                asking.stdin.write(f"{seconds}\n")
                asking.stdin.flush()
                return str(asking.stdout.readline().strip())

            assert ask(30) == "answer"
            made.cut("h2")
            assert ask(0.5) == "silence"
            state = subprocess.check_output(made.command("h2", ["cat", "/sys/class/net/eth0/carrier"]), text=True)
            assert state == "1\n", "the interface is up"
            refused = subprocess.run([*shlex.split(made.ssh), "-o", "ConnectTimeout=1", "h2", "true"], check=False)
            assert refused.returncode == 255
            assert subprocess.run([*shlex.split(made.ssh), "h3", "true"], check=False).returncode == 0
            made.restore("h2")
            assert ask(60) == "answer"
            asking.stdin.close()
        assert echo.wait(30) == 0


def test_kill_ends_all_of_a_host_and_nothing_else(rig: Rigs) -> None:
    made = rig(2)
    here, there = sleeping(made, "h1"), sleeping(made, "h2")
    session = subprocess.Popen(
        [*shlex.split(made.ssh), "h1", "echo started; sleep 600"], stdout=subprocess.PIPE, text=True
    )
    assert session.stdout is not None and session.stdout.readline() == "started\n"
    assert made.kill("h1") >= 3  # the sleeper, and at least a daemon and a shell of the session
    assert here.wait(30) == -signal.SIGKILL
    assert session.wait(30) == 255
    session.stdout.close()
    assert made.processes("h1") == []
    assert there.poll() is None
    assert subprocess.run([*shlex.split(made.ssh), "h1", "true"], check=False).returncode == 0, "sshd still listens"
    there.kill()
    there.wait()
