"""Controls where a Ctrl-C may be raised: in waits for other threads, but not in a hand-over."""

import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any


class Condition(threading.Condition):
    """A condition whose `with` block never leaves its lock held when a Ctrl-C ends it.

    `__enter__` and `__exit__` of `threading.Condition` are Python functions, in which a signal's
    exception may be raised: after the lock is acquired but before the block begins, or before the
    lock is released. No thread could then acquire the lock again, and the process would not end.
    Here they are the lock's own C methods, which handle a signal only while they wait.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        super().__init__(self.lock)

    # looked up without a Python function, too
    __enter__: Any = property(attrgetter("lock.__enter__"))
    __exit__: Any = property(attrgetter("lock.__exit__"))


@contextmanager
def interruptible() -> Generator[None, None, None]:
    """Let a signal's exception propagate from a wait for a `threading.Condition` or `Event`.

    If a signal arrives while the condition acquires or releases its lock, the lock is left
    unheld, and Python raises `RuntimeError` instead of `KeyboardInterrupt`. This raises the
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


class HeldInterrupt(AbstractContextManager["HeldInterrupt"]):
    """Holds a Ctrl-C back from `begin` to the end of the block; the caller must then raise it.

    This applies only while Python's default handler is installed: other handlers are left alone. A
    second Ctrl-C is not held back. If the block ends with an error, `KeyboardInterrupt` replaces
    it.

    Args:
        react: Called by the handler when a Ctrl-C is held back.

    Attributes:
        came: Whether a Ctrl-C came.

    Examples:
        >>> with HeldInterrupt() as interrupt:
        ...     held = interrupt.begin()
        ...     state = "handed over without an interrupt in the middle"
        >>> interrupt.came
        False
    """

    def __init__(self, react: Callable[[], object] = lambda: None) -> None:
        self.came = self._holds = False
        self._react = react

    def begin(self) -> bool:
        """Begin to hold a Ctrl-C back; no effect if called before, or outside the main thread.

        Returns:
            Whether it is held back: a Ctrl-C that is raised from now on is the second one.
        """
        if self._holds or threading.current_thread() is not threading.main_thread():
            return self._holds
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._holds = True
        return self._holds

    def _note(self, number: int, frame: Any) -> None:
        if self.came:
            signal.default_int_handler(number, frame)
        self.came = True
        self._react()

    def __exit__(self, kind: Any, error: BaseException | None, *_: Any) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._holds = False
        if self.came and error is not None:
            raise KeyboardInterrupt
