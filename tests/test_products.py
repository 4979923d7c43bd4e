"""Coverings of products of parameters."""

import itertools

import pytest
from products import rows


@pytest.mark.parametrize("lengths", [(2, 3), (4, 2, 3), (3, 6, 2, 3)])
def test_every_value_appears_and_with_a_main_parameter_with_every_value_of_it(lengths: tuple[int, ...]) -> None:
    values = [range(length) for length in lengths]
    for place, length in enumerate(lengths):
        assert {row[place] for row in rows(None, values)} == set(range(length))
    main, *others = values
    for place, other in enumerate(others, start=1):
        found = {(row[0], row[place]) for row in rows(main, others)}
        assert found == set(itertools.product(main, other))
