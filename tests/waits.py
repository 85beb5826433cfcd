"""Waits of tests for what other threads do."""

import threading


def comes_about(condition, seconds):
    """Waits for what other threads bring about; whether they did."""
    ready = threading.Event()
    for _ in range(int(seconds / 0.002)):
        if condition():
            return True
        ready.wait(0.002)
    return False


def eventually(condition, seconds=30.0):
    """Waits for what other threads bring about, which they must."""
    assert comes_about(condition, seconds), "it did not come about"
