"""The loader that ``distribute`` returns: with the data set and settings of the script's, and this rank's batches."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from hocket.comm.alone import AloneCommunicator
from hocket.job import randomness
from hocket.job.batch_weights import weigh_share
from hocket.job.loader import global_batch, original_loader, sharding
from hocket.job.loader.dealt_batches import Dealt, DealtBatches, QueuedBatches
from hocket.job.loader.division import DividedPasses
from hocket.job.loader.newcomer_place import NewcomerPlace
from hocket.job.loader.passes import Counts, Pass, Plan, Rest, Start
from hocket.job.loader.sharded_stream import ShardedStream, as_it_is, level
from hocket.job.loader.sharding import ShardedIndices
from hocket.job.loader.timed_rounds import RoundDeal, TimedRounds, timed
from hocket.job.loop_exit import on_purpose
from hocket.job.randomness import RandomState, SharedRandom
from hocket.job.training_loop import Batch, Loop
from hocket.job.worker import Worker
from hocket.strategies.base import BatchAtWork

Item = tuple[Any, Counts]
_NO_MORE: Any = object()


class Loader:
    """Iterates over this rank's share of ``original``.

    In training, every rank sees the same number of batches; a rank without samples of its own repeats another batch,
    with weight 0. In evaluation (``training=False``, or a loop under ``torch.no_grad()``) there are no such batches, so
    ranks may see one batch more or less than others.

    Other attributes (``dataset``, ``batch_size``, ``sampler``, …) are those of the original loader.

    Attributes:
        weight: How much the last batch counts, relative to those of other ranks; 0 if it is a repeated one.
        epoch: How many passes have begun.
        before_next: Called when a training loop asks for the next batch, and so is done with the last one.
        newcomers: What newcomers are told, where workers meet at the coordinator.
    """

    def __init__(self, worker: Worker, original: DataLoader[Any], *, local: bool, training: bool | None) -> None:
        original_loader.check(original)
        original_loader.check_divisible(original, worker.communicator, local=local, training=training)
        self.original, self.local = original, local
        self.weight, self.epoch = 1.0, 0
        self.before_next: Callable[[], None] | None = None
        self._worker, self._training, self._trains = worker, worker.training, training
        self._group = AloneCommunicator() if local else worker.communicator  # among whom the data is divided
        self._generators = original_loader.find_generators(original)
        if self._group.size > 1:
            original_loader.agree(worker.communicator, original, self._generators)
        # PyTorch draws the seeds of data-loader processes from it; these must differ between ranks.
        self._generator = torch.Generator() if original.generator is not None else None
        self._training.loaders += 1
        self._seed = randomness.shared_seed(worker.communicator, self._training.loaders)
        self._shares = not isinstance(original.dataset, IterableDataset) and not local and training is not False
        self._dealt: DealtBatches | None = None
        if worker.client is not None:
            self._dealt = QueuedBatches(worker, worker.client, original, queued=self._shares, local=local)
        self._tell_newcomers()
        self._batch = global_batch.choose(worker, original.batch_size, self._group, shares=self._shares)
        if training is not False and not local:
            self._training.global_batches.append(self._batch)
        self._stream: ShardedStream | None = None
        self._sampler: ShardedIndices | None = None
        self._inner = self._make_stream() if isinstance(original.dataset, IterableDataset) else self._make_indexed()
        if isinstance(self._dealt, QueuedBatches) and self._dealt.deal is not None and self._sampler is not None:
            self._dealt.deal.on_fatal = self._sampler.blame
        local_to = worker.communicator if local else None
        self._at_first = original_loader.count_batches(original, self._sampler, self._batch.whole, local_to)
        self._divided = False  # whether the data set divides itself among the ranks
        self._pass: Pass | None = None  # the pass that is going on
        self._latest: Pass | None = None  # the last pass in training
        self._resumed: dict[str, Any] | None = None
        self._quiet = False  # whether the next pass draws no random numbers when it is opened
        self._divided_passes = DividedPasses(self._training, self._sampler, lambda: self._pass, self._find_rounds)
        if self._group.changes and self._sampler is not None:
            self._training.divided.add(self._divided_passes)

    def __iter__(self) -> Iterator[Any]:
        training = torch.is_grad_enabled() if self._trains is None else self._trains
        if not self._training.loops.in_thread:
            self._training.loops.catch_up("the next loop over a loader", moves_on=training)
        if not training:
            # An evaluation must not disturb the training: neither what comes next, nor where it is resumed.
            aside = Pass(self.epoch)
            if self._group.size > 1:
                aside.plan.random = SharedRandom(RandomState.from_seed(randomness.mix(self._seed, self.epoch, 1)))
            return self._iterate(aside, self._open(aside), training=False)
        self._take_back_a_glance()
        self._find_rounds()
        if self._dealt is not None:
            self._dealt.look()
        global_batch.begin(self._worker, self._batch, self.original, local=self.local, uneven=self._is_uneven)
        now = Pass(self.epoch + 1)
        if self._resumed is not None:
            now, self._resumed = Pass.resume(self._resumed, self._whole), None
            self._inner._iterator = None  # persistent processes would go on with old indices
        now.passes, self.epoch = self._training.counts.tally.progress(), now.plan.epoch
        if self._dealt is not None:
            self._dealt.begin_pass(now.plan)
        if self._sampler is not None and not self._sampler.is_alone:
            now.plan.random = SharedRandom(RandomState.from_seed(randomness.mix(self._own_seed(), self.epoch, 2)))
        self._divided_passes.begin_pass(now)
        inner = self._open(now)
        self._pass = self._latest = now
        return self._iterate(now, inner, training=True)

    @property
    def _deal(self) -> Dealt | None:
        return self._dealt.deal if self._dealt is not None else None

    @property
    def _is_in_step(self) -> bool:
        return self._dealt is not None and self._dealt.in_step

    @property
    def _is_uneven(self) -> bool:  # each worker takes its next batch, of the script's size, as it gets ready
        return self._deal is not None and not self._is_in_step

    @property
    def _whole(self) -> int:  # of what is counted as one batch
        return self._batch.part or 1 if self._is_uneven else self._batch.whole

    @property
    def _length(self) -> int | None:  # batches of a pass
        is_divided = self._sampler is not None and not self.local
        return original_loader.count_batches(self.original, self._sampler, 0, None) if is_divided else self._at_first

    def _find_rounds(self) -> TimedRounds | None:
        group, has_rounds = self._group, self._trains is not False and timed(self._worker)
        if self._dealt is None and has_rounds and (self._worker.config.size > 1 or group.changes):
            deal = RoundDeal(group.rank, group.members) if self._shares else None
            number, self._batch.told = self._divided_passes.number, "per-worker"
            self._dealt = TimedRounds(self._worker, number, deal, lambda: self.before_next and self.before_next())
            self._tell_newcomers()
        return self._dealt if isinstance(self._dealt, TimedRounds) else None

    def _tell_newcomers(self) -> None:
        self.newcomers = NewcomerPlace(self._dealt, self._trains, lambda: self._pass, self._training.counts.tally)

    def _open(self, now: Pass) -> Iterator[Any]:
        quiet, self._quiet, random = now.plan.is_resumed or self._quiet, False, RandomState.capture()
        if not quiet:
            original_loader.seed_processes(self.original, self._inner, self._generator, self._worker.config.rank)
        if self._stream is not None:
            self._stream.prepare(now.plan.epoch, now.plan.taken)
        elif self._sampler is not None:
            self._sampler.plan = now.plan
        inner = iter(self._inner)
        if quiet:
            random.restore()  # the uninterrupted run drew these numbers earlier, or not at all
        if self._sampler is not None and now.plan.start is None:
            self._sampler.note(now.plan)  # unless data-loader processes have been given indices already
        return inner

    def _take_back_a_glance(self) -> None:
        """A loop that was left without any step, to look at a batch, was no pass over the data."""
        glance = self._latest
        if glance is None or not glance.was_left or self._training.counts.tally.progress() > glance.passes:
            return
        self._latest, self.epoch = None, self.epoch - 1
        if self._training.strategies:  # else there are no backward passes to tell a glance by
            self._training.counts.samples -= glance.samples - glance.samples_before
        if glance.origin is not None:
            self._resumed = glance.origin
            self.epoch = glance.origin["epoch"] - 1
            if glance.random is not None:
                self._training.keep_random(glance.random)

    def __len__(self) -> int:
        if (length := self._length) is None:
            raise TypeError(f"{type(self.original.dataset).__name__} has no length, so its loader has none either")
        return length

    def __getattr__(self, name: str) -> Any:
        if name == "original":
            raise AttributeError(name)
        return getattr(self.original, name)

    @property
    def is_per_rank(self) -> bool:
        """Whether every rank has a stream of data of its own."""
        return self._worker.config.size > 1 and (self.local or self._divided)

    @property
    def pass_samples(self) -> int | None:
        """Samples of a pass over the data, of all ranks; None where nobody can know."""
        divides = self._sampler is not None and not self.is_per_rank
        return original_loader.count_samples(self.original, self._whole) if divides else None

    def state(self) -> dict[str, Any]:
        """Where this loader is, as plain data with tensors."""
        if self._pass is None:
            self._take_back_a_glance()
            if self._resumed is not None:
                return self._resumed  # the resumed pass has not gone on yet
        now = self._pass
        start = now.plan.start if now is not None else self._sampler.begin() if self._sampler is not None else None
        batches, samples, taken = now.trained_place if now is not None else (0, 0, 0)
        rest = Rest() if now is None else now.plan.rest.only([(taken, None)])
        if self._deal is not None and self._sampler is not None and now is not None:
            rest = self._sampler.rest(now.plan, self._deal.state())
        return {
            "rest": [list(span) for span in rest.spans],
            "whole": self._whole,
            "part": self._batch.part,
            "open": now is not None,
            "epoch": self.epoch if now is not None else self.epoch + 1,
            "batches": batches,
            "samples": samples,
            "taken": taken,
            "divided": self._divided,
            "seed": self._seed,
            "persists": bool(self._inner.persistent_workers and self._inner._iterator is not None),
            "start": start.as_data() if start is not None else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on, at the next ``iter``, where another loader was."""
        original_loader.check_kind(state, has_indices=self._sampler is not None)
        self._seed, self._divided = state["seed"], state["divided"]
        for each in (self._stream, self._sampler):
            if each is not None and each.seed is not None:
                each.seed = self._own_seed()
        self.epoch = state["epoch"] - 1
        self._find_rounds()
        if self._shares and not self._is_uneven:
            global_batch.say(self._worker, self._batch.adopt(state, self._group))
        self._resumed, self._latest, self._quiet = state if state["open"] else None, None, state["persists"]
        if self._dealt is not None and not self.newcomers.go_on(state):
            self._dealt.restore({"epoch": self.epoch + bool(state["open"]), "next": 0, "again": []})
        if self._sampler is not None and not state["open"]:
            self._sampler.restore(Start.from_data(state["start"]))

    def _iterate(self, now: Pass, inner: Iterator[Any], *, training: bool) -> Iterator[Any]:
        worker = self._worker
        loop = self._training.begin_loop(self, now.plan.epoch) if training else None
        items = self._read(now, now.plan, inner, loop)
        if training and worker.config.size > 1 and self._dealt is None and (self.local or self._stream is not None):
            items = level(worker.communicator, items, lambda: self.is_per_rank)
        if training and now.plan.is_resumed:
            now.random = self._training.restore_random()  # undoes all draws since the resumption
        items = now.watched(items, training=training)
        if loop is not None:
            self._prepare(now, loop)
        ahead = loop is not None and loop.in_thread  # reads one batch ahead, so that the last one is known as such
        following = next(items, None) if ahead else None
        try:
            while True:
                if loop is not None and not ahead:
                    self._training.loops.ask(loop)
                    if not loop.is_torn:
                        self._end_step(loop)
                    worker.look()
                item, following = (following, next(items, None)) if ahead else (next(items, None), None)
                if item is None:
                    break
                batch, counts = item
                everywhere = counts.everywhere or counts.here
                now.add(counts, now.plan.correct(counts).everywhere if now.plan.short else everywhere)
                if counts.here == 0 and (loop is None or (self._dealt is not None and not self._is_in_step)):
                    continue  # a repeated batch, which an evaluation does not need
                if loop is not None:
                    begin = functools.partial(self._begin_step, now, now.plan, counts, everywhere, [])
                    if self._dealt is not None:
                        self._dealt.give(counts)
                    self._training.loops.give(loop, Batch(batch, counts.here, now.place, begin))
                    if ahead and following is None:  # before the script can have trained on the last one
                        self._training.loops.end(loop, functools.partial(self._finish, now, loop))
                yield batch
            if loop is not None and not (ahead and now.batches):
                self._training.loops.end(loop, functools.partial(self._finish, now, loop))
        except (GeneratorExit, SystemExit):  # as in next(iter(loader)): the last batch may be at work; or an error came
            now.was_left = True
            if loop is not None:
                self._leave(now, loop, on_purpose=on_purpose(sys._getframe().f_back))
            raise
        finally:
            if self._pass is now and (loop is None or loop.after is None):
                self._pass = None

    def _prepare(self, now: Pass, loop: Loop) -> None:
        """A training loop begins; not in a thread, if ranks agree on something in every batch."""
        self._worker.teller.tell_beginning(self.pass_samples)
        now.loop, loop.between = loop, functools.partial(self._end_step, loop)
        loop.pause = None if self._dealt is None else self._dealt.pause
        agrees = self._dealt is not None
        agrees |= self._worker.config.size > 1 and (self.local or self._stream is not None)
        loop.check_thread(self._group, agrees=agrees)

    def _finish(self, now: Pass, loop: Loop) -> None:
        """The script has trained on all batches of a pass; collective."""
        if self._dealt is None:
            self._worker.teller.tell_pass(self._divided_passes.number, now, self.pass_samples)
        elif self._dealt.finish(now.plan, is_late=loop.is_late):
            self._training.counts.samples += now.complete(self.pass_samples)
        self._training.loops.finish(loop, alone=self._worker.client is not None or self._group.changes)
        self._worker.teller.tell_again()  # now that the last step of the pass is done
        self._training.end_loop(self)
        if self._pass is now:
            self._pass = None

    def _leave(self, now: Pass, loop: Loop, *, on_purpose: bool) -> None:
        has_trained = bool(now.batches) and self._training.counts.tally.progress() > now.passes
        later = None if self._dealt is None else self._dealt.leave(now.plan, loop, has_trained=has_trained)
        if self._worker.has_left:
            return
        self._training.leave_loop(self)
        self._worker.teller.tell_again()
        if has_trained:
            self._training.loops.leave(loop, later, on_purpose=on_purpose)
        else:
            self._training.loops.forget(loop)

    def _begin_step(self, now: Pass, plan: Plan, counts: Counts, everywhere: int, begun: list[bool]) -> float:
        """A training loop works on a batch, for the first time or again; returns how much the batch weighs."""
        worker, is_first = self._worker, not begun
        begun.append(True)
        self._training.weights.leave_no_trace()
        total, divides = self._length, self._dealt is None or (self._is_in_step and counts.everywhere > 0)
        everywhere = plan.correct(counts).everywhere if plan.short else everywhere
        if is_first:
            self._training.counts.tally.give(self, counts.here)
            if self._group.changes and self._dealt is None:
                self._divided_passes.begin(plan, counts)
        if self._dealt is not None:
            self._dealt.begin(now, counts, is_first=is_first)
            total = sharding.total(self.original) if self._is_uneven else total
        else:
            mean = self.pass_samples / total if self.pass_samples and total else None
            self._training.begin_batch(BatchAtWork(everywhere, mean), again=not is_first)
        self.weight = 1.0
        if divides:
            if self._group.size > 1:
                original_loader.check_same_order(worker.communicator, now.plan)
            size = worker.config.size if self.is_per_rank else self._group.size
            self.weight = weigh_share(counts.here, everywhere, size)
        self._training.weights.weigh(self, self.weight)
        if is_first:
            worker.teller.tell(now.plan.epoch, now.batches, total, now.samples)
        if self.weight == 0:
            self._training.weights.repeat(self._training.models)
        return self.weight

    def _end_step(self, loop: Loop) -> None:
        """The script is done with the batches that it was given, as far as it has trained on them."""
        self._training.weights.leave_no_trace()
        self._divided_passes.turn()
        if self._dealt is not None:
            self._dealt.end_step(loop)
        if self.before_next is not None:
            self.before_next()

    def _read(self, now: Pass, plan: Plan, inner: Iterator[Any], loop: Loop | None) -> Iterator[Item]:
        skip = now.batches if now.is_divided else 0
        while now.plan is plan and (item := next(inner, _NO_MORE)) is not _NO_MORE:
            if self._sampler is not None:
                plan.given += 1
                yield item, plan.counts.popleft()
                self._divided_passes.turn()
            elif item is None:
                self._divided = True
            elif skip:
                skip -= 1
            else:
                yield item
        divides = self._group.changes and self._dealt is None and now.plan is plan
        if divides and loop is not None and not (loop.waits or loop.in_thread):
            self._training.loops.settle()  # as at the end of the loop; what a worker that is lost now had comes then
        if now.plan is not plan:
            self._quiet, self._inner._iterator = True, None
            yield from self._read(now, now.plan, self._open(now), loop)
            return
        if self._pass is now and loop is not None and self._dealt is not None and self._dealt.await_more(loop):
            self._quiet = True
            yield from self._read(now, now.plan, self._open(now), loop)

    def _own_seed(self) -> int:
        return randomness.mix(self._seed, self._worker.config.rank) if self.local else self._seed

    def _make_indexed(self) -> DataLoader[Any]:
        original, group, seed = self.original, self._group, self._own_seed()
        alone = (self.local or self._worker.config.size == 1) and self._deal is None
        self._sampler = sharding.divide(original, self._batch, group, self._generators, seed, alone=alone)
        return original_loader.remake_with(original, self._sampler, self._generator)

    def _make_stream(self) -> DataLoader[Any]:
        self._stream = ShardedStream(self.original, self._group.rank, self._group.size, self._own_seed())
        how = {"batch_size": None, "collate_fn": as_it_is, "generator": self._generator}
        return original_loader.remake(self.original, self._stream, **how)
