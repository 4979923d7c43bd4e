"""Newcomers wait for those who train, however long these take, and as long as there are some."""

import threading
from typing import Any, cast

import pytest
from server.serving import together, until

from hocket.coordinator.changes import Changes
from hocket.coordinator.coordinator_client import Coordinator
from hocket.coordinator.ledger import Ledger
from hocket.errors import WorkerLost
from hocket.transport.requests import Link


class Waiting:
    """A newcomer that takes the place of rank 1 of two workers, on a clock that the test sets."""

    def __init__(self) -> None:
        self.ledger, self.condition, self.now = Ledger(2), threading.Condition(), 0.0
        self.changes = Changes(self.condition, lambda: self.ledger.live, 2e5, lambda: self.now)
        self.notes: list[tuple[list[int], float]] = []
        self.ledger.lose(1, "was lost")

    def note(self, ranks: list[int], seconds: float) -> None:
        self.notes.append((ranks, seconds))

    def wait(self, what: str) -> Any:
        return self.changes.kept(1, self.note) if what == "kept" else self.changes.join(1, self.note)

    def pass_on(self, seconds: float) -> None:
        """Let time pass while the newcomer waits."""
        until(lambda: self.condition._waiters)  # type: ignore[attr-defined]
        with self.condition:
            self.now += seconds
            self.condition.notify_all()

    def pass_on_until_told(self, seconds: float) -> None:
        """The same, until the newcomer has told for how long it has waited."""
        self.pass_on(seconds)
        until(lambda: self.notes and self.notes[-1] == ([0], self.now))


@pytest.mark.parametrize("what", ["kept", "join"])
def test_a_newcomer_waits_as_long_as_others_train(what: str) -> None:
    waiting = Waiting()

    def work(number: int) -> Any:
        if number == 0:
            return waiting.wait(what)
        for _ in range(4):
            waiting.pass_on_until_told(1e5)
        waiting.changes.keep(b"answers", "")
        return waiting.changes.admit([1], {"generation": 1}, b"all")

    assert together(2, work)[0] == (({"failure": ""}, b"answers") if what == "kept" else ({"generation": 1}, b"all"))


@pytest.mark.parametrize("what", ["kept", "join"])
def test_a_newcomer_does_not_wait_for_ever_where_nobody_is_left(what: str) -> None:
    waiting = Waiting()

    def work(number: int) -> None:
        if number == 0:
            with pytest.raises(WorkerLost, match="all workers have ended before a new one could join them"):
                waiting.wait(what)
            return
        for _ in range(3):
            waiting.pass_on_until_told(1e5)
        waiting.ledger.lose(0, "")
        for _ in range(2):  # the launcher may end it meanwhile
            waiting.pass_on_until_told(9e4)
        waiting.pass_on(3e4)

    together(2, work)


@pytest.mark.parametrize("what", ["kept", "join"])
def test_a_worker_is_no_newcomer(what: str) -> None:
    waiting = Waiting()
    waiting.ledger.admit(1)
    with pytest.raises(ValueError, match="rank 1 is one of the workers already"):
        waiting.wait(what)


def test_a_failure_that_some_workers_know_of_counts() -> None:
    waiting = Waiting()
    waiting.changes.keep(b"answers", "")
    waiting.changes.keep(b"answers", "groups")
    assert waiting.wait("kept") == ({"failure": "groups"}, b"answers")


def test_a_worker_that_has_left_wants_nothing_more() -> None:
    """It is not a member any more, though the coordinator may not know yet that it is gone."""

    class Answers:
        def request(self, *_: object) -> tuple[dict[str, list[int]], bytes]:
            return {"ranks": [0, 1, 2], "joining": [3], "leaving": [1, 2]}, b""

    coordinator = Coordinator(0, 3, cast(Link, Answers()))
    assert coordinator.wanted() == {"joining": [3], "leaving": [1, 2]}
    assert coordinator.wanted((0, 1)) == {"joining": [3], "leaving": [1]}
