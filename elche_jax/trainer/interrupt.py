"""Ctrl-C in a run in the foreground."""

import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from elche_jax.trainer.control import Control


@contextmanager
def interrupts(control: Control, say: bool) -> Generator[None]:
    """Lets the first Ctrl-C stop a run; it is raised when the run has ended.

    The second one is raised at once. A handler of the program's own is left in place.

    Args:
        control: The run's.
        say: Whether to say so on the standard error stream.

    Raises:
        KeyboardInterrupt: There was one.
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
            print("elche: ends before its next window; Ctrl-C again: at once", file=sys.stderr)

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if heard:
        raise KeyboardInterrupt
