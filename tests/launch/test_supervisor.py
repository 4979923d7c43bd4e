"""The supervisor with workers that are made up: what is said when several things happen at once."""

from collections.abc import Callable, Iterator

import pytest

from hocket.events import Stage, encode
from hocket.launch import supervisor
from hocket.launch.crew import Chunk, Crew, CrewMember, Loss
from hocket.launch.environment import Job
from hocket.launch.signals import Signals

TRACEBACK = b"Traceback (most recent call last):\n  File x\nValueError: broken\n"
Act = Callable[[list[CrewMember], list[Loss]], list[Chunk]]


class Actors(Crew):
    """Members of hosts a and b that do what was written for them, one act at each look."""

    def __init__(self, acts: list[Act]) -> None:
        self.members = [CrewMember(0, "a"), CrewMember(1, "b"), CrewMember(2, "b")]
        self.losses: list[Loss] = []
        self.notes: list[str] = []
        self._acts = acts

    def read(self, seconds: float) -> Iterator[Chunk]:
        if self._acts:
            yield from self._acts.pop(0)(self.members, self.losses)

    def signal(self, member: CrewMember, number: int) -> None:
        member.returncode = -number

    def end(self) -> Iterator[Chunk]:
        return iter(())

    def close(self) -> None:
        pass


def run(acts: list[Act], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    monkeypatch.setattr(supervisor, "_GRACE", 0.0)

    def start(_: Job, __: Signals) -> Crew:
        return Actors(acts)

    status = supervisor.run(Job(("x.py",), 3), None, start=start)
    return status, capfd.readouterr().err.splitlines()


def test_a_rank_that_ends_late_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(workers: list[CrewMember], _: list[Loss]) -> list[Chunk]:
        return [Chunk(workers[1], "stderr", TRACEBACK), Chunk(workers[1], "events", encode(Stage("failed", 1)))]

    def end(workers: list[CrewMember], _: list[Loss]) -> list[Chunk]:
        workers[1].returncode = 1
        return []

    status, lines = run([fail, lambda *_: [], end], monkeypatch, capfd)
    assert status == 1
    assert lines[0].startswith("hocket: rank 1 on b ended with exit code 1 after ")
    assert lines[1] == "hocket: the other 2 workers were stopped."
    assert lines[2:] == TRACEBACK.decode().splitlines()


def test_a_lost_host_is_the_cause_of_what_failed_for_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(workers: list[CrewMember], _: list[Loss]) -> list[Chunk]:
        workers[0].returncode = 1
        return [Chunk(workers[0], "stderr", TRACEBACK.replace(b"broken", b"connection reset"))]

    def lose(workers: list[CrewMember], losses: list[Loss]) -> list[Chunk]:
        workers[1].is_lost = workers[2].is_lost = True
        losses.append(Loss("b", [1, 2], "the connection ended"))
        return [Chunk(workers[2], "stderr", b"last words")]

    status, lines = run([fail, lose], monkeypatch, capfd)
    assert status == 1
    assert lines[0] == "[2] last words"
    assert lines[1] == "hocket: rank 0 on a failed too: ValueError: connection reset"
    assert lines[-1].startswith("hocket: host b (ranks 1, 2) was lost after ")
    assert lines[-1].endswith(" s: the connection ended")
