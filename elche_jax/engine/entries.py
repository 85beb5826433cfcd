"""One device's entries of stacked arrays, in a program that takes them out and stacks them itself.

To take an entry out and to stack it are an equation each, six for a parameter array with Adam's
moments. Bundles are filled with stacked arrays, and what is taken out of them is stacked, too. So
while a program is traced, the stacked array of an entry is remembered, for code that has a use for
it; equations whose results nobody uses are not compiled.
"""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax


class Entries:
    """The entries of stacked arrays, leaves `(1, ...)`, of a program that is being traced.

    Examples:
        >>> import jax.numpy as jnp
        >>> from elche_jax.engine.entries import Entries
        >>> entries, stacked = Entries(), jnp.ones((1, 3))
        >>> entry = entries.take(stacked)
        >>> entry.shape, entries.stack(entry) is stacked, entries.stack(entry + 1).shape
        ((3,), True, (1, 3))
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}  # by identity: an entry, and it stacked

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
    """Make new entries those of the program that is traced in this context."""
    token = _CURRENT.set(entries := Entries())
    try:
        yield entries
    finally:
        _CURRENT.reset(token)


def current_entries() -> Entries | None:
    """Return the entries of the program that is being traced; None if it stacks none itself."""
    return _CURRENT.get()
