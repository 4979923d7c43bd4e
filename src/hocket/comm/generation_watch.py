"""What a worker knows of the others of its generation: whoever has ended, says so or not, has ended its connections."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from hocket.comm.cut_links import judge
from hocket.comm.tcp_group import TcpGroup
from hocket.errors import DeadlineExceeded, JobError, WorkerLost
from hocket.transport.gate import FINISHED
from hocket.transport.member_links import Links
from hocket.transport.store import Store
from hocket.transport.waiting import Description, Patience, Standing, give_notice, ranks, say

_TELL = 0.4  # seconds of a wait after which the others are told
_ASK = 0.5  # seconds between two questions to the coordinator, while the members are not connected yet


class Quiet(Protocol):
    """A worker's quiet connection to the others, over which all know who waits where; see ``QuietConnection``."""

    def follow(self, places: Mapping[int, tuple[str, str]]) -> None:
        """The workers of a new generation are these, each on a host with this name and this address."""

    def tell(self, standing: Standing | None) -> None:
        """Tell the others where this worker waits; None if it waits no longer."""

    def waits(self) -> dict[int, str]:
        """What each worker waits in that waits."""
        ...

    def compare(self) -> None:
        """Raise if workers wait for each other in different places, as far as is known."""

    def print_stacks(self) -> None:
        """Have all workers print their stacks, and wait until that is on the screen."""

    def leave(self, failed: bool) -> None:
        """Close the connection."""


