"""A background thread that prepares items ahead of the loop that uses them."""

import atexit
import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from elche_jax._waiting import interruptible

Item = TypeVar("Item")

PATIENCE_S = 0.5
"""Seconds that `close` waits for an iterator that is preparing an item."""

_Ready = queue.Queue[tuple[Any, BaseException | None]]
"""Items, and finally the exception that ends the iteration."""


class Prefetch(Generic[Item]):
    """Iterator that runs another iterator in a thread, at most `depth` items ahead.

    An exception of that iterator is raised, with its traceback, in the loop that requests the
    next item. The thread ends with `close`, which is also called when the last reference is
    dropped, after an exception, and when the interpreter exits.

    Args:
        make: Returns the iterator. Called in the thread, with an event that is set when the
            thread must end. If the iterator waits, `wake` must be able to end the wait.
        wake: Called once, after the event was set.
        depth: Number of items held ready, at least 1.
    """

    def __init__(
        self,
        make: Callable[[threading.Event], Iterator[Item]],
        wake: Callable[[], None],
        depth: int = 1,
    ):
        ready: _Ready = queue.Queue(maxsize=depth)
        stop = threading.Event()
        # a daemon, as a source that is stuck must not keep the process from ending
        thread = threading.Thread(
            target=_run, args=(make, ready, stop), name="elche-prefetch", daemon=True
        )
        self._ready, self._stop = ready, stop
        # neither thread nor finalizer may refer to `self`, or it would never be collected
        self._finish = weakref.finalize(self, _close, thread, ready, stop, wake)
        thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._stop.is_set():
            raise StopIteration
        with interruptible():
            item, end = self._ready.get()
        if end is not None:
            self.close()
            try:
                raise end
            finally:
                del end  # its traceback refers to this frame, and would be referred to by it
        return item

    def close(self) -> None:
        """End the thread and wait for it briefly. Idempotent.

        An iterator that is stuck, in the user's data source, cannot be interrupted. `close`
        waits for half a second; the thread ends as soon as the iterator continues.
        """
        self._finish()


def _run(
    make: Callable[[threading.Event], Iterator[Any]], ready: _Ready, stop: threading.Event
) -> None:
    end: BaseException = StopIteration()
    try:
        for item in make(stop):
            if not stop.is_set():
                # may wait until `close` makes room, hence the second look
                ready.put((item, None))
            if stop.is_set():
                return
    except BaseException as error:  # raised again in the loop
        end = error
    if not stop.is_set():
        ready.put((None, end))


def _close(
    thread: threading.Thread, ready: _Ready, stop: threading.Event, wake: Callable[[], None]
) -> None:
    stop.set()
    wake()
    if thread is threading.current_thread():
        return  # the last reference was dropped in the thread itself, which cannot join itself
    ending = not threading.main_thread().is_alive()
    deadline = time.monotonic() + (4 if ending else 1) * PATIENCE_S
    while thread.is_alive() and time.monotonic() < deadline:
        with contextlib.suppress(queue.Empty):  # makes room, so that a blocked put returns
            ready.get_nowait()
        thread.join(timeout=0.01)
    if thread.is_alive():
        # A process that exits during a transfer would crash, while one that waits for a stuck
        # source would never exit: wait, but not forever.
        atexit.register(thread.join, 4 * PATIENCE_S)
    with contextlib.suppress(queue.Full):  # releases a loop that waits for an item
        ready.put_nowait((None, StopIteration()))
