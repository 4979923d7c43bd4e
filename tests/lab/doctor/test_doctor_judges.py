"""How a doctor judges what was seen: figures of links, clocks, versions, threads; and how it says so."""

import re
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hocket.errors import JobError
from hocket.lab.doctor import doctor_cli, findings, host_links, leftover_check, machine_check, meter, software_check
from hocket.lab.doctor.findings import Finding, note, ok, wrong
from hocket.lab.doctor.host_links import HostPair, Trip
from hocket.launch import machine

FACTS: dict[str, Any] = {
    "version": "2.13.0+cpu", "cuda build": None, "rocm build": None, "threads": 2, "gloo": True, "nccl": False,
    "sum": 64.0**3, "gpus": [], "gpu trouble": "",
}  # fmt: skip


def way(first: str, second: str, there: float, back: float | None = None, median: float = 1e-4) -> HostPair:
    return HostPair(first, second, "10.0.0.1", median, 2 * median, there, there if back is None else back)


def states(findings: list[Finding]) -> dict[str, str]:
    return {found.name: found.state for found in findings}


def test_links_that_are_alike_are_fine() -> None:
    found = host_links.judge([way("a", "b", 1.2e8), way("a", "c", 1.1e8), way("b", "c", 0.9e8)])
    assert states(found) == {"links": "ok"} and "3 pairs" in found[0].seen and "90.0 MB/s" in found[0].seen
    assert host_links.judge([]) == []


def test_one_slow_direction_is_named() -> None:
    found = host_links.judge([way("a", "b", 1e9, 2e8), way("a", "c", 1e9), way("b", "c", 1e9)])
    assert states(found) == {"links": "note"}
    assert found[0].seen == "b to a: 200.0 MB/s, and the best has 1.0 GB/s"


def test_a_host_all_of_whose_links_are_slow_is_one_finding() -> None:
    found = host_links.judge([way("a", "b", 1e9), way("a", "c", 1e8), way("b", "c", 1e8)])
    assert len(found) == 1 and found[0].seen.startswith("all links of c are slow: 100.0 MB/s")


def test_a_pair_that_is_far() -> None:
    found = host_links.judge([way("a", "b", 1e9), way("a", "c", 1e9, median=8e-3), way("b", "c", 1e9)])
    assert states(found) == {"links": "note", "strategies": "note"}
    assert found[0].seen == "a and c: a round trip takes 8.00 ms, and the best 0.10 ms"


def test_slow_links_are_for_strategies_that_send_seldom() -> None:
    (found,) = host_links.judge([way("a", "b", 1.25e6)])
    assert "mirrored will not pay over 1.2 MB/s" in found.seen and "64.0 s" in found.seen
    assert "local_sgd" in found.remedy and "diloco" in found.remedy


def test_the_tables() -> None:
    lines = host_links.matrix([way("node1", "node2", 1e8, 2e8)])
    assert re.fullmatch(r" +node1 +– +100\.0", lines[2]) and re.fullmatch(r" +node2 +200\.0 +–", lines[3])
    assert lines[-1].split() == ["node2", "0.10", "(0.20)", "–"]


def test_clocks_are_compared_by_the_best_trip() -> None:
    trips = [Trip(0.0, 2.0, 9.0), Trip(10.0, 10.2, 15.1), Trip(20.0, 21.0, 26.0)]
    ahead, uncertain = host_links.clock_difference(trips)
    assert ahead == pytest.approx(5.0) and uncertain == pytest.approx(0.1)
    late = host_links.judge_clock(ahead, uncertain)
    assert late.state == "note" and "5.0 s ahead of" in late.seen
    assert host_links.judge_clock(-0.4e-3, 0.2e-3).state == "ok"
    assert host_links.judge_clock(1.5, 1.0).state == "ok"  # it may be half a second


