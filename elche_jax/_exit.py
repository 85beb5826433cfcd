"""What must end before the interpreter lets go of its threads.

When a program's main thread ends, Python first closes its pools of threads and then waits
for the other threads. Whoever still needs a pool, as orbax does to write a checkpoint, must
be done before: `atexit` is too late.
"""

# imported here so that its own end is asked for before, and thus comes after, what is added
import concurrent.futures.thread
import threading
from collections.abc import Callable
from typing import Any

End = Callable[[], object]

_lock = threading.Lock()
_ends: dict[int, End] = {}
_number = 0


def before_exit(end: End) -> Callable[[], None]:
    """Has something called when the program ends.

    Args:
        end: Called by the main thread, after its own work; waits until it is done.

    Returns:
        Forgets it again.
    """
    global _number
    assert concurrent.futures.thread
    with _lock:
        if not _number:
            # the only hook that comes in time; concurrent.futures itself lives on it
            getattr(threading, "_register_atexit")(_end_all)  # noqa: B009
        _number += 1
        number = _number
        _ends[number] = end

    def forget() -> None:
        with _lock:
            _ends.pop(number, None)

    return forget


def _end_all() -> Any:
    while _ends:
        with _lock:
            end = _ends.pop(min(_ends)) if _ends else None
        if end is not None:
            end()
