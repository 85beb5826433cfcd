"""What must end before the interpreter lets go of its threads.

When a program's main thread ends, Python first closes its pools of threads and then waits
for the other threads. Whoever still needs a pool, as orbax does to write a checkpoint, must
be done before: `atexit` is too late.
"""

# imported here so that its own end is asked for before, and thus comes after, what is added
import concurrent.futures.thread
import os
import threading
from collections.abc import Callable

End = Callable[[], object]

_lock = threading.Lock()
_ends: dict[tuple[bool, int], End] = {}  # by whether it is to be last, and number
_number = 0


def before_exit(end: End, last: bool = False) -> Callable[[], None]:
    """Has something called when the program ends; not in processes that are forked off it.

    Args:
        end: Called by the main thread, after its own work; waits until it is done.
        last: Call it when nothing else is left that was not to be last.

    Returns:
        Forgets it again.
    """
    global _number
    assert concurrent.futures.thread
    with _lock:
        if not _number:
            _register()
        _number += 1
        key = last, _number
        _ends[key] = end

    def forget() -> None:
        with _lock:
            _ends.pop(key, None)

    return forget


def _register() -> None:
    try:
        # the only hook that comes in time; concurrent.futures itself lives on it
        getattr(threading, "_register_atexit")(_end_all)  # noqa: B009  (private: as an attribute pyright refuses it)
    except RuntimeError as error:
        raise RuntimeError(
            "elche: nothing can be begun when the program has ended. Let the main thread wait for "
            "those that train or save."
        ) from error
    if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
        os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    """A process that was forked off has none of the threads there were."""
    global _lock
    _lock = threading.Lock()
    _ends.clear()


def _end_all() -> None:
    """Ends all, whatever becomes of one of them; the first error is raised then."""
    first: BaseException | None = None
    while True:
        with _lock:
            if not _ends:
                break
            end = _ends.pop(min(_ends))
        try:
            end()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first
