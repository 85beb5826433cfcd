"""Writers of a run's scalars, to a CSV file or to TensorBoard.

Any object with the two methods of `Writer` is a writer.
"""

import csv
import io
import os
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from io import FileIO
from os import PathLike
from pathlib import Path
from typing import Any, Final, Protocol, cast, runtime_checkable

from elche_jax import _check as check
from elche_jax._log import logger
from elche_jax.observe.atomic import replacing

STEP: Final = "step"
FORMULA: Final = ("=", "+", "-", "@", "\t", "\r", "\n", "\0")
"""Beginnings of cells that a spreadsheet may interpret as formulas (OWASP, CSV injection)."""


@runtime_checkable
class Writer(Protocol):
    """A receiver of a run's scalars."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a step; steps never decrease.

        Args:
            step: Number of the window, at least 0. A resumed run may begin at a step that the
                previous process has already written: older values from this step on are
                invalid.
            values: The values by name; they may be NaN or infinite. `CSVWriter` and
                `TensorBoardWriter` also take arrays without dimensions, such as the metrics of a
                step, and wait for them.
        """
        ...

    def close(self) -> None:
        """Write remaining values. Calling it again does nothing."""
        ...


class _FileWriter:
    """Base of the writers: a file opened by the first `scalars`, and checked values."""

    def __init__(self) -> None:
        self._last = 0
        self._closed = False
        self._file: FileIO | None = None

    def close(self) -> None:
        """Close the file. Calling it again does nothing."""
        self._closed = True
        self._close_file()

    def _close_file(self) -> None:
        """Close the file, which the next `scalars` may open again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _check(self, step: int, values: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
        """Return the checked arguments of `scalars` as plain numbers."""
        where = f"{type(self).__name__}.scalars"
        if self._closed:
            raise ValueError(check.message(where, "the writer", "be open", "a closed one"))
        step = check.integer(where, "step", step, low=self._last)
        check.instance(where, "values", values, Mapping)
        for name in values:
            check.instance(where, "a name in values", name, str)
        numbers = {
            name: check.number(where, f"values[{name!r}]", _element(value))
            for name, value in values.items()
        }
        self._last = step
        return step, numbers


def _element(value: object) -> object:
    """Return the element of an array without dimensions, as a number; other values as they are."""
    element = check.unwrapped(value)
    is_array = element is not value
    return float(element) if is_array and isinstance(element, bool) else element


def _append(file: FileIO, line: bytes) -> None:
    """Append a line completely or, for instance on a full disk, not at all."""
    end = file.seek(0, io.SEEK_END)
    rest = line
    try:
        while rest:  # an unbuffered file may accept a part
            rest = rest[file.write(rest) or 0 :]
    except OSError as error:
        error.filename = file.name  # Python's error names no file
        file.truncate(end)
        raise


class CSVWriter(_FileWriter):
    """A writer of scalars to a CSV file with `step` and a column per name.

    Each row is written immediately and completely. A name that first appears later becomes a
    new column on the right, empty in the rows above: the file is then rewritten, and replaced
    atomically. An existing file is continued: rows from the first new step on are dropped, as
    is an incomplete last row, left by a kill. A damaged file is renamed to
    `metrics-damaged-<time>.csv`, which is logged, and a new one is begun.

    Spreadsheets interpret a cell that begins with `=`, `+`, `-`, `@`, a tab or a newline as a
    formula, which may run programs. In the file such a name is prefixed with an apostrophe, as
    OWASP recommends; remove it when you read the file with `csv`. Numbers are written as is.

    Args:
        path: The file; missing folders are created. It is opened by the first `scalars`.

    Raises:
        TypeError: `path` is not a path.
        ValueError: It is empty, a folder, or contains a null byte.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from elche_jax.observe.writers import CSVWriter
        >>> path = Path(tempfile.mkdtemp(), "metrics.csv")
        >>> writer = CSVWriter(path)
        >>> writer.scalars(0, {"loss": 2.5})
        >>> writer.scalars(1, {"loss": float("nan"), "accuracy": 0.5})
        >>> writer.close()
        >>> print(path.read_text())
        step,loss,accuracy
        0,2.5,
        1,nan,0.5
        <BLANKLINE>
    """

    def __init__(self, path: str | PathLike[str]):
        super().__init__()
        self._path = check.file("CSVWriter", "path", path, "metrics.csv")
        self._columns: list[str] = []
        self._begun = False  # whether the rows of an earlier run have been dropped

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Write a row.

        Args:
            step: Number of the window, at least that of the row above.
            values: The values by name; none may be called `step`.

        Raises:
            TypeError: `step` is not an integer, or a value not a number.
            ValueError: The step is below the last one, a value is called `step`, the writer
                is closed, or the existing file is not a table of a `CSVWriter` or not a
                regular file.
            OSError: The file cannot be written; only complete rows are left in it.
        """
        step, numbers = self._check(step, values)
        if STEP in numbers:
            rule = f"hold no name {STEP!r}"
            raise ValueError(check.message("CSVWriter.scalars", "values", rule, [*numbers]))
        new = [name for name in numbers if name not in self._columns]
        if self._file is None or new:
            self._close_file()
            self._file = self._rewrite(new, None if self._begun else step)
            self._begun = True
        _append(self._file, _line([step, *(numbers.get(name, "") for name in self._columns)]))

    def check(self) -> None:
        """Raise what the first `scalars` would raise about the existing file.

        Raises:
            ValueError: It is not a table of a `CSVWriter`, or not a regular file.
            OSError: It cannot be read.
        """
        _read(self._path)

    def _rewrite(self, new: Iterable[str], before: int | None) -> FileIO:
        """Rewrite the file with more columns and only rows before a step, and open it."""
        columns, rows = _read(self._path)
        columns += [name for name in new if name not in columns]
        with replacing(self._path) as file:
            file.write(_line([STEP, *map(_as_text, columns)]))
            for step, cells in rows:
                if before is None or step < before:
                    empty = [""] * (len(columns) - len(cells))
                    file.write(_line([step, *cells, *empty]))
        self._columns = columns
        return FileIO(str(self._path), "ab")  # unbuffered, so that no row waits in a buffer


