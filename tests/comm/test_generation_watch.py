"""Who is named while workers of a generation wait: those who are alive and have not come."""

import pytest
import torch.distributed as dist

from comm.quiet_ends import QuietEnd, Square
from hocket.comm.generation_watch import GenerationWatch
from hocket.errors import DeadlineExceeded, MismatchError
from hocket.transport.network_group import Among
from hocket.transport.waiting import NOTICE, Patience

TIMEOUT = 100.0
NUMBERS = (0, 2, 3, 5)


class Hour:
    """A clock that tests set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Town:
    """The watches of a generation in which one worker has died."""

    def __init__(self, *newer: int) -> None:
        store, hosts = dist.HashStore(), {number: f"host {number}" for number in NUMBERS}
        live = [number for number in NUMBERS if number != 5]
        self.hour, self.square = Hour(), Square()
        self.watches = {
            number: GenerationWatch(
                number, NUMBERS, hosts, store, lambda: live, TIMEOUT, QuietEnd(self.square, number), number in newer
            )
            for number in live
        }
        for watch in self.watches.values():
            watch._asked = float("inf")  # it is the gathering that is tested, not who is lost

    def wait(self, *numbers: int, what: str = "a sum", seconds: float, members: tuple[int, ...] = ()) -> None:
        """Let workers look, one after the other, after so many seconds of a wait that begins now."""
        patience = {number: Patience(TIMEOUT, self.hour) for number in numbers}
        for passed in (3.0, seconds):
            self.hour.now += passed
            for number in numbers:
                watch = Among(self.watches[number], members) if members else self.watches[number]
                watch.look(what, patience[number])

    def differ(self, first: str, second: str) -> None:
        """Ranks 0 and 2 wait in something each; then they look at each other's place."""
        self.wait(0, seconds=0.0, what=first)
        self.wait(2, seconds=0.0, what=second)
        self.wait(0, seconds=0.0, what=first)


@pytest.fixture
def town() -> Town:
    return Town()


def test_the_first_of_those_who_wait_names_those_who_do_not(town: Town, capfd: pytest.CaptureFixture[str]) -> None:
    town.wait(0, 3, seconds=NOTICE)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("hocket: ranks 0, 3 waited 33 s for rank 2 (alive) in a sum; giving up after 100 s")


def test_who_waits_no_longer_is_named(town: Town, capfd: pytest.CaptureFixture[str]) -> None:
    town.wait(0, 2, 3, seconds=10)
    assert not capfd.readouterr().err
    for watch in town.watches.values():
        watch.rest()
    town.wait(0, seconds=NOTICE)
    assert "rank 0 waited 33 s for ranks 2, 3 (alive) in a sum" in capfd.readouterr().err


def test_who_is_not_in_the_group_is_not_named(town: Town, capfd: pytest.CaptureFixture[str]) -> None:
    town.wait(0, seconds=NOTICE, members=(0, 3))
    assert "rank 0 waited 33 s for rank 3 (alive) in a sum" in capfd.readouterr().err


def test_the_end_of_patience_names_all(town: Town) -> None:
    town.wait(3, what="a mean", seconds=1)
    says = r"^rank 0 waited 100 s in a sum for rank 2 \(alive\); rank 3 waits in a mean: the stacks above say"
    with pytest.raises(DeadlineExceeded, match=says):
        town.wait(0, seconds=TIMEOUT)
    assert town.square.asked == 1


def test_who_waits_for_each_other_in_different_collectives(town: Town) -> None:
    for number, lanes in ((0, ["exchange 1", "exchange 1"]), (2, ["exchange 1", "collectives"])):
        for lane in lanes:
            town.watches[number].enter(lane)
    with pytest.raises(MismatchError, match="rank 0: the second; rank 2: a barrier"):
        town.differ("the second", "a barrier")


def test_who_is_in_another_generation_will_notice() -> None:
    """Rank 0 counts anew after a loss of which rank 2 does not know yet."""
    town = Town(0)
    for number, lane in ((0, "exchange 1"), (2, "collectives")):
        town.watches[number].enter(lane)
    town.differ("a sum", "a barrier")


def test_a_worker_that_is_behind_will_come(town: Town) -> None:
    """Rank 0 has the sum already, and waits until rank 2 has it, too."""
    for number, lanes in ((0, ["exchange 1", "collectives"]), (2, ["exchange 1"])):
        for lane in lanes:
            town.watches[number].enter(lane)
    town.differ("the end", "the sum")
