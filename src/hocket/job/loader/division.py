"""Who has which part of the batches that are at work, so that the part of a worker that dies can be given to others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from hocket.comm.generation import Change
from hocket.job.loader.passes import Counts, Pass, Plan, Rest, Span

T = TypeVar("T")


def share(items: Sequence[T], rank: int, size: int, least: int = 1) -> Sequence[T]:
    """The part of ``items`` for ``rank``: contiguous, as even as possible, and at least ``least`` or none."""
    size = min(size, max(1, len(items) // least))
    if rank >= size:
        return items[:0]
    each, more = divmod(len(items), size)
    start = rank * each + min(rank, more)
    return items[start : start + each + (rank < more)]


def least(batch_size: int | None) -> int:
    """The fewest samples that a rank gets: not a single one of many, which batch norm refuses to train on."""
    return 2 if batch_size is not None and batch_size > 2 else 1


Mark = tuple[int, ...]
"""Something that changes with each exchange."""


class Lost(NamedTuple):
    """Samples that were lost with workers, in batches that this worker has begun, and that are not exchanged yet.

    Attributes:
        samples: How many samples were lost.
        total: Samples of all workers in these batches, before the loss.
        last: The samples that lost workers had at work last: epoch and place in its order.
        parts: How many batches lost workers had at work, or would have had, and that are dealt out again.
        again: How many samples these had.
        name: Gives the numbers in the data set of some of ``last``.
    """

    samples: int = 0
    total: int = 0
    last: frozenset[tuple[int, int]] = frozenset()
    parts: int = 0
    again: int = 0
    name: Callable[[Iterable[tuple[int, int]]], list[int]] = lambda _: []


def blame(numbers: Sequence[int]) -> str:
    """Why a job ends in which two workers have died with the same samples; their numbers may be unknown."""
    shown = ", ".join(map(str, numbers[:_MOST_SHOWN])) + (" …" if len(numbers) > _MOST_SHOWN else "")
    named = f" (numbers {shown})" if numbers else ""
    return (
        f"two workers in a row have died with the same samples of the data set{named}: it is these samples, "
        "or what the script does with them, and not the machine: train without them, or mend what they bring about"
    )


_MOST_SHOWN = 16  # numbers of samples in a message


class Division:
    """How the batches of one pass are divided among workers, until these change.

    Args:
        plan: What is left of the pass.
        members: The number that each worker had when the job began, by rank.
        whole: Samples of a global batch.
        left: Samples that are left of the pass.
        least: The fewest samples that a worker gets.
    """

    def __init__(self, plan: Plan, members: Sequence[int], whole: int, left: int, least: int) -> None:
        self.plan, self._members, self._whole, self._left, self._least = plan, members, whole, left, least

    def batch(self, number: int) -> dict[int, tuple[Span, ...]]:
        """The places of batch ``number`` of the division, from 1, by the worker that has them."""
        places = range((number - 1) * self._whole, min(number * self._whole, self._left))
        found: dict[int, tuple[Span, ...]] = {}
        for rank, member in enumerate(self._members):
            mine = share(places, rank, len(self._members), self._least)
            found[member] = self.plan.rest.only([(mine[0], mine[-1] + 1)]).spans if mine else ()
        return found

    def after(self, number: int) -> list[Span]:
        """The places of all batches after batch ``number``; the last span goes to the end."""
        return list(self.plan.rest.only([(min(number * self._whole, self._left), None)]).spans)


Place = tuple[int, int, int]
"""A rank, among how many workers samples are divided, and how many samples are divided at once."""


class _Turn(NamedTuple):
    """Workers have changed in the middle of a pass: after which batch another division holds."""

    change: Change
    since: int
    before: Place
    whole: int


class Marks(Protocol):
    """The training of a worker."""

    loaders: int
    """How many loaders there are so far."""

    def mark(self) -> Mark:
        """Something that changes with each exchange."""
        ...


class Sampler(Protocol):
    """What divides the samples of a pass among workers."""

    @property
    def place(self) -> Place:
        """How passes that begin now are divided."""
        ...

    def divide(self, plan: Plan, members: Sequence[int]) -> Division:
        """How the batches of a pass are divided among ``members``, now and until ``regroup``."""
        ...

    def regroup(self, rank: int, size: int) -> int:
        """The workers have changed, and passes from now on are divided among them; returns what is divided at once."""
        ...

    def numbers(self, plan: Plan, places: Sequence[int]) -> list[int]:
        """The numbers in the data set of the samples at some places in the order of a pass, where they are numbers."""
        ...


class DealtRounds(Protocol):
    """What deals out the batches of a pass where workers are not at the same batches."""

    @property
    def told(self) -> list[int]:
        """What the others are to know when workers change."""
        ...

    def regroup(self, change: Change) -> None:
        """Go on with the workers that there are now."""
        ...


class DividedPasses:
    """The passes of one loader, as far as they are divided among workers that may change.

    Batches that a worker has been given stay as they are, and so that all workers are in step, the others get theirs of
    these batches, too. What is left after them is divided anew, with what lost workers had of batches whose gradients
    were not exchanged.

    Args:
        marks: The worker's training.
        sampler: Divides the samples; None if the data is a stream.
        find: Gives the pass that is going on.
        rounds: Gives what deals out the batches, if the passes are not divided by themselves.

    Attributes:
        number: The number of the loader, the same on all workers.
    """

    def __init__(
        self,
        marks: Marks,
        sampler: Sampler | None,
        find: Callable[[], Pass | None],
        rounds: Callable[[], DealtRounds | None] = lambda: None,
    ) -> None:
        self.number, self._mark, self._sampler, self._find = marks.loaders, marks.mark, sampler, find
        self._rounds = rounds
        self._begun: list[tuple[Mark, Plan, int]] = []  # batches that this worker has begun, and that are open
        self._done: tuple[Plan, int] | None = None  # the last batch that was exchanged
        self._open: list[tuple[Plan, int, dict[int, tuple[Span, ...]]]] = []  # batches in which workers were lost
        self._ahead: list[tuple[int, Plan]] = []  # divisions to come, and after which batch of the one before each
        self._pass: Pass | None = None  # the pass to which these belong
        self._later: list[tuple[int, _Turn]] = []  # for epochs that others have begun, and this worker has not

    @property
    def given(self) -> Sequence[int] | None:
        """The epoch at work, and how many batches of its latest division this worker has been given."""
        if (rounds := self._rounds()) is not None:
            return rounds.told
        now = self._find()
        return None if now is None else (now.plan.epoch, 0 if self._ahead_of(now) else now.plan.given)

    def _ahead_of(self, now: Pass) -> list[tuple[int, Plan]]:
        if self._pass is not now:
            self._pass, self._open, self._ahead = now, [], []
        return self._ahead

    def begin_pass(self, now: Pass) -> None:
        """A pass begins. If workers were lost when others had begun it, it is divided as these have divided it."""
        for epoch, turn in self._later:
            if epoch == now.plan.epoch:
                self._divide_anew(now, turn)
        self._later = [(epoch, turn) for epoch, turn in self._later if epoch > now.plan.epoch]

    def begin(self, plan: Plan, counts: Counts) -> None:
        """This worker begins to work on a batch."""
        self._forget_done()
        self._begun.append((self._mark(), plan, plan.number(counts.taken)))

    def regroup(self, change: Change) -> Lost:
        """Divide what is left among the workers that there are now; returns what was lost of batches at work."""
        sampler, now = self._sampler, self._find()
        assert sampler is not None
        before, whole = sampler.place, sampler.regroup(change.rank, change.size)
        if (rounds := self._rounds()) is not None:
            rounds.regroup(change)
            return Lost()
        if change.is_new:
            return Lost()  # this worker's passes begin divided among those that there are now
        told = [told for said in change.said if (told := said["given"].get(str(self.number))) is not None]
        since: dict[int, int] = {}
        for epoch, given in told:
            since[epoch] = max(given, since.get(epoch, 0))
        mine = None if now is None else now.plan.epoch
        self._later += [(epoch, _Turn(change, n, before, whole)) for epoch, n in since.items() if epoch > (mine or 0)]
        if now is None:
            return Lost()
        lost = self._divide_anew(now, _Turn(change, since[now.plan.epoch], before, whole))
        self.turn()
        return lost

    def _divide_anew(self, now: Pass, turn: _Turn) -> Lost:
        """Have what is left of a pass after some batches divided among the workers that there are then."""
        ahead, (change, since, before, whole) = self._ahead_of(now), turn
        latest = ahead[-1][1] if ahead else now.plan
        if not latest.size:  # nothing of it was read yet
            latest.rank, latest.size, latest.whole = before
        assert self._sampler is not None
        division = self._sampler.divide(latest, change.before)
        self._forget_done()
        first = self._done[1] + 1 if self._done is not None and self._done[0] is latest else 1
        self._open += [(latest, number, division.batch(number)) for number in range(first, since + 1)]
        places, lost = self._lose(now, change.lost)
        rest = Rest(sorted(places + division.after(since), key=lambda span: span[0]))
        plan = dataclasses.replace(latest, rest=rest, has_begun=True, given=0, short={}, whole=whole)
        plan.rank, plan.size = change.rank, change.size
        ahead.append((since, plan))
        return lost

    def _forget_done(self) -> None:
        """Forget batches that were exchanged, but for the last one."""
        mark = self._mark()
        done = [(plan, number) for begun, plan, number in self._begun if begun != mark]
        if done:
            self._done = done[-1]
            self._begun = [each for each in self._begun if each[0] == mark]
            self._open = [
                (plan, number, batch)
                for plan, number, batch in self._open
                if not any(plan is of and number <= last for of, last in done)
            ]

    def _lose(self, now: Pass, members: Sequence[int]) -> tuple[list[Span], Lost]:
        """Take what lost workers have out of the open batches."""
        places: list[Span] = []
        total = samples = parts = 0
        last: frozenset[tuple[int, int]] = frozenset()
        for plan, number, batch in self._open:
            before = sum(map(_count, batch.values()))
            taken = [spans for member in members if (spans := batch.pop(member, ()))]
            gone = [span for spans in taken for span in spans]
            places, parts = places + gone, parts + len(taken)
            if gone:
                last = frozenset((plan.epoch, place) for first, stop in gone for place in range(first, stop or first))
            plan.short[number] = plan.short.get(number, 0) + _count(gone)
            is_given = number <= plan.given if plan is now.plan else all(plan is not each for _, each in self._ahead)
            now.samples -= _count(gone) if is_given else 0
            if any(plan is of and number == begun for _, of, begun in self._begun):
                total, samples = total + before, samples + _count(gone)
        return places, Lost(samples, total, last, parts, _count(places), self._name)

    def _name(self, samples: Iterable[tuple[int, int]]) -> list[int]:
        now = self._find()
        assert now is not None and self._sampler is not None
        places = sorted(place for epoch, place in samples if epoch == now.plan.epoch)
        return self._sampler.numbers(now.plan, places)

    def turn(self) -> None:
        """Go on with the new division, if this worker has all batches that any worker was given of the old one."""
        if self._ahead and (now := self._find()) is not None:
            while self._ahead_of(now) and now.plan.given >= self._ahead[0][0]:
                _, plan = self._ahead.pop(0)
                plan.start = plan.start or now.plan.start
                now.plan, now.taken = plan, 0


def _count(spans: Sequence[Span]) -> int:
    return sum(stop - start for start, stop in spans if stop is not None)
