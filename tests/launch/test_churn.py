"""Workers that are killed, stopped, told to leave, added and removed all the time, for a while."""

from pathlib import Path

import pytest

from fuzz.churn import churn


@pytest.mark.parametrize(
    ("strategy", "seed"),
    [
        ("mirrored", 1),
        pytest.param("local_sgd(period=4)", 2, marks=pytest.mark.all_combinations),
        pytest.param("easgd(period=4)", 3, marks=pytest.mark.all_combinations),
        pytest.param("asynchronous", 4, marks=pytest.mark.all_combinations),
        pytest.param("gossip(push_sum=True)", 5, marks=pytest.mark.all_combinations),
        pytest.param("hogwild", 6, marks=pytest.mark.all_combinations),
    ],
)
def test_every_sample_counts_once_whoever_comes_and_goes(tmp_path: Path, strategy: str, seed: int) -> None:
    assert "generations" in churn(tmp_path.resolve(), 20, seed, strategy)
