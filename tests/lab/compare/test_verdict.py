"""The answer where there is little to go by."""

import dataclasses
import math

from lab.compare.example import TARGET, made
from lab.compare.test_report import changed, with_times

from hocket.lab.compare import html_report, pictures, summary, verdict
from hocket.lab.compare.results import Comparison, Contender, Goal, Point, Result


def by_time(*times: list[float]) -> Comparison:
    """A script without a loader: one worker, and others, that took so many seconds."""
    entries = []
    for number, own in enumerate(times):
        name, workers = ("mirrored", 1) if number == 0 else (f"strategy{number}", 2)
        results = tuple(Result(name, workers, 0, repeat, seconds=took) for repeat, took in enumerate(own))
        entries.append(Contender(name, workers, results))
    return made(target=None, entries=tuple(entries))


def test_time_alone_is_compared() -> None:
    found = by_time([3.0, 3.1], [1.6, 1.7], [2.5, 2.6])
    assert verdict.of(found) == "strategy1 on 2 workers is fastest: 1.65 s, 1.8 times as fast as one worker (3.05 s)."
    columns, rows = summary.of(found)
    titles = [column.title for column in columns]
    assert titles == ["strategy", "workers", "time", "times as fast"]
    assert [row[2:4] for row in rows][:2] == [["3.05 s\n3.00–3.10 s", "1.0×"], ["1.65 s\n1.60–1.70 s", "1.8×"]]
    assert [picture.name for picture in pictures.pictures(found)] == ["time"]
    text = html_report.html(found)
    assert "1.65 s, 1.8×" in text and "Efficiency" not in text
    slower = by_time([1.6, 1.7], [3.0, 3.1])
    assert verdict.of(slower).startswith(
        "Nothing beat one worker, which took 1.65 s; the best of the others, strategy1"
    )
    assert verdict.of(by_time([2.0], [2.0])) == "strategy1 on 2 workers is as fast as one worker: 2.00 s."
    failed = Contender("bad", 2, (Result("bad", 2, 0, 0, failure="exit status 1"),))
    more = dataclasses.replace(found, entries=(*found.entries, failed))
    assert summary.of(more)[1][-1][2] == "failed" and "<svg" in html_report.html(more)


def test_what_went_to_nan_is_not_nearest() -> None:
    def at(value: float) -> dict[str, list[Point]]:
        return {TARGET.metric: [Point(1.0, 10, 0.1), Point(2.0, 20, value)]}

    one, two, three, *_ = made(repeats=1).entries
    for lost in (math.nan, math.inf):
        bad, good = changed(two, curves=at(lost), reached=None), changed(three, curves=at(0.7), reached=None)
        low = changed(one, curves=at(0.4), reached=None)
        assert verdict.of(made(entries=(low, bad, good))) == (
            "No run reached accuracy 0.95. The nearest at its end was mirrored on 4 workers: 0.7."
        )


def test_a_wanted_target_that_could_not_be_judged() -> None:
    found = made(repeats=1, target=None)
    said = verdict.of(dataclasses.replace(found, wanted="q=0.001"))
    assert said.endswith("No run has reported a value by which --until q=0.001 could be judged.")
    assert "No target was given" not in said and "No target was given" in verdict.of(found)


def test_a_target_is_written_as_it_was_typed() -> None:
    small = dataclasses.replace(with_times([20], [10]), target=Goal("loss", 1e-07, rises=False))
    assert "reached loss 1e-07 first" in verdict.of(small)
    broken = dataclasses.replace(small, target=Goal("a\nb", 0.12345, rises=False))
    assert "reached a b 0.12345 first" in verdict.of(broken)
