"""A folder in memory that outlives the processes of a generation, see `checkpoint/memory.py`."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from elche_jax._progress import DESTINATION, MEMORY

IN_MEMORY = "/dev/shm"
"""Where Linux has a file system in memory."""

PREFIX = "elche-memory-"


def make_memory() -> Path | None:
    """Return a new folder in memory; None if there is no place for one, or none is wanted.

    `ELCHE_MEMORY` names another place than `/dev/shm`, and set to nothing none.
    """
    given = os.environ.get(MEMORY)
    place = IN_MEMORY if given is None else given
    if not place or (given is None and not Path(place).is_dir()):
        return None
    try:
        return Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    except OSError as error:
        _say(f"nothing is kept in memory between generations: {error}")
        return None


def remove_memory(folder: Path | None) -> None:
    """Remove the folder, unless it holds a checkpoint that is nowhere else: then say which."""
    left = [] if folder is None else [one for one in folder.glob("*/*") if one.name.isdecimal()]
    for path in left:
        where = (path.parent / DESTINATION).read_text()
        _say(f"the last checkpoint of {where} is in memory only: move {path} into that folder")
    if folder is not None and not left:
        shutil.rmtree(folder, ignore_errors=True)


def _say(text: str) -> None:
    print(f"elche-jax launch: {text}", file=sys.stderr, flush=True)