@pytest.mark.parametrize(
    ("told", "state"),
    [("", "ok"), ("1", "ok"), ("4", "note"), ("4,2", "note"), ("0", "wrong"), ("-1", "wrong"), ("four", "wrong"),
     ("1.5", "wrong"), ("1,", "wrong")],
)  # fmt: skip
def test_threads(told: str, state: str) -> None:
    assert machine_check._threads(told).state == state


def test_quotas_of_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tightest of a group and all groups around it counts."""
    own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    folder = tmp_path / own.split(":", 2)[2].strip("/")
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(machine_check, "_GROUPS", tmp_path)
    assert machine_check._quota() is None
    (folder / "cpu.max").write_text("max 100000\n")
    assert machine_check._quota() is None
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert machine_check._quota() == 0.5
    assert machine_check._cores().state == "note" and "-n 1" in machine_check._cores().remedy


@pytest.mark.parametrize(
    ("changes", "gpus", "bad"),
    [
        ({}, 0, {}),
        ({"version": "2.9.1"}, 0, {"torch": "wrong"}),
        ({"sum": 1.0}, 0, {"torch": "wrong"}),
        ({"gloo": False}, 0, {"gloo": "wrong"}),
        ({}, 2, {"gpu": "note"}),
        ({"cuda build": "13.0", "gpus": ["H200"] * 2}, 2, {"nccl": "note"}),
        ({"cuda build": "13.0", "gpu trouble": "the driver is too old"}, 2, {"gpu": "wrong"}),
        ({"safetensors": "ImportError: it broke"}, 0, {"safetensors": "wrong"}),
    ],
)
def test_torch(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], gpus: int, bad: dict[str, str]) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: gpus)
    found = software_check.judge_torch({**FACTS, **changes})
    assert {name: state for name, state in states(found).items() if state != "ok"} == bad
    assert {"torch", "gloo", "nccl", "gpu"} <= set(states(found))


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    versions: dict[str, str | None] = {"safetensors": "0.3.9", "typer": "0.12.0", "rich": "13", "cryptography": None}
    monkeypatch.setattr(machine, "version", lambda name: versions.get(name))
    found = states(software_check.packages())
    assert found == {"python": "ok", "hocket": "ok", "safetensors": "wrong", "typer": "ok", "rich": "ok",
                     "cryptography": "wrong", "matplotlib": "note", "tensorboard": "note"}  # fmt: skip
    assert software_check.numbers("2.13.0a1+cu130") == (2, 13, 0) and software_check.numbers("x") == ()


def test_an_interface_that_is_not_there() -> None:
    assert states(machine_check.network("nowhere0"))["interfaces"] == "wrong"
    assert states(machine_check.network("lo"))["interfaces"] != "wrong"


LAUNCHER = f"""
import os, subprocess, sys
from hocket.launch import leftovers
leftovers.adopt_orphans()
if not os.fork():
    env = {{leftovers.VARIABLE: {"0" * 32!r}, leftovers.LAUNCHER: leftovers.identity()}}
    print(subprocess.Popen(["sleep", "600"], env=env).pid, flush=True)
    os.read(0, 1)
    os._exit(0)
