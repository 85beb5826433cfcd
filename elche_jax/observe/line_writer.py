"""Writing lines to a file from a background thread, so that callers never wait for the disk."""

import atexit
import errno
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from io import FileIO
from typing import Any

from elche_jax._log import logger
from elche_jax._waiting import Condition

BACKLOG = 100_000
"""Most lines that may wait for the file; beyond that it is abandoned as too slow."""

GATHER_S = 0.05
"""How long to gather lines: waking up for each one would slow down other threads."""

GATHER = 1000
"""Most lines in one write."""

PATIENCE_S = 10.0
"""How long to wait for a file that accepts no data."""


class LineWriter(threading.Thread):
    """A thread that writes lines to a file, in the order in which they were put.

    After a failed write the file gets no more lines; `log_error` logs the error once, and
    `close` raises it. If the owner is garbage collected without `close`, the thread writes the
    remaining lines and ends. At exit the interpreter waits for the thread as long as the file
    accepts data. In a forked process the thread does not run, and `put` refuses every item.

    Args:
        file: The file, opened for writing; closed at the end.
        owner: The object whose lines these are; the log shows its `repr`.
        to_line: Turns an item into a line. It runs in the thread, so as not to delay the
            caller, and must not refer to the owner.
    """

    def __init__(self, file: FileIO, owner: object, to_line: Callable[[Any], bytes]):
        # A daemon, as a file that blocks the thread must not keep the process from ending.
        super().__init__(name="elche-timeline", daemon=True)
        self._file, self._title, self._to_line = file, repr(owner), to_line
        self._items: deque[Any] = deque()
        self._taken = self._written = 0  # lines taken from the queue, lines in the file
        self._ending = self._urgent = self._logged = False
        self._error: OSError | None = None
        # Its lock is reentrant: garbage collection may run the finalizer below in a thread that
        # holds it.
        self._changed = Condition()
        self.start()
        _writers.add(self)
        # Not at exit: `_finish_all` first waits for the lines that are left.
        weakref.finalize(owner, self._end).atexit = False

    def put(self, item: Any) -> bool:
        """Queue an item to be written as a line, without waiting for the file.

        Returns:
            Whether it was accepted; if not, call `log_error`.
        """
        with self._changed:
            if self._error is not None or self._ending:
                return False
            if len(self._items) >= BACKLOG:
                text = f"{BACKLOG} lines wait for a file that is too slow"
                self._fail(OSError(errno.EAGAIN, text))
                return False
            # Before the item is added, so that an interrupt cannot leave it with the thread
            # asleep. With more than one item the thread is awake.
            if not self._items:
                self._changed.notify_all()
            self._items.append(item)
        return True

    def log_error(self) -> None:
        """Log an error once. A log handler may call `put`: hold no lock of the owner."""
        with self._changed:
            if self._error is None or self._logged:
                return
            self._logged = True
        text = "elche: %s could not be written, events are kept in memory only: %s"
        logger.warning(text, self._title, self._error)

    def flush(self) -> None:
        """Wait until the lines put so far are written.

        Raises:
            OSError: A line could not be written, or the file accepts no data for
                `PATIENCE_S`; in the latter case the lines are still written if it recovers.
        """
        progress = self._wait()
        self._raise_error()
        if not progress:
            raise self._stuck()

    def close(self) -> None:
        """Write the remaining lines, end the thread and close the file.

        A thread blocked by the file cannot be interrupted. After `PATIENCE_S` without progress
        it is left alone, and ends once the file recovers. If the wait is interrupted, `close`
        may be called again.

        Raises:
            OSError: As in `flush`; the first such error.
        """
        self.finish()
        self._raise_error()

    def finish(self) -> None:
        """Write the remaining lines and end the thread, if the file allows it."""
        progress = self._wait()
        if not progress:
            self._fail(self._stuck())
        self._end()
        if progress:
            self.join(PATIENCE_S)

    def forked(self) -> None:
        """Mark the writer as failed in a forked process, where the thread does not run."""
        self._changed = Condition()  # another thread may have held the old one
        text = "it was opened before this process was forked, and cannot be written from here"
        self._error = OSError(errno.EBADF, text, self._file.name)

    def _stuck(self) -> OSError:
        text = f"the file has accepted no data for {PATIENCE_S:g} s"
        return OSError(errno.ETIMEDOUT, text, self._file.name)

    def _raise_error(self) -> None:
        """Log and raise the error, if any."""
        self.log_error()
        if self._error is not None:
            # A copy: a raised error keeps its traceback, and thereby the locals in it, alive.
            raise OSError(self._error.errno, self._error.strerror, self._error.filename)

    def _wait(self) -> bool:
        """Wait until the lines put so far are written; return False if the file is stuck."""
        with self._changed:
            lines, self._urgent = self._taken + len(self._items), True
            self._changed.notify_all()
            try:
                while self._written < lines and self._error is None:
                    if not self._changed.wait_for(
                        lambda before=self._written: self._error or self._written > before,
                        PATIENCE_S,
                    ):
                        return False
                return True
            finally:
                self._urgent = False

    def _fail(self, error: OSError) -> None:
        """Abandon the file; the first error is kept."""
        error.filename = self._file.name  # errors of a write name no file
        with self._changed:
            if self._error is None:
                self._error = error
                self._items.clear()
                self._changed.notify_all()

    def _end(self) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def run(self) -> None:
        """Write lines until the end, then close the file; the thread does this."""
        for action in (self._write_all, self._file.close):
            try:
                action()
            except OSError as error:
                self._fail(error)
        self.log_error()

    def _write_all(self) -> None:
        while items := self._next():
            lines: list[bytes] = []
            try:
                for item in items:
                    lines.append(self._to_line(item))
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                raise OSError(errno.EINVAL, f"an event cannot be written ({why})") from error
            finally:  # lines before the failed one are written, too
                self._write(b"".join(lines))
                with self._changed:
                    self._written += len(lines)
                    self._changed.notify_all()

    def _next(self) -> list[Any]:
        """Return the items of the next `GATHER_S`, fewer if a caller waits; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._ending or self._error)
            self._changed.wait_for(lambda: self._urgent or self._ending or self._error, GATHER_S)
            number = min(len(self._items), GATHER)
            self._taken += number
            return [self._items.popleft() for _ in range(number)]

    def _write(self, rest: bytes) -> None:
        while rest:  # a disk that fills up accepts a part
            written = self._file.write(rest)
            if not written:
                raise BlockingIOError(errno.EAGAIN, "the file accepts no data")
            rest = rest[written:]


_writers: weakref.WeakSet[LineWriter] = weakref.WeakSet()
"""All writers. The thread of a writer keeps it alive while there is something to write."""


@atexit.register  # runs before the interpreter ends daemon threads
def _finish_all() -> None:
    for writer in list(_writers):
        if writer.is_alive():
            writer.finish()
            writer.log_error()


def _mark_forked() -> None:
    for writer in list(_writers):
        writer.forked()


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_mark_forked)
