"""Checks of paths given by the user."""

import os
from os import PathLike
from pathlib import Path

from elche_jax import _check as check


def given_file(where: str, argument: str, value: str | PathLike[str], example: str) -> Path:
    """Return the path of a file, which need not exist; `example` is a name for the message.

    Raises:
        TypeError: `value` is not a path.
        ValueError: It is empty, contains a null byte, or is a folder.
    """
    path = check.path(where, argument, value)
    # In Python 3.11 `Path.is_dir` raises OSError for a name that is too long.
    if os.path.isdir(path):
        todo = f"Name a file in it, such as {path / example}."
        raise ValueError(check.message(where, argument, "be a file", f"the folder {path}", todo))
    return path
