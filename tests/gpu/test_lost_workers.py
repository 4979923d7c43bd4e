"""Workers on a GPU that are killed: NCCL is left and made anew, and the others go on.

Without MPS, with which a process that is killed while it computes takes the others along.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool

from hocket.launch import mps
from job import test_newcomers, test_regrouping

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.skipif(mps.is_running(), reason="MPS is running, and a process that is killed takes the others along"),
    pytest.mark.keeps_ports,
]
SIGKILL = 9
TRANSPORTS: list[dict[str, Any]] = [{"share_gpus": True}, {"transport": "shared-memory"}]


@pytest.fixture(scope="module", autouse=True)
def ended(pool: Pool) -> Iterator[None]:
    yield
    pool.close()  # NCCL keeps a port open for as long as a process lives


@pytest.mark.parametrize("transport", TRANSPORTS, ids=str)
@pytest.mark.parametrize("phase", test_regrouping.PHASES)
@pytest.mark.parametrize(("size", "dead"), [(2, 1), (3, 0)])
def test_the_others_go_on(
    pool: Pool, tmp_path: Path, size: int, dead: int, phase: str, transport: dict[str, Any]
) -> None:
    deaths = {dead: (3, phase)}
    found = pool.outcomes_with_death(
        size, test_regrouping.train, dead, str(tmp_path), deaths, 0, "mirrored", None, "cuda", on_loss="continue",
        check_replicas=1, **transport,
    )  # fmt: skip
    test_regrouping.check(tmp_path, found, deaths, size)


@pytest.mark.parametrize("strategy", ["local_sgd(period=4)", "diloco(period=3)", "central", "delayed"])
def test_the_others_go_on_with_every_strategy(pool: Pool, tmp_path: Path, strategy: str) -> None:
    deaths = {1: (5, "forward")}
    found = pool.outcomes_with_death(
        3, test_regrouping.train, 1, str(tmp_path), deaths, 0, strategy, None, "cuda", on_loss="continue",
        share_gpus=True,
    )  # fmt: skip
    left = [found[0], found[2]]
    assert all(not isinstance(each, Exception) for each in left), left
    assert left[0][0] == left[1][0] and [each[2] for each in left] == [2, 2]


@pytest.mark.parametrize("strategy", ["mirrored", "central", "central(fused=True)"])
@pytest.mark.parametrize("phase", ["forward", "between"])
def test_a_lost_worker_is_replaced(pool: Pool, tmp_path: Path, strategy: str, phase: str) -> None:
    found = pool.outcomes(
        3, test_newcomers.train, str(tmp_path), {1: (3, phase)}, 0, strategy, SIGKILL, "cuda", replaced=[1],
        on_loss="replace", check_replicas=1, share_gpus=True,
    )  # fmt: skip
    test_newcomers.check_law(test_newcomers.check(tmp_path, found, 3), found[0][0])
    assert found[1][6]


@pytest.mark.parametrize("strategy", ["local_sgd(period=4)", "diloco(period=3)", "delayed"])
def test_a_lost_worker_is_replaced_whose_last_steps_are_lost(pool: Pool, tmp_path: Path, strategy: str) -> None:
    found = pool.outcomes(
        3, test_newcomers.train, str(tmp_path), {1: (5, "forward")}, 0, strategy, SIGKILL, "cuda", replaced=[1],
        on_loss="replace", share_gpus=True,
    )  # fmt: skip
    test_newcomers.check(tmp_path, found, 3)
