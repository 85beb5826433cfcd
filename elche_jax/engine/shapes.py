"""Shapes and dtypes of pytrees, without their arrays."""

from collections.abc import Hashable
from typing import Any

import jax
from jax.sharding import Sharding

PyTree = Any


def shapes_of(tree: PyTree, sharding: Sharding | None = None) -> PyTree:
    """Return shapes and dtypes only, so that a queued compile keeps no data alive.

    Args:
        tree: Pytree of arrays or shapes.
        sharding: Sharding of the arrays; None if it does not matter.
    """
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def stacked(tree: PyTree, size: int) -> PyTree:
    """Return the shapes of one device's values, stacked over `size` devices."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape), x.dtype), tree)


def one_of(tree: PyTree) -> PyTree:
    """Return the shapes of one device's values, given the shapes stacked over devices."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)


def signature(tree: PyTree) -> Hashable:
    """Return structure, shapes and dtypes of a pytree, the key of its programs."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def named(tree: PyTree, root: str = "tree") -> list[tuple[str, Any]]:
    """Return the leaves of a pytree with their names; a pytree that is a leaf is named `root`."""
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path) or root, leaf) for path, leaf in pairs]


def difference(got: PyTree, want: PyTree) -> str:
    """Describe the first difference between two pytrees of shapes; empty if they are equal."""
    structures = jax.tree.structure(got), jax.tree.structure(want)
    if structures[0] != structures[1]:
        return f"structure {structures[0]} instead of {structures[1]}"
    for (name, a), b in zip(named(got), jax.tree.leaves(want), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"leaf {name} is {a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
    return ""
