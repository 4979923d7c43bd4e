"""What a doctor says of several hosts, and of what is between them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Rigs

from hocket.lab.rig import Rig
from launch.sshd import Sshd
from launch.test_preflight import doctored, hello_with

DOCTOR = [sys.executable, "-m", "hocket.launch.cli", "doctor", "--json"]


def read(out: str, status: int) -> tuple[dict[tuple[str, str], dict[str, Any]], list[dict[str, Any]]]:
    """The findings by host and name, and the pairs."""
    found = json.loads(out)
    assert status == (1 if found["wrong"] else 0)
    for entry in found["findings"]:
        assert entry["seen"] and bool(entry["remedy"]) == (entry["state"] != "ok"), entry
    return {(entry["host"], entry["name"]): entry for entry in found["findings"]}, found["pairs"]


def doctor(*args: str) -> tuple[dict[tuple[str, str], dict[str, Any]], list[dict[str, Any]]]:
    done = subprocess.run([*DOCTOR, *args], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == ""
    return read(done.stdout, done.returncode)


def on(rig: Rig, *args: str, **env: str) -> tuple[dict[tuple[str, str], dict[str, Any]], list[dict[str, Any]]]:
    """The same from the first host of a rig."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    with rig.start("h1", [*DOCTOR, *args], env=env, text=True, stdout=subprocess.PIPE) as process:
        out, _ = process.communicate(timeout=150)
        return read(out, process.returncode)


def without_torch(folder: Path) -> str:
    """A PYTHONPATH with which it cannot be imported: that takes no time, where nothing depends on it."""
    (folder / "torch.py").write_text("raise ImportError('left out')")
    return f"{folder}:{os.environ.get('PYTHONPATH', '')}"


def wrong(found: dict[tuple[str, str], dict[str, Any]]) -> set[tuple[str, str]]:
    return {key for key, entry in found.items() if entry["state"] == "wrong"}


def test_no_host_can_be_reached(sshd: Sshd, free_port: int) -> None:
    ssh = sshd.configured(f"Host shut\n  HostName 127.0.0.1\n  Port {free_port}\n", "shut")
    found, measured = doctor("-H", "nowhere.invalid,shut", "--ssh", ssh)
    assert wrong(found) == {("nowhere.invalid", "ssh"), ("shut", "ssh")} and not measured
    assert found["shut", "ssh"]["seen"] == "nothing listens for SSH there (connection refused)"
    assert found["shut", "ssh"]["remedy"].startswith("start sshd")
    assert "does not resolve" in found["nowhere.invalid", "ssh"]["seen"]
    assert found["", "all-reduce"]["state"] == "note" and "2 of the hosts" in found["", "all-reduce"]["seen"]


def test_no_ssh_here() -> None:
    found, _ = doctor("-H", "node1,node2", "--ssh", "/nowhere/ssh -v", "--quick")
    assert wrong(found) == {("node1", "ssh"), ("node2", "ssh")}
    assert "/nowhere/ssh cannot be started" in found["node1", "ssh"]["seen"]


@pytest.mark.parametrize("values", [{"hocket": "9.9"}, {"python": "3.6.1"}])
def test_other_versions_and_too_many_workers_on_a_host(
    sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, str]
) -> None:
    """One of another Hocket is not asked what it may not understand."""
    monkeypatch.setenv("PYTHONPATH", without_torch(tmp_path))
    python = doctored(tmp_path, hello_with(**values))
    found, _ = doctor("-H", "a:100000", "--ssh", sshd.ssh, "--python", python, "--quick")
    assert ("a", "versions") in wrong(found) and "--python" in found["a", "versions"]["remedy"]
    is_asked = "python" in values
    assert (("a", "torch") in found) == (("a", "slots") in found) == is_asked
    if is_asked:
        assert found["a", "slots"]["state"] == "wrong" and "GB of memory" in found["a", "slots"]["seen"]
        assert found["a", "slots"]["remedy"].startswith("write a:")


def test_an_interpreter_that_is_not_there(sshd: Sshd) -> None:
    found, _ = doctor("-H", "a", "--ssh", sshd.ssh, "--python", "/nowhere/python", "--quick")
    assert wrong(found) == {("a", "ssh")} and "/nowhere/python" in found["a", "ssh"]["seen"]


@pytest.mark.all_combinations
def test_what_is_between_hosts(rig: Rigs, tmp_path: Path) -> None:
    """Of three hosts that are well one is behind a slow link; then two have a wall between, and a fourth is cut off.

    What else is wrong there, and where, does not keep the others from being looked at and measured.
    """
    made = rig(4)
    made.set_rate("h3", "10mbit")
    found, measured = on(made, "-H", "h1,h2,h3")
    assert not wrong(found), found
    rates = {(pair["first"], pair["second"]): (pair["there"], pair["back"]) for pair in measured}
    assert list(rates) == [("h1", "h2"), ("h1", "h3"), ("h2", "h3")]
    for pair, both in rates.items():
        assert all((0.5e6 < rate < 2e6) == ("h3" in pair) for rate in both), rates
    assert all(0 < pair["median"] <= pair["p90"] for pair in measured)
    told = [entry["seen"] for entry in found.values() if entry["name"] == "links"]
    assert any(text.startswith("all links of h3 are slow: ") for text in told), told
    assert "local_sgd" in found["", "strategies"]["remedy"]
    assert found["h2", "clocks"]["state"] == "ok" and "±" in found["h2", "clocks"]["seen"]
    assert found["", "reach"]["state"] == "ok" and made.hosts["h3"].address in found["", "reach"]["seen"]
    assert found["", "all-reduce"]["seen"].startswith("right on a worker on each of 3 hosts: 4 KiB in ")

    for host, other in (("h2", "h3"), ("h3", "h2")):
        wall = ["ip", "route", "add", "unreachable", f"{made.hosts[other].address}/32"]
        subprocess.run(made.command(host, wall), check=True)
    made.cut("h4")
    ssh = f"{made.ssh} -o ConnectTimeout=1"
    found, measured = on(made, "-H", "h1,h2,h3,h4", "--ssh", ssh, PYTHONPATH=without_torch(tmp_path))
    without = {(host, "torch") for host in ("h1", "h2", "h3")}
    assert wrong(found) == {("h2", "reach"), ("h3", "reach"), ("h4", "ssh"), *without}
    assert found["h3", "reach"]["seen"] == f"h2 cannot reach it at {made.hosts['h3'].address} (eth0)"
    assert "does not answer" in found["h4", "ssh"]["seen"]
    assert [(pair["first"], pair["second"]) for pair in measured] == [("h1", "h2"), ("h1", "h3")]
    assert "left out" in found["h3", "torch"]["seen"]
    assert "4 of the hosts" in found["", "all-reduce"]["seen"]
