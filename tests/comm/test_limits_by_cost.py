"""How many buckets there are where the cost of an exchange has been measured."""

import pytest
import torch

from hocket.comm.bucket_layout import Layout, limits_by_cost

MB = 1 << 20


def count(total: int, start: float, per_byte: float, computing: float) -> int:
    tensors = [torch.empty(MB // 16, device="meta") for _ in range(4 * total // MB)]
    return len(Layout(tensors, limits=limits_by_cost(total, start, per_byte, computing)).buckets)


@pytest.mark.parametrize(
    ("total", "start", "per_byte", "computing", "buckets"),
    [
        (14 * MB, 4.5e-3, 2e-10, 9e-3, 1),  # an exchange is dear, and there is little that could be hidden
        (14 * MB, 1e-4, 2e-10, 9e-3, 8),
        (14 * MB, 1e-4, 2e-10, 0.0, 1),  # nothing can be hidden behind nothing
        (6 * MB, 0.0, 2e-10, 1e-2, 4),  # a further one would win too little
        (512 * MB, 1e-4, 2e-10, 0.5, 10),
        (MB // 2, 1e-4, 2e-10, 9e-3, 1),
    ],
)
def test_what_cannot_be_hidden_is_least(
    total: int, start: float, per_byte: float, computing: float, buckets: int
) -> None:
    assert count(total, start, per_byte, computing) == buckets
