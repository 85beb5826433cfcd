"""What this process is doing, noted where a watchdog outside of it can read it.

The library notes the phases of its work here. If nothing watches, a note does nothing. Otherwise
it is a few words in a file that both processes have mapped into memory: no call can block, and the
watchdog can read it while this process is stopped or stuck. `elche_jax.launch.judge` draws the
conclusions.
"""

import mmap
import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple, Self

from elche_jax._log import logger

VARIABLE = "ELCHE_PROGRESS"
"""Environment variable in which a launcher names this file."""

MEMORY = "ELCHE_MEMORY"
"""Environment variable with a folder in memory that outlives the processes of a generation."""

DESTINATION = "folder"
"""Name of the file, beside checkpoints in memory, that says where on disk they belong."""

MANIFEST = "manifest"
"""Name of a folder within each checkpoint: a numbered folder without it is not a checkpoint."""

STEP = re.compile("0|[1-9][0-9]*")
"""Name of a checkpoint: the number of windows trained."""

TOLD = "told"
"""Name of the file, in the same folder, in which a launcher says what it did."""

AGAIN = 75
"""Exit code of a process that has saved and wants to be started again (`EX_TEMPFAIL`)."""

KINDS = ("", "connect", "compile", "restore", "checkpoint", "data", "window", "exchange", "leave")
"""The phases that are noted; a phase is written as its index."""

_SIZE = 4096
_PID, _NOTES, _FIRST, _WINDOW, _RUNS, _TOLD, _PROCESS, _SEVERAL = range(8)
_RANKS, _ASKED, _WATCHED, _TRAINED, _NOTED, _BECAUSE = slice(64, 192), *range(24, 29)
_SLOTS, _SLOT, _COUNT = 32, 4, 64
# words of 8 bytes: those above, then `_COUNT` phases of `_SLOT` words each
_CODES = {kind: code for code, kind in enumerate(KINDS)}


class Phase(NamedTuple):
    """A phase that a process is in.

    Attributes:
        kind: One of `KINDS`.
        window: Number of the window; -1 for the process's first one that is not complete.
        begun: When it began, in nanoseconds, to tell phases apart.
    """

    kind: str
    window: int = -1
    begun: int = 0


class Noted(NamedTuple):
    """What a process has noted.

    Attributes:
        pid: Its process id; 0 if it has not begun.
        notes: A number that changes with every note.
        first: The first window of its run.
        window: The first window that is not complete.
        trained: Number of windows it has trained in all its runs.
        running: Whether its loop is in the middle of a run.
        process: Its index in the job.
        several: Whether the job has several processes.
        ranks: The ranks of its devices, as text.
        phases: The phases that it is in.
    """

    pid: int = 0
    notes: int = 0
    first: int = 0
    window: int = 0
    trained: int = 0
    running: bool = False
    process: int = 0
    several: bool = False
    ranks: str = ""
    phases: tuple[Phase, ...] = ()


