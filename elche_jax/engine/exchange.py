"""Sums over devices: which arrays travel together, and in which type.

A sum over devices costs a little per array and a little per byte. Small arrays are packed
into one buffer per dtype, large ones are summed where they lie: copying them into a buffer
and back would cost more than it saves (docs/design/0006-exchange.md has the figures).
"""

from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any

PACK_BELOW = 64 * 2**10
"""Bytes of an array below which it is packed with others."""


def packed_psum(tree: PyTree, axis_name: str) -> PyTree:
    """`jax.lax.psum` of a pytree of arrays, small ones packed into one buffer per dtype.

    The same values as `jax.lax.psum`, bit for bit.
    """
    leaves, structure = jax.tree.flatten(tree)
    packs: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if leaf.size * leaf.dtype.itemsize < PACK_BELOW:
            packs.setdefault(leaf.dtype, []).append(i)
    packed = {i for members in packs.values() for i in members}
    alone = [i for i in range(len(leaves)) if i not in packed]
    buffers = [_flat([leaves[i] for i in members]) for members in packs.values()]
    buffers, large = jax.lax.psum((buffers, [leaves[i] for i in alone]), axis_name)
    summed: list[Any] = [None] * len(leaves)
    for i, leaf in zip(alone, large, strict=True):
        summed[i] = leaf
    for buffer, members in zip(buffers, packs.values(), strict=True):
        for i, leaf in zip(members, _cut(buffer, [leaves[i] for i in members]), strict=True):
            summed[i] = leaf
    return jax.tree.unflatten(structure, summed)


def psum_bfloat16(tree: PyTree, axis_name: str, world_size: int) -> PyTree:
    """Sums float32 arrays over devices with two bytes per number on the wire.

    Every device sums its part of the numbers in float32, and the sums travel as bfloat16
    again: each number is rounded once before and once after, by at most 2**-8 of its size,
    whatever the number of devices. The result is the same on all devices, bit for bit.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    flat = _flat(leaves)
    padded = jnp.pad(flat, (0, -flat.size % world_size)).astype(jnp.bfloat16)
    mine = jax.lax.all_to_all(padded.reshape(world_size, -1), axis_name, 0, 0)
    summed = mine.astype(jnp.float32).sum(axis=0).astype(jnp.bfloat16)
    whole = jax.lax.all_gather(summed, axis_name, tiled=True)[: flat.size]
    return jax.tree.unflatten(structure, _cut(whole.astype(jnp.float32), leaves))


def _flat(leaves: list[Any]) -> Any:
    return jnp.concatenate([leaf.reshape(-1) for leaf in leaves])


def _cut(buffer: Any, like: list[Any]) -> list[Any]:
    """The arrays that `_flat` has put one after the other."""
    cut, at = [], 0
    for leaf in like:
        cut.append(buffer[at : at + leaf.size].reshape(leaf.shape))
        at += leaf.size
    return cut
