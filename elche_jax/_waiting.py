"""Waiting for other threads with Ctrl-C allowed."""

import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Generator[None, None, None]:
    """Let a signal's exception propagate from a wait for a `threading.Condition` or `Event`.

    A signal that arrives while the condition acquires or releases its lock leaves the lock
    unheld, so that Python raises `RuntimeError` instead of `KeyboardInterrupt`. This raises the
    original exception: `KeyboardInterrupt`, `SystemExit`, or whatever the handler raised.
    """
    before = sys.exc_info()[1]
    try:
        yield
    except RuntimeError as error:
        cause = error.__context__
        # a genuine error: a subclass, or raised while handling an earlier exception
        if type(error) is not RuntimeError or cause is None or cause is before:
            raise
        if isinstance(cause, Exception):
            raise
        raise cause from None
