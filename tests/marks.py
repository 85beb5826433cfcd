"""Marks for rows of tests."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any, id: str | None = None):
    """A row of a table that `make test` leaves out, as another row shows the behaviour, too."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def table(**values: Iterable[Any]):
    """A test of as few combinations as have each two values of two names; see `pairs`.

    `make test` runs as few as have each value of each name once: the first values of all names,
    the second ones, and so on; a name with fewer values than others begins anew.

    Args:
        values: For each argument of the test its values; their order is that of the ids.
    """
    columns = [list(column) for column in values.values()]
    longest = max(map(len, columns))
    quick = [tuple(at % len(column) for column in columns) for at in range(longest)]
    rows = []
    for at in pairs(itertools.product(*(range(len(column)) for column in columns)), first=quick):
        row = [column[index] for column, index in zip(columns, at, strict=True)]
        rows.append(pytest.param(*row) if at in quick else slow(*row))
    return pytest.mark.parametrize(list(values), rows)


def pairs(rows: Iterable[tuple], first: Iterable[tuple] = ()) -> list[tuple]:
    """A few of the rows, in which all values meet that meet in any of them, two and two.

    A row is taken for the most pairs that no row before has, until all have met.

    Args:
        rows: The values of each row, as many in each.
        first: Rows that are taken in any case.

    Returns:
        The rows, in their order.
    """
    every = list(rows)

    def of(row):
        return set(itertools.combinations(enumerate(row), 2))

    taken = set(first)
    assert taken <= {*every}, "no other rows"
    left = set().union(*map(of, every)).difference(*map(of, taken))
    while left:
        row = max(every, key=lambda row: len(of(row) & left))
        taken.add(row)
        left -= of(row)
    return [row for row in every if row in taken]
