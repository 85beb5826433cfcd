"""Threads that the interpreter waits for before it ends, unless they are stuck.

They are daemon threads, as a stuck thread must not keep the process from ending. But a thread that
runs on while the interpreter ends crashes the process if it is in JAX's runtime, even if it only
drops an array.
"""

import atexit
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from elche_jax._settings import with_settings
from elche_jax._waiting import Condition, interruptible


class BackgroundThread(threading.Thread):
    """A thread that can be waited for, even after a Ctrl-C has ended an earlier wait.

    On Python 3.11 and 3.12 an interrupted `Thread.join` marks the thread as ended.

    Args:
        target: The function to run, under the JAX settings of the thread that creates this one.
        args: Its arguments.
        name: Name of the thread.
        daemon: Whether it is a daemon thread, which Python itself does not wait for.
    """

    def __init__(
        self,
        target: Callable[..., object],
        args: Sequence[Any] = (),
        *,
        name: str,
        daemon: bool = True,
    ):
        super().__init__(target=with_settings(target), args=args, name=name, daemon=daemon)
        self._changed = Condition()
        self._process = os.getpid()
        self._over = False

    def run(self) -> None:
        """Run the target; when over, the thread keeps no reference to it."""
        try:
            super().run()
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    @property
    def over(self) -> bool:
        """Whether it has ended; always true in a fork, which has only the thread that forked."""
        return self._over or self._process != os.getpid()

    @property
    def running(self) -> bool:
        """Whether it was started and is not over; unlike `is_alive`, also right after a Ctrl-C."""
        return self.ident is not None and not self.over

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is over, for at most some seconds; return whether it is not running."""
        if not self.running:  # without the lock, which another thread may have held at a fork
            return True
        with interruptible(), self._changed:
            return self._changed.wait_for(lambda: not self.running, seconds)


class _Waited(NamedTuple):
    thread: BackgroundThread
    close: "weakref.finalize[Any, Any] | None"
    seconds: float | None


# no weak mapping: it runs Python code when an entry goes, and a Ctrl-C in that is lost
_running: list[_Waited] = []
_lock = threading.Lock()
_owners: list[object] = []
"""Owners of threads that are still running when the interpreter begins to end."""


def wait_at_exit(
    thread: BackgroundThread,
    close: "weakref.finalize[Any, Any] | None" = None,
    seconds: float | None = None,
) -> None:
    """Make the interpreter wait at its end for a thread that was told to end, but has not yet.

    The owner of a thread cannot always wait for it: it is often garbage collected, possibly in
    this very thread.

    Args:
        thread: The thread.
        close: Finalizer of the owner, which tells the thread to end; if the owner still exists at
            the end, it also waits for the thread. None for a thread that ends by itself.
        seconds: Longest time to wait; None for no limit.
    """
    with _lock:
        _running[:] = [one for one in _running if not one.thread.over]
        _running.append(_Waited(thread, close, seconds))


def wait_for_end(thread: BackgroundThread, seconds: float, at_exit: float | None = None) -> None:
    """Wait for a thread that was told to end.

    While the interpreter ends, a Ctrl-C ends the process at once: if it only ended the wait, the
    process would go on, and crash beside the thread.

    Args:
        thread: The thread.
        seconds: Longest time to wait; the thread is then left to end by itself.
        at_exit: Longest time to wait while the interpreter ends; None for no limit.
    """
    if threading.main_thread().is_alive():
        thread.wait(seconds)
        return
    with _deadly_interrupt():
        thread.wait(at_exit)


@contextmanager
def _deadly_interrupt() -> Generator[None]:
    """Let a Ctrl-C end the process, as it does without Python's signal handler."""
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # its reader is gone, or it is not a file
            stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _forked() -> None:
    """Forget all threads in a fork, which has none of them."""
    global _lock
    _lock = threading.Lock()
    _running.clear()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forked)


@atexit.register
def _wait() -> None:
    while True:
        with _lock:  # a thread that is still running may start another one
            if not _running:
                return
            thread, close, seconds = _running.pop()
        if close is not None and (there := close.peek()) is not None:
            # keeps the owner until its finalizer runs, later and in this thread
            _owners.append(there[0])
        else:
            with _deadly_interrupt():
                thread.wait(seconds)
