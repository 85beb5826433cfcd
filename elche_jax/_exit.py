"""Functions to call at the end of the program, before Python shuts down its thread pools.

When the main thread ends, Python first shuts down thread pools and then waits for the other
threads. A thread that still needs a pool, as Orbax does to write a checkpoint, must finish
before that: `atexit` is too late.
"""

# exit functions run in reverse order: this import registers its shutdown before ours
import concurrent.futures.thread
import os
import threading
from collections.abc import Callable

End = Callable[[], object]

_lock = threading.Lock()
# keyed by (last, number), so that min() is the next to call
_ends: dict[tuple[bool, int], End] = {}
_number = 0


def before_exit(end: End, last: bool = False) -> Callable[[], None]:
    """Register a function to call when the main thread ends; forked processes do not call it.

    Args:
        end: Called on the main thread; it should block until its work is done.
        last: Whether to call it after all functions registered without `last`.

    Returns:
        A function that removes the registration.
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
        # the only hook that is early enough; concurrent.futures uses it, too
        getattr(threading, "_register_atexit")(_end_all)  # noqa: B009  (private: as an attribute pyright refuses it)
    except RuntimeError as error:
        raise RuntimeError(
            "elche: no run or checkpoint can be started once the program has ended. Let the main "
            "thread wait for the threads that train or save."
        ) from error
    if hasattr(os, "register_at_fork"):  # Windows has no fork
        os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    """Drop all functions in a forked process, which has none of the threads they wait for."""
    global _lock
    _lock = threading.Lock()
    _ends.clear()


def _end_all() -> None:
    """Call all functions even if some fail, then raise the first error."""
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
