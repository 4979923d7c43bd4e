"""A step of an element-wise optimizer, divided among workers by slices of the flat parameters.

Neighbouring parameters that always have gradients together form a *run*: one range of the flat buffer, updated
as a whole. Each worker takes its slice of every run, cut into pieces that stay in the cache, and shows these to
the optimizer in place of the parameters. The optimizer's state becomes one shared copy; its scalars (the step
count) are the same on all workers, because a worker whose slice is empty steps a small piece of nothing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from hocket.comm.bucket_layout import Layout, align, cut
from hocket.updates.update import Owners, Range, Step, Trained, Update

_PIECE = 1 << 16  # elements per thread; with gradient and state a few pieces fit into the second-level cache
_NOTHING = 16  # elements of the piece of a worker whose slice is empty

_SCALARS = frozenset(("step", "eta", "mu", "mu_product"))  # of PyTorch's optimizers

State = dict[str, Any]


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


class SlicedUpdate(Update):
    """Runs the user's optimizer on this worker's slices.

    Args:
        parameters: The shared parameters, flat, one per bucket of ``layout``.
        gradients: Where this worker finds (or puts) averaged gradients, flat, one per bucket.
    """

    def __init__(
        self,
        owners: Owners,
        optimizer: Optimizer,
        members: Trained,
        layout: Layout,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
    ) -> None:
        self._owners, self._optimizer, self._members, self._layout = owners, optimizer, members, layout
        self._parameters, self._gradients = parameters, gradients
        self._runs: list[Run] = []
        self._present = b""
        self._states: dict[tuple[int, str], tuple[torch.Tensor, dict[int, torch.Tensor]]] = {}
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
        flat = self._full(bucket, key, value.dtype)[0]
        shared = flat[piece.start : piece.end] if piece.end else value
        if piece.end:
            shared.copy_(value)
        piece.state[key] = piece.shared[key] = shared

    def _full(self, bucket: int, key: str, dtype: torch.dtype) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """The one copy of state ``key`` for all of a bucket: flat, and by parameter; made when first asked for."""
        if (bucket, key) not in self._states:
            indices = [i for i, place in enumerate(self._layout.places) if place.bucket == bucket]
            flat, views = self._owners.one_copy(
                dtype,
                self._layout.buckets[bucket].count,
                [self._layout.places[i] for i in indices],
                f"optimizer state {key!r}",
            )
            self._states[bucket, key] = flat, dict(zip(indices, views, strict=True))
        return self._states[bucket, key]

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
        first = self._layout.places[run.members[0]].start
        last = align(self._layout.places[run.members[-1]].end, bucket.dtype)
        begin, end = cut(last - first, bucket.dtype, self._owners.size)[self._owners.rank]
        fused = self._optimizer.param_groups[run.group].get("fused")
        size = max(end - begin, 1) if fused else _PIECE * torch.get_num_threads()
        pieces = []
        for start in range(first + begin, first + end, size):
            stop = min(start + size, first + end)
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

    def _adopt_loaded(self) -> None:
        """Make the state that the script (or the optimizer's constructor) has put there the shared copy.

        Parameters whose scalars differ must not share a run.
        """
        state, parameters = self._optimizer.state, self._members.parameters
        loaded = {i: state[p] for i, p in enumerate(parameters) if self._members.groups[i] >= 0 and p in state}
        self._runs, self._present = [], b""
        for i, values in loaded.items():
            bucket = self._layout.places[i].bucket
            for key, value in values.items():
                if _is_elementwise(key, value, parameters[i]):
                    _, views = self._full(bucket, key, value.dtype)
                    if self._owners.rank == 0 and views[i] is not value:
                        views[i].copy_(value)
        self._owners.barrier("loading the optimizer's state")
        for i, values in loaded.items():
            if not values:
                continue
            last = self._runs[-1] if self._runs else None
            if (
                last
                and self._continues(last, i)
                and _scalars(loaded[last.members[-1]], parameters[last.members[-1]])
                == (_scalars(values, parameters[i]))
            ):
                last.members.append(i)
            else:
                self._runs.append(Run(self._members.groups[i], self._layout.places[i].bucket, [i], present=False))
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
