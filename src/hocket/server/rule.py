"""The update rule of a shard: the script's own optimizer, described in plain data and built again on the server."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Adagrad, Optimizer

from hocket.errors import StrategyError

_OWN = {"state", "param_groups", "defaults"}


def describe(optimizer: Optimizer) -> dict[str, Any]:
    """Class, group values and attributes of an optimizer; not its parameters, nor its state."""
    kind = type(optimizer)
    if kind.__module__ == "__main__":
        raise StrategyError(
            f"{kind.__name__} is defined in the script itself, where a server cannot find it: move it to a module "
            "beside the script, and import it from there"
        )
    attributes = {}
    for name, value in vars(optimizer).items():
        if name not in _OWN and not callable(value):
            try:
                attributes[name] = json.loads(json.dumps(value))
            except (TypeError, ValueError):
                continue  # hooks, caches and the like, which the class makes by itself
            if attributes[name] != value:
                del attributes[name]
    return {
        "module": kind.__module__,
        "name": kind.__qualname__,
        "groups": describe_groups(optimizer),
        "attributes": attributes,
    }


def describe_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The values of the parameter groups, as the script or a scheduler has set them, in plain data."""
    return [
        {key: _encode(key, value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def build(described: dict[str, Any], parameters: Sequence[Sequence[torch.nn.Parameter]]) -> Optimizer:
    """The optimizer that ``describe`` was given, for other parameters: a list for each group.

    Its class is imported by name; its constructor is not called.
    """
    try:
        found: Any = importlib.import_module(described["module"])
        for part in described["name"].split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise StrategyError(
            f"a server cannot import the optimizer {described['module']}.{described['name']} ({error}): put its module "
            "beside the script, or install it on the servers' hosts"
        ) from None
    if not isinstance(found, type) or not issubclass(found, Optimizer):
        raise StrategyError(f"{described['module']}.{described['name']} is no optimizer")
    optimizer: Optimizer = object.__new__(found)
    vars(optimizer).update(described["attributes"])
    groups = [
        {**{key: _decode(value) for key, value in values.items()}, "params": list(members)}
        for values, members in zip(described["groups"], parameters, strict=True)
    ]
    defaults = {key: value for key, value in groups[0].items() if key != "params"} if groups else {}
    for group in groups:
        if not group["params"]:
            group["params"] = [torch.nn.Parameter(torch.empty(0))]  # this server has nothing of this group
    Optimizer.__init__(optimizer, groups, defaults)
    for group, members in zip(optimizer.param_groups, parameters, strict=True):
        group["params"] = list(members)
        if isinstance(optimizer, Adagrad):  # which makes its state in its constructor
            for parameter in members:
                start = group["initial_accumulator_value"]
                optimizer.state[parameter] = {"step": torch.tensor(0.0), "sum": torch.full_like(parameter, start)}
    return optimizer


def set_groups(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Take over the values of a worker's groups."""
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        for key, value in values.items():
            if key != "params":
                group[key] = _decode(value)


def _encode(key: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise StrategyError(f"the optimizer's {key!r} is a tensor of {value.numel()} elements: use a number")
        return float(value)
    if isinstance(value, tuple):
        return {"tuple": [_encode(key, each) for each in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_encode(key, each) for each in value]
    raise StrategyError(f"the optimizer's {key!r} is a {type(value).__name__}, which cannot be told to a server")


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(_decode(each) for each in value["tuple"])
    return [_decode(each) for each in value] if isinstance(value, list) else value
