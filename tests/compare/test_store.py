"""A comparison becomes JSON and comes back the same."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from hocket.compare import store
from hocket.compare.results import Comparison, Entry, Point, Result, Target
from hocket.errors import UsageError


def example() -> Comparison:
    """One with something in every field."""
    reached = Point(2.0, 200, 0.96)
    curves = {"accuracy": [Point(1.0, 100, 0.5), reached], "loss": [Point(1.0, 100, 1.25)]}
    shares = {"compute": 0.75, "communication": 0.125, "waiting": 0.125}
    good = Result(
        "asynchronous", 2, 1, 0, "", 3.5, 1.5, 400, 114.3, 100, shares, 12345, {0: 7, 3: 1}, curves, reached,
        {"noise scale": 32.5, "says": "up to 64 samples"},
    )  # fmt: skip
    alone = Result("mirrored", 1, 0, 0, seconds=7.0, samples=400, speed=57.0)
    entries = (
        Entry("mirrored", 1, (alone,)),
        Entry("asynchronous", 2, (good, Result("asynchronous", 2, 1, 1, "worker 1: ValueError: no"))),
    )
    about = {"cpu": "a good one", "cores": "2"}
    target = Target("accuracy", 0.95, True)
    return Comparison(
        "train.py", ("--fast",), "hocket compare", about, target, 2, entries, 1, ("So it is.",), "accuracy=0.95"
    )


def test_json_and_back(tmp_path: Path) -> None:
    path = store.save(example(), tmp_path)
    assert store.load(tmp_path) == example()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]  # nothing half-written beside it


def test_numbers_that_json_has_not() -> None:
    result = Result("mirrored", 1, 0, 0, curves={"loss": [Point(1.0, 10, math.nan), Point(2.0, 20, math.inf)]})
    found = dataclasses.replace(example(), entries=(Entry("mirrored", 1, (result,)),))
    text = json.dumps(store.to_json(found), allow_nan=False)
    values = [point.value for point in store.from_json(json.loads(text)).entries[0].results[0].curves["loss"]]
    assert all(math.isnan(value) for value in values)


def test_a_comparison_from_before_there_was_a_field_is_read() -> None:
    older = store.to_json(example())
    del older["wanted"]
    assert store.from_json(older) == dataclasses.replace(example(), wanted="")


def test_what_is_no_comparison(tmp_path: Path) -> None:
    (tmp_path / store.RESULTS).write_text("{")
    with pytest.raises(UsageError, match="choose another folder"):
        store.load(tmp_path)
    (tmp_path / store.RESULTS).write_text('{"version": 1, "target": null, "entries": [3]}')
    with pytest.raises(UsageError, match="is no comparison"):
        store.load(tmp_path)
    with pytest.raises(UsageError, match="make room there"):
        store.save(example(), tmp_path / "nowhere")
    with pytest.raises(UsageError, match="version 99"):
        store.from_json({"version": 99})
