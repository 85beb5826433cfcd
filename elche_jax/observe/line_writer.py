"""Lines to a file from a thread of its own: a slow disk or pipe holds up nobody."""

import atexit
import errno
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from io import FileIO
from typing import Any

logger = logging.getLogger("elche_jax")

BACKLOG = 100_000
"""Lines that may wait for the file; more than that, and it is given up as too slow."""

GATHER_S = 0.05
"""How long lines are gathered: a thread that wakes for every one disturbs the others."""

GATHER = 1000
"""Most lines of one write."""

PATIENCE_S = 10.0
"""How long to wait for a file that takes nothing."""


_process = os.getpid()  # kept, as to ask the system for every line costs too much


def _forked() -> None:
    """This process was forked off."""
    global _process
    _process = os.getpid()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(after_in_child=_forked)


class LineWriter:
    """Writes lines in the order in which they were put, those of a moment at a time.

    After a write that fails the file gets nothing more; `say` logs it once, and `close`
    raises the error. Left without `close`, the thread writes what is there and ends; the
    end of the interpreter waits for it as long as the file takes something.

    A process that was forked off has no such thread: what it puts fails.

    Args:
        file: The file, opened for writing; it is closed at the end.
        name: What the log calls it.
        line: Makes a line of what was put; in the thread, so that whoever puts it is not
            held up by that either.
    """

    def __init__(self, file: FileIO, name: str, line: Callable[[Any], bytes]):
        self._shared = _Shared(file, name, line)
        self._thread = threading.Thread(
            target=_write_all, args=(self._shared,), name="elche-timeline", daemon=True
        )
        self._thread.start()
        self._finish = weakref.finalize(self, _end, self._shared, self._thread)

    def put(self, item: Any) -> bool:
        """Hands over what is to become a line; does not wait.

        Returns:
            Whether it was taken; else see `say`.
        """
        return self._shared.put(item)

    def say(self) -> None:
        """Logs that the file was given up, once; not to be called under a lock."""
        self._shared.say()

    def flush(self) -> None:
        """Waits until the file has the lines put so far.

        Raises:
            OSError: A line could not be written, or the file takes nothing for
                `PATIENCE_S`; then it gets them later, if it goes on.
        """
        moving = self._shared.wait()
        self._shared.say()
        self._shared.raise_error()
        if not moving:
            raise _stuck()

    def close(self) -> None:
        """Writes what is left, ends the thread and closes the file.

        A thread that a file holds up cannot be interrupted. After `PATIENCE_S` without a
        line it is left alone, and ends by itself as soon as the file goes on. Where the
        wait is interrupted, `close` may be called again.

        Raises:
            OSError: As in `flush`: the first such error.
        """
        moving = self._shared.wait()
        if not moving:
            self._shared.fail(_stuck())
        self._shared.end()
        if moving and not self._shared.elsewhere:
            self._thread.join(PATIENCE_S)
        self._finish.detach()
        self._shared.say()
        self._shared.raise_error()


def _stuck() -> OSError:
    return OSError(errno.ETIMEDOUT, f"the file has taken nothing for {PATIENCE_S:g} s")


