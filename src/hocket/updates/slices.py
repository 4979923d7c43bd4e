"""A step of an element-wise optimizer, divided among workers by slices of the flat parameters.

Neighbouring parameters that always have gradients together form a *run*: one range of the flat buffer, updated
as a whole. Each worker takes its slice of every run, cut into pieces that stay in the cache, and shows these to
the optimizer in place of the parameters. The optimizer's state becomes one shared copy; its scalars (the step
count) are the same on all workers, because a worker whose slice is empty steps a small piece of nothing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from hocket.comm.bucket_layout import Layout, align, cut
from hocket.errors import WorkerLost
from hocket.updates.undo_log import ChangedRange, UndoLog
from hocket.updates.update import Owners, Range, Step, Trained, Update

_PIECE = 1 << 16  # elements per thread; with gradient and state a few pieces fit into the second-level cache
_NOTHING = 16  # elements of the piece of a worker whose slice is empty

_SCALARS = frozenset(("step", "eta", "mu", "mu_product"))  # of PyTorch's optimizers

State = dict[str, Any]
States = dict[tuple[int, str], tuple[torch.Tensor, dict[int, torch.Tensor]]]
"""The one copy of each state of a bucket: flat, and by parameter."""


@dataclass(eq=False)
class Piece:
    """What the optimizer sees of a run on this worker: elements ``start`` to ``end``, or nothing (both 0)."""

    tensor: torch.Tensor
    start: int
    end: int
    state: State = field(default_factory=dict)
    shared: State = field(default_factory=dict)  # those of ``state`` that lie in the shared copy


@dataclass(eq=False)
class Run:
    """Parameters ``members`` of one group, neighbours in bucket ``bucket``."""

    group: int
    bucket: int
    members: list[int]
    present: bool
    pieces: list[Piece] = field(default_factory=list)


class Found(NamedTuple):
    """What a step has found of a run: which states are in the shared copy, and the scalars."""

    run: Run
    keys: list[str]
    scalars: State


class SlicedUpdate(Update):
    """Runs the user's optimizer on this worker's slices.

    Args:
        parameters: The shared parameters, flat, one per bucket of ``layout``.
        gradients: Where this worker finds (or puts) averaged gradients, flat, one per bucket.
        log: Where each step can be undone. Without it, the owners may only change between steps.
    """

    def __init__(
        self,
        owners: Owners,
        optimizer: Optimizer,
        members: Trained,
        layout: Layout,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        log: UndoLog | None = None,
    ) -> None:
        self._log, self._is_open = log, False
        self._found: list[Found] = []  # by the step that is going on
        self._options: list[State] = []  # of each group of the optimizer, as that step has found them
        self._own_gradients: list[tuple[torch.Tensor, torch.Tensor]] = []  # with copies, if the step may change them
        self._owners, self._optimizer, self._members, self._layout = owners, optimizer, members, layout
        self._parameters, self._gradients = parameters, gradients
        self._runs: list[Run] = []
        self._present = b""
        self._states: States = {}
        self._shown: object = None  # the optimizer.state that has been taken over, and how much it then held
        self._shown_length = 0
        if not optimizer.state:
            self._note_shown()
        optimizer.register_state_dict_pre_hook(lambda _: self.show())
        optimizer.register_state_dict_post_hook(_separate_scalars)

    def prepare(self, present: bytes) -> list[Range]:
        if self._is_loaded():
            self._adopt_loaded()
        if present != self._present:
            self._plan(present)
        active = (run for run in self._runs if run.present)
        return [(run.bucket, p.start, p.end) for run in active for p in run.pieces if p.end]

    def step(self, original: Step, **options: Any) -> Any:
        optimizer = self._optimizer
        active = [run for run in self._runs if run.present]
        if self._log is not None:
            self._keep(self._log)
        self._is_open = True
        visible, groups = optimizer.state, [group["params"] for group in optimizer.param_groups]
        try:
            optimizer.state = defaultdict(dict, {p.tensor: p.state for run in active for p in run.pieces})
            for number, group in enumerate(optimizer.param_groups):
                group["params"] = [p.tensor for run in active if run.group == number for p in run.pieces]
            result = original(**options)
            for run in active:
                for piece in run.pieces:
                    piece.state = optimizer.state[piece.tensor]
        finally:
            optimizer.state = visible
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters
        return result

    def _keep(self, log: UndoLog) -> None:
        """Keep what the step changes; collective if no step has changed some of it so far."""
        found, parts = list[Found](), list[ChangedRange]()
        for run in self._runs:
            state = run.pieces[0].state
            keys = [key for key in state if (run.bucket, key) in self._states]
            scalars = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items() if k not in keys}
            found.append(Found(run, keys, scalars))
            if run.present:
                start, end = self._slice(run, self._owners.rank, self._owners.size)
                flats = {"": self._parameters[run.bucket]} | {key: self._states[run.bucket, key][0] for key in keys}
                parts += [ChangedRange((run.bucket, key), flat, start, end) for key, flat in flats.items()]
        log.keep(parts)
        self._options = [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups]
        self._found = found
        if not type(self._optimizer).__module__.startswith("torch.optim"):
            tensors = [p.tensor.grad for run in self._runs if run.present for p in run.pieces]
            self._own_gradients = [(tensor, tensor.clone()) for tensor in tensors if tensor is not None]

    def end(self) -> None:
        self._is_open, self._found, self._own_gradients = False, [], []

    def regroup(self, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        if self._is_open and self._log is None:
            raise WorkerLost(
                "a worker was lost in the middle of its update of the one copy, which cannot be undone: resume from "
                "the last checkpoint"
            )
        if self._found:
            self._show_found()
        else:
            self.show()
        states: States = {}
        loaded = self._bring_loaded(states)
        if self._owners.rank == 0:
            for key, (flat, _) in states.items():
                self._undo(key, flat)
            for bucket, flat in enumerate(parameters):
                self._undo((bucket, ""), flat)
        self._owners.barrier("dividing the optimizer's state anew")
        self._states, self._parameters, self._gradients = states, parameters, gradients
        self.end()
        if self._log is not None:
            self._log.renew()
        self._divide_loaded(loaded)

    def _show_found(self) -> None:
        """Let the optimizer be as the step has found it that is going on; what the step has written is still there."""
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            group.update(options)
        for gradient, kept in self._own_gradients:
            gradient.copy_(kept)
        for run, keys, scalars in self._found:
            for i in run.members:
                state = {key: self._states[run.bucket, key][1][i] for key in keys} | scalars
                if state:
                    self._optimizer.state[self._members.parameters[i]] = state
                else:
                    self._optimizer.state.pop(self._members.parameters[i], None)

    def _undo(self, key: tuple[int, str], flat: torch.Tensor) -> None:
        """Put back in a copy of a flat buffer what workers have written in the step that is going on."""
        for run, keys, _ in self._found:
            if self._log is not None and run.present and run.bucket == key[0] and key[1] in ("", *keys):
                for rank in filter(self._log.has_begun, range(self._log.size)):
                    self._log.undo(key, flat, *self._slice(run, rank, self._log.size))

    def read_from(self, gradients: list[torch.Tensor]) -> None:
        """Take gradients from these flat buffers from now on, one per bucket."""
        self._gradients = gradients
        for run in self._runs:
            for piece in run.pieces:
                if piece.end:
                    piece.tensor.grad = gradients[run.bucket][piece.start : piece.end]

    def news(self) -> bool:
        return any(self._new_keys(piece) for run in self._runs for piece in run.pieces)

    def share(self) -> None:
        for run in self._runs:
            for piece in run.pieces:
                for key in self._new_keys(piece):
                    value = piece.state[key]
                    if _is_elementwise(key, value, piece.tensor):
                        self._share(run.bucket, piece, key, value)
                    else:
                        piece.shared[key] = None
        self.show()
        self._note_shown()
        self._owners.barrier("sharing the optimizer's state")

    def _new_keys(self, piece: Piece) -> list[str]:
        """The entries of a piece's state that are not (or no longer) in the shared copy."""
        shared = piece.shared
        return [
            key
            for key, value in piece.state.items()
            if key not in shared or (shared[key] is not value and shared[key] is not None)
        ]

    def _is_loaded(self) -> bool:
        """Whether the script has put another state there since the last step, or cleared it."""
        return self._optimizer.state is not self._shown or len(self._optimizer.state) < self._shown_length

    def _note_shown(self) -> None:
        self._shown, self._shown_length = self._optimizer.state, len(self._optimizer.state)

    def _share(self, bucket: int, piece: Piece, key: str, value: torch.Tensor) -> None:
        flat = self._full(self._states, bucket, key, value.dtype)[0]
        shared = flat[piece.start : piece.end] if piece.end else value
        if piece.end:
            shared.copy_(value)
        piece.state[key] = piece.shared[key] = shared

    def _full(
        self, states: States, bucket: int, key: str, dtype: torch.dtype
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """The one copy of state ``key`` for all of a bucket, among ``states``; made when first asked for."""
        if (bucket, key) not in states:
            indices = [i for i, place in enumerate(self._layout.places) if place.bucket == bucket]
            flat, views = self._owners.one_copy(
                dtype,
                self._layout.buckets[bucket].count,
                [self._layout.places[i] for i in indices],
                f"optimizer state {key!r}",
            )
            states[bucket, key] = flat, dict(zip(indices, views, strict=True))
        return states[bucket, key]

    def show(self) -> None:
        """Let ``optimizer.state`` have for every parameter what it would have in a plain script."""
        if self._is_loaded():
            return  # it has, until the next step takes that over
        for run in self._runs:
            for key, value in run.pieces[0].state.items():
                for i in run.members:
                    full = self._states.get((run.bucket, key))
                    self._optimizer.state[self._members.parameters[i]][key] = full[1][i] if full else value

    def _plan(self, present: bytes) -> None:
        """Divide the runs further where only some of a run's parameters have a gradient now."""
        old = {i: run for run in self._runs for i in run.members}
        runs: list[Run] = []
        for i, group in enumerate(self._members.groups):
            before = old.get(i)
            if group < 0 or not (present[i] or before):
                continue
            last = runs[-1] if runs else None
            if (
                last
                and self._continues(last, i)
                and last.present == bool(present[i])
                and (old.get(last.members[-1]) is before)
            ):
                last.members.append(i)
            else:
                runs.append(Run(group, self._layout.places[i].bucket, [i], bool(present[i])))
        for run in runs:
            before = old.get(run.members[0])
            run.pieces = before.pieces if before and before.members == run.members else self._cut(run, before)
        self._runs, self._present = runs, present

    def _continues(self, run: Run, index: int) -> bool:
        last = run.members[-1]
        places, bucket = self._layout.places, self._layout.buckets[run.bucket]
        return (
            self._members.groups[index] == run.group
            and places[index].bucket == run.bucket
            and align(places[last].end, bucket.dtype) == places[index].start
        )

    def _cut(self, run: Run, before: Run | None) -> list[Piece]:
        """This worker's pieces of ``run``, with the state that they had as part of the run ``before``."""
        bucket = self._layout.buckets[run.bucket]
        begin, end = self._slice(run, self._owners.rank, self._owners.size)
        fused = self._optimizer.param_groups[run.group].get("fused")
        size = max(end - begin, 1) if fused else _PIECE * torch.get_num_threads()
        pieces = []
        for start in range(begin, end, size):
            stop = min(start + size, end)
            piece = Piece(self._parameters[run.bucket][start:stop], start, stop)
            piece.tensor.grad = self._gradients[run.bucket][start:stop]
            pieces.append(piece)
        if not pieces:
            pieces.append(Piece(torch.zeros(_NOTHING, dtype=bucket.dtype), 0, 0))
            pieces[0].tensor.grad = torch.zeros(_NOTHING, dtype=bucket.dtype)
        if before:
            for key, value in before.pieces[0].state.items():
                for piece in pieces:
                    full = self._states.get((run.bucket, key))
                    if full is None:
                        piece.state[key] = value.clone() if isinstance(value, torch.Tensor) else value
                    elif piece.end:
                        piece.state[key] = full[0][piece.start : piece.end]
                    else:
                        piece.state[key] = torch.zeros(_NOTHING, dtype=full[0].dtype)
        return pieces

    def _slice(self, run: Run, rank: int, size: int) -> tuple[int, int]:
        """The slice of ``run`` for one of ``size`` workers."""
        dtype, places = self._layout.buckets[run.bucket].dtype, self._layout.places
        first, last = places[run.members[0]].start, align(places[run.members[-1]].end, dtype)
        begin, end = cut(last - first, dtype, size)[rank]
        return first + begin, first + end

    def _adopt_loaded(self) -> None:
        """Make the state that the script (or the optimizer's constructor) has put there the shared copy.

        Parameters whose scalars differ must not share a run.
        """
        loaded = self._bring_loaded(self._states)
        self._owners.barrier("loading the optimizer's state")
        self._divide_loaded(loaded)

    def _bring_loaded(self, states: States) -> dict[int, State]:
        """Have rank 0 copy what the optimizer shows to the one copies; returns it by parameter. Collective."""
        state, parameters = self._optimizer.state, self._members.parameters
        loaded = {i: state[p] for i, p in enumerate(parameters) if self._members.groups[i] >= 0 and p in state}
        for i, values in loaded.items():
            bucket = self._layout.places[i].bucket
            for key, value in values.items():
                if _is_elementwise(key, value, parameters[i]):
                    _, views = self._full(states, bucket, key, value.dtype)
                    if self._owners.rank == 0 and views[i] is not value:
                        views[i].copy_(value)
        return loaded

    def _divide_loaded(self, loaded: dict[int, State]) -> None:
        """Make runs of parameters whose scalars are equal."""
        parameters, before = self._members.parameters, State()
        self._runs, self._present = [], b""
        for i, values in loaded.items():
            if not values:
                continue
            last = self._runs[-1] if self._runs else None
            scalars = _scalars(values, parameters[i])
            if last and self._continues(last, i) and before == scalars:
                last.members.append(i)
            else:
                self._runs.append(Run(self._members.groups[i], self._layout.places[i].bucket, [i], present=False))
            before = scalars
        for run in self._runs:
            template = Run(run.group, run.bucket, run.members, present=False)
            template.pieces = [Piece(torch.empty(0), 0, 0, dict(loaded[run.members[0]]))]
            run.pieces = self._cut(run, template)
        self._note_shown()
        self.show()


def _is_elementwise(key: str, value: Any, parameter: torch.Tensor) -> bool:
    # For a parameter without dimensions the shape does not tell a step count from a momentum.
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and key not in _SCALARS


def _scalars(values: State, parameter: torch.Tensor) -> dict[str, Any]:
    return {
        key: value.tolist() if isinstance(value, torch.Tensor) else value
        for key, value in values.items()
        if not _is_elementwise(key, value, parameter)
    }


def _separate_scalars(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Parameters of a run show one and the same step count; in a checkpoint each must have its own."""
    state = {
        index: {
            key: value.clone() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
            for key, value in values.items()
        }
        for index, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}
