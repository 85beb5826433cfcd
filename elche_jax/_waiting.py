"""Waiting for other threads where Ctrl-C may come."""

import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Generator[None, None, None]:
    """Round a wait for a `threading.Condition`, or what is made of one: Ctrl-C stays what it is.

    An interrupt that comes while the condition takes its lock back, or gives it up, leaves it
    without one; Python then raises `RuntimeError` for a lock that is not held. What a signal
    raised besides `KeyboardInterrupt`, `SystemExit` say, is treated alike.
    """
    before = sys.exc_info()[1]
    try:
        yield
    except RuntimeError as error:
        cause = error.__context__
        # a subclass, or in the course of what was there before: an error of its own
        if type(error) is not RuntimeError or cause is None or cause is before:
            raise
        if isinstance(cause, Exception):
            raise
        raise cause from None
