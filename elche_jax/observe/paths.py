"""Paths as a user gives them."""

import os
from os import PathLike
from pathlib import Path

from elche_jax import _check as check


def given_path(where: str, argument: str, value: str | PathLike[str]) -> Path:
    """The path, with the home folder in place of a leading `~`.

    Raises:
        TypeError: `value` is no path.
        ValueError: It is empty, or has a null byte in it.

    Examples:
        >>> from elche_jax.observe.paths import given_path
        >>> "~" in str(given_path("Timeline", "path", "~/run.jsonl"))
        False
    """
    return Path(os.path.expanduser(check.path(where, argument, value)))


def given_file(where: str, argument: str, value: str | PathLike[str], example: str) -> Path:
    """The path of a file, which need not be there; `example` is a name that it could have.

    Raises:
        TypeError: `value` is no path.
        ValueError: It is empty, has a null byte in it, or is a folder.
    """
    path = given_path(where, argument, value)
    if os.path.isdir(path):
        todo = f"Name a file in it, such as {path / example}."
        raise ValueError(check.message(where, argument, "be a file", f"the folder {path}", todo))
    return path
