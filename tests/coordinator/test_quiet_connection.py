"""Where workers come and go: all hear who waits where, a host that is silent is named, and nobody is lost here."""

import dataclasses
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest
from server.serving import SECRET, until

from hocket.config import Config
from hocket.coordinator.coordinator_client import connect
from hocket.coordinator.hosting import HostedCoordinator
from hocket.coordinator.quiet_connection import QuietConnection
from hocket.errors import MismatchError
from hocket.transport import replies
from hocket.transport.waiting import Standing
from hocket.transport.wire import Wire

HOSTS = ["a", "b", "b"]


@dataclass
class Town:
    """A coordinator in this process, and the quiet connections of all workers."""

    coordinator: HostedCoordinator
    config: Config
    ends: list[QuietConnection]
    said: list[str]

    def come(self, rank: int, host: str) -> QuietConnection:
        """A new worker, or another one with the number of a worker that is gone."""
        return QuietConnection(dataclasses.replace(self.config, rank=rank, newcomer=True), SECRET, host)


@contextmanager
def town() -> Iterator[Town]:
    """Workers on ``HOSTS``, which all are this process; each comes without waiting for others."""
    config = Config(size=len(HOSTS), timeout=20.0)
    hosted, said = HostedCoordinator(config, SECRET), list[str]()
    hosted.service.say = said.append
    config = dataclasses.replace(config, coordinator_port=hosted.said["port"])
    with ExitStack() as stack:
        stack.callback(hosted.close)
        ends = []
        for rank, host in enumerate(HOSTS):
            ends.append(QuietConnection(dataclasses.replace(config, rank=rank), SECRET, host))
            stack.callback(ends[-1].leave, failed=False)
        yield Town(hosted, config, ends, said)


def standing(lane: str, text: str, generation: int, **counts: int) -> Standing:
    return Standing(lane, counts, text, generation)


def test_all_hear_who_waits_where() -> None:
    with town() as here:
        here.ends[1].tell(standing("sums", "a sum", 0, sums=1))
        until(lambda: all(end.waits() == {1: "a sum"} for end in here.ends))
        here.ends[1].tell(None)
        until(lambda: all(end.waits() == {} for end in here.ends))


def test_who_waits_for_each_other_in_vain_is_told_unless_one_has_another_generation() -> None:
    with town() as here:
        here.ends[0].tell(standing("sums", "a sum", 1, sums=3))
        here.ends[1].tell(standing("means", "a mean", 2, means=2))
        until(lambda: all(end.waits() == {0: "a sum", 1: "a mean"} for end in here.ends))
        here.ends[0].compare()
        here.ends[0].tell(standing("sums", "a sum", 2, sums=1))
        until(lambda: here.ends[2]._news.mismatch != "")
        with pytest.raises(MismatchError, match=r"do not do the same: rank 0: a sum; rank 1: a mean\. All ranks must"):
            here.ends[2].compare()


def test_the_end_of_a_connection_is_no_loss_and_a_newcomer_has_its_number() -> None:
    with town() as here:
        here.ends[2].tell(standing("sums", "a sum", 0, sums=1))
        until(lambda: here.ends[0].waits() == {2: "a sum"})
        here.ends[2]._wire.close()
        until(lambda: here.ends[0].waits() == {})
        assert here.coordinator.service.ledger.live == [0, 1, 2]
        here.coordinator.service.lose(2, "was killed")
        newcomer = here.come(2, "c")
        newcomer.tell(standing("sums", "a start", 1, sums=1))
        until(lambda: here.coordinator.service.liveness._hosts[2] == "c")
        assert here.ends[0].waits() == {}, "it has not joined"
        here.coordinator.service.ledger.admit(2)
        until(lambda: here.ends[0].waits() == {2: "a start"})
        newcomer.leave(failed=False)
        until(lambda: here.ends[0].waits() == {})
        assert here.coordinator.service.ledger.live == [0, 1, 2]


def test_silence_is_said_and_nobody_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the kernel knows of a silent host is in place of the host: see tests/rig for real ones."""
    silences: dict[int, float] = {}
    monkeypatch.setattr(Wire, "silence", lambda wire: silences.get(id(wire), 0.0))
    with town() as here:
        liveness, address = here.coordinator.service.liveness, here.config.address
        until(lambda: len(liveness._wires) == 3)
        of = {rank: id(wire) for rank, wire in liveness._wires.items()}
        silences |= {of[1]: 2.0, of[2]: 12.0}
        until(lambda: here.said != [])
        silences[of[1]] = 11.0
        here.coordinator.service.lose(1, "was killed")
        silences[of[2]] = 0.0
        until(lambda: len(here.said) == 2)
        assert re.match(r"hocket: b \(ranks 1, 2\) does not answer: it is down .*; giving up after 10 s", here.said[0])
        assert re.match(r"hocket: b \(rank 2\) answers again after \d+\.\d s", here.said[1])
        assert here.coordinator.service.ledger.live == [0, 2]
        for end in here.ends:
            end.follow({rank: (host, address if host == "a" else "") for rank, host in enumerate(HOSTS)})
        silences |= {id(end._wire): 2.0 for end in here.ends[1:]}
        until(lambda: all(end._silence._since is not None for end in here.ends[1:]))
    assert capfd.readouterr().err.count("hocket: a (rank 0) does not answer: ") == 1, "once for a host"


def test_all_stacks_are_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with town() as here:
        here.ends[1].print_stacks()
        told: list[str] = []

        def all_have_told() -> bool:
            told.append(capfd.readouterr().err)
            return "".join(told).count("(most recent call first)") >= 3

        until(all_have_told)


def test_a_process_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another connection of a living process may break for a while, and be made again."""
    monkeypatch.setattr(replies, "GRACE", 3600.0)
    with town() as here:
        config = dataclasses.replace(here.config, rank=1)
        link, _ = connect(config, SECRET, 1)
        link._wire.close()
        assert 1 in here.coordinator.service.ledger.live
        here.ends[1]._wire.close()
        until(lambda: here.coordinator.service.ledger.live == [0, 2])
