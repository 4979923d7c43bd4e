"""The strategies that can be chosen, and how a choice is written: ``name(key=value, …)``.

This module imports no torch, so that the command line can check a choice before it starts anything.
"""

from __future__ import annotations

import ast
import dataclasses
from dataclasses import dataclass

from hocket.errors import StrategyError


@dataclass(frozen=True)
class Mirrored:
    """Gradients are averaged in every step, and every worker updates its own replica, all identical."""


@dataclass(frozen=True)
class Central:
    """One copy of parameters and optimizer state per host; each worker updates its own slice of it.

    Attributes:
        fused: Reduce gradients straight into the update. Faster, but ``p.grad`` is never the average, so
            clipping, GradScaler and gradient logging are refused.
    """

    fused: bool = False


Choice = Mirrored | Central

TABLE: dict[str, type[Mirrored] | type[Central]] = {"mirrored": Mirrored, "central": Central}


def parse(text: str) -> Choice:
    """Read ``name`` or ``name(key=value, …)``; values are literals and nothing is evaluated."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise StrategyError(f"cannot read strategy {text!r}: write name or name(key=value, …), {_known()}") from None
    call = node if isinstance(node, ast.Call) else None
    name = call.func if call else node
    if not isinstance(name, ast.Name) or (call and call.args):
        raise StrategyError(f"cannot read strategy {text!r}: write name or name(key=value, …), {_known()}")
    if name.id not in TABLE:
        raise StrategyError(f"unknown strategy {name.id!r}: {_known()}")
    kind = TABLE[name.id]
    options: dict[str, object] = {}
    for keyword in call.keywords if call else ():
        if keyword.arg is None:
            raise StrategyError(f"cannot read strategy {text!r}: ** is not possible, write key=value")
        try:
            options[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            raise StrategyError(
                f"strategy {name.id!r}: the value of {keyword.arg!r} is no literal: write for example "
                f"{keyword.arg}=True or {keyword.arg}=0.5"
            ) from None
    return _build(name.id, kind, options)


def write(choice: Choice) -> str:
    """The text from which ``parse`` makes ``choice``; options at their defaults are left out."""
    name = next(name for name, kind in TABLE.items() if type(choice) is kind)
    options = [
        f"{field.name}={getattr(choice, field.name)!r}"
        for field in dataclasses.fields(choice)
        if getattr(choice, field.name) != field.default
    ]
    return f"{name}({', '.join(options)})" if options else name


def _build(name: str, kind: type[Mirrored] | type[Central], options: dict[str, object]) -> Choice:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key, value in options.items():
        if key not in fields:
            takes = f"it takes {', '.join(fields)}" if fields else "it takes no options"
            raise StrategyError(f"strategy {name!r} has no option {key!r}: {takes}")
        expected = type(fields[key].default)
        if type(value) is not expected:
            raise StrategyError(
                f"strategy {name!r}: {key}={value!r} must be a {expected.__name__}, "
                f"for example {key}={fields[key].default!r}"
            )
    return kind(**options)  # type: ignore[arg-type]


def _known() -> str:
    def signature(name: str, kind: type[Mirrored] | type[Central]) -> str:
        options = ", ".join(f"{field.name}={field.default!r}" for field in dataclasses.fields(kind))
        return f"{name}({options})" if options else name

    return "the choices are " + ", ".join(signature(*item) for item in TABLE.items())
