"""Errors that occur while another one is being raised."""

from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def beside(first: BaseException | None) -> Generator[None]:
    """Adds an error in the block to the one that is being raised, as a note.

    Args:
        first: The error being raised; if None, the one in the block is raised.

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
        if repr(second) != repr(first):  # the same error again says nothing new
            first.add_note(f"Besides, {second}")