class _Shared:
    """What the writer and its thread share; `changed` guards it.

    But for `put`, which takes no lock unless the thread sleeps: only the thread removes items,
    under the lock, and it says that it sleeps before it looks for items a last time, while
    `put` adds one before it looks whether the thread sleeps.
    """

    def __init__(self, file: FileIO, name: str, line: Callable[[Any], bytes]):
        self.file, self.line, self._name = file, line, name
        self.changed = threading.Condition(threading.RLock())
        self._lines: deque[Any] = deque()
        self._taken = self._written = 0
        self._asleep = self._ending = self._said = self._urgent = False
        self._error: OSError | None = None
        self._process = _process

    @property
    def elsewhere(self) -> bool:
        """Whether this process was forked off, and has no thread that writes."""
        return self._process != _process

    def put(self, item: Any) -> bool:
        if self.elsewhere:
            if self._error is None:
                text = "the process that opened it has been forked, and this is the other one"
                self._error = OSError(errno.EBADF, text)
            return False
        if self._error is not None or self._ending:
            return False
        if len(self._lines) >= BACKLOG:
            text = f"{BACKLOG} lines wait for a file that is too slow"
            self.fail(OSError(errno.EAGAIN, text))
            return False
        self._lines.append(item)
        if self._asleep:
            with self.changed:
                self.changed.notify_all()
        return True

    def next(self) -> list[Any]:
        """The next lines, those of `GATHER_S` unless somebody waits; none when there are no
        more."""
        with self.changed:
            self._asleep = True
            self.changed.wait_for(lambda: self._lines or self._ending or self._error)
            self._asleep = False
            self.changed.wait_for(lambda: self._urgent or self._ending or self._error, GATHER_S)
            number = 0 if self._error is not None else min(len(self._lines), GATHER)
            self._taken += number
            return [self._lines.popleft() for _ in range(number)]

    def wrote(self, lines: int) -> None:
        with self.changed:
            self._written += lines
            self.changed.notify_all()

    def over(self) -> None:
        """The thread ends; what comes later is not waited for."""
        with self.changed:
            self._ending = True
            self._lines.clear()

    def wait(self) -> bool:
        """Waits until all lines put so far are written; False where nothing moves."""
        if self.elsewhere:
            return True
        with self.changed:
            lines, self._urgent = self._taken + len(self._lines), True
            self.changed.notify_all()
            try:
                while self._written < lines and self._error is None:
                    moved = self.changed.wait_for(
                        lambda before=self._written: self._error or self._written > before,
                        PATIENCE_S,
                    )
                    if not moved:
                        return False
                return True
            finally:
                self._urgent = False

    def fail(self, error: OSError) -> None:
        """The file is given up."""
        with self.changed:
            if self._error is None:
                self._error = error
                self._lines.clear()
                self.changed.notify_all()

    def say(self) -> None:
        if self._error is None or self._said:
            return
        with self.changed:  # two threads may come at once
            said, self._said = self._said, True
        if said:
            return
        logger.warning(
            "elche: %s could not be written, events are kept in memory only: %s",
            self._name,
            self._error,
        )

    def raise_error(self) -> None:
        if self._error is not None:  # a new one, as an error keeps what it was raised through
            raise type(self._error)(*self._error.args)

    def end(self) -> None:
        if self.elsewhere:
            return
        with self.changed:
            self._ending = True
            self.changed.notify_all()


def _write_all(shared: _Shared) -> None:
    """The thread: writes lines until there are no more, then closes the file."""
    try:
        while items := shared.next():
            _write_items(shared, items)
    except OSError as error:
        shared.fail(error)
    try:
        shared.file.close()
    except OSError as error:
        shared.fail(error)
    shared.over()
    shared.say()


def _write_items(shared: _Shared, items: list[Any]) -> None:
    """Writes lines of what was put; before one that cannot be made, those that can."""
    lines: list[bytes] = []
    try:
        for item in items:
            lines.append(shared.line(item))
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise OSError(errno.EINVAL, f"no line can be made of an event ({why})") from error
    finally:
        _write(shared.file, b"".join(lines))
        shared.wrote(len(lines))


def _write(file: FileIO, line: bytes) -> None:
    rest = line
    while rest:  # a disk that becomes full takes a part
        written = file.write(rest)
        if not written:
            raise BlockingIOError(errno.EAGAIN, "the file takes nothing")
        rest = rest[written:]


def _end(shared: _Shared, thread: threading.Thread) -> None:
    """Nobody holds the writer any more: it ends when all is written."""
    shared.end()
    if threading.main_thread().is_alive():  # the end of the interpreter waits for it
        if thread.is_alive():
            atexit.register(_drain, shared, thread)
    else:
        _drain(shared, thread)


def _drain(shared: _Shared, thread: threading.Thread) -> None:
    if shared.elsewhere:
        return
    if shared.wait():
        thread.join(PATIENCE_S)
    else:
        shared.fail(_stuck())
    shared.say()
