"""Files that are there whole or not at all."""

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: str | PathLike[str]) -> Generator[BinaryIO, None, None]:
    """Opens a file beside `path` to write, which takes its place at the end.

    Whoever reads `path` sees what was there before, or all that is new. After an error what
    was there before stays. Missing folders are made. A link stays one, and what it leads to
    is written. What is there and no regular file, a pipe or a device, is written as it is:
    there is nothing in it to keep.

    Args:
        path: The file to write.

    Raises:
        OSError: The file cannot be written; `path` is a folder.

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
    # Links of /proc lead to things that have no path: those are only there by their own.
    if path.exists() and not file.is_file():
        with path.open("wb") as there:
            yield there
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    # Of this thread alone: two that write the same file do not write into each other's.
    beside = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with beside.open("wb") as new:
            yield new
            new.flush()
            os.fsync(new.fileno())
        os.replace(beside, file)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(beside):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
