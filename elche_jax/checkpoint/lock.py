"""A lock that allows one writer per folder."""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

from elche_jax._log import logger

try:
    import fcntl
except ImportError:  # Windows: the folder is not locked
    fcntl = None


def lock(folder: Path, what: str = "checkpoints", name: str = ".lock") -> Callable[[], None]:
    """Lock a folder until the returned function is called or the process ends.

    Args:
        folder: The folder.
        what: What the folder is, for messages.
        name: Name of the locked file in it.

    Returns:
        The function that unlocks it, which may be called again. It does nothing if files cannot
        be locked.

    Raises:
        RuntimeError: Another process, or another object of this process, holds the lock.
    """
    if fcntl is None:
        return lambda: None
    # not "w", which would erase the other process's id before the lock is taken
    file = (folder / name).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.seek(0)
        pid = file.read().strip() or "unknown"
        file.close()
        raise RuntimeError(
            f"{what}: {folder} must be used by one run at a time, but another one (process "
            f"{pid}, or a fork of it) is using it. Wait for it, or use another folder."
        ) from error
    except OSError as error:
        file.close()
        logger.warning(
            "elche: %s is not locked, as its file system has no locks (%s). Use it for one run "
            "at a time.",
            folder,
            error,
        )
        return lambda: None
    file.truncate(0)
    # only processes that are refused need the id: a full disk must not prevent reading here
    with suppress(OSError):
        os.write(file.fileno(), str(os.getpid()).encode())
    return partial(_unlock, file, os.getpid())


def _unlock(file: IO[str], owner: int) -> None:
    # a process forked meanwhile also has the file open: closing it here would not unlock it, and a
    # fork that closes its own copy must not unlock it
    if fcntl is not None and not file.closed and os.getpid() == owner:
        fcntl.flock(file, fcntl.LOCK_UN)
    file.close()
