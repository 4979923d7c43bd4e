"""Which strategies there are: those of this package, and those of others that are installed beside it.

Another distribution adds a strategy by an entry point of the group ``hocket.strategies``: its name is the strategy's,
and it leads to a spec. Nothing of such a distribution is imported before its strategy is asked for by name, or all
choices are listed.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from hocket.errors import StrategyError
from hocket.specs.local_steps import EASGD, DiLoCo, Gossip, Hogwild, LocalSGD
from hocket.specs.spec import Spec
from hocket.specs.synchronous import DMB, Central, Delayed, FullBatch, Mirrored
from hocket.specs.with_servers import BSP, PS, SSP, Asynchronous, Downpour, Softsync

GROUP = "hocket.strategies"
BUILT_IN: dict[str, type[Spec]] = {
    kind.name: kind
    for kind in (
        Mirrored, Central, Delayed, DMB, FullBatch, LocalSGD, DiLoCo, EASGD, Gossip, Hogwild,
        PS, BSP, SSP, Asynchronous, Softsync, Downpour,
    )
}  # fmt: skip


def find(name: str) -> type[Spec] | None:
    """The spec called ``name``; None if there is none."""
    outside = _outside()
    return _load(outside[name]) if name in outside else BUILT_IN.get(name)


def everything() -> dict[str, type[Spec]]:
    """All specs by name; imports those from outside."""
    return BUILT_IN | {name: _load(entry) for name, entry in _outside().items()}


@cache
def _outside() -> dict[str, EntryPoint]:
    """The entry points of other distributions by name, not loaded."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        other = found.get(entry.name)
        if other is not None and other.value == entry.value:
            continue  # one distribution that is found twice, in two folders of the path
        if other is not None or entry.name in BUILT_IN:
            owner = "Hocket" if other is None else _distribution(other)
            raise StrategyError(
                f"{_distribution(entry)} adds a strategy {entry.name!r}, and {owner} has one of this name: give it "
                f"another name in the entry point group {GROUP!r}, or uninstall {_distribution(entry)}"
            )
        found[entry.name] = entry
    return found


@cache
def _load(entry: EntryPoint) -> type[Spec]:
    try:
        kind = entry.load()
    except Exception as error:
        raise StrategyError(
            f"strategy {entry.name!r} of {_distribution(entry)} cannot be imported from {entry.value!r}: {error!r}"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Spec)) or getattr(kind, "name", None) != entry.name:
        raise StrategyError(
            f"strategy {entry.name!r} of {_distribution(entry)}: {entry.value!r} must be a subclass of "
            f"hocket.specs.Spec with name = {entry.name!r}"
        )
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING:
            raise StrategyError(
                f"strategy {entry.name!r} of {_distribution(entry)}: option {field.name!r} has no default: give it one"
            )
    return kind


def _distribution(entry: EntryPoint) -> str:
    return f"the distribution {entry.dist.name!r}" if entry.dist is not None else "an unknown distribution"
