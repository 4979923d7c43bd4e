"""What a training function of ``hvd.elastic.run`` has: kept at each commit, the same on all workers after a change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from hocket.horovod.elastic_sampler import ElasticSampler
from hocket.horovod.objects import broadcast_object, broadcast_optimizer_state, broadcast_parameters


class State:
    """The contract of a state; a script's own has ``save``, ``restore`` and ``sync``."""

    def __init__(self, bcast_object: Any = None, get_rank: Any = None) -> None:
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Have these called after a change of workers: for a learning rate that follows their number, for example."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Workers have changed."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Keep the state as it is, and look whether workers are to come or to leave; all ranks call this."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Look whether workers are to come or to leave; all ranks call this.

        Raises:
            HostsUpdatedInterrupt: they are.
        """
        from hocket.horovod.elastic_run import look_for_changes

        look_for_changes()

    def save(self) -> None:
        """Keep the state as it is now."""
        raise NotImplementedError

    def restore(self) -> None:
        """Be as at the last ``save``."""
        raise NotImplementedError

    def sync(self) -> None:
        """Have all ranks be as rank 0 is."""
        raise NotImplementedError

    def reset(self) -> None:
        """Workers have changed; called before the callbacks."""


class ObjectState(State):
    """Values of any kind, as attributes.

    Args:
        bcast_object: Of no meaning here.
        get_rank: Of no meaning here.
        **kwargs: The values.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self._names = list(kwargs)
        vars(self).update(kwargs)
        self._kept = copy.deepcopy(kwargs)

    def save(self) -> None:
        """Keep a copy of each value."""
        self._kept = {name: copy.deepcopy(getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        """Have each value as it was kept."""
        vars(self).update(copy.deepcopy(self._kept))

    def sync(self) -> None:
        """Have the values of rank 0."""
        if self._names:
            vars(self).update(broadcast_object({name: getattr(self, name) for name in self._names}, 0))
            self.save()


class TorchState(ObjectState):
    """Models, optimizers and samplers, beside values of any kind.

    Args:
        model: A model.
        optimizer: Its optimizer.
        **kwargs: More of them, and other values; all are attributes.
    """

    def __init__(
        self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        given = {**kwargs, **({"model": model} if model else {}), **({"optimizer": optimizer} if optimizer else {})}
        self._stateful = {name: value for name, value in given.items() if isinstance(value, _STATEFUL)}
        super().__init__(**{name: value for name, value in given.items() if name not in self._stateful})
        self.model, self.optimizer = model, optimizer
        vars(self).update(self._stateful)
        self._states: dict[str, Any] = {}
        self.save()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("_stateful", {}):
            self._stateful[name] = value
        super().__setattr__(name, value)

    def save(self) -> None:
        """Keep a copy of all."""
        super().save()
        self._states = {name: copy.deepcopy(each.state_dict()) for name, each in self._stateful.items()}

    def restore(self) -> None:
        """Have all as it was kept."""
        super().restore()
        for name, each in self._stateful.items():
            each.load_state_dict(copy.deepcopy(self._states[name]))

    def sync(self) -> None:
        """Have all as rank 0 has it."""
        for each in self._stateful.values():
            if isinstance(each, nn.Module):
                broadcast_parameters(each.state_dict(), 0)
            elif isinstance(each, torch.optim.Optimizer):
                broadcast_optimizer_state(each, 0)
            else:
                each.load_state_dict(broadcast_object(each.state_dict(), 0))
        super().sync()
        self.save()


_STATEFUL = (nn.Module, torch.optim.Optimizer, ElasticSampler)
