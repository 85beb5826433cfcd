"""Files that are written completely or not at all."""

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: str | PathLike[str]) -> Generator[BinaryIO, None, None]:
    """Opens a file beside `path` for writing, which replaces it at the end.

    A reader of `path` sees either the old content or all of the new one. After an error the
    old content stays. Missing folders are made. A link stays a link, and its target is
    written. Anything else than a regular file, such as a pipe or a device, is written
    directly: it holds nothing to keep.

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
    # Links under /proc may lead to things without a path, which exist only through the link.
    if path.exists() and not file.is_file():
        with path.open("wb") as there:
            yield there
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    # One name per thread: two that write the same file do not write into each other's copy.
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
