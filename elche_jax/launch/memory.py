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
    if folder is None:
        return
    kept = [path for path in folder.glob("*/*") if path.name.isdecimal()]
    where = {path: Path((path.parent / DESTINATION).read_text()) for path in kept}
    only = [path for path in kept if not (where[path] / path.name).exists()]
    for path in only:
        _say(f"the last checkpoint of {where[path]} is in memory only: move {path} there")
    if not only:
        shutil.rmtree(folder, ignore_errors=True)


def _say(text: str) -> None:
    print(f"elche-jax launch: {text}", file=sys.stderr, flush=True)
