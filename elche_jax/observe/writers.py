"""Writers of a run's scalars, to a table in a file or to TensorBoard.

Your own writer can be any object with the two methods of `Writer`.
"""

import csv
import io
import logging
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from io import FileIO
from os import PathLike
from pathlib import Path
from typing import Any, Final, Protocol, cast, runtime_checkable

from elche_jax import _check as check
from elche_jax.observe.atomic import replacing
from elche_jax.observe.paths import given_file, given_path

logger = logging.getLogger("elche_jax")

STEP: Final = "step"
FORMULA: Final = ("=", "+", "-", "@", "\t", "\r", "\n", "\0")
"""Beginnings of cells that a spreadsheet may take for a formula (OWASP, CSV injection)."""


@runtime_checkable
class Writer(Protocol):
    """Takes the scalars of a run."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the values at a step, which is never below the one before.

        Args:
            step: Number of the window, at least 0. A resumed run begins at a step that the
                process before may already have written: what is there from this step on no
                longer counts.
            values: The values by name; they may be NaN or infinite.
        """
        ...

    def close(self) -> None:
        """Writes what is left. Calling it again does nothing."""
        ...


class _FileWriter:
    """What both writers share: steps that never fall, and a file that is opened late."""

    def __init__(self) -> None:
        self._where = f"{type(self).__name__}.scalars"
        self._last = 0
        self._closed = False
        self._file: FileIO | None = None

    def close(self) -> None:
        """Closes the file. Calling it again does nothing."""
        self._closed = True
        self._shut()

    def _shut(self) -> None:
        """Closes the file; the next `scalars` may open it again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _take(self, step: int, values: Mapping[str, float]) -> tuple[int, dict[str, float]]:
        where = self._where
        if self._closed:
            raise ValueError(check.message(where, "the writer", "be open", "a closed one"))
        step = check.integer(where, "step", step, low=self._last)
        check.instance(where, "values", values, Mapping)
        numbers = {name: _number(where, name, value) for name, value in values.items()}
        self._last = step
        return step, numbers


def _number(where: str, name: object, value: object) -> float:
    check.instance(where, "a name in values", name, str)
    plain = cast(Any, value).item() if getattr(value, "ndim", None) == 0 else value
    if isinstance(plain, bool) or not isinstance(plain, int | float):
        text = check.message(where, f"values[{name!r}]", "be a number", check.describe(value))
        raise TypeError(text)
    return float(plain)


def _append(file: FileIO, line: bytes) -> None:
    """Writes a line completely or, on a full disk for instance, not at all."""
    end = file.seek(0, io.SEEK_END)
    rest = line
    try:
        while rest:
            rest = rest[file.write(rest) or 0 :]
    except OSError:
        file.truncate(end)
        raise


class CSVWriter(_FileWriter):
    """Writes scalars as a table, `step` and a column per name, for a spreadsheet or pandas.

    A row is written at once and completely. A name that first appears later becomes a new
    column at the right, empty in the rows above: the file is then written anew, and replaces
    the old one in one step. An existing file is continued: rows from the first new step on
    are dropped, as is a last row that a kill has left unfinished. A damaged file is renamed
    to `metrics-damaged-<time>.csv`, the log says so, and a new one is begun.

    A spreadsheet takes a cell that begins with `=`, `+`, `-`, `@`, a tab or a new line for a
    formula, which may run programs. In the file such a name has an apostrophe in front, as
    OWASP advises; take it off when you read the file with `csv`. Numbers are written as is.

    Args:
        path: The file; missing folders are made. It is opened by the first `scalars`.

    Raises:
        TypeError: `path` is no path.
        ValueError: It is empty, a folder, or has a null byte in it.

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
        self._path = given_file("CSVWriter", "path", path, "metrics.csv")
        self._columns: list[str] = []
        self._begun = False  # whether the file is of this writer, not of one before

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes a row.

        Args:
            step: Number of the window; at least that of the row above.
            values: The values by name; none may be called `step`.

        Raises:
            TypeError: `step` is no integer, or a value no number.
            ValueError: The step is below the last one, a value is called `step`, the writer
                is closed, or there is a file that is no table of this writer.
            OSError: The file cannot be written; only complete rows are left in it.
        """
        step, numbers = self._take(step, values)
        if STEP in numbers:
            rule = f"hold no name {STEP!r}"
            raise ValueError(check.message("CSVWriter.scalars", "values", rule, [*numbers]))
        new = [name for name in numbers if name not in self._columns]
        if self._file is None or new:
            self._shut()
            self._file = self._anew(new, None if self._begun else step)
            self._begun = True
        cells = [repr(numbers[name]) if name in numbers else "" for name in self._columns]
        _append(self._file, _line([str(step), *cells]))

    def _anew(self, new: Iterable[str], before: int | None) -> FileIO:
        """Rewrites the file with more columns and without rows from a step on; opens it."""
        columns, rows = _read(self._path)
        columns += [name for name in new if name not in columns]
        with replacing(self._path) as file:
            file.write(_line([STEP, *map(_as_text, columns)]))
            for step, cells in rows:
                if before is None or step < before:
                    empty = [""] * (len(columns) - len(cells))
                    file.write(_line([str(step), *cells, *empty]))
        self._columns = columns
        return FileIO(self._path, "ab")  # without a buffer: a row is one write


def _as_text(name: str) -> str:
    """The name as a cell that no spreadsheet takes for a formula."""
    return f"'{name}" if name.lstrip("'").startswith(FORMULA) else name


def _as_name(cell: str) -> str:
    """The name in a cell that `_as_text` made; older files hold names as they are."""
    is_text = cell.startswith("'") and cell.lstrip("'").startswith(FORMULA)
    return cell[1:] if is_text else cell


def _line(cells: Sequence[str]) -> bytes:
    text = io.StringIO()
    # With both characters, so that names that contain either are quoted.
    csv.writer(text, lineterminator="\r\n").writerow(cells)
    return text.getvalue().removesuffix("\r\n").encode() + b"\n"


def _read(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Columns and rows of a table, without `step`; none if there is no file.

    A damaged table is put aside: it must not stop a run, which does not need it.
    """
    content = path.read_bytes() if path.exists() else b""
    content = content.rstrip(b"\0")  # a power loss leaves zeros in place of rows
    if not content:
        return [], []
    try:
        return _parsed(content)
    except (ValueError, csv.Error) as error:
        if not content.startswith((b"step,", b"step\n")):
            rule, got = f"be a table with a first column {STEP!r}", f"{content[:60]!r}"
            todo = "Give another path, or move that file away."
            raise ValueError(check.message("CSVWriter", str(path), rule, got, todo)) from error
        aside = path.with_name(f"{path.stem}-damaged-{time.time_ns()}{path.suffix}")
        path.rename(aside)
        logger.warning(
            "elche: %s is a damaged table: %s. It was renamed to %s, and a new one is begun.",
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
    """Writes scalars as events for TensorBoard; needs `tensorboardX`.

    A folder that holds events is continued: TensorBoard leaves out the old ones from the
    first new step on.

    Args:
        folder: Folder of the event files; made if missing.

    Raises:
        TypeError: `folder` is no path.
        ValueError: It is empty, or has a null byte in it.
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
        self._folder = given_path("TensorBoardWriter", "folder", folder)
        try:  # now, not in the middle of a run
            from tensorboardX import record_writer, summary
            from tensorboardX.proto import event_pb2
        except ImportError as error:
            todo = "pip install 'elche_jax[tensorboard]'"
            raise ImportError(f"TensorBoardWriter: needs tensorboardX: {todo}.") from error
        self._event = cast(Any, event_pb2).Event
        self._checksum: Any = record_writer.masked_crc32c
        self._summary: Any = summary.scalar  # it makes names that TensorBoard accepts

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes values at once.

        Args:
            step: Number of the window; at least the last one.
            values: The values by name; single precision.

        Raises:
            TypeError: `step` is no integer, or a value no number.
            ValueError: The step is below the last one, or the writer is closed.
            OSError: The file cannot be written; only complete events are left in it.
        """
        step, numbers = self._take(step, values)
        if self._file is None:
            self._file = self._open(step)
        summaries = [self._summary(name, number) for name, number in numbers.items()]
        summary = {"value": [value for each in summaries for value in each.value]}
        _append(self._file, self._record(step, summary=summary))

    def _open(self, step: int) -> FileIO:
        """A new file with its first events, which say at which step older files end."""
        goes_on = any(self._folder.glob("events.out.tfevents.*"))
        first = self._record(step if goes_on else 0, file_version="brain.Event:2")
        if goes_on:
            first += self._record(step, session_log={"status": "START"})
        self._folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names; microseconds keep them in order.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
        file = FileIO(self._folder / name, "xb")  # without a buffer: an event is one write
        try:
            _append(file, first)
        except BaseException:
            file.close()
            raise
        return file

    def _record(self, step: int, **what: Any) -> bytes:
        """An event as a file holds it: its length and its bytes, each with a checksum.

        tensorboardX's own writers are not used: one has a thread that waits for ever for a disk
        that has failed, and the other leaves a part of an event on a full disk.
        """
        event: bytes = self._event(step=step, wall_time=time.time(), **what).SerializeToString()
        parts = struct.pack("<Q", len(event)), event
        return b"".join(part + struct.pack("<I", self._checksum(part)) for part in parts)
