"""Collectives for the user's own mapped functions: weighted sums, means and broadcasts.

All take a pytree of per-device values and the name of the mapped axis, and run inside
`jax.pmap`, `jax.vmap` or `jax.shard_map`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from elche_jax.engine.bits import as_bits, is_float, raw, wide, with_type_of
from elche_jax.engine.exchange import packed_psum

PyTree = Any


def weighted_psum(tree: PyTree, weight: Any, axis_name: str) -> PyTree:
    """Compute a weighted sum of a pytree over devices.

        out = sum over d of weight[d] * tree[d]

    Sums are computed in float32 (float64 for float64 leaves) and returned in the leaves'
    dtypes. A device of weight 0 contributes nothing, even if its values are NaN.

    Args:
        tree: Pytree of float arrays, of the same structure and shapes on all devices.
        weight: This device's weight, a scalar, at least 0. A negative weight makes the
            sum NaN, as a compiled program cannot raise an error.
        axis_name: Name of the mapped axis.

    Returns:
        The sums, the same on all devices.

    Raises:
        TypeError: A leaf is not a float array.
        ValueError: `weight` is not a scalar.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from elche_jax import weighted_psum
        >>> values, counts = jnp.array([1.0, jnp.nan, 5.0]), jnp.array([2, 0, 1])
        >>> sums = lambda x, n: weighted_psum(x, n, "devices")
        >>> jax.vmap(sums, axis_name="devices")(values, counts).tolist()
        [7.0, 7.0, 7.0]
    """
    tree = jax.tree.map(jnp.asarray, tree)
    weighted, _ = weighted_terms("weighted_psum", tree, weight)
    summed = packed_psum(weighted, axis_name)
    return jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), summed, tree)


def weighted_mean(tree: PyTree, weight: Any, axis_name: str) -> PyTree:
    """Compute a weighted mean of a pytree over devices.

        out = sum over d of weight[d] * tree[d] / sum over d of weight[d]

    With `weight` a device's number of microbatches (or examples, tokens) and `tree` its
    mean gradient over them, this is the mean gradient over the data of all devices.

    Args:
        tree: Pytree of float arrays, of the same structure and shapes on all devices.
        weight: This device's weight, a scalar, at least 0.
        axis_name: Name of the mapped axis.

    Returns:
        The means, the same on all devices; NaN if all weights are 0.

    Raises:
        TypeError: A leaf is not a float array.
        ValueError: `weight` is not a scalar.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from elche_jax import weighted_mean
        >>> mean = lambda x, n: weighted_mean(x, n, "devices")
        >>> jax.vmap(mean, axis_name="devices")(jnp.array([1.0, 4.0]), jnp.array([2, 1])).tolist()
        [2.0, 2.0]
    """
    tree = jax.tree.map(jnp.asarray, tree)
    summed, total = packed_psum(weighted_terms("weighted_mean", tree, weight), axis_name)
    return jax.tree.map(lambda s, x: (s / total.astype(s.dtype)).astype(x.dtype), summed, tree)


def broadcast_from(tree: PyTree, source: Any, axis_name: str) -> PyTree:
    """Broadcast one device's values to all devices, bit for bit.

    Args:
        tree: Pytree of arrays of any dtype, of the same structure and shapes on all devices.
        source: Index of the device on the axis. Its values are copied exactly, including
            NaN and negative zeros. An index out of range gives zeros.
        axis_name: Name of the mapped axis.

    Returns:
        The values of device `source`, on every device.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from elche_jax import broadcast_from
        >>> first = lambda x: broadcast_from(x, 0, "devices")
        >>> jax.vmap(first, axis_name="devices")(jnp.array([3.0, 4.0])).tolist()
        [3.0, 3.0]
    """
    here = jax.lax.axis_index(axis_name) == source

    def broadcast(leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        # bits, not floats: -0.0 + 0.0 would lose the sign
        bits, back = as_bits(raw(leaf))
        return with_type_of(leaf, back(jax.lax.psum(jnp.where(here, bits, 0), axis_name)))

    return jax.tree.map(broadcast, tree)


def weighted_terms(where: str, tree: PyTree, weight: Any) -> tuple[PyTree, Any]:
    """Check tree and weight; return `tree * weight`, in at least float32, and the weight."""
    weight = jnp.asarray(weight)
    if weight.shape != ():
        raise ValueError(f"{where}: weight must be a scalar, got shape {weight.shape}.")
    weight = wide(weight)
    weight = jnp.where(weight < 0, jnp.nan, weight)

    def times(path: Any, leaf: Any) -> Any:
        if not is_float(leaf):
            raise TypeError(
                f"{where}: every leaf must be a float array, but leaf "
                f"{jax.tree_util.keystr(path) or 'tree'} is of dtype {leaf.dtype}."
            )
        # not by promotion, which JAX refuses for 8-bit floats
        value = wide(leaf)
        # `!=`, not `>`: a NaN weight must make the sum NaN
        return jnp.where(weight != 0, value * weight.astype(value.dtype), 0)

    return jax.tree_util.tree_map_with_path(times, tree), weight
