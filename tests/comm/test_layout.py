"""How tensors are fused into buckets."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.comm.bucket_layout import Layout, Limits, bucket_limits

MB = 1 << 20


def sizes(counts: list[int]) -> list[float]:
    """The sizes of buckets, in MB, for tensors of so many KiB."""
    tensors = [torch.empty(count << 8, device="meta") for count in counts]
    layout = Layout(tensors, limits=bucket_limits(sum(t.nbytes for t in tensors)))
    return [round(bucket.nbytes / MB, 1) for bucket in layout.buckets]


def test_little_goes_in_one() -> None:
    assert sizes([16] * 60) == [0.9]
    assert sizes([16] * 100) == [0.8, 0.8]


def test_a_small_one_first_then_at_least_four_and_little_at_the_end() -> None:
    assert sizes([500] * 40) == [1.0, 4.9, 4.9, 4.9, 2.9, 1.0]


def test_at_most_25_mb() -> None:
    found = sizes([5000] * 100)
    assert max(found) <= 25 and len(found) >= 20


def test_a_large_tensor_is_not_divided_and_takes_little_ones_along() -> None:
    assert sizes([80, 16384, 8, 16384, 8, 6272]) == [16.1, 16.0, 6.1]


def test_nothing_tiny_goes_alone_not_even_first() -> None:
    """A head of 2 kB before layers of 1 MB each: fusion is there so that such little does not travel by itself."""
    assert min(sizes([2, *[1024] * 24])) >= 0.25


@given(
    counts=st.lists(st.integers(0, 50), min_size=1, max_size=30),
    limits=st.builds(Limits, st.integers(1, 500), st.integers(1, 500), st.integers(0, 500), st.integers(0, 100)),
    seed=st.integers(0, 100),
)
def test_every_tensor_has_a_place_of_its_own(counts: list[int], limits: Limits, seed: int) -> None:
    tensors = [torch.full((count,), float(i)) for i, count in enumerate(counts)]
    order = torch.randperm(len(counts), generator=torch.Generator().manual_seed(seed)).tolist()
    layout = Layout(tensors, order=order, limits=limits)
    flats = layout.allocate()
    for view, tensor in zip(layout.views(flats), tensors, strict=True):
        view.copy_(tensor)
    for view, tensor in zip(layout.views(flats), tensors, strict=True):
        assert torch.equal(view, tensor)
    positions = [(layout.places[i].bucket, layout.places[i].start) for i in order if counts[i]]
    assert positions == sorted(positions)
    assert sorted(i for bucket in range(len(layout.buckets)) for i in layout.members(bucket)) == sorted(order)
