"""Agents that dial the launcher, instead of being led to it: over TCP, with TLS, and over a socket of this host."""

import json
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hocket.errors import HostError
from hocket.launch import remote
from hocket.launch.agent_links import AgentLink
from hocket.launch.dialing import Call
from hocket.launch.engines.engine import Engine
from hocket.launch.environment import Job
from hocket.launch.host_list import Host, Wishes
from hocket.launch.reception import Reception
from hocket.transport.door import listen, listen_here

TELL = """
import json, sys, torch, hocket
hocket.init()
told = hocket.allgather(torch.tensor([hocket.rank(), hocket.size()]))
if hocket.rank() == 0:
    json.dump(told.tolist(), open(sys.argv[1], "w"))
"""


class DialingEngine(Engine):
    """Starts agents on this machine, under other names; each dials. ``rings`` are the calls that it gives them."""

    patience = 10.0

    def __init__(self, listener: socket.socket, address: str, *, encrypted: bool) -> None:
        self.secret = secrets.token_bytes(32)
        self.reception = Reception(listener, self.secret, encrypted=encrypted)
        self._port = self.reception.port if not address.startswith("@") else 0
        self._address, self._encrypted = address, encrypted
        self.processes: list[subprocess.Popen[bytes]] = []
        self.noticed: list[tuple[str, str]] = []

    def first(self) -> list[Host]:
        return [Host("one", 1), Host("two", 1)]

    def begin_elsewhere(self, host: Host, number: int) -> AgentLink:
        self.ring(Call((self._address,), self._port, self.secret, number, host.name, self._encrypted, 10.0))
        return AgentLink(host, number)

    def ring(self, call: Call) -> None:
        process = subprocess.Popen([sys.executable, "-m", "hocket.launch.dialing"], stdin=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(call.write())
        process.stdin.close()
        self.processes.append(process)

    def why_silent(self, link: AgentLink) -> str:
        return "its agent has not dialed"

    def notices(self) -> list[tuple[str, str]]:
        found, self.noticed = self.noticed, []
        return found

    def ends(self) -> list[int]:
        """The statuses of the agents."""
        return [process.wait(10) for process in self.processes]


@pytest.fixture(params=["tls", "here"])
def engine(request: pytest.FixtureRequest) -> Iterator[DialingEngine]:
    if request.param == "here":
        name = f"hocket-test-{secrets.token_hex(8)}"
        made = DialingEngine(listen_here(name), f"@{name}", encrypted=False)
    else:
        made = DialingEngine(listen("127.0.0.1", 0), "127.0.0.1", encrypted=True)
    yield made
    made.close()
    for process in made.processes:
        process.kill()
        process.wait()


def run(engine: DialingEngine, folder: Path, monkeypatch: pytest.MonkeyPatch, text: str = TELL) -> int:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PWD", str(folder))
    (folder / "script.py").write_text(text)
    job = Job(("script.py", "out.json"), 0, secret=engine.secret)
    return remote.run_on_hosts(job, Wishes(engine.first(), None, engine, None, {}))


def test_a_job_of_agents_that_dial(engine: DialingEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(engine, tmp_path, monkeypatch) == 0
    told = json.loads((tmp_path / "out.json").read_text())
    assert told == [[0, 2], [1, 2]]
    assert engine.ends() == [0, 0]


def test_a_stranger_is_not_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Strangers(DialingEngine):
        patience = 3.0

        def ring(self, call: Call) -> None:
            super().ring(Call(call.addresses, call.port, b"x" * 32, call.number, call.host, call.encrypted, 10.0))

    engine = Strangers(listen("127.0.0.1", 0), "127.0.0.1", encrypted=False)
    with pytest.raises(HostError, match="one: its agent has not dialed"):
        run(engine, tmp_path, monkeypatch)
    assert engine.ends() == [1, 1]
    assert "one does not reach the launcher" in (said := capfd.readouterr().err) and "secret" in said
    engine.close()


def test_an_agent_that_nobody_waits_for_is_sent_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = DialingEngine(listen("127.0.0.1", 0), "127.0.0.1", encrypted=False)
    engine.ring(Call(("127.0.0.1",), engine.reception.port if engine.reception else 0, engine.secret, 77, "x", False))
    assert run(engine, tmp_path, monkeypatch) == 0
    engine.close()
    assert sorted(engine.ends()) == [0, 0, 1]


def test_the_agent_says_that_it_was_told_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hocket.launch.dialing"], input=b"{}\n", capture_output=True, check=False
    )
    assert done.returncode == 2 and b"it is started by the launcher" in done.stderr
