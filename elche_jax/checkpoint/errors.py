"""Errors that come while another one is on its way."""

from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def beside(first: BaseException | None) -> Generator[None]:
    """Adds what goes wrong in here to the error that is on its way, as a note.

    Args:
        first: That error; None if there is none: then what goes wrong is raised.

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
        if repr(second) != repr(first):  # not the one that is known
            first.add_note(f"Besides, {second}")
