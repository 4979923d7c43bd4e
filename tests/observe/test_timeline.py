"""Timelines: what processes tell becomes a file that viewers read, also when somebody is killed."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from products import rarely

from hocket import spans
from hocket.errors import RecordError, UsageError
from hocket.events import Happening, NoSink, PipeSink, Record, RecordDecoder, Spans, Stage
from hocket.lab.trace import trace_file as trace
from hocket.observe.timeline import HostClock, Timeline
from launch.test_served_jobs import find

TRAIN = """
import os, sys, time, torch, hocket
from torch.utils.data import DataLoader, TensorDataset
hocket.init()
model = torch.nn.Sequential(torch.nn.Linear(4, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(160, 4)), 4)
model, optimizer, loader = hocket.distribute(model, optimizer, loader)
while True:
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        open(f"began{hocket.rank()}", "w").close()
        while not (os.path.exists("began0") and os.path.exists("began1")):  # or one might train on all batches
            time.sleep(0.001)
    if len(sys.argv) > 1:
        print("trained", flush=True)
        time.sleep(0.05)
    else:
        break
"""


def told(*names: list[str], rows: list[int], base: int = 0) -> Spans:
    return Spans(base, list(names), rows)


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def test_what_processes_tell_is_a_trace_that_viewers_read(tmp_path: Path) -> None:
    begin = time.perf_counter_ns()
    timeline = Timeline(tmp_path / "out.json")
    names = (["forward", "script", "compute"], ["batch", "script", "frame"], ['bucket "1"', "bucket 1", "exchange"])
    rows = [0, 1000, 2500, -1, 1, 0, 5000, 7, 2, 500, 100, -1]
    timeline.take("rank", 1, "here", told(*names, rows=rows, base=time.perf_counter_ns()))
    timeline.take("server", 0, "there", told(["update", "updates", "serve"], rows=[0, 0, 9, -1]))
    timeline.take("rank", 1, "here", Happening("checkpoint saved", {}))
    timeline.mark("worker lost")
    timeline.finish()
    timeline.finish()
    found = events(tmp_path / "out.json")
    took = (time.perf_counter_ns() - begin) / 1e3
    complete = {event["name"]: event for event in found if event["ph"] == "X"}
    assert complete["forward"]["dur"] == 2.5 and 0 <= complete["forward"]["ts"] <= took
    assert complete["batch 7"]["args"] == {"number": 7}
    assert complete['bucket "1"']["tid"] != complete["forward"]["tid"]
    assert complete['bucket "1"']["pid"] == complete["forward"]["pid"] != complete["update"]["pid"]
    meta = {(e["name"], e["args"].get("name")) for e in found if e["ph"] == "M"}
    assert {
        ("process_name", "rank 1 on here"),
        ("process_name", "server 0 on there"),
        ("thread_name", "bucket 1"),
    } <= meta
    assert {event["name"] for event in found if event["ph"] == "i"} == {"checkpoint saved", "worker lost"}


def test_clocks_of_other_hosts_are_set_right(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "out.json")
    ahead = HostClock()
    ahead.compare(1.0, 1001.0005, 1.001)
    timeline.clock = lambda host: ahead if host == "there" else None
    now = time.perf_counter_ns()
    for host, base in (("here", now), ("there", now + 1000 * 10**9)):
        timeline.take(
            "rank", int(host == "there"), host, told([host, "script", "compute"], rows=[0, 0, 1, -1], base=base)
        )
    timeline.finish()
    times = {event["name"]: event["ts"] for event in events(tmp_path / "out.json") if event["ph"] == "X"}
    assert times["here"] == pytest.approx(times["there"], abs=0.01)


@settings(max_examples=60)
@given(st.floats(0, 1))
def test_a_file_that_was_cut_anywhere_is_repaired(tmp_path_factory: pytest.TempPathFactory, where: float) -> None:
    path = tmp_path_factory.mktemp("cut") / "out.json"
    timeline = Timeline(path)
    for number in range(3):
        timeline.take("rank", number, "h", told(["forward é", "script", "compute"], rows=[0, 0, 5, -1] * 4))
    timeline.finish()
    whole = path.read_bytes()
    first = whole.index(b"\n", 2) + 1
    path.write_bytes(whole[: round(first + where * (len(whole) - 2 - first))])
    found = trace.read(path)
    assert found.was_cut
    trace.repair(path, found)
    again = trace.read(path)
    assert not again.was_cut
    assert again.events == events(path) == json.loads(whole)[: len(again.events)]
    assert [p.name for p in path.parent.iterdir()] == ["out.json"]


@pytest.mark.parametrize(("name", "says"), [
    ("train.py", "must end with .json"), ("missing/out.json", "No such file"), ("folder.json", "Is a directory"),
    ("pipe.json", "no plain file|No such device"), ("locked.json", "another run is writing it"),
])  # fmt: skip
def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    other = Timeline(tmp_path / "locked.json")
    with pytest.raises(UsageError, match=says):
        Timeline(tmp_path / name)
    assert trace.read(tmp_path / "locked.json").is_being_written
    other.finish()
    assert not trace.read(tmp_path / "locked.json").is_being_written


def test_a_disk_that_becomes_full_ends_the_timeline_and_nothing_else(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "out.json")
    full = os.open("/dev/full", os.O_WRONLY)
    assert timeline._descriptor is not None
    os.dup2(full, timeline._descriptor)
    os.close(full)
    with pytest.raises(RecordError, match="No space left"):
        timeline.mark("something")
    timeline.mark("something else")
    timeline.finish()


@pytest.mark.parametrize(("text", "says"), [
    ("", "no timeline"), ("hello", "no timeline"), ("[1, 2]", "no timeline of Hocket"),
    ('[{"ph": "X"}]', "no timeline of Hocket"), ('{"traceEvents": []}', "no timeline of Hocket"),
])  # fmt: skip
def test_what_is_no_timeline_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "out.json").write_text(text)
    with pytest.raises(RecordError, match=says):
        trace.read(tmp_path / "out.json")


class Choosy(NoSink):
    """Takes only when it wants to."""

    def __init__(self) -> None:
        self.wants, self.taken = True, list[Record]()

    def has_room(self) -> bool:
        return self.wants

    def put(self, record: Record) -> None:
        assert self.wants
        self.taken.append(record)


def test_spans_are_kept_while_there_is_no_room_for_them() -> None:
    sink = Choosy()
    spans.add(spans.COMPUTE, "nobody asked for this", 0.0, 1.0)
    spans.start(sink)
    try:
        sink.wants = False
        for number in range(3):
            spans.add(spans.COMPUTE, "forward", float(number), number + 0.5, number=number)
        sink.wants = True
        spans.flush()
    finally:
        spans.stop()
    (record,) = sink.taken
    assert isinstance(record, Spans)
    assert (record.base, record.names) == (0, [["forward", "script", "compute"]])
    assert record.rows == [0, 0, 500_000_000, 0, 0, 10**9, 500_000_000, 1, 0, 2 * 10**9, 500_000_000, 2]


def test_what_there_was_no_room_for_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "_MOST", 10)
    sink = Choosy()
    spans.start(sink)
    sink.wants = False
    for number in range(25):
        spans.add(spans.COMPUTE, "forward", 0.0, 1.0, number=number)
    spans.flush()
    sink.wants = True
    spans.stop()
    (record,) = sink.taken
    assert isinstance(record, Spans)
    assert record.lost == 15 and record.rows[3::4] == list(range(15, 25))


def test_a_slow_launcher_gets_all_spans_and_all_else() -> None:
    """It begins to read when the pipe is full, and the process is about to end."""
    reader, writer = os.pipe()
    sink = PipeSink(writer)
    spans.start(sink)
    count = 30_000
    for number in range(count):
        spans.add(spans.COMPUTE, "forward", 0.0, 1.0, number=number)
    spans.flush()
    assert not sink.has_room()
    sink.put(Stage("failed", 1))
    found = list[Record]()

    def read() -> None:
        with os.fdopen(reader, "rb") as pipe:
            found.extend(RecordDecoder().feed(pipe.read()))

    thread = threading.Thread(target=read)
    thread.start()
    spans.stop()
    while not sink.has_room():
        pass
    os.close(writer)
    thread.join()
    numbers = [n for record in found if isinstance(record, Spans) for n in record.rows[3::4]]
    assert numbers == list(range(count))
    assert Stage("failed", 1) in found


def test_a_forked_process_tells_nothing() -> None:
    sink = Choosy()
    spans.start(sink)
    spans.add(spans.COMPUTE, "forward", 0.0, 1.0)
    child = os.fork()
    if not child:
        os._exit(spans.are_kept())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    spans.stop()
    assert len(sink.taken) == 1


@given(st.lists(st.tuples(st.floats(0.05, 3), st.floats(0, 0.01), st.floats(0, 1)), min_size=1, max_size=20))
def test_a_clock_never_goes_back_nor_changes_what_it_said(steps: list[tuple[float, float, float]]) -> None:
    """However long answers take: times of one process stay in order, and those that were written stay right."""
    clock, now, said = HostClock(), 10.0, dict[float, float]()
    for pause, trip, share in steps:
        now += pause
        there = now - share * trip + 1000  # it is 1000 s ahead, and was read some time between question and answer
        clock.compare(now - trip, there, now)
        said |= {there - ago: clock.here(there - ago) for ago in (0.0, 0.01, 0.5) if there - ago not in said}
    assert {there: clock.here(there) for there in said} == said
    times = [1010 + 0.01 * i for i in range(int((now - 7) * 100))]
    shown = [clock.here(each) for each in times]
    assert shown == sorted(shown)
    assert all(abs(here - (there - 1000)) < 0.0051 for there, here in zip(times, shown, strict=True))


def start(folder: Path, *args: str, flags: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(TRAIN)
    command = [
        sys.executable,
        "-m",
        "hocket.launch.cli",
        "run",
        "-n",
        "2",
        "--timeline",
        "out.json",
        *flags,
        "train.py",
    ]
    return subprocess.Popen(
        [*command, *args],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def summary(folder: Path, *flags: str) -> str:
    command = [sys.executable, "-m", "hocket.launch.cli", "trace", "out.json", *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=60)
    return done.stderr + done.stdout


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["mirrored", rarely("central(fused=True)"), "asynchronous"])
def test_a_run_has_spans_of_everything_that_it_does(tmp_path: Path, strategy: str) -> None:
    servers = ("--servers", "1") if strategy == "asynchronous" else ()
    job = start(tmp_path, flags=("--strategy", strategy, *servers))
    said = job.communicate(timeout=90)[0]
    assert job.returncode == 0, said
    assert "the timeline is out.json" in said
    found = trace.read(tmp_path / "out.json")
    assert not found.was_cut
    assert [process.name for process in found.ranks] == ["rank 0", "rank 1"]
    names = {span.name for rank in found.ranks for span in rank.spans()}
    assert {"forward", "backward", "update", "next batch", "join the other workers"} <= names
    wanted = {
        "mirrored": {"exchange gradients", "wait for all ranks", "reduce bucket 1 of 1"},
        "central(fused=True)": {"wait for all ranks", "reduce this rank's slice of all buckets"},
        "asynchronous": {"exchange with servers", "push and pull"},
    }[strategy]
    assert wanted <= {name.partition(" (")[0] for name in names}, names
    for rank in found.ranks:
        batches = [span for span in rank.spans("script") if span.kind == "frame"]
        steps = ["forward", "backward", "update"]
        inner = [[s.name for s in batch.inner if s.name in steps] for batch in batches]
        assert all(names == steps for names in inner), inner
        if strategy != "asynchronous":
            assert len(batches) == 20
    if servers:
        (server,) = (process for process in found.processes if process.role == "server")
        assert {span.name for span in server.spans()} >= {f"update for rank {r}" for r in (0, 1)}
    text = summary(tmp_path, "--png", "out.png")
    assert "Where the time of training went" in text and "The slowest rank" in text
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert set(json.loads(summary(tmp_path, "--json"))["ranks"]) == {"rank 0", "rank 1"}


def until_trained(job: subprocess.Popen[str], folder: Path) -> None:
    """Until both ranks have trained, and that is in the file."""
    assert job.stdout is not None
    for _ in job.stdout:
        known = [json.loads(line.rstrip(",")) for line in (folder / "out.json").read_text().splitlines()[1:-1]]
        if {event["pid"] for event in known if event["name"] == "update"} == {1, 2}:
            return
    raise AssertionError("it ended before it had trained")


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [rarely(signal.SIGINT), signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_its_timeline(tmp_path: Path, number: int) -> None:
    job = start(tmp_path, "forever")
    until_trained(job, tmp_path)
    job.send_signal(number)
    assert job.stdout is not None
    job.stdout.read()
    job.wait(60)
    found = trace.read(tmp_path / "out.json")
    assert found.was_cut == (number == signal.SIGKILL)
    assert {span.name for rank in found.ranks for span in rank.spans()} >= {"forward", "backward", "update"}
    assert ("is repaired" in summary(tmp_path)) == found.was_cut
    assert "is repaired" not in summary(tmp_path)
    assert events(tmp_path / "out.json")


def test_a_worker_that_is_killed_is_in_the_timeline(tmp_path: Path) -> None:
    job = start(tmp_path, "forever", flags=("--on-loss", "end"))
    until_trained(job, tmp_path)
    os.kill(find(tmp_path, "RANK=1"), signal.SIGKILL)
    assert job.stdout is not None
    job.stdout.read()
    assert job.wait(60) == 137
    found = trace.read(tmp_path / "out.json")
    assert not found.was_cut
    assert all(any(span.name == "backward" for span in rank.spans()) for rank in found.ranks)
