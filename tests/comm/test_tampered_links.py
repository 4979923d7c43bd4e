"""What comes in the place of a member's message is refused by its receiver, and the group ends for all."""

import random

from products import product

from fuzz.member_links import WAYS, one_group


@product("way", way=WAYS, algorithm=["ring", "direct", "tree"], count=[10, 300_000], encrypted=[False, True])
def test_other_messages_are_refused(way: str, algorithm: str, count: int, encrypted: bool) -> None:
    found = [one_group(random.Random(seed), way, algorithm, count, encrypted=encrypted) for seed in range(3)]
    assert "refused" in found
