"""Rounds of gossip in step: everyone sends its vector to its neighbours and waits for theirs.

Workers may learn of a loss in different rounds, and then have made different graphs for the same round. Nobody agrees
on anything beforehand; instead no edge is used unless both of its ends want it:

- A message says of which pass and round it is. A worker makes its graph when it starts a round, sends to all
  neighbours in it, and waits for each neighbour until its message is there, or it is clear that none will come: the
    neighbour is lost, rests until the next pass, or *skips* this worker in this round.
- A worker that gets a message from another that is no neighbour in its own graph for that round answers that it skips
  the other, as soon as it has started that round itself. So every wait is answered, and a worker in the earliest round
  of all can always go on: no two wait for each other.
- A message has the weight that its sender has for the edge, and both ends use the smaller one. So mixing stays
  symmetric and doubly stochastic, and preserves the mean, whatever the two graphs look like; what is missing of a
  neighbour's weight is a worker's own.
- A worker that has no more batches in a pass *rests*: it tells everybody from which round on, and skips workers that
  have not heard it yet. Others, which may be in earlier rounds, make the graphs of that round and later ones without
  it. It takes part again in the next pass, which begins when all have met.

In push-sum edges have one direction, so that a waiting worker must ask for the answer; it does so after a moment. What
comes from somebody that is not waited for counts all the same, a round later: nothing that was pushed may be lost. A
worker keeps what it has pushed to somebody that never heard it.

Lost workers are noticed when their connections end, at once if a process dies.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from hocket import spans
from hocket.comm.peers import Peers, Sending
from hocket.errors import DeadlineExceeded
from hocket.messages import Message, WireError
from hocket.transport.tensor_bytes import as_bytes
from hocket.transport.waiting import Wait, ranks
from hocket.transport.wire import Wire

_ASK = 0.05  # seconds after which a worker asks whether something will come

Flats = list[torch.Tensor]
When = tuple[int, int]  # pass and round


class PeerKind(IntEnum):
    """What messages between workers are about."""

    DATA = 1
    SKIP = 2
    WANT = 3
    REST = 4
    PAIR = 5
    DELTA = 6
    ASK = 7
    SNAPSHOT = 8
    AREA = 9


@dataclass
class Arrival:
    """A vector that has come, and what was said of it; to be given back with ``Rounds.recycle``."""

    head: dict[str, Any]
    flats: Flats


class Rounds:
    """This worker's part in the rounds of gossip.

    Args:
        peers: The links; handlers are set here.
        template: Flat tensors (of the CPU) of the same lengths as those that will travel.
        timeout: Seconds to wait for a worker that is alive.
        pushes: For push-sum: edges have one direction, and what comes unexpectedly is kept.

    Attributes:
        pushed: How many messages were sent in this pass, by rank.
        unheard: How many messages of the last round have reached nobody.
    """

    def __init__(self, peers: Peers, template: Flats, timeout: float, *, pushes: bool = False) -> None:
        self._peers, self._timeout, self._pushes = peers, timeout, pushes
        self._template = template
        self._nbytes = sum(flat.nbytes for flat in template)
        self._condition = peers.condition()
        self._started: When = (0, -1)
        self._expected: frozenset[int] = frozenset()
        self._mail: dict[When, dict[int, Arrival]] = {}
        self._skips: dict[When, set[int]] = {}
        self._wants: dict[When, set[int]] = {}
        self._resting: dict[int, dict[int, int]] = {}  # by pass and rank, the first round without that rank
        self._late: list[Arrival] = []
        self._free: list[Flats] = []
        self._rests = self._has_told = False
        self._sent = Sending(0)
        self.pushed: dict[int, int] = {}
        self.unheard = 0
        self._arrived: dict[tuple[int, int], int] = {}  # messages that have come, by pass and rank
        self._broken: set[int] = set()  # ranks lost in this pass
        peers.handlers |= {
            PeerKind.DATA: self._take_data, PeerKind.SKIP: self._take_skip, PeerKind.WANT: self._take_want,
            PeerKind.REST: self._take_rest,
        }  # fmt: skip
        peers.on_loss.append(self._lose)
        peers.on_join.append(self._admit)
        peers.gate = self._condition

    @property
    def members(self) -> list[int]:
        """Who takes part in the next round, as far as this worker knows."""
        with self._condition:
            resting = self._rest_in(self.when)
            return [rank for rank in self._peers.live if rank not in resting]

    @property
    def rests(self) -> bool:
        """Whether this worker takes no part in this pass any more."""
        return self._rests

    @property
    def when(self) -> When:
        """The pass and the round that come next."""
        return self._started[0], self._started[1] + 1

    def begin_pass(self, number: int) -> None:
        """All workers have met, and begin anew; rounds are counted from 0.

        The same pass may begin again as long as there was no round in it: a rest that was not for good ends then.
        """
        with self._condition:
            if number != self._started[0]:
                self._late, self.pushed, self._broken = [], {}, set()
                self._has_told = False
            self._started, self._expected, self._rests = (number, -1), frozenset(), self._has_told
            self._resting = {each: ranks for each, ranks in self._resting.items() if each >= number}
            self._arrived = {each: count for each, count in self._arrived.items() if each[0] >= number}
            self._forget()

    def go_on(self, number: int, turn: int) -> None:
        """Take part, as a newcomer, from round ``turn`` of the pass on, in which others are already."""
        with self._condition:
            self._started, self._expected, self._rests, self._has_told = (number, turn - 1), frozenset(), False, False
            for when in [when for when in {*self._mail, *self._wants} if when <= self._started]:
                self._answer(when, ())
            self._forget()

    def rest(self, *, for_good: bool) -> None:
        """Take no part in this pass any more; nobody is to wait.

        Args:
            for_good: Whether everybody is told, and makes graphs without this worker. Else a worker that waits for this
                one is answered that nothing comes, and the pass may begin again.
        """
        with self._condition:
            number, turn = self.when
            if not self._rests:
                self._rests = True
                for when in [when for when in {*self._mail, *self._wants} if when[0] == number]:
                    self._answer(when, ())
            if self._has_told or not for_good:
                return
            self._has_told = True
        for rank in self._peers.live:
            if rank != self._peers.rank:
                self._peers.send(rank, PeerKind.REST, {"pass": number}, sequence=turn)

    def start(self, flats: Flats, heads: Mapping[int, dict[str, Any]], expected: Iterable[int]) -> None:
        """Begin the next round: send to all ranks in ``heads``, and expect a message from all in ``expected``.

        The tensors must stay as they are until ``finish``. A worker that rests sends and expects nothing.
        """
        with self._condition:
            self._started = when = self.when
            self._expected = frozenset() if self._rests else frozenset(expected)
            listed = () if self._rests else (heads if self._pushes else self._expected)
            self._sent = Sending(0 if self._rests else len(heads))
            parts, (number, turn) = as_bytes(flats), when
            for rank, head in heads.items() if not self._rests else ():
                self.pushed[rank] = self.pushed.get(rank, 0) + 1
                told = {**head, "pass": number}
                self._peers.send(rank, PeerKind.DATA, told, parts, sequence=turn, sent=self._sent)
            self._answer(when, listed)
            self._forget()

    def finish(self) -> dict[int, Arrival]:
        """The expected messages that have come, by rank; blocks until all are there that will come.

        Raises:
            DeadlineExceeded: a worker is alive and has neither sent a message nor said that it will not.
        """
        begin = self._peers.now()
        asked = False
        with self._condition:
            when, mail = self._started, self._mail.setdefault(self._started, {})
            what = f"come to round {when[1]} of gossip"
            wait = Wait(self._condition, self._timeout, self._peers.now, _give_notice, what)
            since = time.perf_counter()
            while missing := self._missing(when, mail):
                if self._pushes and not asked and wait.seconds >= _ASK:
                    asked = True
                    for rank in missing:
                        self._peers.send(rank, PeerKind.WANT, {"pass": when[0]}, sequence=when[1])
                wait.sleep(missing, wait.seconds + (_ASK if self._pushes and not asked else 1.0))
                now = time.perf_counter()
                spans.add(spans.WAIT, f"{spans.WAIT_FOR} rank {missing[0]}", since, now)
                since = now
            found = {rank: arrival for rank, arrival in sorted(mail.items()) if rank in self._expected}
            self._mail.pop(when)
            self._expected = frozenset()
        if not self._sent.wait(max(1.0, self._timeout - (self._peers.now() - begin))):
            raise DeadlineExceeded(
                f"a worker has not taken what was sent to it in round {when[1]} within {self._timeout:g} s: see their "
                "output, or give them more time with --timeout"
            )
        self.unheard = self._sent.unheard
        return found

    def await_pushes(self, counts: Mapping[int, int]) -> None:
        """Block until all that others have sent in this pass has come; lost workers are not waited for.

        Args:
            counts: How many messages each rank has sent.

        Raises:
            DeadlineExceeded: a message is still under way.
        """
        number = self._started[0]

        def missing() -> list[int]:
            live = set(self._peers.live) - self._broken
            return [rank for rank, n in counts.items() if rank in live and self._arrived.get((number, rank), 0) < n]

        with self._condition:
            if not self._condition.wait_for(lambda: not missing(), self._timeout):
                raise DeadlineExceeded(
                    f"what rank {missing()[0]} has pushed did not come within {self._timeout:g} s: see its output, or "
                    "give it more time with --timeout"
                )

    def take_late(self) -> list[Arrival]:
        """The messages that have come without being expected, in push-sum."""
        with self._condition:
            late, self._late = self._late, []
            return late

    def recycle(self, arrivals: Iterable[Arrival]) -> None:
        """Use the tensors of these arrivals again for the next messages."""
        with self._condition:
            self._free += [arrival.flats for arrival in arrivals]

    def _missing(self, when: When, mail: Mapping[int, Arrival]) -> list[int]:
        gone = self._rest_in(when) | self._skips.get(when, set())
        live = set(self._peers.live)
        return sorted(rank for rank in self._expected if rank not in mail and rank not in gone and rank in live)

    def _rest_in(self, when: When) -> set[int]:
        return {rank for rank, first in self._resting.get(when[0], {}).items() if first <= when[1]}

    def _answer(self, when: When, listed: Iterable[int]) -> None:
        """Tell workers that wait for this one in a round, and are no neighbours in it here, that nothing will come."""
        mail, listed = self._mail.get(when, {}), set(listed)
        for rank in [rank for rank in mail if rank not in self._expected or self._rests]:
            self._keep_late(mail.pop(rank))
            if not self._pushes:
                self._skip(rank, when)
        for rank in self._wants.pop(when, set()) - listed:
            self._skip(rank, when)

    def _skip(self, rank: int, when: When) -> None:
        self._peers.send(rank, PeerKind.SKIP, {"pass": when[0]}, sequence=when[1])

    def _keep_late(self, arrival: Arrival) -> None:
        if self._pushes:
            self._late.append(arrival)
        else:
            self._free.append(arrival.flats)

    def _forget(self) -> None:
        """Forget messages and answers of rounds before this one."""
        for kept in (self._mail, self._skips, self._wants):
            for when in [when for when in kept if when < self._started]:
                kept.pop(when)

    def _take_data(self, rank: int, message: Message, wire: Wire) -> None:
        when = _when(message)
        arrival = Arrival(message.head, self._receive(message, wire))
        with self._condition:
            is_past = when < self._started or (self._rests and when[0] == self._started[0])
            is_wanted = when > self._started or rank in self._expected
            is_wanted = is_wanted and rank not in self._skips.get(when, ())  # it has not used what it was sent
            self._arrived[when[0], rank] = self._arrived.get((when[0], rank), 0) + 1
            self._condition.notify_all()
            if not is_past and is_wanted:
                self._mail.setdefault(when, {})[rank] = arrival
                return
            if when[0] == self._started[0]:
                self._keep_late(arrival)
            if not self._pushes:
                self._skip(rank, when)

    def _take_skip(self, rank: int, message: Message, _: Wire) -> None:
        when = _when(message)
        with self._condition:
            if when >= self._started:
                self._skips.setdefault(when, set()).add(rank)
                self._condition.notify_all()

    def _take_want(self, rank: int, message: Message, _: Wire) -> None:
        when = _when(message)
        with self._condition:
            if when <= self._started or (self._rests and when[0] == self._started[0]):
                self._skip(rank, when)  # this follows anything that was sent
            else:
                self._wants.setdefault(when, set()).add(rank)

    def _take_rest(self, rank: int, message: Message, _: Wire) -> None:
        with self._condition:
            number, turn = _when(message)
            self._resting.setdefault(number, {})[rank] = turn
            self._condition.notify_all()

    def _receive(self, message: Message, wire: Wire) -> Flats:
        if message.body != self._nbytes:
            raise WireError(f"{message.body:,} bytes came, and {self._nbytes:,} were expected")
        with self._condition:
            flats = self._free.pop() if self._free else None
        flats = flats if flats is not None else [torch.empty_like(flat) for flat in self._template]
        wire.receive_into(as_bytes(flats))
        return flats

    def _admit(self, rank: int) -> None:
        """A newcomer has come: what is known of a worker that had its rank is over."""
        with self._condition:
            self._broken.discard(rank)
            self.pushed.pop(rank, None)
            self._arrived = {each: count for each, count in self._arrived.items() if each[1] != rank}
            for resting in self._resting.values():
                resting.pop(rank, None)
            for mail in self._mail.values():
                if (arrival := mail.pop(rank, None)) is not None:
                    self._keep_late(arrival)
            for when, waiting in [*self._skips.items(), *self._wants.items()]:
                if when > self._started:
                    waiting.discard(rank)

    def _lose(self, rank: int) -> None:
        with self._condition:
            self._broken.add(rank)
            self._skips.setdefault(self._started, set()).add(rank)
            self._condition.notify_all()


def _when(message: Message) -> When:
    return int(message.head["pass"]), message.sequence


def _give_notice(missing: list[int], seconds: float) -> None:
    print(f"hocket: waited {seconds:.0f} s for {ranks(missing)} in gossip", file=sys.stderr, flush=True)
