"""Checks for nonfinite numbers in arrays, in a few passes and without copies."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from elche_jax.engine.bits import is_float

PyTree = Any

LEAVES_PER_REDUCTION = 8
"""Number of equally shaped arrays that one reduction checks."""

ALONE = 1 << 20
"""Size in bytes from which an array of float32 or float64 is checked alone."""


def all_finite(tree: PyTree) -> Any:
    """Return whether all elements of a tree of floats are finite.

    `x - x` and `0 * x` are 0 for a finite `x` and NaN otherwise. For small arrays of one
    shape, these differences are first added in groups, as each reduction adds to the compile time.
    """
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    total = _differences([leaf for leaf in leaves if not _is_large(leaf)])
    large = [leaf for leaf in leaves if _is_large(leaf)]
    if large:
        # functions of this call: JAX keeps the trace of a function as long as the function lives
        total += jax.lax.platform_dependent(
            large, cpu=lambda large: _products(large), default=lambda large: _differences(large)
        )
    return total == 0


def none_worse(before: PyTree, after: PyTree, forgive_nan: bool = False) -> Any:
    """Return whether the floats of a tree are finite, except where they were not finite before.

    Where they were not, an infinity is allowed, but NaN is not.

    Args:
        before: The tree before; a running minimum may begin at `inf`.
        after: The tree after.
        forgive_nan: Whether to allow a NaN where there was one before.
    """
    pairs = list(zip(floats(before), floats(after), strict=True))

    def judged(old: Any, new: Any) -> Any:
        bad = jax.lax.ne(new, new)
        if forgive_nan:
            bad &= jax.lax.eq(old, old)
        return jax.lax.select(jax.lax.is_finite(old), ~jax.lax.is_finite(new), bad)

    def number(old: Any, new: Any) -> Any:
        nan, zero = jax.lax.full_like(new, jnp.nan), jax.lax.full_like(new, 0)
        return jax.lax.select(judged(old, new), nan, zero)

    small = [number(old, new) for old, new in pairs if not _is_large(new)]
    # not `number`, a copy that XLA's CPU compiler would write to memory
    large = [jnp.any(judged(old, new)) for old, new in pairs if _is_large(new)]
    return all_finite(small) & ~jnp.any(jnp.stack([jnp.bool_(False), *large]))


def floats(tree: PyTree) -> list[Any]:
    """Return the leaves of a float dtype."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_float(leaf)]


def _is_large(leaf: Any) -> bool:
    # products of smaller floats are slow on a CPU
    return leaf.size * leaf.dtype.itemsize >= ALONE and leaf.dtype in (jnp.float32, jnp.float64)


def _differences(leaves: Sequence[Any]) -> Any:
    """Return 0 if all are finite, computed from `x - x`."""
    alike: dict[Any, list[Any]] = {}
    for leaf in leaves:
        alike.setdefault((leaf.shape, leaf.dtype), []).append(jax.lax.sub(leaf, leaf))
    zeros = [
        functools.reduce(jax.lax.add, leaves[at : at + LEAVES_PER_REDUCTION])
        for leaves in alike.values()
        for at in range(0, len(leaves), LEAVES_PER_REDUCTION)
    ]
    return _total(jax.lax.reduce_sum(zero, range(zero.ndim)) for zero in zeros)


def _products(leaves: Sequence[Any]) -> Any:
    """Return 0 if all are finite, computed from `0 * x`.

    XLA's CPU compiler does not fuse a difference with its sum, so it would write the difference
    to memory. A product with a vector of zeros only reads the array.
    """
    return _total(map(_product, leaves))


def _product(leaf: Any) -> Any:
    rows = leaf.reshape(-1, leaf.shape[-1])
    zeros = jnp.zeros(rows.shape[1], leaf.dtype)
    # not in the user's precision of products, which may round to infinity
    product = jax.lax.dot(rows, zeros, precision=jax.lax.Precision.HIGHEST)
    return jax.lax.reduce_sum(product, (0,))


def _total(sums: Iterable[Any]) -> Any:
    sums = [jnp.float32(0), *(each.astype(jnp.float32) for each in sums)]
    return jax.lax.reduce_sum(jnp.stack(sums), (0,))