def _as_text(name: str) -> str:
    """Return a name as a cell that no spreadsheet interprets as a formula."""
    # Also if it begins with apostrophes, so that `_as_name` restores every name.
    return f"'{name}" if name.lstrip("'").startswith(FORMULA) else name


def _as_name(cell: str) -> str:
    """Return the name in a cell of `_as_text`; older files contain names as they are."""
    is_text = cell.startswith("'") and cell.lstrip("'").startswith(FORMULA)
    return cell[1:] if is_text else cell


def _line(cells: Iterable[object]) -> bytes:
    text = io.StringIO()
    # `csv` quotes cells that contain a character of the line end: "\n" and "\r" must be quoted.
    csv.writer(text, lineterminator="\r\n").writerow(cells)
    return text.getvalue().removesuffix("\r\n").encode() + b"\n"


def _read(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return a table's columns except `step`, and its rows; both empty if there is no file.

    A damaged table is renamed and raises no error: the run does not depend on it.
    """
    # reading a pipe or a terminal waits for its other end; the null device only has no content
    if path.exists() and not path.is_file() and not path.samefile(os.devnull):
        rule, got = "be a regular file", "another kind, such as a pipe"
        todo = "Give another path, as a table is read and rewritten."
        raise ValueError(check.message("CSVWriter", str(path), rule, got, todo))
    content = path.read_bytes() if path.exists() else b""
    content = content.rstrip(b"\0")  # a power loss may leave zeros in place of rows
    if not content:
        return [], []
    try:
        return _parsed(content)
    except (ValueError, csv.Error) as error:
        # Another program's file stays where it is; only a table of ours is renamed.
        if not content.startswith((b"step,", b"step\n")):
            rule, got = f"be a table with a first column {STEP!r}", f"{content[:60]!r}"
            todo = "Give another path, or move that file away."
            raise ValueError(check.message("CSVWriter", str(path), rule, got, todo)) from error
        aside = path.with_name(f"{path.stem}-damaged-{time.time_ns()}{path.suffix}")
        path.rename(aside)
        logger.warning(
            "elche: %s is a damaged table: %s. It was renamed to %s, and a new one is started.",
            path, error, aside.name,
        )  # fmt: skip
        return [], []


def _parsed(content: bytes) -> tuple[list[str], list[tuple[int, list[str]]]]:
    whole, newline, _ = content.rpartition(b"\n")  # a kill may have cut the last row
    if not newline:
        raise ValueError("line 1 has no end")
    reader = csv.reader(io.StringIO((whole + newline).decode(), newline=""), strict=True)
    head = next(reader)
    if head[:1] != [STEP]:
        raise ValueError(f"line 1 does not begin with {STEP!r}")
    rows: list[tuple[int, list[str]]] = []
    for row in reader:
        if len(row) != len(head) or not row[0].isdecimal():
            rule = f"must be a step and its values ({len(head)} cells), got {row}"
            raise ValueError(f"line {reader.line_num} {rule}")
        rows.append((int(row[0]), row[1:]))
    return list(map(_as_name, head[1:])), rows


class TensorBoardWriter(_FileWriter):
    """A writer of scalars for TensorBoard; needs `tensorboardX`.

    A folder that contains events is continued: TensorBoard ignores the old ones from the first
    new step on.

    Args:
        folder: Folder of the event files; created if missing.

    Raises:
        TypeError: `folder` is not a path.
        ValueError: It is empty or contains a null byte.
        ImportError: tensorboardX is not installed.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from elche_jax.observe.writers import TensorBoardWriter
        >>> folder = tempfile.mkdtemp()
        >>> writer = TensorBoardWriter(folder)
        >>> writer.scalars(0, {"loss": 2.5})
        >>> writer.close()
        >>> len(list(Path(folder).glob("events.out.tfevents.*")))
        1
    """

    def __init__(self, folder: str | PathLike[str]):
        super().__init__()
        self._folder = check.path("TensorBoardWriter", "folder", folder)
        try:  # here rather than in `scalars`, so that a missing package shows before the run
            from tensorboardX import record_writer, summary
            from tensorboardX.proto import event_pb2
        except ImportError as error:
            todo = "pip install 'elche_jax[tensorboard]'"
            raise ImportError(f"TensorBoardWriter: needs tensorboardX: {todo}.") from error
        self._event = cast(Any, event_pb2).Event
        self._checksum: Any = record_writer.masked_crc32c
        self._summary: Any = summary.scalar  # it makes names that TensorBoard accepts

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Write values immediately.

        Args:
            step: Number of the window, at least the last one.
            values: The values by name, stored in single precision.

        Raises:
            TypeError: `step` is not an integer, or a value not a number.
            ValueError: The step is below the last one, or the writer is closed.
            OSError: The file cannot be written; only complete events are left in it.
        """
        step, numbers = self._check(step, values)
        if self._file is None:
            self._file = self._open(step)
        summaries = [self._summary(name, number) for name, number in numbers.items()]
        summary = {"value": [value for each in summaries for value in each.value]}
        _append(self._file, self._record(step, summary=summary))

    def _open(self, step: int) -> FileIO:
        """Open a new file, whose first events tell TensorBoard where older files end."""
        resumed = any(self._folder.glob("events.out.tfevents.*"))
        first = self._record(step if resumed else 0, file_version="brain.Event:2")
        if resumed:
            first += self._record(step, session_log={"status": "START"})
        self._folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in order of their names; microseconds tell apart files of the
        # same second.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
        file = FileIO(str(self._folder / name), "xb")  # unbuffered, so that no event waits
        try:
            _append(file, first)
        except BaseException:
            file.close()
            raise
        return file

    def _record(self, step: int, **what: Any) -> bytes:
        """Return an event as stored in a file: its length and its bytes, each with a checksum.

        tensorboardX's own writers are not used: `EventFileWriter` has a thread that waits
        forever for a failed disk, and `RecordWriter` leaves part of an event on a full disk.
        """
        event: bytes = self._event(step=step, wall_time=time.time(), **what).SerializeToString()
        parts = struct.pack("<Q", len(event)), event
        return b"".join(part + struct.pack("<I", self._checksum(part)) for part in parts)
