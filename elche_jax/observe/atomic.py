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
    was there before stays. Missing folders are made.

    Args:
        path: The file to write.

    Raises:
        OSError: The file cannot be written.

    Example:
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
    path.parent.mkdir(parents=True, exist_ok=True)
    # Of this thread alone: two that write the same file do not write into each other's.
    beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
