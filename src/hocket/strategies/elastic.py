"""What both forms of ``easgd`` have in common: a worker's own replica, and a centre that is evaluated and saved."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from hocket.errors import StrategyError
from hocket.specs import EASGD
from hocket.strategies.base import Context, DoneBatch, Why
from hocket.strategies.local_training import LocalTraining
from hocket.updates.update import Step


class ElasticTraining(LocalTraining):
    """Local steps, and every ``period`` batches a pull between this worker's parameters and the centre.

    When a training loop ends or is left, the parameters become the centre's, and the worker's own are kept aside. They
    are put back at the first forward pass for training in the next loop, unless the script has given the parameters
    other values meanwhile: a loop that only evaluates sees the centre.

    Attributes:
        alpha: How much of the difference a pull takes away.
        pulls: How many pulls there have been.
    """

    def __init__(self, context: Context, spec: EASGD) -> None:
        assert context.optimizer is not None
        _check_momentum(context.optimizer, spec.momentum)
        super().__init__(context, spec)
        self._model, self._spec, self._in_round, self.pulls = context.model, spec, 0, 0
        if not context.rests:
            self._give_momentum(spec.momentum)
        self.alpha = self._find_alpha()
        self._shows = False  # whether the parameters are the centre's
        self._aside: list[torch.Tensor] | None = None  # the worker's own while the centre is shown, then the centre
        self._is_loaded = self._returns = False  # whether a loop has begun for which the worker's own return
        self._hooks.before_forward = self._before_forward
        self._hooks.watch_loading(context.model, lambda: None, self._loaded, self._heed_loading)

    def _find_alpha(self) -> float:
        return 0.9 / self._communicator.size if self._spec.alpha is None else self._spec.alpha

    def state(self) -> dict[str, Any]:
        return {**super().state(), "in round": self._in_round}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from the centre, which the checkpoint has as the model, on all workers."""
        super().load_state(state)
        self._in_round = state.get("in round", 0) % self._spec.period  # rounds may have been longer
        self._give_momentum(self._spec.momentum)
        self._loaded()

    def begin_loop(self, epoch: int) -> None:
        self._heed_loading()
        if self._shows:
            self._is_settled, self._returns = False, True

    def _before_forward(self) -> None:
        if self._returns and self._model.training and torch.is_grad_enabled():
            self._return()

    def _return(self) -> None:
        """Put the worker's own parameters back, if a loop has begun and this was not done yet."""
        if self._returns:
            self._shows = self._returns = False
            if all(map(torch.equal, self._members.parameters, self._shown())):
                self._swap()
            else:
                self._aside = None
                self._take_written()

    def settle(self, why: Why) -> None:
        super().settle(why)
        if why is Why.GLANCE:
            self._take_back()
        elif why is Why.SWITCH_AWAY:
            self._returns = False
            self._give_momentum(0.0)
        elif why is Why.SWITCH_TO:
            self._give_momentum(self._spec.momentum)

    def _take_back(self) -> None:
        """A loop has trained nothing: show the centre as before."""
        if self._aside is not None:
            if not self._shows:
                self._swap()
            self._shows = self._is_settled = True
        self._returns = False

    def end_batch(self, batch: DoneBatch) -> None:
        if self._has_moved:
            self._return()
            self._shows, self._aside = False, None
        super().end_batch(batch)

    @contextmanager
    def merged(self) -> Iterator[None]:
        """The centre, with the buffers and the optimizer state that the subclass has for it."""
        self._heed_loading()
        tensors = self._merged_tensors()
        own = [tensor.detach().clone() for tensor in tensors]
        before = self._shows, self._aside
        try:
            self._merge()
            self._shows = True
            yield
        finally:
            self._shows, self._aside = before
            with torch.no_grad():
                torch._foreach_copy_([tensor.detach() for tensor in tensors], own)

    def _exchange(self, batches: int, samples: int) -> None:
        self._in_round += batches
        if self._in_round >= self._spec.period:
            self._end_round()

    def _end_round(self) -> None:
        self._in_round = 0
        if self.alpha:
            self._pull()
            self.pulls += 1

    def _make_equal(self) -> None:
        """End the last round, which may be short, and show the centre."""
        if self._in_round:
            self._end_round()
        self._show()

    def step(self, original: Step, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        self._heed_loading()
        self._return()  # late, if the forward pass of a compiled model has not told
        self._shows, self._aside = False, None  # a script that trains on what it was shown goes on from there
        return super().step(original, closure, **options)

    def _give_momentum(self, momentum: float) -> None:
        """EAMSGD: let the worker's plain SGD have Nesterov momentum while this strategy is at work."""
        optimizer = self._optimizer
        if self._spec.momentum and optimizer is not None:
            for group in optimizer.param_groups:
                if bool(group["momentum"]) != bool(momentum):
                    group["momentum"], group["nesterov"] = momentum, momentum > 0

    @torch.no_grad()
    def _show(self) -> None:
        """Set the parameters to those of the centre."""
        self._returns = False
        if not self._shows:
            self._aside = [tensor.detach().clone() for tensor in self._tensors()]
            self._shows = True
        torch._foreach_copy_([p.detach() for p in self._members.parameters], self._centre())

    @torch.no_grad()
    def _swap(self) -> None:
        assert self._aside is not None
        shown = [tensor.data for tensor in self._tensors()]  # a penalty that the script computed before stays usable
        kept, self._aside = self._aside, [tensor.clone() for tensor in shown]
        torch._foreach_copy_(shown, kept)

    def _loaded(self) -> None:
        """The script has called ``load_state_dict``, on all ranks."""
        self._is_loaded = True

    def _heed_loading(self) -> None:
        """Take the loaded parameters as the new centre; all workers go on from it."""
        if self._is_loaded:
            self._is_loaded, self._returns, self._shows, self._aside = False, False, False, None
            self._take_centre()

    def _merged_tensors(self) -> list[torch.Tensor]:
        """The tensors that ``_merge`` changes."""
        return [*self._members.parameters, *self._buffers]

    def _shown(self) -> list[torch.Tensor]:
        """The centre that was shown last."""
        return self._centre()

    def _take_written(self) -> None:
        """The script has written to the parameters that it was shown, on all ranks alike."""
        self._take_centre()

    @abstractmethod
    def _centre(self) -> list[torch.Tensor]:
        """The centre as it is now."""

    @abstractmethod
    def _pull(self) -> None:
        """Move this worker and the centre towards each other, by opposite amounts."""

    @abstractmethod
    def _merge(self) -> None:
        """Set model and optimizer to what a checkpoint keeps."""

    @abstractmethod
    def _take_centre(self) -> None:
        """Take the parameters, which are the same on all ranks, as the centre."""


def _check_momentum(optimizer: Optimizer, momentum: float) -> None:
    if not momentum:
        return
    plain = type(optimizer) is SGD and not any(g["momentum"] or g["dampening"] for g in optimizer.param_groups)
    if not plain:
        raise StrategyError(
            f"easgd(momentum={momentum}) gives the workers' SGD its momentum, and the script's optimizer is "
            f"{type(optimizer).__name__}{' with momentum' if type(optimizer) is SGD else ''}: use torch.optim.SGD "
            "without momentum, or leave out momentum="
        )
