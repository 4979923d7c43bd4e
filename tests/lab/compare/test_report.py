"""Pictures and page of a comparison: what is in them, and what is said where something is missing."""

import dataclasses
import json
import re
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from lab.compare.example import KINDS, TARGET, entry, made

from hocket.errors import UsageError
from hocket.lab.compare import html_report, metric_pictures, pictures, scaling_pictures, summary, verdict
from hocket.lab.compare.looks import Looks
from hocket.lab.compare.results import Comparison, Contender, Point, Result


def changed(one: Contender, **changes: Any) -> Contender:
    results = tuple(dataclasses.replace(result, **changes) for result in one.results)
    return dataclasses.replace(one, results=results)


def with_times(*times: list[float]) -> Comparison:
    """One worker and others that reached the target after so many seconds."""
    entries = []
    for number, own in enumerate(times):
        name = "mirrored" if number == 0 else list(KINDS)[number - 1]
        results = [
            Result(name, 4 if number else 1, 0, repeat, reached=Point(seconds, 100, 0.96) if seconds else None)
            for repeat, seconds in enumerate(own)
        ]
        entries.append(Contender(name, 4 if number else 1, tuple(results)))
    return made(entries=tuple(entries))


@pytest.fixture(scope="module")
def text() -> str:
    return html_report.html(made())


def names(comparison: Comparison) -> set[str]:
    return {re.sub(r"metric-\d-", "", picture.name) for picture in pictures.pictures(comparison)}


def test_all_pictures_are_there_and_are_pngs(tmp_path: Path) -> None:
    paths = pictures.write(made(repeats=2, workers=(2,)), tmp_path / "a" / "b")
    assert [path.read_bytes()[:4] for path in paths] == [b"\x89PNG"] * len(paths)
    found = names(made())
    assert found >= {"time-to-target", "passes", "accuracy-time", "accuracy-samples", "loss-time", "loss-samples"}
    assert found >= {"shares", "sent", "speed-up", "efficiency", "processes", "staleness", "noise-scale"}


def test_the_targets_metric_comes_first() -> None:
    found = [picture.name for picture in pictures.pictures(made())]
    assert found.index("metric-0-accuracy-time") < found.index("shares") < found.index("metric-1-loss-time")


def test_a_picture_without_data_is_left_out() -> None:
    few = {"workers": 1, "shares": {}, "sent": 0, "staleness": {}, "curves": {}, "reached": None, "gradients": {}}
    bare = made(target=None, entries=tuple(changed(e, **few) for e in made(workers=(4,)).entries))
    assert names(bare) == {"throughput"}
    unknown = made(target=None, entries=tuple(changed(e, **few, speed=None) for e in made(workers=(4,)).entries))
    assert names(unknown) == {"time"}
    unknown = made(target=None, entries=tuple(changed(e, seconds=0.0) for e in unknown.entries))
    assert names(unknown) == set()
    assert "Pictures" not in html_report.html(unknown)
    assert names(made(workers=(4,))) & {"speed-up", "efficiency"} == set()
    nothing = made(entries=())
    assert names(nothing) == set() and "No run has ended yet." in html_report.html(nothing)


def test_the_same_comparison_gives_the_same_page(text: str) -> None:
    assert html_report.html(made()) == text


def test_ids_in_the_page_are_unique_and_lead_somewhere(text: str) -> None:
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(#|href="#)([^")]*)', text)) <= set(ids)


def test_the_page_needs_nothing_else(text: str) -> None:
    assert not re.search(r'(?:src|href)="(?!#|data:)', text) and "@import" not in text
    assert "abcd" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)  # a placeholder of a colour
    assert len(re.findall("<script", text)) == 1


def test_the_data_are_in_the_page() -> None:
    comparison = made(workers=(2,))
    curve = comparison.entries[0].results[0].curves
    curve["accuracy"][3] = Point(1.0, 2, float("nan"))
    text = html_report.html(comparison)
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    assert data["entries"][0]["results"][0]["curves"]["accuracy"][3] == {"seconds": 1.0, "samples": 2, "value": None}
    assert data["entries"][4]["results"][2]["speed"] == comparison.entries[4].results[2].speed


def test_what_comes_from_outside_is_text() -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)> & \"'"
    bad = Contender(evil, 2, (Result(evil, 2, 0, 0, failure=evil), Result(evil, 2, 0, 1, failure=evil)))
    odd = changed(entry("central", 2, 2), strategy=evil, curves={evil: [Point(1, 1, 0.5), Point(2, 2, 0.6)]})
    odd = dataclasses.replace(odd, strategy=f"b{evil}")
    comparison = made(
        script=evil, command=evil, about={evil: evil}, notes=(evil,), entries=(entry("mirrored", 1, 2), bad, odd)
    )
    text = html_report.html(comparison)
    assert "<img" not in text and text.count("<script") == 1 and text.count("</script>") == 1
    assert unescape(text).count(evil) > 6
    assert f"2 of 2 repeats: {evil}" in unescape(text)


