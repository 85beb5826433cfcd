"""Lines to a file from a thread of its own: a slow disk or pipe holds up nobody."""

import errno
import logging
import threading
import weakref
from collections import deque
from io import FileIO

logger = logging.getLogger("elche_jax")

BACKLOG = 100_000
"""Lines that may wait for the file; more than that, and it is given up as too slow."""

PATIENCE_S = 10.0
"""How long `flush` and `close` wait for a file that takes nothing."""


class LineWriter:
    """Writes lines in the order in which they were put, each whole and without a buffer.

    A write that fails is logged once; the file then gets nothing more, and `close`
    raises the error. Left without `close`, the thread writes what is there and ends;
    the end of the interpreter waits for it, up to `PATIENCE_S`.

    Args:
        file: The file, opened for writing; it is closed at the end.
        name: What the log calls it.
    """

    def __init__(self, file: FileIO, name: str):
        self._shared = _Shared(file, name)
        thread = threading.Thread(
            target=_write_all, args=(self._shared,), name="elche-timeline", daemon=True
        )
        thread.start()
        self._finish = weakref.finalize(self, _end, self._shared, thread)

    def put(self, line: bytes) -> None:
        """Hands a line over; does not wait."""
        with self._shared.changed:
            if self._shared.error is not None or self._shared.ending:
                return
            if len(self._shared.lines) >= BACKLOG:
                text = f"{BACKLOG} lines wait for a file that is too slow"
                self._shared.fail(OSError(errno.EAGAIN, text))
                return
            self._shared.lines.append(line)
            self._shared.put += 1
            self._shared.changed.notify_all()

    def flush(self) -> None:
        """Waits until the file has the lines put so far, or a write has failed.

        Raises:
            OSError: A line could not be written, or the file takes nothing for `PATIENCE_S`.
        """
        with self._shared.changed:
            self._wait(self._shared.put)
            if self._shared.error is not None:
                raise self._shared.error

    def close(self) -> None:
        """Writes what is left, ends the thread and closes the file.

        A thread that a file holds up cannot be interrupted. It is given `PATIENCE_S`, and
        ends by itself as soon as the file goes on.

        Raises:
            OSError: As in `flush`: the first such error.
        """
        with self._shared.changed:
            self._wait(self._shared.put)
        self._finish()
        if self._shared.error is not None:
            raise self._shared.error

    def _wait(self, lines: int) -> None:
        shared = self._shared
        while shared.written < lines and shared.error is None:
            moved = shared.changed.wait_for(
                lambda before=shared.written: shared.error or shared.written > before, PATIENCE_S
            )
            if not moved:
                text = f"the file has taken nothing for {PATIENCE_S:g} s"
                shared.fail(OSError(errno.ETIMEDOUT, text))


class _Shared:
    """What the writer and its thread share; `changed` guards it."""

    def __init__(self, file: FileIO, name: str):
        self.file, self.name = file, name
        self.changed = threading.Condition(threading.RLock())
        self.lines: deque[bytes] = deque()
        self.put = self.written = 0
        self.ending = False
        self.error: OSError | None = None

    def next(self) -> bytes | None:
        """The next line; None when there are no more."""
        with self.changed:
            self.changed.wait_for(lambda: self.lines or self.ending or self.error)
            return self.lines.popleft() if self.lines and self.error is None else None

    def wrote(self) -> None:
        with self.changed:
            self.written += 1
            self.changed.notify_all()

    def fail(self, error: OSError) -> None:
        """The file is given up: notes why, and says it once."""
        with self.changed:
            if self.error is not None:
                return
            self.error = error
            self.lines.clear()
            self.changed.notify_all()
        logger.warning(
            "elche: %s could not be written, events are kept in memory only: %s", self.name, error
        )

    def end(self) -> None:
        with self.changed:
            self.ending = True
            self.changed.notify_all()


def _write_all(shared: _Shared) -> None:
    """The thread: writes lines until there are no more, then closes the file."""
    try:
        while (line := shared.next()) is not None:
            _write(shared.file, line)
            shared.wrote()
    except OSError as error:
        shared.fail(error)
    try:
        shared.file.close()
    except OSError as error:
        shared.fail(error)


def _write(file: FileIO, line: bytes) -> None:
    rest = line
    while rest:  # a disk that becomes full takes a part
        written = file.write(rest)
        if not written:
            raise BlockingIOError(errno.EAGAIN, "the file takes nothing")
        rest = rest[written:]


def _end(shared: _Shared, thread: threading.Thread) -> None:
    shared.end()
    if thread is not threading.current_thread():
        thread.join(PATIENCE_S)
