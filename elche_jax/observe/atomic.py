"""Writing files completely or not at all, even if the power is cut."""

import errno
import os
import shutil
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: str | PathLike[str]) -> Generator[BinaryIO, None, None]:
    """Open a temporary file that replaces `path` once it is complete.

    A reader of `path` sees either the old content or all of the new content. After an error
    the old content stays. Missing folders are created. The permissions of an old file stay. A
    symbolic link is kept, and its target is written. Anything that is not a regular file, such as
    a pipe or a device, is written directly, as it has no content to keep.

    Args:
        path: The file to write.

    Raises:
        OSError: The file cannot be written, or `path` is a folder.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from elche_jax.observe.atomic import replacing
        >>> path = Path(tempfile.mkdtemp(), "page.html")
        >>> with replacing(path) as file:
        ...     _ = file.write(b"all of it")
        >>> path.read_text()
        'all of it'
    """
    path = Path(path)
    file = path.resolve()
    # Opened through `path`: links under /proc may lead to pipes, which have no path themselves.
    if path.exists() and not file.is_file():
        with path.open("wb") as special:
            yield special
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    # One temporary file per thread, so that concurrent writers of `path` do not mix.
    # Not by `tempfile`, whose files only the owner may read.
    temporary = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with temporary.open("wb") as new:
            with suppress(OSError):  # there is no old file, or the file system has no modes
                shutil.copymode(file, temporary)
            yield new
            new.flush()
            # Otherwise a power loss after the rename could leave an empty file.
            os.fsync(new.fileno())
        os.replace(temporary, file)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # The caller knows only `path`, and errors of a write name no file.
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def sync(path: Path) -> None:
    """Wait until a file, or a folder and everything in it, is on disk.

    A new or renamed file survives a power cut only once its folder is synced, too.

    Raises:
        OSError: It cannot be written.
    """
    folder = path.is_dir()
    for one in path.iterdir() if folder else ():
        sync(one)
    sync_entries(path) if folder else _sync(path, os.O_RDWR)


def sync_entries(folder: Path) -> None:
    """Wait until the names in a folder are on disk.

    Raises:
        OSError: They cannot be written.
    """
    if os.name == "nt":  # it has no such call
        return
    try:
        _sync(folder, os.O_RDONLY)
    except OSError as error:  # some network file systems have none either
        if error.errno not in (errno.EINVAL, errno.EBADF):
            raise


def _sync(path: Path, flags: int) -> None:
    file = os.open(path, flags)
    try:
        os.fsync(file)
    finally:
        os.close(file)
