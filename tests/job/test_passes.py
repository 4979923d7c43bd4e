"""What is left of an epoch: whoever goes on, and however often, every sample comes once."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.job.loader.division import least, share
from hocket.job.loader.global_batch import GlobalBatch
from hocket.job.loader.passes import Rest
from hocket.job.loader.sharding import Plan, ShardedIndices
from hocket.job.randomness import OwnRandom


@settings(max_examples=200)
@given(
    total=st.integers(0, 40),
    runs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.booleans(), st.randoms()), max_size=4),
)
def test_every_sample_comes_once_over_several_runs(total: int, runs: list[Any]) -> None:
    rest, done = Rest(), list[int]()
    for ranks, size, in_step, random in runs:
        sampler = ShardedIndices(range(total), GlobalBatch(size, ranks), False, 0, ranks, OwnRandom())
        plan = Plan(1, rest=rest, in_step=in_step)
        left = list(rest.pick(iter(range(total))))
        assert [rest.place(number) for number in range(len(left))] == left and rest.count(total) == len(left)
        each, whole = sampler._units(plan)
        last = -(-len(left) // whole) * each
        taken = random.randrange(last + 1)
        again = sorted(random.sample(range(taken), random.randrange(taken + 1)))
        for number in {*range(taken)} - {*again}:
            which, rank = divmod(number, each)
            batch = left[which * whole : (which + 1) * whole]
            done += share(batch, rank, each, least(size))
        rest = sampler.rest(plan, {"epoch": 1, "next": taken, "again": again})
    assert sorted([*done, *rest.pick(iter(range(total)))]) == list(range(total))
