"""How an optimizer may be divided: by elements, by whole tensors, or not at all.

The answer is known for PyTorch's own optimizers and tried out for others: a divided step must give the same
numbers as an undivided one.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence

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


def divides_by_elements(optimizer: Optimizer) -> bool:
    """True if ``optimizer`` may work on slices, False if on whole tensors.

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
            raise StrategyError(_refusal(name, _REFUSED[name]))
    random = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(48, 32, generator=random, dtype=torch.float64) for _ in range(4))
    whole = _run(optimizer, [start], [[g] for g in gradients])[0]
    top, bottom = slice(0, 16), slice(16, 48)
    # Each part has an optimizer of its own, as it would have on another worker.
    rows = [_run(optimizer, [start[part]], [[g[part]] for g in gradients])[0] for part in (top, bottom)]
    if torch.allclose(whole, torch.cat(rows), rtol=1e-9, atol=1e-12):
        return True
    pair = _run(optimizer, [start[top], start[bottom]], [[g[top], g[bottom]] for g in gradients])
    if torch.allclose(torch.cat(pair), torch.cat(rows), rtol=1e-9, atol=1e-12):
        return False
    raise StrategyError(_refusal(name, "its step on one parameter depends on the other parameters"))


def _run(
    optimizer: Optimizer, starts: Sequence[torch.Tensor], gradients: Sequence[Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    parameters = [torch.nn.Parameter(start.clone()) for start in starts]
    trial = object.__new__(type(optimizer))
    trial.__dict__.update(optimizer.__dict__)
    trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    trial.param_groups = [{"params": parameters, **copy.deepcopy(group)}]
    trial.state = defaultdict(dict)
    with torch.random.fork_rng():
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            type(optimizer).step(trial)
    return [parameter.detach() for parameter in parameters]


def _refusal(name: str, reason: str) -> str:
    return f"strategy 'central' cannot divide {name} among the workers: {reason}; use --strategy mirrored"
