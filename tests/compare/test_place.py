"""The folder of a comparison: new, continued, or refused."""

import dataclasses
import os
from pathlib import Path

import pytest

from compare.test_store import example
from hocket.compare import place as places
from hocket.compare import store
from hocket.compare.place import Place
from hocket.errors import UsageError

WANTED = {"script": "train.py", "strategies": ["mirrored"], "until": None}


def begun(place: Place, missing: int) -> Path:
    """What is left of a comparison with so many runs to be made."""
    place.prepare(WANTED)
    store.save(dataclasses.replace(example(), missing=missing), place.folder)
    if not missing:
        (place.folder / "report.html").write_text("done")
    place.close()
    return place.folder


def test_an_unfinished_one_is_continued_and_a_finished_one_is_not(tmp_path: Path) -> None:
    first = begun(places.found_or_made(tmp_path, "train", WANTED), missing=1)
    again = places.found_or_made(tmp_path, "train", WANTED)
    assert again.folder == first and again.earlier is not None and again.earlier.missing == 1
    begun(again, missing=0)
    new = places.found_or_made(tmp_path, "train", WANTED)
    assert new.folder != first and new.earlier is None
    new.close()


def test_one_whose_report_is_missing_or_older_than_its_results_is_continued(tmp_path: Path) -> None:
    first = begun(places.found_or_made(tmp_path, "train", WANTED), missing=0)
    os.utime(first / "report.html", (1, 1))
    again = places.found_or_made(tmp_path, "train", WANTED)
    assert again.folder == first
    again.close()
    (first / "report.html").unlink()
    again = places.found_or_made(tmp_path, "train", WANTED)
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
        places.named(tmp_path, WANTED)
    assert len(str(caught.value).splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_another_one_or_one_at_work_is_not_continued(tmp_path: Path) -> None:
    first = begun(places.found_or_made(tmp_path, "train", WANTED), missing=1)
    other = places.found_or_made(tmp_path, "train", {**WANTED, "until": "loss=1"})
    assert other.folder != first
    at_work = places.found_or_made(tmp_path, "train", WANTED)
    beside = places.found_or_made(tmp_path, "train", WANTED)
    assert at_work.folder == first and beside.folder not in (first, other.folder)
    for place in (other, at_work, beside):
        place.close()


def test_a_folder_that_is_damaged_is_left_alone(tmp_path: Path) -> None:
    first = begun(places.found_or_made(tmp_path, "train", WANTED), missing=1)
    (first / store.RESULTS).write_text("{")
    new = places.found_or_made(tmp_path, "train", WANTED)
    assert new.folder != first
    new.close()


def test_a_named_folder(tmp_path: Path) -> None:
    begun(places.named(tmp_path / "out", WANTED), missing=0)
    again = places.named(tmp_path / "out", WANTED)  # whoever names it wants it, finished or not
    assert again.earlier is not None
    with pytest.raises(UsageError, match="is being made there"):
        places.named(tmp_path / "out", WANTED)
    again.close()
    with pytest.raises(UsageError, match="another comparison \\(until differs\\)"):
        places.named(tmp_path / "out", {**WANTED, "until": "loss=1"})


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="choose a folder that can be written to"):
        places.named(tmp_path / "file" / "out", WANTED)
    with pytest.raises(UsageError, match="with --out"):
        places.found_or_made(tmp_path / "file", "train", WANTED)
