"""Gradient noise on a GPU: sums stay there until they have arrived by themselves."""

import pytest
import torch
from pool import Pool
from strategies.test_noise import check_identity, known

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@pytest.mark.parametrize("hosts", [None, (1, 1), (2, 1)])
@pytest.mark.parametrize("strategy", ["mirrored", "delayed"])
def test_sums_are_those_of_the_gradients(pool: Pool, strategy: str, hosts: tuple[int, ...] | None) -> None:
    size = sum(hosts or (2,))
    told = pool.run(size, known, strategy, "float32", False, "cuda", hosts=hosts, transport="shared-memory")
    check_identity(told, 1e-5)


@pytest.mark.keeps_ports
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strategy", ["mirrored", "delayed"])
def test_sums_over_nccl_are_those_of_the_gradients(pool: Pool, strategy: str, size: int) -> None:
    try:
        check_identity(pool.run(size, known, strategy, "float32", False, "cuda", share_gpus=True), 1e-5)
    finally:
        pool.close()  # NCCL keeps a port open for as long as a process lives
