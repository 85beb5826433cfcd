"""Errors of checkpoints, and errors during the handling of another error."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any


class CheckpointError(RuntimeError):
    """A checkpoint could not be written.

    Attributes:
        result: The result of `Trainer.fit`, if the error is raised after training has finished.
    """

    result: Any = None


def none_there(folder: Path) -> ValueError:
    """Return the error for `resume="must"` without a checkpoint."""
    return ValueError(
        f"checkpoints: {folder} must hold a whole checkpoint with resume='must', got none. Pass "
        "resume='auto' to start without one."
    )


def described(error: BaseException) -> str:
    """Return an error as one line of text."""
    return shorten(f"{type(error).__name__}: {error}", 300)


def advised(error: BaseException) -> str:
    """Return an error as text that ends a message; one of the disk says what to do."""
    if not isinstance(error, OSError):
        return described(error)
    return f"{described(error).rstrip('.')}. Fix that, or use another folder."


@contextmanager
def beside(first: BaseException | None) -> Generator[None]:
    """Turn an error of the block into a note on an error that is already being raised.

    Args:
        first: The error being raised; if None, errors of the block propagate.

    Examples:
        >>> first = ValueError("first")
        >>> with beside(first):
        ...     raise OSError("no room")
        >>> first.__notes__
        ['Besides, no room']
    """
    try:
        yield
    except Exception as second:
        if first is None:
            raise
        if repr(second) != repr(first):  # not the same error again
            first.add_note(f"Besides, {second}")
