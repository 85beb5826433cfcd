"""Recording of a run's events, in memory and as lines of JSON in a file.

The kinds of events are in `elche_jax.observe.events`.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import fields
from io import FileIO
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any, Final, Self, cast

from elche_jax import _check as check
from elche_jax.cadence import WindowMeasurement
from elche_jax.observe.events import (
    EVENTS as EVENTS,
    NAMES,
    Event as Event,
    SkipEvent as SkipEvent,
    VerdictEvent as VerdictEvent,
    WindowEvent as WindowEvent,
    values_of,
)
from elche_jax.observe.line_writer import LineWriter

TIMELINE = "timeline.jsonl"
"""File name of the timeline in a run's folder."""

KEEP = 10_000
"""Events that a timeline keeps in memory by default."""

_values: Final = attrgetter(*(field.name for field in fields(WindowMeasurement)))
# `json.dumps` with an option would create an encoder for every line.
_encode: Final = json.JSONEncoder(allow_nan=False).encode
_BEGIN: Final = b'{"event": "'
_LATER: Final = {"run": {"exchange_bytes": 0, "frozen_bytes": 0}}
"""Fields that older files lack, and their default values."""

NUL: Final = b"\0"
"""What a power loss may leave at the end: space that was allocated but never written."""


class Timeline:
    """A recorder of a run's events, in memory and as lines of JSON in a file.

    Any thread may report events, and none waits for the disk: a background thread writes the
    new lines 20 times per second, so that another process can follow the file. If the process
    is killed, lines not yet written are lost; `flush` waits until they are written.
    Use it as a context manager, or close it:

        with Timeline("run.jsonl") as timeline:
            train = build_train_step(loss_fn, tx, timeline=timeline)
            ...

    **A failed write**, for instance on a full disk, or a file that falls 100 000 lines behind,
    does not stop training: one line is logged, recording continues in memory only, and `close`
    raises the error. Events reported after `close` are also kept in memory only.

    Args:
        path: The file to write, one line per event; missing folders are created, and a leading
            `~` is the home folder, as in all paths. An existing timeline is continued: an
            incomplete last line, left by a kill, is cut off, as are trailing zeros, left by a
            power loss, and `at` goes on from its last event. Only the first and the last line are
            checked, however long the file is. None records in memory only.
        keep: Most events to keep in memory, at least 1; the oldest are dropped first.

    Raises:
        TypeError: `path` is not a path, or `keep` not an integer.
        ValueError: `keep` is below 1; `path` is a folder, is empty or contains a null byte; the
            file exists and is not a timeline.
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
        self._path = None if path is None else check.file("Timeline", "path", path, TIMELINE)
        self._writer: LineWriter | None = None
        begun = 0.0
        if self._path is not None:
            file, begun = _open(self._path)
            self._writer = LineWriter(file, self, _to_line)
        self._began = time.perf_counter() - begun

    def __repr__(self) -> str:
        return f"Timeline({'' if self._path is None else repr(str(self._path))})"

    @property
    def events(self) -> list[Event]:
        """The most recent events, oldest first."""
        with self._lock:
            return list(self._events)

    def window(self, record: WindowMeasurement) -> None:
        """Record a finished window as a `WindowEvent`.

        Args:
            record: The measured window.

        Raises:
            TypeError: `record` is not a `WindowMeasurement`, or a value has the wrong type.
            ValueError: A number is not finite.
        """
        check.instance("Timeline.window", "record", record, WindowMeasurement)
        self._record(lambda at: WindowEvent(*_values(record), at=at).validate())

    def measured(self, record: WindowMeasurement) -> None:
        """Record a window like `window`, without checking its numbers.

        For a training step's own measurements, which are known to be valid.

        Args:
            record: The measured window: plain numbers, all finite.
        """
        self._record(lambda at: WindowEvent(*_values(record), at=at))

    def add(self, kind: type[Event], **values: Any) -> None:
        """Record an event with the current time.

        Args:
            kind: One of the classes in `EVENTS`.
            **values: Its fields except `at`.

        Raises:
            TypeError: A field is missing, unknown or has the wrong type.
            ValueError: `kind` is not an event class, or a number is not finite.
        """
        if kind not in EVENTS.values():
            rule = f"be one of {', '.join(known.__name__ for known in NAMES)}"
            raise ValueError(check.message("Timeline.add", "kind", rule, repr(kind)))
        self._record(lambda at: cast(Any, kind)(**values, at=at).validate())

    def _record(self, make: Callable[[float], Event]) -> None:
        """Record the event that `make(at)` returns."""
        with self._lock:  # the time is read inside, so that events are in order of time
            event = make(time.perf_counter() - self._began)
            self._events.append(event)
            writer = self._writer
            refused = writer is not None and not writer.put(event)
        if writer is not None and refused:  # without the lock: a log handler may report events
            writer.log_error()

    def flush(self) -> None:
        """Wait until the events reported so far are written.

        Raises:
            OSError: A line could not be written, or the file accepts no data for 10 s; in the
                latter case the lines are still written if it recovers.
        """
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write the remaining lines and close the file. Calling it again does nothing.

        Raises:
            OSError: As in `flush`; the first such error.
        """
        if self._writer is None:
            return
        try:
            self._writer.close()
        except OSError:
            self._writer = None
            raise
        self._writer = None  # not after an interrupt, so that `close` can be called again

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
        """Read the events of a file.

        Args:
            path: A file that a timeline has written or is still writing.

        Returns:
            The events, oldest first; without the last line if it is incomplete, as after a
            kill or a power loss.

        Raises:
            TypeError: `path` is not a path.
            ValueError: Another line, which the error names, is not an event; or `path` is empty
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
        path = check.file("Timeline.read", "path", path, TIMELINE)
        *lines, last = path.read_bytes().rstrip(NUL).split(b"\n")
        where = "Timeline.read"
        events = [_from_line(where, path, f"line {at + 1}", line) for at, line in enumerate(lines)]
        return events + _last(where, path, f"line {len(lines) + 1}", last)


def _open(path: Path) -> tuple[FileIO, float]:
    """Open a file to append lines after the last complete line of a timeline.

    Returns:
        The file, and the time of its last event; 0 if there is none.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # unbuffered, so that no line waits in a buffer; a string, as errors show the name as it is
    file = FileIO(str(path), "ab")
    try:
        # not a pipe or a device, which cannot be read back
        at = _repair_end(file, path) if path.is_file() else 0.0
    except BaseException:
        file.close()
        raise
    return file, at