def test_two_metrics_of_the_same_letters_have_two_files(tmp_path: Path) -> None:
    points = [Point(1, 1, 0.5), Point(2, 2, 0.6)]
    odd = changed(entry("mirrored", 1, 1), curves={"a/b": points, "a b": points, "../x": points, "é": points})
    paths = pictures.write(made(entries=(odd,), target=None), tmp_path)
    assert len(set(paths)) == len(paths) and sum("metric-" in path.name for path in paths) == 8
    assert {path.parent for path in paths} == {tmp_path}


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ([[20, 21, 22], [10, 11, 12]], "mirrored on 4 workers reached accuracy 0.95 first: 11.0 s, 1.9 times as fast"),
        ([[20, 21, 22], [10, 11, 30]], "Their repeats overlap (10.0 s to 30.0 s and 20.0 s to 22.0 s), so this may be"),
        ([[9, 10, 11], [12, 13, 14]], "Nothing beat one worker, which reached accuracy 0.95 in 10.0 s; the best of"),
        (
            [[20, 21, 22], [10, 11, 12], [11, 12, 13]],
            "Within the spread of the repeats central on 4 workers is as good",
        ),
        ([[20, 21], [10, 0], [15, 16]], "central on 4 workers reached accuracy 0.95 first: 15.5 s"),
        (
            [[20, 21], [10, 0]],
            "one worker, which reached accuracy 0.95 in every repeat: 20.5 s; the best of the others,",
        ),
        ([[20, 0], [10, 0]], "first (in 1 of 2 repeats): 10.0 s, 2 times as fast"),
        (
            [[0, 5, 0], [6, 6, 6]],
            "mirrored on 4 workers reached accuracy 0.95 in every repeat: 6.00 s; one worker did so in 1 of 3",
        ),
        ([[9, 9], [9, 9]], "mirrored on 4 workers reached accuracy 0.95 as fast as one worker: 9.00 s."),
        ([[10], [9.8]], "9.80 s, 1.02 times as fast as one worker"),
        ([[0, 0], [10, 11]], "10.5 s; one worker did not reach it."),
        ([[20], [0]], "Only one worker reached accuracy 0.95: 20.0 s."),
        ([[0], [0]], "No run reached accuracy 0.95."),
    ],
)
def test_the_answer(times: list[list[float]], said: str) -> None:
    assert said in verdict.of(with_times(*times))


def test_the_answer_by_throughput() -> None:
    bare = [changed(e, curves={}, reached=None) for e in made(workers=(4,)).entries]
    said = verdict.of(made(entries=tuple(bare), target=None))
    assert re.match(r"local_sgd\(period=16\) on 4 workers is fastest: [\d,]+ samples/s, 3\.\d times as fast as", said)
    assert "--until loss=VALUE" in verdict.of(made(target=None))
    slow = (bare[0], *(changed(e, speed=1.0) for e in bare[1:]))
    assert "Nothing beat one worker" in verdict.of(made(entries=slow, target=None))
    failed = tuple(changed(e, failure="exit status 1") for e in bare)
    assert verdict.of(made(entries=failed)) == "Every run failed."
    assert verdict.of(made(missing=2)).endswith("2 runs are still to be made.")


def test_the_table_has_a_row_for_each_and_no_empty_column() -> None:
    comparison = made()
    failed = changed(entry("central", 8, 3), failure="rank 3 ran out of memory")
    columns, rows = summary.of(dataclasses.replace(comparison, entries=(*comparison.entries, failed)))
    titles = [column.title for column in columns]
    assert len(rows) == 12 and {len(row) for row in rows} == {len(titles)}
    assert rows[0][0] == "one worker" and rows[-1][titles.index("time to target")] == "failed"
    time, one_pass, passes = (titles.index(name) for name in ("time to target", "= one pass", "× passes"))
    found = [row for row in rows[:-1] if row[one_pass].endswith(" s")]
    for row in found:  # to the three digits that are shown
        product = float(row[one_pass].removesuffix(" s")) * float(row[passes])
        assert product == pytest.approx(float(row[time].partition(" s")[0]), rel=0.01)
    assert len(found) > 2
    unstale = tuple(changed(e, staleness={}, shares={}) for e in comparison.entries)
    fewer = {column.title for column in summary.of(made(entries=unstale))[0]}
    assert set(titles) - fewer == {"staleness", "compute · communication · waiting"}


def test_an_even_number_of_repeats_still_multiplies() -> None:
    for each in made(repeats=2).entries:
        assert each.time_to_target and each.passes and each.seconds_per_pass
        assert each.passes * each.seconds_per_pass == pytest.approx(each.time_to_target.median)