os.wait()
print("gone", flush=True)
os.read(0, 1)
leftovers.kill({"0" * 32!r}, spare=0)
"""


def test_processes_of_a_job_that_is_gone() -> None:
    """A launcher below a Python that adopts orphans, as the first process of a container may; then that one alone."""
    command = [sys.executable, "-c", LAUNCHER, "hocket"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdin is not None
        pid = first.stdout.readline().strip()
        alive = leftover_check._processes()
        first.stdin.write("x")
        first.stdin.flush()
        assert first.stdout.readline() == "gone\n"
        found = leftover_check._processes()
        first.stdin.close()
    assert pid not in alive.remedy.split()
    assert found.state == "note" and pid in found.remedy.split()


def test_the_last_line() -> None:
    one, two, three = ok("a", "b"), note("c", "d", "e"), wrong("f", "g", "h")
    assert doctor_cli.closing([one]) == "All is well."
    assert doctor_cli.closing([one, two]) == "Nothing is wrong, 1 thing is worth a look."
    assert doctor_cli.closing([two, two]) == "Nothing is wrong, 2 things are worth a look."
    assert doctor_cli.closing([three]) == "1 thing is wrong."
    assert doctor_cli.closing([three, three, three, two]) == "3 things are wrong, 1 is worth a look."


def test_lines_are_aligned_in_any_encoding() -> None:
    found = [ok("torch", "5 µs").at("h1"), ok("torch", "5 µs").at("h2"), wrong("clock", "late", "set it").at("h2")]
    assert doctor_cli.text(found, [], "utf-8").splitlines()[:3] == [
        "✓  all 2  torch  5 µs",
        "✗  h2     clock  late",
        "     → set it",
    ]
    plain = doctor_cli.text(found, [way("h1", "h2", 1e8)], "ascii")
    assert plain.isascii() and "ok     all 2  torch  5 us" in plain and "\n         -> set it" in plain


def test_many_hosts_are_shown_in_few_characters() -> None:
    """Their names are beneath, and what is so on eleven hosts counts eleven times, in the text and as data."""
    hosts = [f"127.0.0.{number}" for number in range(1, 13)]
    reached = ", ".join(f"{host} at 10.0.0.{number}" for number, host in enumerate(hosts))
    shut = wrong("ssh", "nothing listens for SSH there", "start sshd there")
    found = [ok("torch", "2.13").at(hosts[0]), *(shut.at(host) for host in hosts[1:]), ok("reach", f"all: {reached}")]
    lines = doctor_cli.text(found, [], "utf-8").splitlines()
    assert lines[:2] == [
        "✓  127.0.0.1              torch  2.13",
        "✗  127.0.0.2 and 10 more  ssh    nothing listens for SSH there",
    ]
    assert " ".join(line.strip() for line in lines[2:4]) == f"on {', '.join(hosts[1:])}"
    assert lines[4] == "     → start sshd there" and lines[5] == f"✓{'':25}reach  all:"
    assert " ".join(line.strip() for line in lines[6:-2]) == reached and max(map(len, lines)) <= 100
    assert lines[-1] == "11 things are wrong." and doctor_cli.data(found, [])["wrong"] == 11
    assert [entry["host"] for entry in doctor_cli.data(found, [])["findings"]] == [*hosts, ""]


def test_findings_travel_as_plain_data() -> None:
    found = [note("a", "b", "c").at("h"), ok("d", "e")]
    assert findings.read(entry.plain() for entry in found) == found
    for raw in ([{"name": "a", "state": "fine"}], ["a"], [{}]):
        with pytest.raises(ValueError, match="no finding"):
            findings.read(raw)  # type: ignore[arg-type]
    assert findings.split("ssh", "it is shut (a: b): open it") == wrong("ssh", "it is shut (a: b)", "open it")


def test_a_meter_takes_orders_from_who_knows_the_secret_alone() -> None:
    """Strangers who say nothing, or nonsense, stay meanwhile; one that pretends to be it is found out."""
    secret = secrets.token_bytes(32)
    listening = meter.Meter(secret, "127.0.0.1")
    strangers = [socket.create_connection(("127.0.0.1", listening.port)) for _ in range(3)]
    try:
        strangers[0].sendall(b"GET / HTTP/1.0\r\n\r\n" * 10)
        found = meter.measure("127.0.0.1", listening.port, secret, 0.05)
        assert found["there"] > 0 and found["back"] > 0 and 0 < found["median"] <= found["p90"] and found["trips"] >= 2
        with pytest.raises(JobError):
            meter.measure("127.0.0.1", listening.port, secrets.token_bytes(32), 0.05)
    finally:
        for stranger in strangers:
            stranger.close()
        listening.close()
    with pytest.raises(OSError):
        meter.measure("127.0.0.1", listening.port, secret, 0.05)
