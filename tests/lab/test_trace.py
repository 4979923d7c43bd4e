"""What ``hocket trace`` says of a timeline: shares, what was hidden, who waited for whom, gaps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import RecordError
from hocket.events import Spans
from hocket.lab.trace import trace_view, waits
from hocket.lab.trace.trace_file import Trace, read, repair
from hocket.observe.timeline import Timeline

MS = 1_000_000  # nanoseconds

Told = tuple[str, str, str, float, float, int]  # name, track, kind, begin and end in milliseconds, number


def made(folder: Path, spans: dict[tuple[str, int], list[Told]]) -> Trace:
    timeline = Timeline(folder / "out.json")
    for (role, number), told in spans.items():
        names = [[name, track, kind] for name, track, kind, *_ in told]
        rows = [v for i, t in enumerate(told) for v in (i, int(t[3] * MS), int((t[4] - t[3]) * MS), t[5])]
        timeline.take(role, number, "here", Spans(timeline._origin, names, rows))
    timeline.finish()
    return read(folder / "out.json")


def script(name: str, kind: str, begin: float, end: float, number: int = -1) -> Told:
    return name, "script", kind, begin, end, number


def beside(name: str, track: str, begin: float, end: float) -> Told:
    return name, track, "exchange", begin, end, -1


@pytest.fixture
def two_ranks(tmp_path: Path) -> Trace:
    """Rank 1 takes 60 ms to compute what takes rank 0 40, so that rank 0 waits for it; then rank 0 is late."""
    return made(
        tmp_path,
        {
            ("rank", 0): [
                script("batch", "frame", 0, 100, 1),
                script("forward", "compute", 0, 20),
                script("backward", "compute", 20, 40),
                script("exchange gradients", "exchange", 40, 65, 0),
                script("wait for all ranks", "wait", 40, 60, 1),
                script("update", "compute", 65, 90),
                script("wait for all ranks", "wait", 95, 96, 2),
                beside("bucket 1 of 2", "bucket 1", 30, 50),
                beside("bucket 2 of 2", "bucket 2", 45, 60),
            ],
            ("rank", 1): [
                script("batch", "frame", 0, 100, 1),
                script("forward", "compute", 0, 30),
                script("backward", "compute", 30, 60),
                script("exchange gradients", "exchange", 60, 65, 0),
                script("wait for all ranks", "wait", 60, 60.5, 1),
                script("update", "compute", 65, 85),
                script("wait for all ranks", "wait", 85, 96, 2),
            ],
        },
    )


def test_shares_are_of_what_a_rank_did_itself(two_ranks: Trace) -> None:
    found = waits.shares(two_ranks, two_ranks.ranks[0])
    expected = {"computing": 65, "exchanging": 5, "waiting": 21, "getting batches": 0, "other": 9}
    assert found == pytest.approx({name: ms / 1e3 for name, ms in expected.items()})


def test_hidden_is_what_travelled_while_the_script_computed(two_ranks: Trace) -> None:
    travelling, covered = waits.hidden(two_ranks, two_ranks.ranks[0])
    assert (travelling, covered) == pytest.approx((0.030, 0.010))  # 30-60, of which 30-40
    assert waits.hidden(two_ranks, two_ranks.ranks[1]) == (0, 0)


def test_whoever_came_last_was_waited_for(two_ranks: Trace) -> None:
    assert waits.waits(two_ranks) == pytest.approx({("rank 0", "rank 1"): 0.020, ("rank 1", "rank 0"): 0.010})


def test_the_slowest_rank_works_longest_for_a_batch(two_ranks: Trace) -> None:
    """Its own code counts, and not only what it computes."""
    assert waits.slowest(two_ranks) == pytest.approx({"rank 1": 0.084, "rank 0": 0.074})
    assert list(waits.slowest(two_ranks)) == ["rank 1", "rank 0"]


def test_gaps_are_between_what_is_known(two_ranks: Trace) -> None:
    found = waits.gaps(two_ranks, most=3)
    assert [(gap.rank, gap.after, gap.before) for gap in found] == [
        (0, "update", "wait for all ranks"),
        (0, "wait for all ranks", "the end"),
        (1, "wait for all ranks", "the end"),
    ]
    assert [gap.seconds for gap in found] == pytest.approx([0.005, 0.004, 0.004])


def test_waits_for_one_rank_and_waits_at_servers_count(tmp_path: Path) -> None:
    """Two servers that hold back a rank at the same time do so once, and what it waits there is no exchange."""
    found = made(
        tmp_path,
        {
            ("rank", 0): [
                script("wait for rank 1", "wait", -50, -10),  # before the training
                script("batch", "frame", 0, 20, 1),
                script("wait for rank 3", "wait", 0, 7),
                script("exchange with servers", "exchange", 8, 18),
                beside("push and pull", "server 0", 8, 18),
            ],
            ("server", 0): [("rank 0 waits for rank 2", "for rank 0", "wait", 10.0, 15.0, -1)],
            ("server", 1): [("rank 0 waits for rank 2 and others", "for rank 0", "wait", 11.0, 16.0, -1)],
        },
    )
    expected = {("rank 0", "rank 3"): 0.007, ("rank 0", "rank 2"): 0.006, ("rank 0", "rank 1"): 0}
    assert waits.waits(found) == pytest.approx(expected)
    shares = waits.shares(found, found.ranks[0])
    assert shares["waiting"] == pytest.approx(0.013) and shares["exchanging"] == pytest.approx(0.004)
    assert waits.hidden(found, found.ranks[0]) == pytest.approx((0.004, 0))


def test_without_a_loader_the_training_is_what_was_computed(tmp_path: Path) -> None:
    found = made(
        tmp_path,
        {("rank", 0): [script("join the other workers", "wait", 0, 900), script("forward", "compute", 950, 960)]},
    )
    assert waits.training(found.ranks[0]) == pytest.approx((0.950, 0.960))


def test_the_text_says_it_all(two_ranks: Trace, tmp_path: Path) -> None:
    text = "\n".join(trace_view.lines(two_ranks, tmp_path / "out.json"))
    for part in (
        "2 ranks",
        "rank 0    100.00 ms: 65% computing, 5% exchanging, 21% waiting",
        "33% of the 30.00 ms in which tensors travelled",
        "rank 0 waited 20.00 ms for rank 1",
        "rank 1 works 84.00 ms for a batch (median), rank 0 74.00 ms: 1.14×",
        "5.00 ms between 'update' and 'wait for all ranks'",
    ):
        assert part in text, text


def test_a_timeline_without_spans_says_so(tmp_path: Path) -> None:
    assert "no spans" in next(trace_view.lines(made(tmp_path, {}), tmp_path / "out.json"))


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), max_size=8))
def test_a_union_covers_the_same_time_once(pairs: list[tuple[int, int]]) -> None:
    merged = waits.union([(float(a), float(b)) for a, b in pairs if b > a])
    covered = {point for a, b in pairs if b > a for point in range(a, b)}
    assert {point for a, b in merged for point in range(int(a), int(b))} == covered
    assert sum(b - a for a, b in merged) == len(covered)


@pytest.mark.parametrize(
    "event",
    [
        '{"ph":"X","pid":1,"tid":1}',
        '{"name":"x","ph":"X","pid":1,"tid":1,"ts":"now"}',
        '{"name":"process_name","ph":"M","pid":1,"args":null}',
        '{"name":"process_name","ph":"M","pid":[1],"args":{}}',
        '{"name":"process_name","ph":"M","pid":1,"args":{"number":"x"}}',
        "[" * 200_000,
    ],
)
def test_a_damaged_timeline_is_one_line(tmp_path: Path, event: str) -> None:
    made(tmp_path, {})
    text = (tmp_path / "out.json").read_text().removesuffix("\n]\n")
    (tmp_path / "out.json").write_text(f"{text},\n{event}\n]\n")
    with pytest.raises(RecordError, match="is damaged"):
        read(tmp_path / "out.json")


def test_a_cut_timeline_is_summed_up_also_where_it_cannot_be_repaired(tmp_path: Path) -> None:
    """By a link, which stays one, to a folder in which nothing can be made."""
    folder = tmp_path / "folder"
    folder.mkdir()
    made(folder, {("rank", 0): [script("forward é", "compute", 0, 1)]})
    path = folder / "out.json"
    path.write_text(path.read_text().removesuffix("\n]\n"))
    (tmp_path / "link.json").symlink_to(path)
    blocked = folder / f".out.json.{os.getpid()}"
    blocked.mkdir()  # the name that is needed
    with pytest.raises(RecordError, match="cannot be repaired"):
        repair(tmp_path / "link.json", read(tmp_path / "link.json"))
    blocked.rmdir()
    assert read(path).was_cut
    environment = {**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "POSIX"}
    command = [sys.executable, "-m", "hocket.launch.cli", "trace", "link.json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and "is repaired" in done.stderr, done.stderr
    assert not read(path).was_cut and (tmp_path / "link.json").is_symlink()
    assert [each.name for each in folder.iterdir()] == ["out.json"]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["missing.json"], "missing.json: No such file or directory"),
        (["out.json", "--seconds", "1"], "--from and --seconds are for drawing: add --png timeline.png"),
        (["out.json", "--png", "x.png", "--from", "99"], "there is nothing between 99.000 s"),
        (["out.json", "--png", "missing/x.png"], "--png missing/x.png"),
    ],
)
def test_wrong_uses_are_one_line(tmp_path: Path, flags: list[str], says: str) -> None:
    made(tmp_path, {("rank", 0): [script("forward", "compute", 0, 1)]})
    command = [sys.executable, "-m", "hocket.launch.cli", "trace", *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert says in done.stderr
