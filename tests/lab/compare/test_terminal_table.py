"""The table, and what is said beneath it."""

import dataclasses
import io

from lab.compare.test_comparison_folder import example
from rich.console import Console

from hocket.lab.compare import terminal_table, verdict
from hocket.lab.compare.results import Comparison, Contender, Point, Result


def shown(found: Comparison, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(terminal_table.fit(found, width)[0])
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_time_to_target_is_time_per_pass_times_passes() -> None:
    text = shown(example())
    assert "1.00 × 2.0 = 2.0" in text and "accuracy ≥ 0.95" in text and "not reached" in text
    assert "114 2.01×" in text and "75/13/12 %" in text and "12.3 kB" in text


def test_markup_in_names_and_arguments_is_text() -> None:
    curve = {name: [Point(1.0, 100, 0.5)] for name in ("acc[/val]", "acc[val]\n")}
    run = dataclasses.replace(example().entries[0].results[0], curves=curve)
    found = dataclasses.replace(
        example(), target=None, arguments=("exclude=[/data]",), entries=(Contender("mirrored", 1, (run,)),)
    )
    text = shown(found)
    assert "exclude=[/data]" in text and "acc[/val]" in text and "acc[val]" in text


def test_a_narrow_terminal_has_fewer_columns_and_says_which() -> None:
    assert terminal_table.fit(example(), 100)[1] == []
    for width in (20, 30, 40, 60, 80):
        text, (_, without) = shown(example(), width), terminal_table.fit(example(), width)
        titles = [" ".join(column.title.split()) for column in terminal_table.columns(example()) if column.title]
        assert all(len(line) <= width for line in text.splitlines())
        assert without == [title for title in titles if title in without]
        if width >= 40:
            assert "asynchro" in text and "= 2.0" in text, text
    assert "sent" in terminal_table.fit(example(), 60)[1] and terminal_table.fit(example(), 80)[1] in ([], ["sent"])


def test_large_numbers_are_short() -> None:
    run = dataclasses.replace(
        example().entries[0].results[0], speed=1e12, curves={"loss": [Point(1.0, 100, 1e300)], "x" * 80: []}
    )
    found = dataclasses.replace(example(), target=None, entries=(Contender("mirrored", 1, (run,)),))
    text = shown(found)
    assert "1e+300" in text and "1e+12" in text and "00000" not in text


def test_failures_and_what_is_missing_are_said_beneath() -> None:
    said = terminal_table.lines(example())
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
    found = dataclasses.replace(example(), target=None, repeats=3, entries=(Contender("mirrored", 2, runs),))
    text = shown(found)
    assert "200" in text and "±50%" in text and "11.0 s" in text and "±9%" in text and "±1" in text


def test_a_long_name_and_many_repeats_fit_a_hundred_columns() -> None:
    name = "gossip(topology='exponential', asynchronous=True, period=4)"
    results = tuple(dataclasses.replace(example().entries[1].results[0], strategy=name, repeat=i) for i in range(3))
    found = dataclasses.replace(example(), entries=(*example().entries, Contender(name, 16, results)))
    assert all(len(line) <= 100 for line in shown(found).splitlines())
    assert "sent" in shown(found) and "12.3 kB" in shown(found)


def test_notes() -> None:
    alone = Result("mirrored", 1, 0, 0, speed=1.0, told={"threads": 4})
    two = Result("mirrored", 2, 0, 0, speed=1.0, told={"threads": 2})
    entries = (Contender("mirrored", 1, (alone,)), Contender("mirrored", 2, (two,)))
    found = dataclasses.replace(example(), repeats=1, entries=entries)
    said = " ".join(verdict.notes(found))
    assert "no metrics" in said and "2 workers had 2 threads each" in said and "not reached by one worker" in said
    silent = dataclasses.replace(found, entries=(Contender("mirrored", 1, (dataclasses.replace(alone, speed=None),)),))
    assert "no training loop" in verdict.notes(silent)[0]


def _with(about: dict[str, str], threads: dict[int, int], strategy: str = "mirrored") -> Comparison:
    runs = [Result(strategy, n, 0, 0, speed=1.0, told={"threads": each}) for n, each in threads.items()]
    entries = tuple(Contender(strategy, run.workers, (run,)) for run in runs)
    return dataclasses.replace(example(), about=about, target=None, wanted="", entries=entries)


def test_notes_on_threads_and_cores() -> None:
    said = " ".join(verdict.notes(_with({"cores": "2", "network": "one host"}, {1: 2, 2: 1, 4: 1})))
    assert "One worker had 2 threads (all cores" in said and "--threads 1 compares like with like" in said
    assert "4 workers shared 2 cores" in said
    said = " ".join(verdict.notes(_with({"cores": "8", "network": "one host"}, {1: 4, 2: 1})))
    assert "One worker had 4 threads, 2 workers" in said and "all cores" not in said and "shared" not in said
    said = " ".join(verdict.notes(_with({"cores": "1", "network": "4 hosts of a rig, unlimited"}, {1: 1, 4: 1, 8: 1})))
    assert "4 and 8 workers shared 1 core:" in said
    assert "shared" not in " ".join(verdict.notes(_with({"cores": "1", "network": "node1:8"}, {1: 1, 8: 1})))


def test_what_sends_nothing_says_so() -> None:
    found = _with({"cores": "2"}, {1: 1, 2: 1}, "hogwild")
    assert "hogwild on 2: 0 B are sent" in " ".join(verdict.notes(found)) and " 0 B " in shown(found)
