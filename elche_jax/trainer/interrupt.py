"""Ctrl-C during a run in the foreground."""

import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

from elche_jax.trainer.control import Control


@contextmanager
def interrupts(control: Control, say: bool) -> Generator[None]:
    """Make the first Ctrl-C stop a run gracefully, and raise it once the run has ended.

    A second Ctrl-C is raised immediately. If the program has installed its own SIGINT handler,
    or this is not the main thread, nothing changes.

    Args:
        control: Control of the run.
        say: Whether to print a line to standard error on Ctrl-C.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; its cause is the error of the run, if any.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    heard = False

    def stop(number: int, frame: Any) -> None:
        nonlocal heard
        if heard:
            raise KeyboardInterrupt
        heard = True
        control.stop("interrupt")
        if say and sys.stderr is not None:
            # the same Ctrl-C may have ended who reads it, as in `train.py 2>&1 | tee log`; and the
            # loop may be in the middle of a `print` of its own
            with suppress(OSError, ValueError, RuntimeError):
                print(
                    "elche: stopping before the next window; press Ctrl-C again to stop now",
                    file=sys.stderr,
                )

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if heard:
        error = control.error  # of the windows that were in flight, or of the last checkpoint
        raise KeyboardInterrupt from None if isinstance(error, KeyboardInterrupt) else error
