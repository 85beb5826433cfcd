"""What happened in a run and when: typed events, in memory and as lines of JSON.

The kinds of events are in `elche_jax.observe.events`.
"""

import io
import json
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import fields
from io import FileIO
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, Final, Self, cast

from elche_jax import _check as check
from elche_jax.cadence import WindowMeasurement
from elche_jax.observe.events import (
    EVENTS as EVENTS,
    NAMES,
    Event as Event,
    SkipEvent as SkipEvent,
    VerdictEvent as VerdictEvent,
    WindowEvent as WindowEvent,
)
from elche_jax.observe.line_writer import LineWriter
from elche_jax.observe.paths import given_file

TIMELINE = "timeline.jsonl"
"""Name of the timeline in a run's folder."""

KEEP = 10_000
"""Events that a timeline keeps in memory."""


BLOCK = 65_536
"""Bytes read at once, from the end of a file backwards."""

_values: Final = attrgetter(*(field.name for field in fields(WindowMeasurement)))
_encode: Final = json.JSONEncoder(allow_nan=False).encode
_BEGIN: Final = b'{"event": "'
_LATER: Final = {"run": {"exchange_bytes": 0, "frozen_bytes": 0}}
"""Fields that older files lack, and their values there."""

NUL: Final = b"\0"
"""What a power loss leaves where the disk had reserved room for a line but not written it."""


class Timeline:
    """Records the events of a run, in memory and as lines of JSON in a file.

    Any thread may report, and none waits for the disk: the timeline has its own thread, which
    writes the lines of every twentieth of a second, so that another process can follow the
    file. A kill loses what was not written yet; `flush` waits until it is.
    Use it as a context manager, or close it:

        with Timeline("run.jsonl") as timeline:
            train = build_train_step(loss_fn, tx, timeline=timeline)
            ...

    **A write that fails**, on a full disk for instance, or a file that falls 100 000 lines
    behind, does not stop the training: one line is logged, recording goes on in memory
    only, and `close` raises the error. Events reported after `close` are also kept in
    memory only.

    Args:
        path: The file to write, one line per event; missing folders are made, and `~` is
            the home folder, as in all paths. An existing timeline is continued: a last line
            that a kill has left unfinished is cut off, as are the zeros that a power loss may
            leave behind, and `at` begins at 0 again. Only the first and the last line are
            checked, however long the file is. None: in memory only.
        keep: Most events to keep in memory, at least 1; the oldest are dropped first.

    Raises:
        TypeError: `path` is no path, `keep` no integer.
        ValueError: `keep` is below 1; `path` is a folder, is empty or has a null byte in it; the
            file exists and is no timeline.
        OSError: The file cannot be opened.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from elche_jax.cadence import WindowRecord
        >>> from elche_jax.observe.timeline import Timeline
        >>> path = Path(tempfile.mkdtemp(), "run.jsonl")
        >>> with Timeline(path) as timeline:
        ...     timeline.window(WindowRecord(0, 0, (4, 1), 80, (8.0, 8.0), 9.0, 1.0, 0.0, True))
        ...     timeline.add(SkipEvent, window=1, epoch=0, reason="not finite")
        >>> [event.window for event in Timeline.read(path)]
        [0, 1]
        >>> Timeline.read(path) == timeline.events
        True
    """

    def __init__(self, path: str | PathLike[str] | None = None, keep: int = KEEP):
        keep = check.integer("Timeline", "keep", keep, low=1)
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=keep)
        self._path = None if path is None else given_file("Timeline", "path", path, TIMELINE)
        self._writer = None if self._path is None else LineWriter(_open(self._path), self, _to_line)
        self._began = time.perf_counter()

    def __repr__(self) -> str:
        return f"Timeline({'' if self._path is None else repr(str(self._path))})"

    @property
    def events(self) -> list[Event]:
        """The last events, oldest first."""
        with self._lock:
            return list(self._events)

    def window(self, record: WindowMeasurement) -> None:
        """Records a finished window as a `WindowEvent`.

        Args:
            record: What was measured.

        Raises:
            TypeError: `record` is no `WindowMeasurement`, or holds anything but numbers.
            ValueError: One of its numbers is not finite.
        """
        check.instance("Timeline.window", "record", record, WindowMeasurement)
        self._take(lambda at: WindowEvent(*_values(record), at=at).validate())

    def measured(self, record: WindowMeasurement) -> None:
        """Records a window as `window` does, without checking the numbers.

        A training step calls it with its own measurements.

        Args:
            record: What was measured: plain numbers, all finite.
        """
        self._take(lambda at: WindowEvent(*_values(record), at=at))

    def add(self, kind: type[Event], **values: Any) -> None:
        """Records an event that happens now.

        Args:
            kind: One of the classes in `EVENTS`.
            **values: Its fields except `at`.

        Raises:
            TypeError: A field is missing, unknown or of another type.
            ValueError: `kind` is no event, or a number is not finite.
        """
        if not isinstance(kind, type) or kind not in NAMES:
            rule = f"be one of {', '.join(known.__name__ for known in NAMES)}"
            raise ValueError(check.message("Timeline.add", "kind", rule, repr(kind)))
        self._take(lambda at: cast(Any, kind)(**values, at=at).validate())

    def _take(self, make: Callable[[float], Event]) -> None:
        """Records the event that `make(at)` returns."""
        with self._lock:  # taking the time inside keeps the events in its order
            event = make(time.perf_counter() - self._began)
            self._events.append(event)
            writer = self._writer
            taken = writer is None or writer.put(event)
        if not taken and writer is not None:
            writer.say()

    def flush(self) -> None:
        """Waits until the file has what was reported so far.

        Raises:
            OSError: A line could not be written, or the file accepts nothing for 10 s; the
                lines are still written if it recovers.
        """
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Writes what is left and closes the file. Calling it again does nothing.

        Raises:
            OSError: As in `flush`: the first such error.
        """
        if self._writer is None:
            return
        try:
            self._writer.close()
        except OSError:
            self._writer = None
            raise
        self._writer = None  # not if interrupted: then `close` may be called again

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except OSError as unwritten:
            if error is None:
                raise
            error.add_note(f"Besides, {self!r} could not be written: {unwritten}")

    @staticmethod
    def read(path: str | PathLike[str]) -> list[Event]:
        """Reads the events of a file.

        Args:
            path: A file that a timeline has written or is still writing.

        Returns:
            The events, oldest first; without the last line if it is unfinished, as
            after a kill or a power loss.

        Raises:
            TypeError: `path` is no path.
            ValueError: Any other line is not an event, which the error names. Or `path` is empty,
                or a folder.
            OSError: The file cannot be read.

        Examples:
            >>> import tempfile
            >>> from pathlib import Path
            >>> from elche_jax.observe.timeline import Timeline
            >>> path = Path(tempfile.mkdtemp(), "run.jsonl")
            >>> line = '{"event": "skip", "window": 7, "epoch": 1, "reason": "NaN", "at": 2.5}'
            >>> _ = path.write_text(line + "\\n" + line[:20])
            >>> Timeline.read(path)
            [SkipEvent(window=7, epoch=1, reason='NaN', at=2.5)]
        """
        path = given_file("Timeline.read", "path", path, TIMELINE)
        *lines, last = path.read_bytes().rstrip(NUL).split(b"\n")
        where = "Timeline.read"
        events = [_from_line(where, path, f"line {at + 1}", line) for at, line in enumerate(lines)]
        return events + _last(where, path, f"line {len(lines) + 1}", last)


def _open(path: Path) -> FileIO:
    """Opens a file to append lines after the last whole line of a timeline."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = FileIO(path, "ab")  # without a buffer: a line is one write
    try:
        size = path.stat()
        if stat.S_ISREG(size.st_mode):  # not a pipe or the like
            whole, ended = _whole(path)
            if whole < size.st_size:
                file.truncate(whole)
            if not ended:
                file.write(b"\n")
    except BaseException:
        file.close()
        raise
    return file


