"""A folder in memory that outlives the processes of a generation, see `checkpoint/memory.py`."""

import fcntl
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from elche_jax._progress import DESTINATION, MANIFEST, MEMORY, STEP

IN_MEMORY = "/dev/shm"
"""Where Linux has a file system in memory."""

PREFIX = "elche-memory-"


class Folder(NamedTuple):
    """A folder that is in use as long as a process has its lock open.

    Attributes:
        path: The folder.
        lock: A descriptor that the launcher, its guard and the processes of the job have open.
    """

    path: Path
    lock: int


def make_memory() -> Folder | None:
    """Return a new folder in memory; None if there is no place for one, or none is wanted.

    `ELCHE_MEMORY` names a place other than `/dev/shm`; if it is empty, there is no folder.
    Abandoned folders there are removed: those of a launcher that was killed together with its
    guard.
    """
    given = os.environ.get(MEMORY)
    if given == "" or (given is None and not Path(IN_MEMORY).is_dir()):
        return None
    # absolute: processes may change their working directory
    place = Path(IN_MEMORY if given is None else given).absolute()
    try:
        _remove_abandoned(place)
        return _new(place)
    except OSError as error:
        _say(f"nothing is kept in memory between generations: {error}")
        return None


def _new(place: Path) -> Folder:
    while True:  # until one is locked before another launcher takes it for abandoned
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                os.set_inheritable(lock, True)
                return Folder(path, lock)
            os.close(lock)


def _remove_abandoned(place: Path) -> None:
    for path in place.glob(f"{PREFIX}*"):
        with suppress(OSError):  # in use, or another user's
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid():
                    remove_memory(path)
            finally:
                os.close(lock)


def remove_memory(folder: Path) -> None:
    """Remove the folder, unless it holds a checkpoint later than those on disk: then say which."""
    only = False
    # one without a destination was being removed when its process was killed: it is on disk
    for destination in folder.glob(f"*/{DESTINATION}"):
        place, where = destination.parent, Path(destination.read_text())
        newest = _newest(place)
        if newest > _newest(where):
            only = True
            path = place / str(newest)
            _say(f"the last checkpoint of {where} is in memory only: move {path} there")
    if not only:
        shutil.rmtree(folder, ignore_errors=True)


def _newest(folder: Path) -> int:
    """Return the step of the newest checkpoint in a folder, -1 if none can be found."""
    found = [path.parent.name for path in folder.glob(f"*/{MANIFEST}") if path.is_dir()]
    return max((int(name) for name in found if STEP.fullmatch(name)), default=-1)


def _say(text: str) -> None:
    print(f"elche-jax launch: {text}", file=sys.stderr, flush=True)
