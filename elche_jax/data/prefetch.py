"""A background thread that prepares items ahead of the loop that uses them."""

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from elche_jax._threads import BackgroundThread, wait_at_exit, wait_for_end

Item = TypeVar("Item")

PATIENCE_S = 0.5
"""Seconds that `close` waits for an iterator that is preparing an item."""

EXIT_S = 2.0
"""Seconds that the interpreter waits for such an iterator at exit."""


class _Channel:
    """What the thread and the loop share.

    Attributes:
        ready: Items, and finally the exception that ends the iteration.
        room: Holds an entry if another item may be made ready.
        stop: Set when the thread must end.
    """

    def __init__(self) -> None:
        # Simple queues, as only these are reentrant: garbage collection may call `close` in the
        # middle of a call, in the thread that holds the lock of the queue.
        self.ready = queue.SimpleQueue[tuple[Any, BaseException | None]]()
        self.room = queue.SimpleQueue[None]()
        self.room.put(None)
        self.stop = threading.Event()


class Prefetch(Generic[Item]):
    """Iterator that runs another iterator in a thread, which keeps one item ready.

    The thread has the JAX settings of the thread that creates this object.

    If the other iterator raises an exception, it is raised, with its traceback, in the loop that
    requests the next item. The thread ends with `close`, which is also called when the last
    reference is dropped, after an exception, and when the interpreter exits.

    Args:
        make: Returns the iterator. Called in the thread, with an event that is set when the
            thread must end. If the iterator waits, `wake` must be able to end the wait.
        wake: Called once, after the event has been set.
    """

    def __init__(self, make: Callable[[threading.Event], Iterator[Item]], wake: Callable[[], None]):
        self._channel = channel = _Channel()
        # a daemon, as a source that hangs must not keep the process from ending
        thread = BackgroundThread(_run, (make, channel), name="elche-prefetch")
        # neither thread nor finalizer may refer to `self`, or it would never be collected
        self._finish = weakref.finalize(self, _close, thread, channel, wake)
        wait_at_exit(thread, self._finish, EXIT_S)
        thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        channel = self._channel
        if channel.stop.is_set():
            raise StopIteration
        item, end = channel.ready.get()
        channel.room.put(None)
        if end is not None:
            self.close()
            channel.ready.put((None, StopIteration()))  # another thread may wait for an item, too
            try:
                raise end
            finally:
                del end  # its traceback refers to this frame: avoids a reference cycle
        return item

    def close(self) -> None:
        """End the thread and wait for it briefly. Idempotent.

        An iterator that hangs in the user's data source cannot be interrupted. `close` waits
        for half a second; the thread ends as soon as the iterator checks the event.
        """
        self._finish()


def _run(make: Callable[[threading.Event], Iterator[Any]], channel: _Channel) -> None:
    end: BaseException = StopIteration()
    try:
        for item in make(channel.stop):
            channel.room.get()
            if channel.stop.is_set():
                return
            channel.ready.put((item, None))
            del item  # hold no arrays while the next one is made
    except BaseException as error:  # raised again in the loop
        end = error
    if not channel.stop.is_set():
        channel.ready.put((None, end))
    del end  # its traceback refers to this frame: avoids a reference cycle


def _close(thread: BackgroundThread, channel: _Channel, wake: Callable[[], None]) -> None:
    channel.stop.set()
    wake()
    channel.room.put(None)
    try:
        # the last reference may be dropped in the thread itself, which cannot wait for itself
        if thread.running and thread is not threading.current_thread():
            # a process that ends during a transfer would crash
            wait_for_end(thread, PATIENCE_S, EXIT_S)
    finally:
        channel.ready.put((None, StopIteration()))  # releases a loop that waits for an item
