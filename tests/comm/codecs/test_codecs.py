"""The laws of codecs: what was sent and what is owed is all there was; all members get the same bits."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import product

from comm.algorithms.members import in_threads
from hocket.comm.codecs.codec import Codec, Gathered, Scattered
from hocket.comm.codecs.levels import Signs, Stochastic
from hocket.comm.codecs.narrow import Cast, Integers, pack, unpack
from hocket.comm.codecs.sparse_values import LargestValues, PassedThreshold, RandomPlaces, largest
from hocket.messages import WireError

MAKES: dict[str, Callable[[int], Codec]] = {
    "fp16": lambda _: Cast(torch.float16),
    "bf16": lambda _: Cast(torch.bfloat16),
    "int8": lambda _: Integers(8, 64),
    "int4": lambda _: Integers(4, 32),
    "onebit": lambda _: Signs(),
    "topk": lambda _: LargestValues(0.05),
    "topk, warmed up": lambda _: LargestValues(0.01, warmup=3),
    "randomk": lambda _: RandomPlaces(0.1, 7),
    "threshold": lambda _: PassedThreshold(0.8),
    "ternary": lambda rank: Stochastic(2, rank),
    "qsgd(4)": lambda rank: Stochastic(4, rank),
    "qsgd(8)": lambda rank: Stochastic(8, rank),
}
BIASED = [name for name, make in MAKES.items() if not make(0).is_unbiased]


def gradients(rank: int, step: int, count: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    random = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(count, generator=random, dtype=torch.float64).to(dtype)


def train(
    name: str, size: int, count: int, steps: int, dtype: torch.dtype = torch.float64
) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
    """What each member got in every step, and what it owes at the end."""
    codecs = [MAKES[name](rank) for rank in range(size)]
    got: list[list[torch.Tensor]] = [[] for _ in range(size)]
    for step in range(steps):
        data = [gradients(rank, step, count, dtype) for rank in range(size)]
        in_threads(size, lambda links, data=data: codecs[links.rank].add_up(links, data[links.rank]))
        for rank, codec in enumerate(codecs):
            codec.end_round(counts=True)
            got[rank].append(data[rank])
    return [(each, codec.owed(each[-1])) for each, codec in zip(got, codecs, strict=True)]


@product("name", name=MAKES, size=[1, 2, 3, 5], count=[1, 33, 5000])
def test_all_members_get_the_same_bits(name: str, size: int, count: int) -> None:
    first, *others = train(name, size, count, 3)
    for other in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first[0], other[0], strict=True))


@product("name", name=BIASED, size=[1, 2, 4], count=[1, 100, 3000])
def test_what_was_sent_and_what_is_owed_is_all_there_was(name: str, size: int, count: int) -> None:
    steps = 6
    found = train(name, size, count, steps)
    whole = sum(gradients(rank, step, count) for rank in range(size) for step in range(steps))
    sent, owed = sum(found[0][0]), sum(owed for _, owed in found)
    assert torch.allclose(sent + owed, whole, rtol=1e-6, atol=1e-6)  # scales and means travel in 32 bits


WHOLE: list[Callable[[int], Codec]] = [lambda _: LargestValues(1.0), lambda _: RandomPlaces(1.0, 3)]


@pytest.mark.parametrize("make", WHOLE, ids=["topk", "randomk"])
def test_all_values_are_exact(make: Callable[[int], Codec], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MAKES, "whole", make)
    ((sums, owed), _, _) = train("whole", 3, 1000, 1)
    assert torch.allclose(sums[0], sum(gradients(rank, 0, 1000) for rank in range(3)), rtol=1e-12, atol=1e-12)
    assert not owed.any()


@settings(max_examples=30, deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    block=st.sampled_from([2, 32, 256]),
    count=st.integers(1, 2000),
    seed=st.integers(0, 99),
)
def test_integers_are_wrong_by_half_a_quantum_at_most(bits: int, block: int, count: int, seed: int) -> None:
    codec, values = Integers(bits, block), gradients(seed, 0, count, torch.float32)
    message = codec.encode(values)
    assert message.numel() == codec.size(count)
    into = torch.empty_like(values)
    codec.decode(message, into)
    for start in range(0, count, block):
        part = slice(start, start + block)
        quantum = values[part].abs().max() / (2 ** (bits - 1) - 1)
        assert (values[part] - into[part]).abs().max() <= quantum / 2 * 1.0001


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_by_chance_is_right_on_the_average(bits: int) -> None:
    codec, values, total, times = Stochastic(bits, 5), gradients(0, 0, 500, torch.float32), torch.zeros(500), 4000
    for _ in range(times):
        codec.add(codec.encode(values), total)
        codec.end_round(counts=True)
    quantum = float(values.abs().max()) / (2 ** (bits - 1) - 1)
    assert ((total / times - values).abs() <= 5 * quantum / 2 / times**0.5).all()


def test_a_round_that_does_not_count_leaves_nothing() -> None:
    for name, make in MAKES.items():
        codec, again = make(0), []
        for counts in (True, False, True):
            data = gradients(0, 1, 3000)
            in_threads(1, lambda links, codec=codec, data=data: codec.add_up(links, data))
            again.append((data, codec.owed(data).clone(), codec.rounds))
            codec.end_round(counts=counts)
        assert torch.equal(again[1][0], again[2][0]), name
        assert torch.equal(again[1][1], again[2][1]) and again[1][2] == again[2][2], name


def test_the_largest_of_many_are_found_with_a_sample() -> None:
    values = gradients(0, 0, 300_000, torch.float32)
    found = largest(values, 3000)
    exact = values.abs().topk(3000).indices
    assert len(found) == 3000 and bool((found[1:] > found[:-1]).all())
    assert len(set(found.tolist()) & set(exact.tolist())) == 3000
    assert len(largest(torch.zeros(300_000), 300)) == 300


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_packed_numbers_come_back(bits: int) -> None:
    for count in (1, 7, 8, 1000):
        random = torch.Generator().manual_seed(count)
        numbers = torch.randint(0, 1 << bits, (count,), generator=random, dtype=torch.uint8)
        assert torch.equal(unpack(pack(numbers, bits), bits, count), numbers)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from([n for n, make in MAKES.items() if isinstance(make(0), Gathered)]))
def test_a_message_that_was_changed_is_refused_or_changes_numbers_within_the_tensor(
    data: st.DataObject, name: str
) -> None:
    codec = MAKES[name](0)
    assert isinstance(codec, Gathered)
    message = codec.encode(gradients(0, 0, 200, torch.float32)).clone()
    changed = data.draw(st.sampled_from(["cut", "longer", "noise"]))
    if changed == "cut":
        message = message[: data.draw(st.integers(0, max(message.numel() - 1, 0)))]
    elif changed == "longer":
        message = torch.cat([message, torch.zeros(data.draw(st.integers(1, 9)), dtype=torch.uint8)])
    elif message.numel():
        at = data.draw(st.integers(0, message.numel() - 1))
        message[at] ^= data.draw(st.integers(1, 255))
    into = torch.zeros(200)
    try:
        codec.add(message, into)
    except WireError:
        return
    assert changed == "noise"


def test_scattered_messages_have_the_size_that_is_expected() -> None:
    for name, make in MAKES.items():
        codec = make(0)
        if isinstance(codec, Scattered):
            for count in (1, 31, 32, 33, 1000):
                assert codec.encode(gradients(0, 0, count, torch.float32)).numel() == codec.size(count), name
