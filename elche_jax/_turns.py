"""Keeps the exchanges that a process's threads have with other processes in one order."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol
from weakref import WeakSet

from elche_jax._log import logger

SECOND = (
    "train: in a job of several processes, only one thread of each may train, evaluate or save at "
    "a time, but a second one does so, too. Their order may differ between processes, so exchanges "
    "of different loops would meet. Run one after the other, or start more jobs."
)


class Averaging(Protocol):
    """Windows that a thread exchanges while the loop goes on."""

    def settle(self) -> None:
        """Wait until all windows dispatched so far are exchanged, or the thread has ended."""
        ...


class OneThread(AbstractContextManager[None]):
    """Raises an error in a thread's call while another thread is in one.

    Args:
        message: The error's message.
        for_good: Whether the error is also logged, and all later calls raise it, as the other
            thread's results cannot be relied on any more.

    Examples:
        >>> calls = OneThread("one at a time")
        >>> with calls, calls:  # one call may make another
        ...     pass
    """

    def __init__(self, message: str, for_good: bool = False):
        self._message, self._for_good = message, for_good
        self._calls = threading.RLock()  # a thread may nest calls
        self._refused = False

    def __enter__(self) -> None:
        if self._calls.acquire(blocking=False):
            if not self._refused:  # read only now that no other thread is in a call
                return
            self._calls.release()
        elif self._for_good and not self._refused:
            self._refused = True
            # logged at once: the other thread may wait forever for an exchange
            logger.error("elche: %s", self._message)
        raise RuntimeError(self._message)

    def __exit__(self, *_: object) -> None:
        self._calls.release()


class Turns:
    """Decides which thread may exchange with other processes next.

    What the loop exchanges, another loop's windows included, comes after the windows that were
    dispatched before. Loops make the same calls in all processes, so the order is the same in all:
    that of one thread. A second thread is an error, as its calls may come in any order.

    Examples:
        >>> class Windows:
        ...     settle = staticmethod(lambda: print("after the windows"))
        >>> turns, windows = Turns(), Windows()
        >>> turns.begin(windows)
        >>> turns.wait()
        after the windows
        >>> turns.of_windows(turns.wait)  # in their own thread
    """

    def __init__(self) -> None:
        self._averaging: WeakSet[Averaging] = WeakSet()
        self._lock = threading.Lock()  # a weak set must not change while it is read
        self._thread = threading.local()
        self._calls = OneThread(SECOND, for_good=True)

    def call(self) -> AbstractContextManager[None]:
        """Return a context for a call of a loop that exchanges, in a job of several processes.

        Raises:
            RuntimeError: In the context, if another thread is in such a call.
        """
        return nullcontext() if self.in_thread_of_windows else self._calls

    @property
    def in_thread_of_windows(self) -> bool:
        """Whether this thread exchanges windows, see `of_windows`."""
        return getattr(self._thread, "of_windows", False)

    def begin(self, averaging: Averaging) -> None:
        """Wait before a window is dispatched whose thread will exchange it."""
        self._wait(averaging)
        with self._lock:
            self._averaging.add(averaging)

    def wait(self) -> None:
        """Wait before an exchange, except in the threads that exchange windows."""
        if not self.in_thread_of_windows:
            self._wait()

    def of_windows(self, exchange: Callable[[], None]) -> None:
        """Call a function in which a thread exchanges windows."""
        self._thread.of_windows = True
        try:
            exchange()
        finally:
            self._thread.of_windows = False

    def _wait(self, own: Averaging | None = None) -> None:
        with self._lock:
            known = list(self._averaging)
        for averaging in known:
            if averaging is not own:
                averaging.settle()


TURNS = Turns()
"""The turns of this process."""
