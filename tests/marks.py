"""Marks for rows of tests."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any, id: str | None = None):
    """A row of a table that `make test` leaves out, as another row shows the behaviour, too."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def table(**values: Iterable[Any]):
    """A test of all combinations; `make test` runs as few as have each value of each name once.

    Those are the first values of all names, the second ones, and so on; a name with fewer
    values than others begins anew.

    Args:
        values: For each argument of the test its values; their order is that of the ids.
    """
    columns = [list(column) for column in values.values()]
    longest = max(map(len, columns))
    quick = {tuple(at % len(column) for column in columns) for at in range(longest)}
    rows = []
    for at in itertools.product(*(range(len(column)) for column in columns)):
        row = [column[index] for column, index in zip(columns, at, strict=True)]
        rows.append(pytest.param(*row) if at in quick else slow(*row))
    return pytest.mark.parametrize(list(values), rows)
