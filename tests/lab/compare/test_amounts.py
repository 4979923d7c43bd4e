"""Numbers are written as people read them."""

import math

import pytest

from hocket.lab.compare import amounts


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (amounts.plain(0), "0"),
        (amounts.plain(12.345), "12.3"),
        (amounts.plain(12345.6), "12,300"),
        (amounts.plain(-0.001234), "−0.00123"),
        (amounts.plain(3e-9), "3e−09"),
        (amounts.plain(-1.25e300), "−1.25e+300"),
        (amounts.given(1e-7), "1e-07"),
        (amounts.given(0.97125), "0.97125"),
        (amounts.plain(math.nan), "NaN"),
        (amounts.plain(9.999), "10"),
        (amounts.metric(0.95493), "0.9549"),
        (amounts.seconds(0.0853), "85.3 ms"),
        (amounts.seconds(12.34), "12.3 s"),
        (amounts.seconds(365), "6 min 5 s"),
        (amounts.seconds(7500), "2 h 5 min"),
        (amounts.share(0.07), "7 %"),
        (amounts.share(0.123), "12 %"),
        (amounts.share(1), "100 %"),
        (amounts.times(2.04), "2.0×"),
        (amounts.times(14.4), "14×"),
        (amounts.size(0), "0 B"),
        (amounts.size(999), "999 B"),
        (amounts.size(1000), "1 kB"),
        (amounts.size(4.2e9), "4.2 GB"),
    ],
)
def test_amounts(made: str, text: str) -> None:
    assert made == text


def test_per_cent_of_a_whole_add_up_to_a_hundred() -> None:
    assert amounts.percents([0.336, 0.336, 0.328]) == [34, 33, 33]
    assert amounts.percents([1.0, 0.0, 0.0]) == [100, 0, 0]
    assert amounts.percents([0.75, 0.125, 0.125]) == [75, 13, 12]
    assert amounts.percents([]) == []
