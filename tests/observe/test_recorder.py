"""Writing and reading a record, without a job."""

import math
import os
import socket
import sqlite3
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hocket.errors import RecordError, UsageError
from hocket.events import Facts, Happening, Metrics, Progress, ServerReport
from hocket.observe import reader, run_records, show
from hocket.observe import recorder as recorder_module
from hocket.observe.recorder import Recorder, Thinning
from hocket.observe.run_records import RecordWriter

FACTS = {
    "run": {"started": 1000.0, "pid": os.getpid(), "pid_started": reader.process_start(os.getpid()), "workers": 2},
    "settings": {"strategy": "mirrored"},
    "host": {"name": socket.gethostname()},
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time as the recorder sees it."""
    now = [1000.0]
    fake = SimpleNamespace(time=lambda: now[0], monotonic=lambda: now[0])
    monkeypatch.setattr(recorder_module, "time", fake)
    return now


def rows(folder: Path, query: str) -> list[tuple[Any, ...]]:
    database = sqlite3.connect(folder / "run.sqlite")
    try:
        return database.execute(query).fetchall()
    finally:
        database.close()


def test_ten_rows_a_second_for_a_minute_then_one() -> None:
    thinning = Thinning()
    kept = [moment / 100 for moment in range(12_000) if thinning.lets_through(7.0 + moment / 100)]
    for second in range(120):
        count = sum(second <= moment < second + 1 for moment in kept)
        assert count == (10 if second < 60 else 1), second


def test_what_workers_tell_is_read_back(tmp_path: Path, clock: list[float]) -> None:
    recorder = Recorder(tmp_path, FACTS)
    recorder.take(1, Facts({"strategy": "wrong", "only here": [1]}))
    recorder.take(0, Facts({"strategy": "central"}))
    recorder.take(1, Facts({"strategy": "wrong again"}))
    for step in range(5):
        clock[0] = 1000.0 + step
        for rank in (0, 1):
            recorder.take(rank, Progress(1, step, 9, 64 * step, step, 64 * step, 0.1 * step, (0.3 + rank) * step))
        recorder.take(0, Metrics(step, 64 * step, clock[0], {"loss": 5.0 - step, "accuracy": 0.1 * step}))
        recorder.take(1, Metrics(step, 64 * step, clock[0], {"loss": 100.0}))
    recorder.take(1, Happening("replicas differ", {"step": 3}, 1002.0))
    recorder.finish(3, "rank 1 failed", ["hocket: rank 1 failed", "Traceback"])
    run = reader.read(tmp_path)
    assert (run.state, run.status, run.reason, run.seconds) == ("failed (3)", 3, "rank 1 failed", 4.0)
    assert run.strategy == "central" and run.fact("told", "only here") == [1]
    assert run.speed.samples_per_second == pytest.approx(64) and run.speed.step_seconds == pytest.approx(1)
    assert run.speed.waiting == pytest.approx(0.1) and run.speed.communication == pytest.approx(0.2)
    assert (run.speed.total, run.speed.seen, run.speed.epoch) == (4, 256, 1)
    assert run.ranks[1] == {"waited": pytest.approx(0.4), "exchanging": pytest.approx(5.2)}
    loss = run.metrics["loss"]
    assert (loss.count, loss.first, loss.lowest, loss.highest, loss.last, loss.last_step) == (5, 5.0, 1.0, 5.0, 1.0, 4)
    assert [(event["rank"], event["name"]) for event in run.events] == [(1, "replicas differ"), (None, "failure")]
    assert run.events[1]["details"] == {"report": ["hocket: rank 1 failed", "Traceback"]}
    assert [path.name for path in tmp_path.iterdir()] == ["run.sqlite"], "one file is left"


def test_the_last_progress_is_kept_even_if_thinned(tmp_path: Path, clock: list[float]) -> None:
    recorder = Recorder(tmp_path, FACTS)
    for step in range(1, 1001):
        clock[0] += 0.001
        recorder.take(0, Progress(1, step, 1000, step, step, step))
    recorder.finish(0, "", [])
    assert rows(tmp_path, "SELECT count(*), max(total) FROM steps") == [(11, 1000)]


def test_samples_of_all_ranks_are_added_up_in_the_end(tmp_path: Path, clock: list[float]) -> None:
    """The lead knows 90 of 100; others tell more later, and the script ends long after its training."""
    recorder = Recorder(tmp_path, FACTS)
    for step in range(1, 4):
        clock[0] += 1.0
        recorder.take(0, Progress(1, step, 9, 30 * step, step, 500 + 30 * step, own=10 * step, before=500))
        recorder.take(1, Progress(1, step, 9, 30 * step, step, 500 + 30 * step, own=20 * step, before=500))
    clock[0] += 60.0
    recorder.take(1, Progress(1, 3, 9, 90, 3, 590, own=70, before=500, ends=True))
    recorder.take(0, Progress(1, 3, 9, 90, 3, 590, own=30, before=500, ends=True))
    recorder.finish(0, "", [])
    assert reader.read(tmp_path).speed.seen == 600 and reader.read_curves(tmp_path).seen == 600
    assert rows(tmp_path, "SELECT max(time) - min(time) FROM steps") == [(2.0,)]


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, FACTS)
    for step, value in enumerate((1.0, math.inf, math.nan)):
        recorder.take(0, Metrics(step, step, 0.0, {"loss": value}))
    recorder.finish(0, "", [])
    loss = reader.read(tmp_path).metrics["loss"]
    assert (loss.first, loss.lowest, loss.highest) == (1.0, 1.0, math.inf) and math.isnan(loss.last)


def test_a_run_can_be_read_while_it_goes_on(tmp_path: Path, clock: list[float]) -> None:
    recorder = Recorder(tmp_path, FACTS)
    recorder.take(0, Metrics(1, 8, 1000.0, {"loss": 0.5}))
    recorder.tick()
    assert rows(tmp_path, "PRAGMA journal_mode") == [("wal",)]
    run = reader.read(tmp_path)
    assert run.state == "running" and run.metrics["loss"].last == 0.5
    recorder.take(0, Metrics(2, 16, 1001.0, {"loss": 0.25}))
    recorder.tick()
    assert reader.read(tmp_path).metrics["loss"].last == 0.5, "not yet a second later"
    clock[0] += 1
    recorder.tick()
    assert reader.read(tmp_path).metrics["loss"].last == 0.25
    recorder.finish(0, "", [])
    assert reader.read(tmp_path).state == "finished"


def test_a_process_id_that_is_used_again_is_not_the_launcher(tmp_path: Path) -> None:
    Recorder(tmp_path, {**FACTS, "run": {**FACTS["run"], "pid_started": 1}})
    assert reader.read(tmp_path).state == "killed"


def test_a_run_on_another_host(tmp_path: Path) -> None:
    Recorder(tmp_path, {**FACTS, "host": {"name": "elsewhere"}})
    assert reader.read(tmp_path).state == "unknown"


@pytest.mark.parametrize("answer", ["another mode", "an error"])
def test_where_there_is_no_wal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    connect = sqlite3.connect

    class Refuses(sqlite3.Connection):
        def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
            if "WAL" in sql and answer == "an error":
                raise sqlite3.OperationalError("locking protocol")
            return super().execute(sql, *args)

    def without_shared_memory(address: str, **options: Any) -> sqlite3.Connection:
        return connect(f"{address}?vfs=unix-dotfile", factory=Refuses, **options)

    monkeypatch.setattr(sqlite3, "connect", without_shared_memory)
    recorder = Recorder(tmp_path, FACTS)
    monkeypatch.undo()
    assert rows(tmp_path, "PRAGMA journal_mode") == [("delete",)]
    recorder.take(0, Metrics(1, 8, 1000.0, {"loss": 0.5}))
    recorder.tick()
    assert reader.read(tmp_path).metrics["loss"].last == 0.5
    recorder.finish(0, "", [])
    assert reader.read(tmp_path).state == "finished"


def test_a_reader_in_the_way_loses_nothing(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "run.sqlite")
    other = sqlite3.connect(tmp_path / "run.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    writer.add("exit", 0.0, 0, "first", 0.0)
    writer.commit()
    assert rows(tmp_path, "SELECT reason FROM exit") == []
    other.execute("COMMIT")
    other.close()
    writer.commit()
    assert rows(tmp_path, "SELECT reason FROM exit") == [("first",)]
    writer.close()


def test_a_full_disk_keeps_what_was_written_before(small_disk: Path) -> None:
    recorder = Recorder(small_disk, FACTS)
    recorder.take(0, Metrics(1, 8, 1000.0, {"loss": 0.5}))
    recorder.tick()
    recorder._next = 0.0
    for step in range(20_000):
        recorder.take(0, Metrics(step, step, 1000.0, {"accuracy": 0.5}))
    with pytest.raises(RecordError, match="full"):
        recorder.tick()
    recorder.take(0, Metrics(2, 16, 1000.0, {"loss": 0.1}))
    recorder.tick()  # nothing more is written, and nothing more is said
    recorder.finish(0, "", [])
    run = reader.read(small_disk)
    assert run.state == "finished", "there was room for this one row"
    assert set(run.metrics) == {"loss"} and run.metrics["loss"].last == 0.5


def test_ids_are_found_by_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((1000.1, 1000.5, 1000.9))  # within one second, and still in order
    monkeypatch.setattr(run_records, "time", SimpleNamespace(**{**vars(time), "time": lambda: next(times)}))
    made = [run_records.make(tmp_path, script) for script in ("digits", "digits", "my script!")]
    for folder in made:
        (folder / "run.sqlite").touch()
    assert made[2].name[19:].startswith("_my-script_") and len(set(made)) == 3
    assert run_records.find(tmp_path, "my-s") == run_records.find(tmp_path, made[2].name) == made[2]
    assert run_records.find(tmp_path, "last") == made[2]
    with pytest.raises(UsageError, match="2 runs have 'digits' in their id; write more of one of"):
        run_records.find(tmp_path, "digits")
    with pytest.raises(UsageError, match=f"no run has 'nope' in its id; there are .*{made[2].name}"):
        run_records.find(tmp_path, "nope")


def test_what_is_no_record_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "run.sqlite").write_bytes(b"not a database, but long enough to be read as the header of one" * 40)
    with pytest.raises(RecordError, match="cannot be read: file is not a database"):
        reader.read(tmp_path)


def test_servers_are_no_ranks_and_another_rank_may_lead(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, FACTS)
    recorder.take(None, Progress(1, 1, 9, 1, 1, 1))
    recorder.take(None, Metrics(1, 1, 0.0, {"loss": 9.0}))
    recorder.take(None, Facts({"strategy": "ps", "on": "a server"}))
    recorder.take(None, Happening("worker lost", {"rank": 0}))
    for updates in (1, 2):
        workers = {"0": {"staleness": {"3": updates}}}
        recorder.take(None, ServerReport(1, "here", 1.0, 0.5, updates, 0, 0, {}, workers))
    recorder.lead = 1
    recorder.take(0, Metrics(2, 2, 0.0, {"loss": 8.0}))
    recorder.take(1, Metrics(2, 2, 0.0, {"loss": 1.0}))
    recorder.add_facts("servers", {"staleness": "mean 3.0"})
    recorder.finish(0, "well", [])
    run = reader.read(tmp_path)
    assert run.metrics["loss"].count == 1 and run.metrics["loss"].last == 1.0 and run.ranks == {}
    assert run.facts["told"] == {"strategy": "ps", "on": "a server"} and run.events[0]["rank"] is None
    assert run.facts["served"]["server 1"]["workers"]["0"]["staleness"] == {"3": 2}
    assert "Servers\n  staleness  mean 3.0\n" in "\n".join(show.details(run)) + "\n"
