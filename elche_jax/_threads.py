"""Threads that the interpreter waits for before it ends, unless they are stuck.

They are daemons, as one that is stuck must not keep the process from ending. But one that goes on
while the interpreter ends crashes the process if it is in JAX's runtime, if only to drop an array.
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
    """A thread that can be waited for, also once a Ctrl-C has ended an earlier wait.

    On Python 3.11 and 3.12 a `Thread.join` that is interrupted marks the thread as ended.

    Args:
        target: What it runs, under the JAX settings of the thread that makes it.
        args: The arguments.
        name: Its name.
        daemon: Whether Python itself does not wait for it.
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
        """Run the target; it holds nothing of it any more when it is over."""
        try:
            super().run()
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    @property
    def over(self) -> bool:
        """Whether it has ended; in a fork, which has only the thread that forked, it has."""
        return self._over or self._process != os.getpid()

    @property
    def running(self) -> bool:
        """Whether it was started and is not over; unlike `is_alive` right after a Ctrl-C, too."""
        return self.ident is not None and not self.over

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is over, at most some seconds; return whether it is not running."""
        if not self.running:  # in a fork another thread may have held the lock
            return True
        with interruptible(), self._changed:
            return self._changed.wait_for(lambda: not self.running, seconds)


class _Waited(NamedTuple):
    thread: BackgroundThread
    close: "weakref.finalize[Any, Any] | None"
    seconds: float | None


# a list: Python code runs when an entry of a weak mapping goes, and a Ctrl-C in it is lost
_running: list[_Waited] = []
_lock = threading.Lock()
_owners: list[object] = []
"""Owners of threads that run when the interpreter begins to end."""


def wait_at_exit(
    thread: BackgroundThread,
    close: "weakref.finalize[Any, Any] | None" = None,
    seconds: float | None = None,
) -> None:
    """Let the interpreter wait for a thread that was told to end, but has not yet.

    Its owner is often collected as garbage, which happens in any thread: also in this one, which
    cannot wait for itself.

    Args:
        thread: The thread.
        close: Tells it to end when its owner is dropped; if the owner is there at the end, it also
            waits for the thread. None for a thread that ends by itself.
        seconds: How long to wait at most; None for no limit.
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
        seconds: How long to wait at most; it is then left to end by itself.
        at_exit: The same while the interpreter ends; None for no limit.
    """
    if threading.main_thread().is_alive():
        thread.wait(seconds)
        return
    with _deadly_interrupt():
        thread.wait(at_exit)


@contextmanager
def _deadly_interrupt() -> Generator[None]:
    """Let a Ctrl-C end the process as if Python had not changed what it does."""
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # nobody reads it, or it is no file
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
        with _lock:  # one that still runs may begin another one
            if not _running:
                return
            thread, close, seconds = _running.pop()
        if close is not None and (there := close.peek()) is not None:
            # its finalizer runs later, and in this thread: no other one drops it meanwhile
            _owners.append(there[0])
        else:
            with _deadly_interrupt():
                thread.wait(seconds)
