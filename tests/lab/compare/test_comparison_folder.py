"""The folder of a comparison: new, continued or refused; a comparison becomes JSON and comes back the same."""

import dataclasses
import json
import math
import os
from pathlib import Path

import pytest

from hocket.errors import UsageError
from hocket.lab.compare import comparison_folder as folders
from hocket.lab.compare.comparison_folder import ComparisonFolder
from hocket.lab.compare.results import Comparison, Contender, Goal, Point, Result


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
        Contender("mirrored", 1, (alone,)),
        Contender("asynchronous", 2, (good, Result("asynchronous", 2, 1, 1, "worker 1: ValueError: no"))),
    )
    about = {"cpu": "a good one", "cores": "2"}
    target = Goal("accuracy", 0.95, True)
    return Comparison(
        "train.py", ("--fast",), "hocket compare", about, target, 2, entries, 1, ("So it is.",), "accuracy=0.95"
    )


def test_json_and_back(tmp_path: Path) -> None:
    path = folders.save(example(), tmp_path)
    assert folders.load(tmp_path) == example()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]  # nothing half-written beside it


def test_numbers_that_json_has_not() -> None:
    result = Result("mirrored", 1, 0, 0, curves={"loss": [Point(1.0, 10, math.nan), Point(2.0, 20, math.inf)]})
    found = dataclasses.replace(example(), entries=(Contender("mirrored", 1, (result,)),))
    text = json.dumps(folders.to_json(found), allow_nan=False)
    values = [point.value for point in folders.from_json(json.loads(text)).entries[0].results[0].curves["loss"]]
    assert all(math.isnan(value) for value in values)


def test_a_comparison_from_before_there_was_a_field_is_read() -> None:
    older = folders.to_json(example())
    del older["wanted"]
    assert folders.from_json(older) == dataclasses.replace(example(), wanted="")


def test_what_is_no_comparison(tmp_path: Path) -> None:
    (tmp_path / folders.RESULTS).write_text("{")
    with pytest.raises(UsageError, match="choose another folder"):
        folders.load(tmp_path)
    (tmp_path / folders.RESULTS).write_text('{"version": 1, "target": null, "entries": [3]}')
    with pytest.raises(UsageError, match="is no comparison"):
        folders.load(tmp_path)
    with pytest.raises(UsageError, match="make room there"):
        folders.save(example(), tmp_path / "nowhere")
    with pytest.raises(UsageError, match="version 99"):
        folders.from_json({"version": 99})


WANTED = {"script": "train.py", "strategies": ["mirrored"], "until": None}


def begun(place: ComparisonFolder, missing: int) -> Path:
    """What is left of a comparison with so many runs to be made."""
    place.prepare(WANTED)
    folders.save(dataclasses.replace(example(), missing=missing), place.folder)
    if not missing:
        (place.folder / "report.html").write_text("done")
    place.close()
    return place.folder


def test_an_unfinished_one_is_continued_and_a_finished_one_is_not(tmp_path: Path) -> None:
    first = begun(folders.found_or_made(tmp_path, "train", WANTED), missing=1)
    again = folders.found_or_made(tmp_path, "train", WANTED)
    assert again.folder == first and again.earlier is not None and again.earlier.missing == 1
    begun(again, missing=0)
    new = folders.found_or_made(tmp_path, "train", WANTED)
    assert new.folder != first and new.earlier is None
    new.close()


def test_one_whose_report_is_missing_or_older_than_its_results_is_continued(tmp_path: Path) -> None:
    first = begun(folders.found_or_made(tmp_path, "train", WANTED), missing=0)
    os.utime(first / "report.html", (1, 1))
    again = folders.found_or_made(tmp_path, "train", WANTED)
    assert again.folder == first
    again.close()
    (first / "report.html").unlink()
    again = folders.found_or_made(tmp_path, "train", WANTED)
    assert again.folder == first
    again.close()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("thesis.tex", "mine"),
        ("results.json", "{}"),
        ("runs", "a file"),
        ("report.html", None),
        ("results.json", None),
        ("plan.json", None),
        ("plan.json", '{"wanted": [1]}'),
        ("plan.json", '{"wanted": 5}'),
        ("plan.json", "[]"),
    ],
)
def test_a_named_folder_that_holds_something_else_is_refused_and_left_as_it_is(
    tmp_path: Path, name: str, text: str | None
) -> None:
    if text is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=r"choose (a folder that is new|another folder)") as caught:
        folders.named(tmp_path, WANTED)
    assert len(str(caught.value).splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_another_one_or_one_at_work_is_not_continued(tmp_path: Path) -> None:
    first = begun(folders.found_or_made(tmp_path, "train", WANTED), missing=1)
    other = folders.found_or_made(tmp_path, "train", {**WANTED, "until": "loss=1"})
    assert other.folder != first
    at_work = folders.found_or_made(tmp_path, "train", WANTED)
    beside = folders.found_or_made(tmp_path, "train", WANTED)
    assert at_work.folder == first and beside.folder not in (first, other.folder)
    for place in (other, at_work, beside):
        place.close()


def test_a_folder_that_is_damaged_is_left_alone(tmp_path: Path) -> None:
    first = begun(folders.found_or_made(tmp_path, "train", WANTED), missing=1)
    (first / folders.RESULTS).write_text("{")
    new = folders.found_or_made(tmp_path, "train", WANTED)
    assert new.folder != first
    new.close()


def test_a_named_folder(tmp_path: Path) -> None:
    begun(folders.named(tmp_path / "out", WANTED), missing=0)
    again = folders.named(tmp_path / "out", WANTED)  # whoever names it wants it, finished or not
    assert again.earlier is not None
    with pytest.raises(UsageError, match="is being made there"):
        folders.named(tmp_path / "out", WANTED)
    again.close()
    with pytest.raises(UsageError, match="another comparison \\(until differs\\)"):
        folders.named(tmp_path / "out", {**WANTED, "until": "loss=1"})


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="choose a folder that can be written to"):
        folders.named(tmp_path / "file" / "out", WANTED)
    with pytest.raises(UsageError, match="with --out"):
        folders.found_or_made(tmp_path / "file", "train", WANTED)
