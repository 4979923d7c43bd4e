"""The table, and what is said beneath it."""

import dataclasses
import io

from rich.console import Console

from compare.test_store import example
from hocket.compare import notes, table
from hocket.compare.results import Comparison, Entry, Point, Result


def shown(found: Comparison) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(table.build(found))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_time_to_target_is_time_per_pass_times_passes() -> None:
    text = shown(example())
    assert "1.00 × 2.0 = 2.0" in text and "accuracy ≥ 0.95" in text and "not reached" in text
    assert "114 2.01×" in text and "75/12/12 %" in text and "12.3 kB" in text


def test_failures_and_what_is_missing_are_said_beneath() -> None:
    said = table.lines(example())
    assert said == [
        "asynchronous on 2 failed (1 of 2): worker 1: ValueError: no",
        "1 run is missing: the same command makes them.",
        "So it is.",
    ]


def test_the_spread_of_repeats() -> None:
    curves = [{"loss": [Point(1.0, 1, value)]} for value in (1.0, 2.0, 3.0)]
    runs = tuple(
        Result("mirrored", 2, 0, i, seconds=10.0 + i, speed=100.0 * (i + 1), curves=curves[i]) for i in range(3)
    )
    found = dataclasses.replace(example(), target=None, repeats=3, entries=(Entry("mirrored", 2, runs),))
    text = shown(found)
    assert "200" in text and "±50%" in text and "11.0 s" in text and "±9%" in text and "±1" in text


def test_a_long_name_and_many_repeats_fit_a_hundred_columns() -> None:
    name = "gossip(topology='exponential', asynchronous=True, period=4)"
    results = tuple(dataclasses.replace(example().entries[1].results[0], strategy=name, repeat=i) for i in range(3))
    found = dataclasses.replace(example(), entries=(*example().entries, Entry(name, 16, results)))
    assert all(len(line) <= 100 for line in shown(found).splitlines())
    assert "sent" in shown(found) and "12.3 kB" in shown(found)


def test_notes() -> None:
    alone = Result("mirrored", 1, 0, 0, speed=1.0, told={"threads": 4})
    two = Result("mirrored", 2, 0, 0, speed=1.0, told={"threads": 2})
    entries = (Entry("mirrored", 1, (alone,)), Entry("mirrored", 2, (two,)))
    found = dataclasses.replace(example(), repeats=1, entries=entries)
    said = " ".join(notes.gather(found))
    assert "no metrics" in said and "2 workers had 2 threads each" in said and "not reached by one worker" in said
    silent = dataclasses.replace(found, entries=(Entry("mirrored", 1, (dataclasses.replace(alone, speed=None),)),))
    assert "no training loop" in notes.gather(silent)[0]
