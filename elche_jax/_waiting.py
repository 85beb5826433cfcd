"""Waiting for other threads where Ctrl-C may come."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Iterator[None]:
    """Round a wait for a `threading.Condition`, or what is made of one: Ctrl-C stays what it is.

    An interrupt that comes while the condition takes its lock back leaves it without one, and
    the end of the `with` block then raises `RuntimeError` for a lock that is not held.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise
