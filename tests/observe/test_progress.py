"""Speed, shares and time left, from records of progress."""

import pytest

from hocket.events import Progress
from hocket.observe.progress import RunPace, clock


def test_speed_shares_and_time_left_are_those_of_the_last_seconds() -> None:
    pace = RunPace()
    assert pace.text == "" and pace.rates is None and pace.seconds_left is None
    for second in range(20):  # slow at first, then 10 batches of 64 a second
        step = second if second < 10 else 10 * (second - 9)
        pace.update(Progress(2, step, 200, 64 * step, step, 64 * step, 0.1 * second, 0.3 * second), now=second)
    current = pace.rates
    assert current is not None
    assert current.samples == pytest.approx(640) and current.step_seconds == pytest.approx(0.1)
    assert current.waiting == pytest.approx(0.1) and current.communication == pytest.approx(0.2)
    assert pace.seconds_left == pytest.approx(10)
    assert pace.text == "epoch 2, step 100/200, 0:10 left, 640 samples/s, 10% waiting, 20% communication"


def test_workers_that_count_only_within_the_epoch() -> None:
    pace = RunPace()
    pace.update(Progress(1, 8, 10, 80), now=0.0)
    pace.update(Progress(1, 10, 10, 100), now=1.0)
    pace.update(Progress(2, 3, 10, 30), now=2.0)
    assert pace.rates is not None and pace.rates.samples == pytest.approx(25)
    assert pace.text == "epoch 2, step 3/10, 0:03 left, 25 samples/s"


def test_a_resumed_run_is_not_infinitely_fast() -> None:
    pace = RunPace()
    pace.update(Progress(5, 1, None, 8), now=0.0)
    pace.update(Progress(5, 2, None, 16, 1_000_000, 8_000_000), now=0.5)
    assert pace.rates is None and pace.text == "epoch 5, step 2/?"
    pace.update(Progress(5, 3, None, 24, 1_000_001, 8_000_008), now=1.0)
    assert pace.rates is not None and pace.rates.samples == pytest.approx(16)


def test_another_loader_between_two_epochs_does_not_count_backwards() -> None:
    pace = RunPace()
    pace.update(Progress(1, 10, 10, 100), now=0.0)
    pace.update(Progress(1, 2, 5, 20), now=1.0)
    assert pace.rates is not None and pace.rates.samples == pytest.approx(20)


def test_clock() -> None:
    assert [clock(seconds) for seconds in (0.2, 42, 3723)] == ["0:00", "0:42", "1:02:03"]
