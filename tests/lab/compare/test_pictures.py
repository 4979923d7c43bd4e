"""Pictures as files, whatever is in the data."""

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lab.compare.example import entry, made
from lab.compare.test_report import changed

from hocket.errors import UsageError
from hocket.lab.compare import drawing, html_report, pictures
from hocket.lab.compare.looks import Looks
from hocket.lab.compare.picture import Picture
from hocket.lab.compare.results import Comparison, Contender, Goal, Point

POINTS = [Point(1, 10, 0.5), Point(2, 20, 0.6)]


def named(metric: str) -> Comparison:
    entries = tuple(changed(entry(name, 1 + n, 1), curves={metric: POINTS}) for n, name in enumerate(("mirrored",) * 2))
    return made(entries=entries, target=Goal(metric, 0.55, rises=True))


@pytest.mark.few(2)
@pytest.mark.parametrize("metric", ["cost $a_b", "a$\\frac$b", "损失 😀", "a\nb\0c", "\ud800", "<b>&"])
def test_a_metric_may_have_any_name(metric: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paths = pictures.write(named(metric), tmp_path)
        text = html_report.write(named(metric), tmp_path).read_text(encoding="utf-8")
    assert len(paths) == len(pictures.pictures(named(metric))) and "could not be drawn" not in text
    assert capfd.readouterr() == ("", "")


def test_a_picture_that_cannot_be_drawn_loses_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error, right = ValueError("no such\ncolour"), pictures.pictures

    def one_fails(comparison: Comparison) -> Sequence[Picture]:
        return [dataclasses.replace(p, failure=error) if p.name == "shares" else p for p in right(comparison)]

    monkeypatch.setattr(pictures, "pictures", one_fails)
    comparison = made(repeats=1, workers=(2,))
    said = "the picture shares could not be drawn (ValueError: no such colour)"
    with pytest.raises(UsageError) as caught:
        pictures.write(comparison, tmp_path)
    assert str(caught.value) == f"{said}; all others are in {tmp_path}"
    assert len(list(tmp_path.glob("*.png"))) == len(right(comparison)) - 1
    text = html_report.html(comparison)
    assert said[1:] in text and text.count("<svg") == len(right(comparison)) - 1


def test_data_of_which_no_picture_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "noise_scale", lambda entry: 1 / 0)
    text = html_report.html(made(repeats=1, workers=(2,)))
    assert "he picture noise-scale could not be drawn (ZeroDivisionError: division by zero)" in text
    assert 'id="staleness"' in text


def test_bytes_without_samples_are_drawn() -> None:
    bare = tuple(changed(e, samples=0, speed=None, pass_samples=None, curves={}) for e in made(repeats=1).entries)
    assert "could not be drawn" not in html_report.html(made(entries=bare, target=None))


def test_pictures_of_an_earlier_report_are_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mine.png").write_bytes(b"\x89PNG")
    (tmp_path / "folder.png").mkdir()
    first = set(pictures.write(named("old"), tmp_path))
    second = set(pictures.write(named("new"), tmp_path))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"mine.png", "folder.png", *(path.name for path in second)}
    assert {path.name for path in first - second} == {"metric-0-old-time.png", "metric-0-old-samples.png"}


def test_files_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C leaves the old one, and nothing beside it."""
    comparison = made(repeats=1, workers=(2,), target=None)
    before = {path: path.read_bytes() for path in pictures.write(comparison, tmp_path)}

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    for write in (pictures.write, html_report.write):
        with pytest.raises(KeyboardInterrupt):
            write(comparison, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_no_strategy_looks_like_another() -> None:
    entries = [Contender(f"s{number}", 2, ()) for number in range(24)]
    looks = [Looks(made(entries=tuple(entries))).of(each) for each in entries]
    assert len({look.tone for look in looks[:6]}) == 6
    for what in (lambda look: (look.tone, look.hatch), lambda look: (look.tone, look.marker, look.dashes)):
        assert len({what(look) for look in looks}) == len(looks)
    assert all(look.marker != "o" for look in looks)  # that of one worker


def test_staleness_of_all_is_shown() -> None:
    late = {0: 3, 1: 5}
    entries = [entry("mirrored", 1, 1), *(changed(entry("asynchronous", 2 + n, 1), staleness=late) for n in range(8))]
    (picture,) = [p for p in pictures.pictures(made(entries=tuple(entries))) if p.name == "staleness"]
    text = drawing.svg(picture)
    assert all(f"asynchronous on {2 + n}: mean" in text for n in range(8))
