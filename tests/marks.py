"""Marks for rows of tests."""

from typing import Any

import pytest


def slow(*values: Any, id: str | None = None):
    """A row of a table that `make test` leaves out, as another row shows the behaviour, too."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)