def test_the_median_of_curves_against_samples() -> None:
    a, b = [Point(0, 0, 0.0), Point(4, 40, 4.0)], [Point(9, 10, 2.0), Point(19, 30, 4.0)]
    c = [Point(0, 5, 9.0), Point(1, 20, 9.0)]
    assert metric_pictures.against_samples([a]) == [(0.0, 0.0, 0.0, 0.0), (40.0, 4.0, 4.0, 4.0)]
    rows = metric_pictures.against_samples([a, b, c])
    assert [row[0] for row in rows] == [10, 20, 30]  # all have begun, and half have not ended
    assert rows[1] == (20, 3.0, 2.0, 9.0)


def test_the_median_of_curves_against_time() -> None:
    """A repeat that is ten times as slow moves the curve to the right, and takes nothing away from it."""
    fast = [Point(1, 10, 0.5), Point(2, 20, 0.7), Point(3, 30, 0.9)]
    slow = [Point(10 * p.seconds, p.samples, p.value + 0.1) for p in fast[:2]]
    rows = metric_pictures.against_time([fast, slow])
    assert [seconds for seconds, _ in rows] == [5.5, 11, 11.5]
    assert [value for _, value in rows] == pytest.approx([0.55, 0.75, 0.85])
    unknown = [Point(1, 0, 0.5), Point(2, 0, 0.7)]
    assert metric_pictures.against_time([unknown, unknown[:1]]) == [(1, 0.5), (2, 0.7)]


def test_laws_are_told_in_words() -> None:
    (picture,) = [picture for picture in scaling_pictures.pictures(made(), Looks(made())) if picture.says]
    assert re.match(r"mirrored: by Amdahl's law, [\d.]+ % of the work is serial: at most \d+ times as", picture.says[0])
    assert "a third would show" in picture.says[-1]
    more = scaling_pictures.scalings(made(workers=(2, 3, 4, 8)))
    for one in more:
        assert one.gunther
        for count, measured in zip(one.counts, one.speed_ups, strict=True):
            assert one.gunther.speed_up(count) == pytest.approx(measured.median, rel=0.15)


def with_threads(alone: int, others: int, **about: str) -> Comparison:
    entries = tuple(changed(e, told={"threads": alone if e.workers == 1 else others}) for e in made().entries)
    return made(entries=entries, about=about)


def test_laws_of_what_is_not_alike_are_no_facts() -> None:
    def says(comparison: Comparison) -> tuple[str, ...]:
        return next(p.says for p in scaling_pictures.pictures(comparison, Looks(comparison)) if p.says)

    unlike = says(with_threads(2, 1, cores="2", network="one host"))
    assert unlike[0] == (
        "Not like with like: one worker had 2 threads, each of 2 workers 1, each of 4 workers 1; --threads 1 compares"
        " like with like"
    )
    assert unlike[1] == "4 workers shared 2 cores: with more than 2, none can be as fast as the first"
    assert "tell about this machine" in unlike[2] and "taken at its word" in unlike[3]
    assert says(with_threads(1, 1, cores="4", network="one host"))[0].startswith("mirrored: by Amdahl's law, ")
    assert "shared 2 cores" in says(with_threads(1, 1, cores="2", network="4 hosts of a rig, 100mbit/s each"))[0]
    assert says(with_threads(1, 1, cores="2", network="node1:2,node2:2"))[0].startswith("mirrored: by Amdahl's")


def test_without_matplotlib_the_page_has_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install 'hocket\[report\]'"):
        pictures.write(made(), tmp_path)
    text = html_report.write(made(), tmp_path).read_text(encoding="utf-8")
    assert "<table>" in text and "<svg" not in text and "pip install" in text


@pytest.mark.parametrize("write", [html_report.write, pictures.write])
def test_a_folder_that_cannot_be_written(tmp_path: Path, write: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write .* name another folder") as caught:
        write(made(repeats=1, workers=(2,)), tmp_path / "file")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_odd_numbers_are_drawn() -> None:
    """Not one point, one value for all, NaN, zero, and values that are far apart."""
    points = [Point(0.0, 0, float("nan")), Point(1.0, 1, 0.5)]
    odd = [
        changed(entry("mirrored", 1, 1), curves={"accuracy": points}, reached=Point(0.001, 1, 1), sent=0),
        changed(entry("mirrored", 4, 1), curves={"accuracy": []}, reached=Point(5000.0, 1, 1), sent=10**12, samples=0),
        changed(entry("central", 4, 1), curves={"accuracy": points[:1]}, reached=None, shares={}, staleness={0: 0}),
        Contender("gossip", 4, ()),
    ]
    assert "<svg" in html_report.html(made(entries=tuple(odd)))
    assert TARGET.metric in summary.of(made(entries=tuple(odd)))[0][-1].title
