"""Whether a loop is seen to be left on purpose, by what lets go of its iterator; an error never is."""

import contextlib
import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hocket.job.loop_exit import on_purpose

found: list[bool] = []  # of each iterator that was closed


def batches() -> Iterator[int]:
    try:
        yield from range(5)
    except GeneratorExit:
        found.append(on_purpose(sys._getframe().f_back))
        raise


def begun() -> Iterator[int]:
    iterator = batches()
    next(iterator)
    return iterator


class Thing:
    def __init__(self, it: Any) -> None:
        self.it = it


class Slotted:
    __slots__ = ("it",)

    def __init__(self, it: Any) -> None:
        self.it = it

    @property
    def fails(self) -> None:
        raise AttributeError(next(begun()))


def broken() -> Iterator[int]:
    yield 1
    raise ValueError


def by_break() -> None:
    for _ in batches():
        break


def by_islice() -> None:
    for _ in itertools.islice(batches(), 2):
        pass


def by_zip() -> None:
    for _ in zip(range(2), batches(), strict=False):
        pass


def by_return_in_the_loop() -> None:
    def inner() -> int:
        for each in batches():
            return each
        return 0

    inner()


def by_wrapper() -> None:
    def watched() -> Iterator[Any]:
        yield from enumerate(batches())

    for _ in watched():
        break


def by_wrapper_of_a_wrapper() -> None:
    def inner() -> Iterator[Any]:
        yield from enumerate(batches())

    def outer() -> Iterator[Any]:
        for each in inner():
            yield -each[1]

    for _ in outer():
        break


def by_another_value() -> None:
    it: Any = begun()
    it = None
    assert it is None


def by_two_values() -> None:
    it: Any = begun()
    it, other = 1, 2
    assert it < other


def by_del() -> None:
    it = begun()
    del it


def by_attribute() -> None:
    thing = Thing(begun())
    thing.it = None


def by_attribute_from_a_variable() -> None:
    thing, value = Thing(begun()), 3
    thing.it = value


def by_slot() -> None:
    thing = Slotted(begun())
    thing.it = None


def by_del_of_an_attribute() -> None:
    thing = Thing(begun())
    del thing.it


def by_item() -> None:
    things: dict[str, Any] = {"it": begun()}
    things["it"] = None


def by_item_of_a_list() -> None:
    things: list[Any] = [begun()]
    things[0] = None


def by_del_of_an_item() -> None:
    things = {"it": begun()}
    del things["it"]


ON_PURPOSE = [
    by_break, by_islice, by_zip, by_return_in_the_loop, by_wrapper, by_wrapper_of_a_wrapper, by_another_value,
    by_two_values, by_del, by_attribute, by_attribute_from_a_variable, by_slot, by_del_of_an_attribute, by_item,
    by_item_of_a_list, by_del_of_an_item,
]  # fmt: skip


@pytest.mark.few(6)
@pytest.mark.parametrize("leave", ON_PURPOSE)
def test_left_on_purpose(leave: Callable[[], None]) -> None:
    found.clear()
    leave()
    assert found == [True]


def by_raise() -> None:
    for _ in batches():
        raise ValueError


def by_raise_in_a_function() -> None:
    def inner() -> None:
        it = begun()
        raise ValueError(it is None)

    inner()


def by_error_of_the_first_in_zip() -> None:
    for _ in zip(broken(), batches(), strict=False):
        pass


def by_error_of_the_last_in_zip() -> None:
    for _ in zip(batches(), broken(), strict=False):
        pass


def by_error_in_a_wrapper() -> None:
    def both() -> Iterator[Any]:
        yield from zip(batches(), broken(), strict=False)

    for _ in both():
        pass


def by_error_that_is_swallowed() -> None:
    thing: Any = Slotted(None)
    getattr(thing, "fails", None)


def by_attribute_of_what_refuses_it() -> None:
    Slotted(begun()).other = 1  # type: ignore[attr-defined]


def by_attribute_of_what_may_be_new(new: bool = True) -> None:
    old: Any = Thing(None)
    (Slotted(begun()) if new else old).other = 1


def by_value_that_is_refused() -> None:
    thing: Any = Slotted(None)
    thing.other = Slotted(begun())


def by_value_that_may_be_new(new: bool = True) -> None:
    thing: Any = Slotted(None)
    thing.other = Slotted(begun()) if new else None


def by_item_that_is_refused() -> None:
    things: Any = ()
    things[Thing(begun())] = 1


def by_del_of_what_is_not_there() -> None:
    del Slotted(begun()).other  # type: ignore[attr-defined]


IN_DOUBT = [
    by_raise, by_raise_in_a_function, by_error_of_the_first_in_zip, by_error_of_the_last_in_zip, by_error_in_a_wrapper,
    by_error_that_is_swallowed, by_attribute_of_what_refuses_it, by_attribute_of_what_may_be_new,
    by_value_that_is_refused, by_value_that_may_be_new, by_item_that_is_refused, by_del_of_what_is_not_there,
]  # fmt: skip


@pytest.mark.few(6)
@pytest.mark.parametrize("leave", IN_DOUBT)
def test_an_error_is_never_taken_for_a_purpose(leave: Callable[[], None]) -> None:
    found.clear()
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        leave()
    gc.collect()
    assert found == [False]


def by_return() -> None:
    def inner() -> int:
        it = batches()
        return next(it)

    inner()


def test_a_function_that_returns_lets_go_of_its_variables() -> None:
    found.clear()
    by_return()
    assert found == [sys.version_info < (3, 13)]  # else it cannot be told from an error that is swallowed
