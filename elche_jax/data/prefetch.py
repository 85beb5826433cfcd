"""A background thread that makes items ahead of the loop that uses them."""

import atexit
import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from elche_jax._waiting import interruptible

Item = TypeVar("Item")
_END = object()

PATIENCE_S = 0.5
"""How long `close` waits for an iterator that is making an item."""


class Prefetch(Generic[Item]):
    """Runs an iterator in a thread, at most `depth` items ahead.

    An exception in the iterator is raised, with its own traceback, in the loop that
    asks for the next item. `close` ends the thread; leaving the last reference, an
    exception and the end of the interpreter close it too.

    Args:
        make: Called in the thread with an event that is set when the thread must end;
            the iterator it returns makes the items. If it waits, it must do so in a
            way that `wake` ends.
        wake: Called once after the event was set.
        depth: Items held ready, at least 1.
    """

    def __init__(
        self,
        make: Callable[[threading.Event], Iterator[Item]],
        wake: Callable[[], None],
        depth: int = 1,
    ):
        ready: queue.Queue[object] = queue.Queue(maxsize=depth)
        stop = threading.Event()
        thread = threading.Thread(
            target=_run, args=(make, ready, stop), name="elche-prefetch", daemon=True
        )
        self._ready, self._stop = ready, stop
        self._finish = weakref.finalize(self, _close, thread, ready, stop, wake)
        thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._stop.is_set():
            raise StopIteration
        with interruptible():
            item = self._ready.get()
        if item is _END:
            self.close()
            raise StopIteration
        if isinstance(item, _Failure):
            self.close()
            raise item.error
        return item  # type: ignore[return-value]  # otherwise the queue holds items

    def close(self) -> None:
        """Ends the thread and waits for it, but not long. Idempotent.

        An iterator that is stuck (in the user's data source) cannot be interrupted. It
        is given half a second; the thread ends by itself as soon as it goes on.
        """
        self._finish()


class _Failure:
    def __init__(self, error: BaseException):
        self.error = error


def _run(
    make: Callable[[threading.Event], Iterator[Item]],
    ready: "queue.Queue[object]",
    stop: threading.Event,
) -> None:
    try:
        for item in make(stop):
            if not stop.is_set():
                ready.put(item)
            if stop.is_set():
                return
        last: object = _END
    except BaseException as error:  # handed to the loop, which raises it
        last = _Failure(error)
    if not stop.is_set():
        ready.put(last)


def _close(
    thread: threading.Thread,
    ready: "queue.Queue[object]",
    stop: threading.Event,
    wake: Callable[[], None],
) -> None:
    stop.set()
    wake()
    if thread is threading.current_thread():  # collected there: it ends by itself
        return
    ending = not threading.main_thread().is_alive()
    deadline = time.monotonic() + (4 if ending else 1) * PATIENCE_S
    while thread.is_alive() and time.monotonic() < deadline:
        with contextlib.suppress(queue.Empty):  # make room, so that a waiting put returns
            ready.get_nowait()
        thread.join(timeout=0.01)
    if thread.is_alive():
        # a process that ends in the middle of a transfer would crash, one that waits
        # for a stuck source would never end
        atexit.register(thread.join, 4 * PATIENCE_S)
    with contextlib.suppress(queue.Full):  # release a loop that waits for an item
        ready.put_nowait(_END)
