"""The output of processes, passed on line by line so that lines do not mix."""

import os
import selectors
from collections import deque

LONGEST = 1 << 20
"""Bytes after which a line without an end is passed on in parts."""

QUEUED = 1 << 20
"""Bytes that may wait for the reader of the output before reading from processes pauses."""

PART = 4096
"""Bytes that a ready pipe takes without blocking: POSIX's `PIPE_BUF` on Linux."""


class Lines:
    """The lines of one stream of bytes, each with a prefix.

    Args:
        prefix: Prefix of each line.

    Examples:
        >>> lines = Lines(b"[0] ")
        >>> lines.add(b"one\\ntw")
        b'[0] one\\n'
        >>> lines.add(b"o") + lines.rest()
        b'[0] two\\n'
    """

    def __init__(self, prefix: bytes):
        self._prefix, self._open = prefix, bytearray()

    def add(self, data: bytes) -> bytes:
        """Add what was read; return the lines that are complete."""
        first, *others = data.split(b"\n")
        self._open += first
        lines: list[bytearray] = []
        for other in others:
            lines.append(self._open)
            self._open = bytearray(other)
        if len(self._open) > LONGEST:
            lines.append(self._open)
            self._open = bytearray()
        return b"".join(b"%b%b\n" % (self._prefix, line) for line in lines)

    def rest(self) -> bytes:
        """Return the last line if it has no end, with one added."""
        return self.add(b"\n") if self._open else b""


class Unwritable(Exception):
    """The output of processes cannot be written; the argument is the error."""


class Output:
    """Writes whole lines to stdout and stderr, in the order in which they came, without blocking.

    Args:
        selector: Waits for the stream that is written next.
    """

    def __init__(self, selector: selectors.BaseSelector):
        self._selector = selector
        self._waiting: deque[tuple[int, memoryview]] = deque()
        self._size = 0
        self._registered: int | None = None

    @property
    def full(self) -> bool:
        """Whether the reader is behind, and processes have to wait for it."""
        return self._size > QUEUED

    @property
    def empty(self) -> bool:
        """Whether everything is written."""
        return not self._waiting

    def put(self, stream: int, lines: bytes) -> None:
        """Write lines to a file descriptor once it is ready."""
        if lines:
            self._waiting.append((stream, memoryview(lines)))
            self._size += len(lines)
            self._watch()

    def write(self) -> None:
        """Write a part to the stream, which is ready.

        Raises:
            Unwritable: The reader is gone, or a disk is full.
        """
        stream, lines = self._waiting[0]
        try:
            done = os.write(stream, lines[:PART])
        except BlockingIOError:  # another program has filled the same pipe meanwhile
            return
        except OSError as error:
            raise Unwritable(error) from error
        self._size -= done
        if done < len(lines):
            self._waiting[0] = stream, lines[done:]
        else:
            self._waiting.popleft()
            self._watch()

    def drop(self) -> None:
        """Drop what waits for the stream that cannot be written; keep what waits for the other."""
        unwritable = self._waiting[0][0]
        self._waiting = deque(one for one in self._waiting if one[0] != unwritable)
        self._size = sum(len(lines) for _, lines in self._waiting)
        self._watch()

    def _watch(self) -> None:
        """Wait for the next stream only."""
        stream = self._waiting[0][0] if self._waiting else None
        if stream == self._registered:
            return
        if self._registered is not None:
            self._selector.unregister(self._registered)
        if stream is not None:
            self._selector.register(stream, selectors.EVENT_WRITE, self.write)
        self._registered = stream
