"""Strategies and numbers of workers, as given or as they fit; which runs there are, in which order, which are left."""

import pytest

from hocket.errors import HocketError, StrategyError, UsageError
from hocket.lab.compare import plan
from hocket.lab.compare.plan import BASELINE, Planned, Way
from hocket.lab.compare.results import Result
from hocket.launch import machine
from hocket.launch.host_list import Host

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


def test_commas_within_parentheses_do_not_divide() -> None:
    texts = ["mirrored, gossip(topology='pairs', asynchronous=True); local_sgd(period=16),", "mirrored"]
    assert plan.split(texts) == ["mirrored", "gossip(topology='pairs', asynchronous=True)", "local_sgd(period=16)"]
    assert plan.split(["gossip(topology='a,b')"]) == ["gossip(topology='a,b')"]
    with pytest.raises(UsageError, match="without any"):
        plan.split([" , "])


def test_numbers_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 4)
    assert plan.counts("4,1,2,2", 0, []) == [2, 4]
    assert plan.counts(None, 0, []) == [4]
    assert plan.counts(None, 3, []) == [3]
    assert plan.counts(None, 0, [Host("a", 2), Host("b", 3)]) == [5]
    for text in ("1", "x", "0,2", "2,", ""):
        with pytest.raises(UsageError, match="-n"):
            plan.counts(text, 0, [])
    with pytest.raises(UsageError, match="-n 4"):
        plan.counts(None, 0, [Host("a")])


def test_servers_are_for_those_that_need_them() -> None:
    names = ["mirrored", "asynchronous", "gossip", "easgd"]
    found = plan.given(names, [2, 4], 3)
    assert found[:4] == [Way("mirrored", 2), Way("mirrored", 4), Way("asynchronous", 2, 3), Way("asynchronous", 4, 3)]
    assert [way.servers for way in found[4:]] == [0, 0, 0, 0]


@pytest.mark.parametrize("name", ["locl_sgd", "local_sgd(perod=4)", "gossip(topology='torus')"])
def test_a_typo_or_a_misfit_is_refused(name: str) -> None:
    with pytest.raises(HocketError, match=r"local_sgd|torus|period"):
        plan.given([name], [3], 1)


def test_what_fits_one_host_and_several() -> None:
    alone, _ = plan.fitting([2], 1, {}, several_hosts=False)
    assert [way.strategy for way in alone][-1] == "asynchronous" and Way("mirrored", 2) in alone
    several, _ = plan.fitting([4], 2, {}, several_hosts=True)
    assert Way("diloco(period=64)", 4) in several and Way("asynchronous", 4, 2) in several


def test_what_does_not_fit_the_script_is_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    found, notes = plan.fitting([2], 1, {"device": "cuda"}, several_hosts=False)
    assert "central" in {way.strategy for way in found} and not notes
    found, notes = plan.fitting([2], 1, {"optimizer": "LBFGS"}, several_hosts=False)
    assert found == [Way("full_batch", 2)] and "L-BFGS" in notes[0]
    monkeypatch.setattr(plan.platform, "machine", lambda: "aarch64")
    found, notes = plan.fitting([2], 1, {}, several_hosts=False)
    assert "central" not in {way.strategy for way in found} and "x86-64" in notes[0]


def test_a_strategy_that_does_not_fit_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "ON_ONE_HOST", ("mirrored", "gossip(topology='torus')"))
    found, notes = plan.fitting([3], 1, {}, several_hosts=False)
    assert found == [Way("mirrored", 3)] and "torus" in notes[0]
    with pytest.raises(StrategyError):
        plan.given(["gossip(topology='torus')"], [3], 1)
