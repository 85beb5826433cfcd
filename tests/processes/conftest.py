"""What the tests of this folder have started for all of them ends with the last one."""

from collections.abc import Iterator

import jobs
import pytest


@pytest.fixture(scope="session", autouse=True)
def forks_end() -> Iterator[None]:
    """Ends what jobs are forks of."""
    try:
        yield
    finally:
        for forks in jobs.FORKS:
            forks.end()
