"""One device's entries of stacked arrays, in a program that takes them out and stacks them itself.

Taking an entry out and stacking it cost one equation each, six for a parameter array with Adam's
moments. Bundles are filled from stacked arrays, and rows taken out of them are stacked again. While
a program is traced, the stacked array of each entry is therefore remembered, for code that can use
it directly. Equations whose results are unused are not compiled.
"""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax


class Entries:
    """The entries of stacked arrays, `(1, ...)`, in a program that is being traced.

    Examples:
        >>> import jax.numpy as jnp
        >>> from elche_jax.engine.entries import Entries
        >>> entries, stacked = Entries(), jnp.ones((1, 3))
        >>> entry = entries.take(stacked)
        >>> entry.shape, entries.stack(entry) is stacked, entries.stack(entry + 1).shape
        ((3,), True, (1, 3))
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}  # by the entry's id: entry, stacked array

    def take(self, stacked: Any) -> Any:
        """Return the entry of a stacked array."""
        entry = jax.lax.squeeze(stacked, (0,))
        self._known[id(entry)] = entry, stacked
        return entry

    def stacked(self, entry: Any) -> Any:
        """Return the array that an entry was taken from; None if it was computed."""
        return self._known.get(id(entry), (None, None))[1]

    def stack(self, entry: Any) -> Any:
        """Return a stacked array with this entry."""
        known = self.stacked(entry)
        return jax.lax.expand_dims(entry, (0,)) if known is None else known


_CURRENT: ContextVar[Entries | None] = ContextVar("entries", default=None)


@contextmanager
def traced_entries() -> Generator[Entries]:
    """Use new `Entries` for the program that is traced in this context."""
    token = _CURRENT.set(entries := Entries())
    try:
        yield entries
    finally:
        _CURRENT.reset(token)


def current_entries() -> Entries | None:
    """Return the entries of the program being traced; None if it stacks none itself."""
    return _CURRENT.get()
