"""Threads that the interpreter waits for before it ends, unless they are stuck.

They are daemons, as one that is stuck must not keep the process from ending. But one that goes on
while the interpreter ends crashes the process if it is in JAX's runtime, if only to drop an array.
"""

import atexit
import threading
import weakref
from typing import Any, NamedTuple


class _Waited(NamedTuple):
    thread: threading.Thread
    close: "weakref.finalize[Any, Any]"
    seconds: float | None


# a list: Python code runs when an entry of a weak mapping goes, and a Ctrl-C in it is lost
_running: list[_Waited] = []
_lock = threading.Lock()
_owners: list[object] = []
"""Owners of threads that run when the interpreter begins to end."""


def wait_at_exit(
    thread: threading.Thread, close: "weakref.finalize[Any, Any]", seconds: float | None = None
) -> None:
    """Let the interpreter wait for a thread that was told to end, but has not yet.

    Its owner is often collected as garbage, which happens in any thread: also in this one, which
    cannot wait for itself.

    Args:
        thread: The thread, started.
        close: Tells it to end when its owner is dropped; if the owner is there at the end, it also
            waits for the thread.
        seconds: How long to wait at most; None for no limit.
    """
    with _lock:
        _running[:] = [one for one in _running if one.thread.is_alive()]
        _running.append(_Waited(thread, close, seconds))


@atexit.register
def _wait() -> None:
    for thread, close, seconds in reversed(_running):
        if (there := close.peek()) is not None:
            # its finalizer runs later, and in this thread: no other one drops it meanwhile
            _owners.append(there[0])
        else:
            thread.join(seconds)
