"""Selection between a new and an old state by a flag that is known only on the device."""

from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def chosen(flag: Any, new: PyTree, old: PyTree) -> PyTree:
    """Select between two trees of equal structure by a scalar flag."""
    # not `jnp.where`, a call in the program that takes long to trace
    return jax.tree.map(lambda a, b: jax.lax.select(flag, a, b), new, old)


def computed_once(value: Any) -> Any:
    """Keep XLA from duplicating the computation of a scalar that every leaf of a tree uses.

    XLA's CPU compiler would otherwise fuse a copy of it into the kernel of every leaf. For a
    flag that depends on all leaves, code size and compile time then grow with the square of
    their number. It never fuses the output of a sort, so the scalar passes through one.
    """
    return jax.lax.sort(jnp.stack([value, value]))[0]
