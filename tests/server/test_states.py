"""An optimizer's state in plain data and bytes, and back."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import StrategyError
from hocket.server import states
from hocket.server.shard import Stored

SHAPES = st.lists(st.integers(0, 4), max_size=3)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
TENSORS = st.tuples(SHAPES, DTYPES).map(lambda made: torch.ones(made[0], dtype=made[1]) * 1)
VALUES = TENSORS | st.none() | st.booleans() | st.integers(-(2**50), 2**50) | st.floats(allow_nan=False) | st.text()
STORED = st.builds(Stored, st.integers(0, 9), st.integers(0, 9), st.text(), VALUES)


@given(stored=st.lists(STORED, max_size=6))
def test_what_is_packed_comes_out(stored: list[Stored]) -> None:
    packed = states.pack(stored)
    described = json.loads(json.dumps(packed.described))
    room = states.allocate(described, sum(tensor.nbytes for tensor in packed.tensors))
    for target, source in zip(room.tensors, packed.tensors, strict=True):
        target.copy_(source)
    for before, after in zip(stored, states.unpack(room), strict=True):
        assert (before.index, before.start, before.key) == (after.index, after.start, after.key)
        if isinstance(before.value, torch.Tensor):
            assert before.value.dtype == after.value.dtype
            assert torch.equal(before.value, after.value)
        else:
            assert before.value == after.value
            assert type(before.value) is type(after.value)


def test_what_is_packed_is_a_copy() -> None:
    momentum = torch.zeros(3)
    packed = states.pack([Stored(0, 0, "momentum", momentum)])
    momentum += 1
    assert not packed.tensors[0].any()


@pytest.mark.parametrize(
    "described",
    [
        [[0, 0, "x", "float32", [1 << 50], None]],
        [[0, 0, "x", "float32", [1 << 20, 1 << 20, 1 << 20], None]],
        [[0, 0, "x", "float32", [-1], None]],
        [[0, 0, "x", "float32", [3], None]],
        [[0, 0, "x", "float32", [], None]],
        [[0, 0, "x", "nn", [1], None]],
        [[0, 0, "x", "no such", [1], None]],
        [[0, 0, "x", 7, [1], None]],
        [["0", 0, "x", "", None, None]],
        [[0, None, "x", "", None, None]],
        [[0, 0, 3, "", None, None]],
        [[0, 0, "x"]],
        [7],
        7,
        None,
        [],
    ],
)
def test_a_description_that_does_not_fit_the_bytes_is_refused(described: Any) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError)):
        states.allocate(described, 16)


def test_what_cannot_travel_is_told() -> None:
    with pytest.raises(StrategyError, match="keeps 'history' as a list"):
        states.pack([Stored(0, 0, "history", [1, 2])])
