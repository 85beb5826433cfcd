"""Choosing between a new state and an old one, by a flag that is known only on the device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from elche_jax.engine.jaxprs import repeats_cheaply

PyTree = Any

IN_PLACE = 1 << 23
"""Bytes of a state from which `TentativeUpdate` repeats an update in place, if that is cheap. A
smaller one stays in a processor's cache, and a selection compiles faster."""


class TentativeUpdate:
    """The update of a state that is wanted only if a flag is set, which may depend on it.

    A selection has to hold the new state beside the old one. Memory is slower than a processor:
    with Adam a step that selects takes four times as long as one that does not. On a CPU a large
    state is therefore updated in a branch, in place, where the update is computed again; its
    first computation then leaves nothing but what the flag depends on. Not on an accelerator,
    where the host may have to ask which branch is taken.

    Args:
        update: Maps a state to `(new state, other results)`; traced once.
        state: The state.

    Attributes:
        seen: The other results, on which the flag may depend.
    """

    def __init__(self, update: Callable[[PyTree], tuple[PyTree, Any]], state: PyTree):
        self._state = state
        self._repeated = False
        if _is_large(state):
            update = jax.jit(update)  # traced once, however often it is called
            self._repeated = repeats_cheaply(update, state)
        self._update = update
        self._new, self.seen = update(state)

    def applied_if(self, flag: Any) -> PyTree:
        """Return the new state if `flag` is set, else the old one."""
        if not self._repeated:
            return chosen(flag, self._new, self._state)

        # functions of this call: JAX keeps what it has traced for as long as a function lives
        def in_place(flag: Any, new: PyTree, old: PyTree) -> PyTree:
            del new
            return jax.lax.cond(flag, lambda old: self._update(old)[0], lambda old: old, old)

        def selected(flag: Any, new: PyTree, old: PyTree) -> PyTree:
            return chosen(flag, new, old)

        return jax.lax.platform_dependent(
            flag, self._new, self._state, cpu=in_place, default=selected
        )


def chosen(flag: Any, new: PyTree, old: PyTree) -> PyTree:
    """Select between two trees of equal structure by a scalar flag."""
    # `lax.select`: a `jnp.where` is a call in the program that takes long to trace
    return jax.tree.map(lambda a, b: jax.lax.select(flag, a, b), new, old)


def computed_once(value: Any) -> Any:
    """Keep XLA from duplicating the computation of a scalar that every leaf of a tree uses.

    XLA's CPU compiler would otherwise fuse a copy of it into the kernel of every leaf. For a
    flag that depends on all leaves, code size and compile time then grow with the square of
    their number. It never fuses the output of a sort, so the scalar passes through one.
    """
    return jax.lax.sort(jnp.stack([value, value]))[0]


def _is_large(state: PyTree) -> bool:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) >= IN_PLACE
