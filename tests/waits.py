"""Waits of tests for what other threads do."""

import threading


def eventually(condition, seconds=30.0):
    """Waits for what other threads bring about."""
    ready = threading.Event()
    for _ in range(int(seconds / 0.002)):
        if condition():
            return
        ready.wait(0.002)
    raise AssertionError("it did not come about")
