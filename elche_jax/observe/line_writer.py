"""Writes lines to a file from a thread of its own, so that a slow disk holds up nobody."""

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
"""Lines that may wait for the file; with more, it is given up as too slow."""

GATHER_S = 0.05
"""How long lines are gathered: waking up for every single one would disturb other threads."""

GATHER = 1000
"""Most lines in one write."""

PATIENCE_S = 10.0
"""How long to wait for a file that accepts nothing."""


class LineWriter:
    """Writes lines in the order in which they were put, those of one moment together.

    After a write that fails the file gets nothing more; `say` logs it once, and `close`
    raises the error. If the owner is collected without `close`, the thread writes what is left
    and ends; at exit the interpreter waits for it as long as the file accepts something.

    A forked process has no such thread: what it puts is refused.

    `put` takes no lock unless the thread sleeps. That is safe because only the thread removes
    items, under the lock, and it announces that it sleeps before it looks for items a last time,
    while `put` adds an item before it checks whether the thread sleeps.

    Args:
        file: The file, opened for writing; it is closed at the end.
        owner: The object whose lines these are; the log shows its `repr`.
        line: Turns an item into a line. It runs in the thread, so that it does not hold up
            the caller either; it must not refer to the owner.
    """

    def __init__(self, file: FileIO, owner: object, line: Callable[[Any], bytes]):
        self._file, self._name, self._line = file, repr(owner), line
        self._items: deque[Any] = deque()
        self._taken = self._written = 0
        self._asleep = self._ending = self._said = self._urgent = False
        self._error: OSError | None = None
        # Reentrant: the owner may be collected, which ends the writer, while the lock is held.
        self._changed = threading.Condition(threading.RLock())
        self._thread = threading.Thread(target=self._run, name="elche-timeline", daemon=True)
        self._thread.start()
        _writers.add(self)
        weakref.finalize(owner, self._end).atexit = False

    @property
    def running(self) -> bool:
        """Whether the thread runs in this process."""
        return self._thread.is_alive()

    def put(self, item: Any) -> bool:
        """Hands over an item that is to become a line; does not wait.

        Returns:
            Whether it was accepted; if not, see `say`.
        """
        if self._error is not None or self._ending:
            return False
        if len(self._items) >= BACKLOG:
            self._fail(OSError(errno.EAGAIN, f"{BACKLOG} lines wait for a file that is too slow"))
            return False
        self._items.append(item)
        if self._asleep:
            with self._changed:
                self._changed.notify_all()
        return True

    def say(self) -> None:
        """Logs once that the file was given up; must not be called under a lock."""
        with self._changed:
            if self._error is None or self._said:
                return
            self._said = True
        text = "elche: %s could not be written, events are kept in memory only: %s"
        logger.warning(text, self._name, self._error)

    def flush(self) -> None:
        """Waits until the file has the lines put so far.

        Raises:
            OSError: A line could not be written, or the file accepts nothing for
                `PATIENCE_S`; it still gets the lines if it recovers.
        """
        moving = self._wait()
        self._tell()
        if not moving:
            raise _stuck()

    def close(self) -> None:
        """Writes what is left, ends the thread and closes the file.

        A thread that is blocked by the file cannot be interrupted. After `PATIENCE_S` without a
        line it is left alone, and ends by itself once the file recovers. If the wait is
        interrupted, `close` may be called again.

        Raises:
            OSError: As in `flush`: the first such error.
        """
        self.finish()
        self._tell()

    def finish(self) -> None:
        """Writes what is left and ends the thread, if the file allows it."""
        moving = self._wait()
        if not moving:
            self._fail(_stuck())
        self._end()
        if moving:
            self._thread.join(PATIENCE_S)

    def forked(self) -> None:
        """Gives up: this process was forked, and the thread does not run in it."""
        self._changed = threading.Condition(threading.RLock())  # the old one may be held
        text = "the process that opened it has been forked, and this is the other one"
        self._error = OSError(errno.EBADF, text)

    def _tell(self) -> None:
        """Logs and raises the error, if any."""
        self.say()
        if self._error is not None:  # a copy: an error keeps its traceback, and what that holds
            raise type(self._error)(*self._error.args)

    def _wait(self) -> bool:
        """Waits until all lines put so far are written; False if no progress is made."""
        with self._changed:
            lines, self._urgent = self._taken + len(self._items), True
            self._changed.notify_all()
            try:
                while self._written < lines and self._error is None:
                    moved = self._changed.wait_for(
                        lambda before=self._written: self._error or self._written > before,
                        PATIENCE_S,
                    )
                    if not moved:
                        return False
                return True
            finally:
                self._urgent = False

    def _fail(self, error: OSError) -> None:
        """Gives up the file."""
        with self._changed:
            if self._error is None:
                self._error = error
                self._items.clear()
                self._changed.notify_all()

    def _end(self) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def _run(self) -> None:
        """Runs in the thread: writes lines until there are no more, then closes the file."""
        for deed in (self._write_all, self._file.close):
            try:
                deed()
            except OSError as error:
                self._fail(error)
        with self._changed:
            self._items.clear()  # nobody waits for what came too late
        self.say()

    def _write_all(self) -> None:
        while items := self._next():
            lines: list[bytes] = []
            try:
                for item in items:
                    lines.append(self._line(item))
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                raise OSError(errno.EINVAL, f"no line can be made of an event ({why})") from error
            finally:  # also the lines before one that cannot be made
                self._write(b"".join(lines))
                with self._changed:
                    self._written += len(lines)
                    self._changed.notify_all()

    def _next(self) -> list[Any]:
        """The items of the next `GATHER_S`, or fewer if someone waits; none at the end."""
        with self._changed:
            self._asleep = True
            self._changed.wait_for(lambda: self._items or self._ending or self._error)
            self._asleep = False
            self._changed.wait_for(lambda: self._urgent or self._ending or self._error, GATHER_S)
            number = 0 if self._error is not None else min(len(self._items), GATHER)
            self._taken += number
            return [self._items.popleft() for _ in range(number)]

    def _write(self, rest: bytes) -> None:
        while rest:  # a disk that fills up accepts only a part
            written = self._file.write(rest)
            if not written:
                raise BlockingIOError(errno.EAGAIN, "the file takes nothing")
            rest = rest[written:]


_writers: weakref.WeakSet[LineWriter] = weakref.WeakSet()
"""All writers; one that still writes is kept alive by its thread."""


def _stuck() -> OSError:
    return OSError(errno.ETIMEDOUT, f"the file has taken nothing for {PATIENCE_S:g} s")


@atexit.register
def _finish_all() -> None:
    """At exit, before the interpreter ends the threads."""
    for writer in list(_writers):
        if writer.running:
            writer.finish()
            writer.say()


def _forked() -> None:
    for writer in list(_writers):
        writer.forked()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(after_in_child=_forked)
