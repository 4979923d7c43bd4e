"""A long run of groups in which one member's messages to another are changed, cut short, or sent twice.

    python tests/fuzz/member_links.py --minutes 30 [--seed 1]

Ends with an error if a member hangs, gets a wrong sum, or goes on with connections on which something else came.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from comm.tcp_groups import Guard, groups, together
from hocket.comm.tcp_group import TcpGroup
from hocket.errors import JobError
from hocket.messages import HEADER, begin
from hocket.transport.streams import DATA, Outgoing
from hocket.transport.wire import hang_up

ROUNDS = 4


def flip(frame: bytes, chance: random.Random) -> bytes:
    """Another header: each byte of it is looked at."""
    data = bytearray(frame)
    for _ in range(chance.randint(1, 4)):
        data[chance.randrange(HEADER.size)] ^= 1 << chance.randrange(8)
    return bytes(data) if data != frame else flip(frame, chance)


def insert(frame: bytes, chance: random.Random) -> bytes:
    return chance.randbytes(chance.randint(1, 100)) + frame


def twice(frame: bytes, chance: random.Random) -> bytes:
    return frame + frame


WAYS = {
    "flip": flip,
    "insert": insert,
    "twice": twice,
    "cut": lambda frame, chance: frame[: chance.randrange(len(frame))],
}


def tamper(out: Outgoing, number: int, change: Callable[[bytes], bytes], *, ends: bool) -> None:
    """Have the message of this ``number`` changed on its way."""
    genuine = out.send

    def send(views: list[memoryview]) -> bool:
        if out._number != number:
            return genuine(views)
        start = begin(DATA, number, {}, sum(view.nbytes for view in views), 0, 0, 1 << 40)
        out._number += 1
        out._left.append(memoryview(change(start + b"".join(views))))
        is_sent = out.push()
        if ends:
            hang_up(out.wire.connection)
        return is_sent

    out.send = send  # type: ignore[method-assign]


def one_group(chance: random.Random, way: str, algorithm: str, count: int, *, encrypted: bool = False) -> str:
    """Rounds of a group in which one message is not what was sent; how that was noticed, and first of all."""
    size = chance.choice([2, 3, 4])
    liar = chance.randrange(size)
    peer = (liar + 1) % size

    def work(group: TcpGroup) -> list[float]:
        group.choice.asked = algorithm
        if group.rank == liar:
            out, number = group._links._out[peer], chance.randrange(2)
            tamper(out, number, lambda frame: WAYS[way](frame, chance), ends=way == "cut")
        found = []
        for number in range(ROUNDS):
            value = torch.full((count,), float(number + group.rank))
            group.allreduce(value, "sum", "a fuzzed sum")
            assert torch.equal(value, value[:1].expand(count)), "a wrong sum"
            found.append(float(value[0]))
            assert found[-1] == sum(number + rank for rank in range(size)), "a wrong sum"
        return found

    with groups(size, encrypted=encrypted, guard=Guard(timeout=20.0)) as members:
        outcomes = together(members, work)
    assert not any(isinstance(each, AssertionError) for each in outcomes), outcomes
    if all(isinstance(each, list) for each in outcomes):
        return "harmless"  # with this algorithm the liar has little to say to that member
    assert all(isinstance(each, JobError) for each in outcomes), outcomes
    assert not any(isinstance(each, TimeoutError) for each in outcomes), outcomes
    if way != "cut":  # which is a connection that broke
        assert members[peer]._links.refused == {"not the message that was to come": 1}, outcomes
    return "refused"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    told = parser.parse_args()
    end, seed, found = time.monotonic() + 60 * told.minutes, told.seed, {"refused": 0, "harmless": 0}
    while time.monotonic() < end:
        chance = random.Random(seed)
        way, algorithm = (
            chance.choice(sorted(WAYS)),
            chance.choice(["ring", "tree", "halving_doubling", "star", "direct"]),
        )
        try:
            found[
                one_group(chance, way, algorithm, chance.choice([1, 1000, 300_000]), encrypted=chance.random() < 0.3)
            ] += 1
        except BaseException:
            print(f"seed {seed}: {way}, {algorithm}", file=sys.stderr)
            raise
        seed += 1
        if seed % 100 == 0:
            print(f"seed {seed}: {found}", flush=True)
    print(found)


if __name__ == "__main__":
    main()
