"""A record becomes a result."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from hocket.events import Facts, Happening, Metrics, Progress, Sent, ServerReport
from hocket.lab.compare import records, target
from hocket.lab.compare.plan import Planned, Way
from hocket.lab.compare.results import Point
from hocket.observe import recorder as recorder_module
from hocket.observe.recorder import Recorder

RUN = Planned(Way("asynchronous", 2, 1), 3)
WORKERS = {
    "0": {"pushes": 4, "staleness": {"0": 1, "2": 3}, "waited": 0.0},
    "1": {"pushes": 4, "staleness": {"0": 4}, "waited": 2.0},
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time as the recorder sees it."""
    now = [100.0]
    fake = SimpleNamespace(time=lambda: now[0], monotonic=lambda: now[0])
    monkeypatch.setattr(recorder_module, "time", fake)
    return now


def record(folder: Path, clock: list[float], *, loop: bool = True) -> Path:
    """Ten seconds of training after five of starting up: a batch of 8 and values of metrics every second."""
    recorder = Recorder(folder, {"run": {"started": 100.0}, "gradients": {"noise scale": 32.0}})
    recorder.take(0, Facts({"threads": 1, "optimizer": "SGD"}))
    for second in range(11):
        clock[0] = now = 105.0 + second
        if loop and second == 0:
            recorder.take(0, Happening("training began", {"samples of a pass": 40}, now))
        for rank in (0, 1) if loop else ():
            waited, exchanging = 1.0 + 0.1 * second, 1.0 + (0.3 + 0.2 * rank) * second
            recorder.take(rank, Progress(1, second, 10, 8 * second, second, 8 * second, waited, exchanging))
        if second:
            values = {"accuracy": second / 10, "distance from consensus": 1.0, "norm": math.nan}
            recorder.take(0, Metrics(second, 8 * second, now, values))
    for rank in (0, 1):
        recorder.take(rank, Sent(1000 + rank))
    recorder.take(None, ServerReport(0, "here", 10.0, 1.0, 8, 0, 0, {}, WORKERS))
    recorder.finish(0, "all workers finished", [])
    return folder


def test_time_counts_from_the_beginning_of_training(tmp_path: Path, clock: list[float]) -> None:
    found = records.result(RUN, record(tmp_path, clock), None, "")
    assert (found.strategy, found.workers, found.servers, found.repeat) == ("asynchronous", 2, 1, 3)
    assert (found.start_up, found.seconds, found.samples, found.pass_samples) == (5.0, 10.0, 80, 40)
    assert found.speed == 8.0 and found.passes == 2.0 and found.seconds_per_pass == 5.0
    assert list(found.curves) == ["accuracy", "norm"]  # a strategy's own measure is no metric of the script
    assert found.curves["accuracy"][0] == Point(1.0, 8, 0.1) and math.isnan(found.curves["norm"][0].value)
    assert found.sent == 2001 and found.gradients == {"noise scale": 32.0} and found.told["threads"] == 1


def test_shares_are_those_since_each_rank_had_its_first_batch(tmp_path: Path, clock: list[float]) -> None:
    found = records.result(RUN, record(tmp_path, clock), None, "")
    # Rank 0 waited 1 s and exchanged for 3 s, rank 1 for 1 s and 5 s, and servers let rank 1 wait for 2 s of these.
    shares = {"compute": 0.6, "communication": 0.2, "waiting": 0.2}
    assert found.shares == pytest.approx(shares)
    assert found.staleness == {0: 5, 2: 3}


def test_curves_end_where_the_target_is_reached(tmp_path: Path, clock: list[float]) -> None:
    found = records.result(RUN, record(tmp_path, clock), target.parse("accuracy=0.55"), "")
    assert found.reached == found.curves["accuracy"][-1] == Point(6.0, 48, 0.6)
    assert found.passes == pytest.approx(1.2) and found.seconds_per_pass == pytest.approx(5.0)
    assert records.result(RUN, tmp_path, target.parse("accuracy=2"), "").reached is None


def test_a_row_is_about_the_moment_at_which_the_target_is_reached(tmp_path: Path, clock: list[float]) -> None:
    """A run goes on until somebody notices: here for as long again, with twice as many samples in a second."""
    recorder = Recorder(tmp_path, {"run": {"started": 100.0}})
    recorder.take(0, Happening("training began", {"samples of a pass": 40}, 100.0))
    for second, samples in ((0, 0), (5, 40), (10, 120)):
        clock[0] = 100.0 + second
        recorder.take(0, Progress(1, second, 10, samples, second, samples))
        recorder.take(0, Metrics(second, samples, clock[0], {"accuracy": second / 10}, sent=100 * second))
    for rank in (0, 1):
        recorder.take(rank, Sent(1000 + 500 * rank))
    recorder.finish(0, "ended", [])
    found = records.result(RUN, tmp_path, target.parse("accuracy=0.5"), "")
    assert (found.sent, found.samples, found.speed, found.passes) == (1250, 40, 8.0, 1.0)
    whole = records.result(RUN, tmp_path, target.parse("accuracy=2"), "")
    assert (whole.sent, whole.samples, whole.speed, whole.passes) == (2500, 120, 12.0, 3.0)


def test_a_script_without_a_training_loop_has_a_time_alone(tmp_path: Path, clock: list[float]) -> None:
    found = records.result(RUN, record(tmp_path, clock, loop=False), None, "")
    assert found.speed is None and found.passes is None and found.shares == {} and found.seconds == 15.0


def test_long_curves_are_thinned_and_keep_their_end() -> None:
    curve = [Point(float(i), i, 0.0) for i in range(100_001)]
    thin = records.thin(curve)
    assert len(thin) <= 2001 and thin[0] == curve[0] and thin[-1] == curve[-1]
    assert records.thin(curve[:5]) == curve[:5]
