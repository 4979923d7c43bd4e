"""Products of parameters: a covering of them by default, every combination with ``pytest --all``."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def rows(main: Sequence[Any] | None, others: Sequence[Sequence[Any]]) -> list[tuple[int, ...]]:
    """The combinations of a covering, as numbers of values.

    Without a main parameter every value appears once at least; with one, in front, every value of each of the others
    appears with every value of it.
    """
    longest = max(map(len, others))
    if main is None:
        return [tuple(i % len(values) for values in others) for i in range(longest)]
    return [
        (first, *((i + first * place) % len(values) for place, values in enumerate(others)))
        for first in range(len(main))
        for i in range(longest)
    ]


def product(main: str | None = None, /, **values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by all combinations of ``values``; those outside of a covering run with ``--all`` only.

    Args:
        main: The parameter that matters most: every value of the others is combined with every value of it.
        values: The values of each parameter, by its name.
    """
    names = ([main] if main else []) + [name for name in values if name != main]
    lists = [list(values[name]) for name in names]
    chosen = set(rows(lists[0] if main else None, lists[1:] if main else lists))
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(
                *(given[number] for given, number in zip(lists, numbers, strict=True)),
                marks=[] if numbers in chosen else pytest.mark.all_combinations,
            )
            for numbers in itertools.product(*(range(len(given)) for given in lists))
        ],
    )


def rarely(*values: Any) -> Any:
    """Values of parameters that run with ``--all`` only, because others prove nearly the same in less time."""
    return pytest.param(*values, marks=pytest.mark.all_combinations)
