"""The strategies that can be chosen, and how a choice is written: ``name(key=value, …)``.

This module imports no torch, so that the command line can check a choice before it starts anything.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import types
import typing
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


@dataclass(frozen=True, kw_only=True)
class Served:
    """What all strategies with parameter servers have in common.

    Attributes:
        clip: The largest norm of a gradient: of the averaged one where gradients are averaged before an update, of each
            worker's where each is applied by itself.
        placement: Of parameters on servers: ``partitioned``, ``greedy`` or ``round_robin``.
        staleness_aware: Divide the rate by the measured staleness, if that is more than 1 (Zhang et al. 2016).
        patience: Seconds after which a worker that holds back others is not waited for until it comes; None is
            ``--timeout``, after which the job ends.
    """

    clip: float | None = None
    placement: str = "partitioned"
    staleness_aware: bool = False
    patience: float | None = None

    def check(self) -> None:
        """Raise a ValueError, with the remedy, if a value makes no sense."""
        if self.placement not in PLACEMENTS:
            raise ValueError(f"placement={self.placement!r}: the choices are {', '.join(PLACEMENTS)}")
        for name in ("clip", "patience"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r}: must be more than 0, for example {name}=1.0")


@dataclass(frozen=True)
class PS(Served):
    """Gradients are pushed to parameter servers, which update and give back the parameters.

    Attributes:
        staleness: How many clocks a worker may be ahead of the slowest: 0 is bulk-synchronous, None without bound.
        scale: By which gradients are multiplied if each is applied on arrival; None is 1 / workers.
    """

    staleness: int | None = 0
    scale: float | None = None

    def check(self) -> None:
        super().check()
        if self.staleness is not None and self.staleness < 0:
            raise ValueError(f"staleness={self.staleness}: must be 0 or more, or None for no bound")


@dataclass(frozen=True)
class BSP(Served):
    """Bulk-synchronous: one averaged update per round; ``ps(staleness=0)``."""


@dataclass(frozen=True)
class SSP(PS):
    """Stale-synchronous (Ho et al. 2013): a worker is at most so many clocks ahead of the slowest."""

    staleness: int | None = 3


@dataclass(frozen=True)
class Asynchronous(Served):
    """Every gradient is applied on arrival, and nobody waits; ``ps(staleness=None)``."""

    scale: float | None = None


@dataclass(frozen=True)
class Softsync(Served):
    """An update for every workers / n gradients (Zhang et al. 2016); n=1 is bulk-synchronous."""

    n: int = 1

    def check(self) -> None:
        super().check()
        if self.n < 1:
            raise ValueError(f"n={self.n}: must be 1 or more, at most the number of workers")


@dataclass(frozen=True)
class Downpour(Served):
    """Asynchronous, with Adagrad on the servers whatever the script's optimizer is (Dean et al. 2012).

    Attributes:
        fetch: Steps between two pulls; between them the worker takes steps of its own.
        push: Steps whose gradients are added up for one push.
        rate: Of Adagrad; None is the script's learning rate.
        adagrad: False for plain SGD on the servers.
        warmup: Updates that rank 0 makes alone before the others begin.
        scale: By which gradients are multiplied.
    """

    fetch: int = 1
    push: int = 1
    rate: float | None = None
    adagrad: bool = True
    warmup: int = 0
    scale: float | None = 1.0

    def check(self) -> None:
        super().check()
        if self.fetch < 1 or self.push < 1 or self.warmup < 0:
            raise ValueError(f"fetch={self.fetch}, push={self.push}, warmup={self.warmup}: must be 1, 1 and 0 or more")


PLACEMENTS = ("partitioned", "greedy", "round_robin")
Choice = Mirrored | Central | Served

TABLE: dict[str, type[Choice]] = {
    "mirrored": Mirrored,
    "central": Central,
    "ps": PS,
    "bsp": BSP,
    "ssp": SSP,
    "asynchronous": Asynchronous,
    "softsync": Softsync,
    "downpour": Downpour,
}


def parse(text: str) -> Choice:
    """Read ``name`` or ``name(key=value, …)``; values are literals and nothing is evaluated."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise StrategyError(f"cannot read strategy {text!r}: write name or name(key=value, …), {_known()}") from None
    call = node if isinstance(node, ast.Call) else None
    name = call.func if call else node
    if not isinstance(name, ast.Name):
        raise StrategyError(f"cannot read strategy {text!r}: write name or name(key=value, …), {_known()}")
    if name.id not in TABLE:
        raise StrategyError(f"unknown strategy {name.id!r}: {_known()}")
    kind = TABLE[name.id]
    options: dict[str, object] = {}
    for key, node in _arguments(text, call, kind):
        try:
            options[key] = ast.literal_eval(node)
        except ValueError:
            raise StrategyError(
                f"strategy {name.id!r}: the value of {key!r} is no literal: write for example {key}=True or {key}=0.5"
            ) from None
    return _build(name.id, kind, options)


