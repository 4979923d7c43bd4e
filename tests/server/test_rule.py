"""The script's optimizer in plain data, and built again: the same class, values and steps."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies.test_laws import OPTIMIZERS

from hocket.errors import StrategyError
from hocket.server import rule


def parameters(count: int = 2) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(4, 5)) for _ in range(count)]


def rebuilt(optimizer: torch.optim.Optimizer, own: list[list[torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return rule.build(json.loads(json.dumps(rule.describe(optimizer))), own)


@pytest.mark.few(6)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_makes_the_same_steps(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    theirs, ours = parameters(), parameters()
    optimizer = getattr(torch.optim, kind)([{"params": theirs[:1], "lr": 0.3}, {"params": theirs[1:]}], **options)
    built = rebuilt(optimizer, [ours[:1], ours[1:]])
    assert type(built) is type(optimizer)
    for step in range(4):
        for mine, yours in zip(ours, theirs, strict=True):
            yours.grad = torch.cos(yours.detach() + step)
            mine.grad = yours.grad.clone()
        optimizer.step()
        built.step()
        if step == 1:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
            rule.set_groups(built, json.loads(json.dumps(rule.describe_groups(optimizer))))
    for mine, yours in zip(ours, theirs, strict=True):
        assert torch.equal(mine, yours)


PLAIN = st.none() | st.booleans() | st.integers(-(2**50), 2**50) | st.floats(allow_nan=False) | st.text()


@given(values=st.dictionaries(st.text(min_size=1), st.recursive(PLAIN, lambda v: st.lists(v) | st.tuples(v, v))))
def test_values_of_groups_come_back_as_they_were(values: dict[str, Any]) -> None:
    values.pop("params", None)
    optimizer = torch.optim.SGD(parameters(1), lr=0.1)
    optimizer.param_groups[0].update(values)
    built = rebuilt(optimizer, [parameters(1)])
    found = built.param_groups[0]
    assert {key: found[key] for key in values} == values
    assert all(type(found[key]) is type(value) for key, value in values.items())


def test_a_group_of_which_nothing_is_here_stays_a_group() -> None:
    ours = parameters()
    optimizer = torch.optim.SGD([{"params": ours[:1]}, {"params": ours[1:], "lr": 0.5}], lr=0.1)
    built = rebuilt(optimizer, [[], [ours[1]]])
    assert [len(group["params"]) for group in built.param_groups] == [0, 1]
    assert [group["lr"] for group in built.param_groups] == [0.1, 0.5]
    built.step()


def test_a_rate_that_is_a_tensor_is_told_as_a_number() -> None:
    optimizer = torch.optim.SGD(parameters(1), lr=torch.tensor(0.25))
    assert rule.describe_groups(optimizer)[0]["lr"] == 0.25
    optimizer.param_groups[0]["lr"] = torch.tensor([0.1, 0.2])
    with pytest.raises(StrategyError, match="'lr' is a tensor of 2 elements"):
        rule.describe_groups(optimizer)
    optimizer.param_groups[0]["lr"] = object()
    with pytest.raises(StrategyError, match="'lr' is a object"):
        rule.describe_groups(optimizer)


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        ("no.such.module", "Own", "cannot import"),
        ("torch.optim", "NoSuch", "cannot import"),
        ("os", "system", "is no optimizer"),
        ("builtins", "eval", "is no optimizer"),
        ("subprocess", "Popen", "is no optimizer"),
        ("torch.nn", "Linear", "is no optimizer"),
    ],
)
def test_only_optimizers_are_built(module: str, name: str, words: str) -> None:
    described = {**rule.describe(torch.optim.SGD(parameters(1))), "module": module, "name": name}
    with pytest.raises(StrategyError, match=words):
        rule.build(described, [parameters(1)])


class Own(torch.optim.SGD):
    """Is not called with its arguments on a server."""

    def __init__(self, given: Any, secret_argument: int) -> None:
        super().__init__(given, lr=0.1)
        self.factor = secret_argument
        self.cache = object()


def test_the_constructor_is_not_called_and_plain_attributes_come_along() -> None:
    built = rebuilt(Own(parameters(1), 7), [parameters(1)])
    assert type(built) is Own
    assert built.factor == 7
    assert not hasattr(built, "cache")


def test_an_optimizer_of_the_script_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Own, "__module__", "__main__")
    with pytest.raises(StrategyError, match="move it to a module beside the script"):
        rule.describe(Own(parameters(1), 7))
