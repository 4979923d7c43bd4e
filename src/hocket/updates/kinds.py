"""How an optimizer may be divided: by elements, by whole tensors, or not at all.

The answer is known for PyTorch's own optimizers and tried out for others: a divided step must give the same
numbers as an undivided one.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.optim import Optimizer

from hocket.errors import StrategyError

_BY_ELEMENTS = frozenset(
    ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "Rprop", "ASGD")
)
_BY_TENSORS = frozenset(("Muon", "Adafactor"))
_REFUSED = {
    "LBFGS": "it evaluates the model several times in a step and couples all parameters",
    "SparseAdam": "it takes sparse gradients only",
}


def divides_by_elements(optimizer: Optimizer, strategy: str) -> bool:
    """True if ``optimizer`` may work on slices, False if on whole tensors.

    Args:
        optimizer: Is not changed.
        strategy: Who asks, for the error.

    Raises:
        StrategyError: it can be divided in neither way.
    """
    kind = type(optimizer)
    name = kind.__name__
    if kind.__module__.startswith("torch.optim"):
        if name in _BY_ELEMENTS:
            return True
        if name in _BY_TENSORS:
            return False
        if name in _REFUSED:
            raise StrategyError(_refusal(strategy, name, _REFUSED[name]))
    if all(_by_elements(optimizer, group) for group in range(len(optimizer.param_groups))):
        return True
    if _by_tensors(optimizer):
        return False
    raise StrategyError(_refusal(strategy, name, "its step on one parameter depends on the other parameters"))


def _by_elements(optimizer: Optimizer, group: int) -> bool:
    """Whether a matrix may be cut anywhere, and its pieces be stepped flat, each by an optimizer of its own."""
    start, *gradients = _random_matrices(4)
    whole = _run(optimizer, {group: [start]}, [{group: [g]} for g in gradients])[group][0]
    pieces = []
    for part in (slice(0, 608), slice(608, None)):
        flat = [{group: [g.view(-1)[part]]} for g in gradients]
        try:
            pieces.append(_run(optimizer, {group: [start.view(-1)[part]]}, flat)[group][0])
        except Exception:  # it wants matrices
            return False
    return torch.allclose(whole.view(-1), torch.cat(pieces), rtol=1e-9, atol=1e-12)


def _by_tensors(optimizer: Optimizer) -> bool:
    """Whether every tensor is stepped as if the others, of its group and of other groups, were not there."""
    groups = range(len(optimizer.param_groups))
    starts = {group: list(_random_matrices(2)) for group in groups}
    gradients = [{group: list(_random_matrices(2, seed=1 + step)) for group in groups} for step in range(3)]
    together = _run(optimizer, starts, gradients)
    for group in groups:
        for i in range(2):
            alone = _run(optimizer, {group: [starts[group][i]]}, [{group: [g[group][i]]} for g in gradients])
            if not torch.allclose(together[group][i], alone[group][0], rtol=1e-9, atol=1e-12):
                return False
    return True


def _random_matrices(count: int, seed: int = 0) -> Iterator[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return (torch.randn(48, 32, generator=random, dtype=torch.float64) for _ in range(count))


_ByGroup = Mapping[int, Sequence[torch.Tensor]]


def _run(optimizer: Optimizer, starts: _ByGroup, gradients: Sequence[_ByGroup]) -> dict[int, list[torch.Tensor]]:
    """Steps of a copy of ``optimizer`` on other parameters; those after the last step, by group."""
    parameters = {group: [torch.nn.Parameter(t.clone()) for t in tensors] for group, tensors in starts.items()}
    trial = object.__new__(type(optimizer))
    trial.__dict__.update(optimizer.__dict__)
    trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    trial.param_groups = [
        {**copy.deepcopy({k: v for k, v in group.items() if k != "params"}), "params": parameters.get(i, [])}
        for i, group in enumerate(optimizer.param_groups)
    ]
    trial.state = defaultdict(dict)
    with torch.random.fork_rng():
        for step in gradients:
            for group, tensors in step.items():
                for parameter, gradient in zip(parameters[group], tensors, strict=True):
                    parameter.grad = gradient.clone()
            type(optimizer).step(trial)
    return {group: [p.detach() for p in tensors] for group, tensors in parameters.items()}


def _refusal(strategy: str, name: str, reason: str) -> str:
    return f"strategy {strategy!r} cannot divide {name}: {reason}; use --strategy mirrored"
