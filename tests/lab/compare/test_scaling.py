"""Laws are found again in data that they have made."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.lab.compare import scaling
from hocket.lab.compare.scaling import Law, amdahl, gunther

COUNTS = st.lists(st.integers(2, 64), min_size=2, max_size=8, unique=True)
SERIAL = st.floats(0, 1)


def law(serial: float, settling: float = 0.0) -> Law:
    return Law("made", serial, settling, 4)


def off(candidate: Law, points: list[tuple[int, float]]) -> float:
    return math.fsum((s - candidate.speed_up(p)) ** 2 for p, s in points)


@given(COUNTS, SERIAL)
def test_amdahls_law_is_found_again(counts: list[int], serial: float) -> None:
    found = amdahl([(p, 1 / (serial + (1 - serial) / p)) for p in counts])
    assert found is not None
    assert found.serial == pytest.approx(serial, abs=1e-9) and found.settling == 0


@given(COUNTS, SERIAL, st.floats(0, 0.5))
def test_gunthers_law_is_found_again(counts: list[int], serial: float, settling: float) -> None:
    found = gunther([(p, law(serial, settling).speed_up(p)) for p in counts])
    assert found is not None
    assert found.serial == pytest.approx(serial, abs=1e-6) and found.settling == pytest.approx(settling, abs=1e-7)


@given(st.lists(st.tuples(st.integers(2, 32), st.floats(0.05, 40)), min_size=2, max_size=12), SERIAL, st.floats(0, 1))
def test_nothing_within_the_bounds_is_nearer(points: list[tuple[int, float]], serial: float, settling: float) -> None:
    a, g = amdahl(points), gunther(points)
    if scaling.reason_not_to_fit(points):
        assert a is None and g is None
        return
    assert a is not None and g is not None
    assert 0 <= a.serial <= 1 and 0 <= g.serial <= 1 and g.settling >= 0
    nearby = [(s, k) for s in (0.95, 1, 1.05) for k in (0.95, 1, 1.05)]
    assert all(off(a, points) <= off(law(min(1, a.serial * s)), points) * (1 + 1e-6) for s, _ in nearby)
    assert all(off(g, points) <= off(law(min(1, g.serial * s), g.settling * k), points) * (1 + 1e-6) for s, k in nearby)


def test_two_worker_counts_besides_one_are_needed() -> None:
    assert "only 4 was tried: --workers 1,2,4" in scaling.reason_not_to_fit([(1, 1.0), (4, 3.0), (4, 3.1)])
    assert "none was tried" in scaling.reason_not_to_fit([(1, 1.0)])
    assert amdahl([(1, 1.0), (4, 3.0)]) is None
    assert scaling.reason_not_to_fit([(2, 1.9), (4, 3.0)]) == ""


def test_what_laws_say() -> None:
    assert law(0.07).says() == "7 % of the work is serial: at most 14 times as fast however many workers"
    assert law(0).says() == "no serial part is seen up to 4 workers"
    assert law(1).says() == "no part of the work gets faster with more workers"
    peaked = law(0.05, 0.01)
    assert peaked.peak == pytest.approx(math.sqrt(95))
    assert peaked.says().endswith("fastest with about 10 workers (4.3 times as fast), slower with more")
    assert "far beyond the 4 workers tried" in law(0.05, 0.0001).says()
    assert "one alone is fastest" in law(0.5, 0.9).says()
    assert law(0.07).limit == pytest.approx(1 / 0.07) and law(0).limit == math.inf


def test_faster_than_ideal_and_slower_than_one() -> None:
    better, worse = amdahl([(2, 2.2), (4, 4.4)]), gunther([(2, 0.8), (4, 0.5)])
    assert better is not None and better.serial == 0
    assert worse is not None and worse.speed_up(4) < 1