def _whole(path: Path) -> tuple[int, bool]:
    """How many bytes of a file are whole lines, and whether the last one has a newline.

    Raises:
        ValueError: The first line, or one at the end, is no event.
    """
    with path.open("rb") as file:
        first = file.readline()
        if first.endswith(b"\n"):
            _from_line("Timeline", path, "line 1", first[:-1])
        at, tail = _tail(file)
    *lines, last = tail.split(b"\n")
    name = "the last line" if lines else "line 1"
    if lines:
        _from_line("Timeline", path, name, lines[-1])
    end = at + len(tail)
    return (end, False) if _last("Timeline", path, name, last) else (end - len(last), True)


def _tail(file: BinaryIO) -> tuple[int, bytes]:
    """The end of a file, with its last whole line, and the position where that end begins."""
    at, tail = file.seek(0, io.SEEK_END), b""
    while at and tail.count(b"\n") < 2:
        step = min(at, BLOCK)
        at -= step
        file.seek(at)
        tail = (file.read(step) + tail).rstrip(NUL)
    return at, tail


def _last(where: str, path: Path, name: str, line: bytes) -> list[Event]:
    """The event of a last line without a newline; none if it is unfinished or empty."""
    try:
        return [_from_line(where, path, name, line)] if line else []
    except ValueError:
        # A kill leaves the beginning of an event; anything else is no timeline.
        if not (line.startswith(_BEGIN) or _BEGIN.startswith(line)):
            raise
        return []


def _to_line(event: Event) -> bytes:
    values = {field.name: getattr(event, field.name) for field in fields(cast(Any, event))}
    return _encode({"event": NAMES[type(event)]} | values).encode() + b"\n"


def _from_line(where: str, path: Path, name: str, line: bytes) -> Event:
    try:
        values: Any = json.loads(line)
        event = values.pop("event")
        return EVENTS[event](**_LATER.get(event, {}) | values).validate()
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        got = f"{line[:60]!r} ({type(error).__name__}: {error})"
        argument, rule = f"{name} of {path}", "be an event of a timeline"
        todo = "Is it another file, or was it edited?"
        raise ValueError(check.message(where, argument, rule, got, todo)) from error
