"""Which runs there are, in which order, and which are left."""

from hocket.compare import plan
from hocket.compare.plan import BASELINE, Planned, Way
from hocket.compare.results import Result

WAYS = [Way("mirrored", 2), Way("asynchronous", 2, 1)]


def test_the_baseline_comes_first_and_everything_once_before_it_comes_again() -> None:
    order = plan.order(WAYS, 2)
    assert order == [Planned(way, repeat) for repeat in (0, 1) for way in (BASELINE, *WAYS)]


def test_what_is_left_is_what_has_no_good_result() -> None:
    order = plan.order(WAYS, 1)
    results = [Result("mirrored", 1, 0, 0), Result("mirrored", 2, 0, 0, "broken")]
    assert plan.missing(order, results) == order[1:]
    assert plan.missing(order, [*results, Result("asynchronous", 2, 1, 0)]) == [order[1]]


def test_results_come_together_in_the_order_of_the_ways() -> None:
    results = [Result("asynchronous", 2, 1, 1), Result("asynchronous", 2, 1, 0), Result("mirrored", 1, 0, 0)]
    entries = plan.entries(WAYS, results)
    assert [entry.name for entry in entries] == ["one worker", "asynchronous on 2"]
    assert [result.repeat for result in entries[1].results] == [0, 1]


def test_a_comparison_is_known_again() -> None:
    assert plan.signature({"a": 1, "b": [2]}) == plan.signature({"b": [2], "a": 1}) != plan.signature({"a": 1})