class GenerationWatch:
    """The watch of one worker over its generation; see ``Watcher``. It has no thread.

    A worker that waits looks ten times a second whether a member's connection has ended. If it has, and the member has
    not said before that its script has ended well, then this generation is over: the worker ends its own connections,
    so that all others notice.

    Args:
        own: The number of this worker.
        members: The number of each worker, by rank.
        hosts: The name of the host of each worker.
        store: The store of this generation, in which workers say that they leave.
        live: Says which workers are alive, as far as the coordinator knows.
        timeout: Seconds to wait for a worker that is alive.
        quiet: Tells the others where this worker waits, and knows where they do.
        generation: The number of the generation.
    """

    def __init__(
        self,
        own: int,
        members: Sequence[int],
        hosts: Mapping[int, str],
        store: Store,
        live: Callable[[], Collection[int]],
        timeout: float,
        quiet: Quiet,
        generation: int = 0,
    ) -> None:
        self.members = tuple(members)
        self.on_loss: Callable[[], None] = lambda: None
        self._own, self._hosts, self._store, self._live, self._timeout = own, hosts, store, live, timeout
        self._quiet, self._generation = quiet, generation
        self.is_cut_off = False
        self._groups: list[TcpGroup] = []
        self._links: Links | None = None  # those between all members
        self._has_told = False  # the others where this worker waits
        self._lane, self._counts = "", dict[str, int]()
        self._done: set[int] = set()  # members that have said that their script has ended well
        self._asked = time.monotonic()

    def expect(self, links: Links) -> None:
        """Connections of one more group are about to be made; the first are those between all members."""
        self._links = self._links or links

    def add(self, group: TcpGroup) -> None:
        """One more group of this generation, in the order of ``expect``."""
        self._groups.append(group)

    def cut_off(self) -> list[int]:
        """The members whose hosts this worker did not reach any more when the generation ended."""
        return [] if self._links is None else sorted(self.members[rank] for rank in self._links.cut_off)

    def hang_up(self) -> None:
        """End all connections of this generation; no thread of theirs is left."""
        for group in self._groups:
            group.close()

    def enter(self, lane: str) -> None:
        """See ``Watcher``."""
        self._lane = lane
        self._counts[lane] = self._counts.get(lane, 0) + 1

    def wait(self, done: Callable[[float], bool], what: Description, members: Sequence[int] = ()) -> None:
        patience = Patience(self._timeout)
        try:
            while not done(0.1):
                self.look(what, patience, members)
        finally:
            self.rest()

    def look(self, what: Description, patience: Patience, members: Sequence[int] = ()) -> None:
        """See ``Overview``: in a long wait, the others are told where this worker waits, and that is compared."""
        missing = self._missing()
        if missing:
            raise WorkerLost(f"{ranks(missing)} ended while rank {self._own} waited in {say(what)}")
        if not self._has_told and patience.seconds > min(_TELL, self._timeout / 2):
            self._has_told = True
            self._quiet.tell(Standing(self._lane, dict(self._counts), say(what), self._generation))
        self._quiet.compare()
        if patience.is_notice_due():
            here, absent, _ = self._places(say(what), members)
            if absent and here[0] == self._own:
                give_notice(here, absent, patience.seconds, what, self._timeout)
        if patience.is_over:
            _, absent, elsewhere = self._places(say(what), members)
            self._quiet.print_stacks()
            raise DeadlineExceeded(
                f"rank {self._own} waited {self._timeout:g} s in {say(what)}"
                + (f" for {ranks(absent)} (alive)" if absent else "")
                + "".join(f"; rank {member} waits in {text}" for member, text in elsewhere.items())
                + ": the stacks above say what each rank does; if that is honest work, raise --timeout"
            )

    def rest(self) -> None:
        """See ``Outlook``: the others are told that this worker waits no longer, if they were told that it does."""
        if self._has_told:
            self._has_told = False
            self._quiet.tell(None)

    def look_for(self, members: Sequence[int]) -> None:
        """Raise if one of some ranks of this generation has ended, well or not; any thread may call it."""
        gone = [self.members[rank] for rank in self._groups[0].ended() if rank in members]
        if gone:
            raise WorkerLost(f"{ranks(gone)} ended before a group of {ranks([self.members[each] for each in members])}")

    def explain(self, error: Exception, what: Description) -> Exception:
        return WorkerLost(f"rank {self._own} waited in {say(what)}, and the connection to another broke ({error})")

    def leave(self, failed: bool) -> None:
        try:
            self._store.set(_key(self._own), "failed" if failed else "finished")
        except (JobError, RuntimeError):  # the coordinator is gone, and so is the job
            return

    def loss(
        self, missing: Sequence[int], where: str, errors: Sequence[str], silent: Mapping[int, Sequence[int]]
    ) -> WorkerLost:
        """The error of the loss of ``missing`` for all who are left; ``silent`` are those that each does not reach.

        If all are there, and links between some of them are cut, some of the others are lost: ``is_cut_off`` says
        whether this worker is one of these.
        """
        verdict = judge(self.members, self._hosts, {} if missing else silent)
        if verdict.goes:
            self.is_cut_off = self._own in verdict.goes
            loss = WorkerLost(f"{verdict.why}: {ranks(sorted(verdict.goes))} cannot stay")
            loss.died = True
            return loss
        words = {member: self._word_of(member) for member in missing}
        died = [member for member, word in words.items() if not word]
        text = f"ranks {', '.join(map(str, self.members))} {where}, "
        if died:
            text += f"and {ranks(died)} ended without a word"
        elif missing and set(words.values()) == {"finished"}:
            text += f"and {ranks(missing)} {FINISHED}"
        elif missing:
            text += f"and {ranks(missing)} ended: see what each has said"
        else:
            text += "and the connection between two of them broke, though all are alive"
        causes = "; ".join(dict.fromkeys(errors))
        loss = WorkerLost(f"{text} ({causes})" if causes else text)
        loss.died = bool(died) and len(died) == len(missing)
        return loss

    def _places(self, text: str, members: Sequence[int]) -> tuple[list[int], list[int], dict[int, str]]:
        """Who of the members that are alive waits in the same, who in nothing, and in what the others do."""
        live = self._live()
        others = [each for each in members or self.members if each != self._own and each in live]
        waits = {each: words for each, words in self._quiet.waits().items() if each in others}
        here = sorted([self._own, *(each for each, words in waits.items() if words == text)])
        elsewhere = {each: words for each, words in waits.items() if words != text}
        return here, [each for each in others if each not in waits], elsewhere

    def _missing(self) -> list[int]:
        if self._groups:
            ended = [self.members[rank] for rank in self._groups[0].ended()]
        elif time.monotonic() > self._asked + _ASK:
            self._asked = time.monotonic()
            live = self._live()
            ended = [member for member in self.members if member not in live]
        else:
            ended = []
        for member in ended:
            if member not in self._done and self._word_of(member) == "finished":
                self._done.add(member)
        return [member for member in ended if member not in self._done]

    def _word_of(self, member: int) -> str:
        """How a member has said that it ends; nothing if it has not."""
        return self._read(_key(member))

    def _read(self, key: str) -> str:
        return bytes(self._store.get(key)).decode() if self._store.check([key]) else ""


def _key(member: int) -> str:
    return f"left {member}"