class ProgressFile:
    """The file with the notes of one process, mapped into memory.

    Attributes:
        path: The file.
        memory: The mapped file, as bytes.
        words: The mapped file, as 8-byte integers.

    Args:
        path: The file, see `create`.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        with self.path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), _SIZE)
        self.words = memoryview(self.memory).cast("q")
        self._free = list(range(_SLOTS, _SLOTS + _SLOT * _COUNT, _SLOT))
        self._read = 0

    @classmethod
    def create(cls, path: Path, watched: bool = True, noted: bool = True) -> Self:
        """Create an empty file.

        Args:
            path: The file.
            watched: Whether a watchdog reads it.
            noted: Whether phases are noted; if not, only the process to blame for the end is.
        """
        path.write_bytes(bytes(_SIZE))
        file = cls(path)
        file.words[_WATCHED], file.words[_NOTED] = watched, noted
        return file

    # -- the process that writes, see also the functions below -----------------------

    def claim(self) -> bool:
        """Take the file for this process, for as long as it lives.

        Processes that it starts inherit the variable, but must not write.

        Returns:
            Whether no other process has it.
        """
        import fcntl  # POSIX only, like a launcher

        lock = os.open(self.path, os.O_RDWR)  # until the process ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        self.words[_PID] = os.getpid()
        return True

    def begin(self, kind: str, window: int) -> int:
        """Note that a phase begins; return its place."""
        if self.words[_TOLD] != self._read:
            self._read = self.words[_TOLD]
            log_told()
        try:
            at, words = self._free.pop(), self.words  # atomic, as any thread may note
        except IndexError:  # more phases at once than places: this one is not noted
            return 0
        words[at + 1], words[at + 2] = window, time.monotonic_ns()
        words[at] = _CODES[kind]  # last: it makes the place valid
        words[_NOTES] += 1
        return at

    def end(self, at: int) -> None:
        """Note that a phase has ended."""
        if not at:
            return
        self.words[at] = 0
        self.words[_NOTES] += 1
        self._free.append(at)

    # -- the process that reads ------------------------------------------------------

    def read(self) -> Noted:
        """Return what is noted at this moment."""
        words = self.words
        phases: list[Phase] = []
        for at in range(_SLOTS, _SLOTS + _SLOT * _COUNT, _SLOT):
            code, window, begun, again = (*words[at : at + 3], words[at])
            if code and code == again:
                phases.append(Phase(KINDS[code], window, begun))
        ranks = self.memory[_RANKS].rstrip(b"\0").decode()
        return Noted(
            words[_PID], words[_NOTES], words[_FIRST], words[_WINDOW], words[_TRAINED],
            words[_RUNS] > 0, words[_PROCESS], bool(words[_SEVERAL]), ranks, tuple(phases),
        )  # fmt: skip

    @property
    def because(self) -> int | None:
        """The process because of which it has ended, which may be itself; None if not noted."""
        return self.words[_BECAUSE] - 1 if self.words[_BECAUSE] else None

    def tell(self) -> None:
        """Make the process log what the watchdog has done, with its next note."""
        self.words[_TOLD] += 1

    def ask(self) -> None:
        """Ask the process to save and to end, so that it can be started again."""
        self.words[_ASKED] = 1


class _Noting(AbstractContextManager[None]):
    __slots__ = ("_at", "_file", "_kind", "_window")

    def __init__(self, file: ProgressFile, kind: str, window: int):
        self._file, self._kind, self._window = file, kind, window

    def __enter__(self) -> None:
        self._at = self._file.begin(self._kind, self._window)

    def __exit__(self, *_: object) -> None:
        self._file.end(self._at)


_file: ProgressFile | None = None
_given: ProgressFile | None = None  # by a launcher
_logged = 0
_asked = False
_NOTHING = nullcontext()


def phase(kind: str, window: int = -1) -> AbstractContextManager[None]:
    """Note that this thread is in a phase of the process's work.

    Args:
        kind: One of `KINDS`.
        window: Number of the window; -1 for the first one that is not complete.

    Examples:
        >>> with phase("data", 17):
        ...     pass
    """
    return _NOTHING if _file is None else _Noting(_file, kind, window)


def completed(window: int, trains: bool) -> None:
    """Note that a window is complete, and whether it trains."""
    if _file is not None:
        _file.words[_WINDOW] = window + 1
        _file.words[_TRAINED] += trains


def joined(process: int, several: bool) -> None:
    """Note the index of this process in its job, and whether the job has others."""
    if (file := _file or _given) is not None:
        file.words[_PROCESS], file.words[_SEVERAL] = process, several
        file.words[_NOTES] += 1


def opened(window: int, ranks: Sequence[int], process: int) -> None:
    """Note that a run begins with a window, on devices of these ranks."""
    if _file is not None:
        _file.words[_PROCESS] = process
        _file.memory[_RANKS] = _named(ranks).encode()[:128].ljust(128, b"\0")
        _file.words[_FIRST] = _file.words[_WINDOW] = window
        _file.words[_RUNS] += 1


def closed() -> None:
    """Note that a run has ended."""
    if _file is not None:
        _file.words[_RUNS] -= 1


def blame(process: int) -> None:
    """Note the process because of which this one ends; itself if others end because of it."""
    if _given is not None:
        _given.words[_BECAUSE] = process + 1


def ask() -> None:
    """Make `asked` return true in this process; may be called in a signal handler."""
    global _asked
    _asked = True


def asked() -> bool:
    """Return whether this process was asked to save and end, by a launcher or by itself."""
    return _asked or (_file is not None and _file.words[_ASKED] != 0)


def noting() -> bool:
    """Return whether a launcher or a watchdog reads the notes."""
    return _file is not None


def watched() -> bool:
    """Return whether a watchdog reads the notes."""
    return _file is not None and _file.words[_WATCHED] != 0


def write_to(file: ProgressFile) -> bool:
    """Note everything in a file from now on; return False if another process has it."""
    global _file
    if not file.claim():
        return False
    _file = file
    os.register_at_fork(after_in_child=_forget)
    return True


def told() -> list[str]:
    """Return what the watchdog has done to processes of the job, one line per action."""
    if _file is not None:
        with suppress(OSError):
            return (_file.path.parent / TOLD).read_text("utf-8").splitlines()
    return []


def log_told() -> None:
    """Log what the watchdog has done since the last call."""
    global _logged
    lines = told()
    new, _logged = lines[_logged:], len(lines)
    for line in new:
        logger.warning("elche: %s", line)


def _named(ranks: Iterable[int]) -> str:
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _forget() -> None:
    global _file, _given
    _file = _given = None


def _begin() -> None:
    global _file, _given
    path = os.environ.get(VARIABLE)
    if path:
        with suppress(OSError):  # the launcher has ended, and ends this process
            given = ProgressFile(path)
            if write_to(given):
                _given = given
                _file = given if given.words[_NOTED] else None


_begin()
