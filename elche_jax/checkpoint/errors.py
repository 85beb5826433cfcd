"""Errors during the handling of another error."""

from collections.abc import Generator
from contextlib import contextmanager


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
