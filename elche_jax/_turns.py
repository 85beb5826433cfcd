"""In which order the threads of a process exchange with other processes: in all in the same."""

import threading
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet


class Averaging(Protocol):
    """Windows that a thread exchanges while the loop goes on."""

    def settle(self) -> None:
        """Wait until all windows dispatched so far are exchanged, or the thread has ended."""
        ...


class Turns:
    """Whose turn it is to exchange with other processes.

    What the loop exchanges, another loop's windows included, comes after the windows that were
    dispatched before. Loops make the same calls in all processes, so that the order is the same.

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
        self._lock = threading.Lock()  # of the set: a weak one is not changed while it is read
        self._thread = threading.local()

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
"""Those of this process."""