def _repair_end(file: FileIO, path: Path) -> float:
    """Cut off an incomplete last line, or end a complete one; return the time of the last event.

    Raises:
        ValueError: The first or the last line is not an event.
    """
    stored = path.read_bytes()
    content = stored.rstrip(NUL)
    end = content.rfind(b"\n") + 1
    name = "the last line" if end else "line 1"
    events: list[Event] = []
    if end:
        _from_line("Timeline", path, "line 1", content[: content.find(b"\n")])
        before = content.rfind(b"\n", 0, end - 1) + 1
        events.append(_from_line("Timeline", path, name, content[before : end - 1]))
    whole = _last("Timeline", path, name, content[end:])
    events += whole
    kept = len(content) if whole else end
    if kept < len(stored):  # only then: another process may have appended since
        file.truncate(kept)
    if whole:
        file.write(b"\n")
    return events[-1].at if events else 0.0


def _last(where: str, path: Path, name: str, line: bytes) -> list[Event]:
    """Return the event of a last line without a newline; none if it is incomplete or empty."""
    try:
        return [_from_line(where, path, name, line)] if line else []
    except ValueError:
        # A kill leaves the beginning of an event. Anything else means that this is another file.
        if not (line.startswith(_BEGIN) or _BEGIN.startswith(line)):
            raise
        return []


def _to_line(event: Event) -> bytes:
    return _encode({"event": NAMES[type(event)]} | values_of(event)).encode() + b"\n"


def _from_line(where: str, path: Path, name: str, line: bytes) -> Event:
    try:
        values: Any = json.loads(line)
        event = values.pop("event")
        return EVENTS[event](**_LATER.get(event, {}) | values).validate()
    # A `RecursionError` comes from JSON that is nested thousands of levels deep.
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        got = f"{line[:60]!r} ({type(error).__name__}: {error})"
        argument, rule = f"{name} of {path}", "be an event of a timeline"
        todo = "Is it another file, or was it edited?"
        raise ValueError(check.message(where, argument, rule, got, todo)) from error