def check_servers(choice: Choice, servers: int) -> None:
    """Raise if a strategy needs servers and the job has none, or the other way round."""
    name = write(choice).partition("(")[0]
    if isinstance(choice, Served) and not servers:
        raise StrategyError(f"--servers 0, but strategy {name!r} needs at least one: add --servers 1")
    if servers and not isinstance(choice, Served):
        raise StrategyError(f"strategy {name!r} uses no servers: leave out --servers {servers}, or use --strategy ps")


def _arguments(text: str, call: ast.Call | None, kind: type[Choice]) -> list[tuple[str, ast.expr]]:
    """Options by name; the strategy's own first number may be given without: ``softsync(4)``."""
    if call is None:
        return []
    found: list[tuple[str, ast.expr]] = []
    own = [name for name in vars(kind).get("__annotations__", {}) if bool not in _types(kind, name)]
    if len(call.args) > min(1, len(own)):
        raise StrategyError(f"cannot read strategy {text!r}: write name or name(key=value, …), {_known()}")
    found += zip(own, call.args, strict=False)
    for keyword in call.keywords:
        if keyword.arg is None:
            raise StrategyError(f"cannot read strategy {text!r}: ** is not possible, write key=value")
        found.append((keyword.arg, keyword.value))
    return found


def write(choice: Choice) -> str:
    """The text from which ``parse`` makes ``choice``; options at their defaults are left out."""
    name = next(name for name, kind in TABLE.items() if type(choice) is kind)
    options = [
        f"{field.name}={getattr(choice, field.name)!r}"
        for field in dataclasses.fields(choice)
        if getattr(choice, field.name) != field.default
    ]
    return f"{name}({', '.join(options)})" if options else name


def _build(name: str, kind: type[Choice], options: dict[str, object]) -> Choice:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key, value in options.items():
        if key not in fields:
            takes = f"it takes {', '.join(fields)}" if fields else "it takes no options"
            raise StrategyError(f"strategy {name!r} has no option {key!r}: {takes}")
        allowed = _types(kind, key)
        if float in allowed and type(value) is int:
            options[key] = float(value)
        elif type(value) not in allowed:
            words = " or ".join("None" if each is types.NoneType else f"a {each.__name__}" for each in allowed)
            example = fields[key].default if fields[key].default is not None else _EXAMPLES[allowed[0]]
            raise StrategyError(f"strategy {name!r}: {key}={value!r} must be {words}, for example {key}={example!r}")
    choice = kind(**options)  # type: ignore[arg-type]
    if isinstance(choice, Served):
        try:
            choice.check()
        except ValueError as error:
            raise StrategyError(f"strategy {name!r}: {error}") from None
    return choice


_EXAMPLES: dict[type, object] = {float: 1.0, int: 3}


def _types(kind: type[Choice], key: str) -> tuple[type, ...]:
    hint = typing.get_type_hints(kind)[key]
    return typing.get_args(hint) or (hint,)


def _known() -> str:
    def signature(name: str, kind: type[Choice]) -> str:
        own = vars(kind).get("__annotations__", {})
        options = ", ".join(f"{f.name}={f.default!r}" for f in dataclasses.fields(kind) if f.name in own)
        return f"{name}({options})" if options else name

    return "the choices are " + ", ".join(signature(*item) for item in TABLE.items())
