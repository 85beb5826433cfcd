"""Checksums of replicas, computed on the devices that hold them.

Each device computes two 32-bit sums over the words of every leaf,

    s_k = sum over i of mix(word[i]) * odd_k(i)   (mod 2**32)

where `mix` is a bijection of 32-bit words and `odd_k(i)` an odd factor that depends on the
position. Both are invertible, so a change within a single word, such as a flipped bit, always
shows; several changes cancel with probability 2**-64. Eight bytes per leaf and device reach the
host.
"""

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elche_jax.engine.bits import as_bits, raw
from elche_jax.engine.lane import Fleet, MappedFunction
from elche_jax.engine.laned import StackedArray

PyTree = Any


def checksums(tree: PyTree, fleet: Fleet) -> StackedArray:
    """Dispatch the checksums of a stacked pytree without waiting for them.

    Args:
        tree: Leaves `(world_size,) + shape`, numbers, bools or typed keys, entry `d` on
            device `d`.
        fleet: The devices.

    Returns:
        uint32, shape `(world_size, leaves, 2)`.
    """
    return _program(fleet)(jax.tree.leaves(tree))[0]


def differing(sums: Any) -> list[tuple[int, int]]:
    """Return every `(leaf, rank)` whose sums differ from the first device's, ordered by leaf."""
    sums = np.asarray(sums)
    unlike = (sums != sums[:1]).any(axis=-1)
    return [(int(leaf), int(rank)) for leaf, rank in np.argwhere(unlike.T)]


# cached, as a new `Mapped` would compile again
@lru_cache(maxsize=16)
def _program(fleet: Fleet) -> MappedFunction:
    return fleet.mapped(lambda leaves: (jnp.stack([_sum(leaf) for leaf in leaves]), None))


def _sum(leaf: Any) -> Any:
    mixed = _mix(_words(leaf))
    place = jax.lax.iota(jnp.uint32, mixed.size)
    # `_mix(0)` is 0, so without the constant both factors of place 0 would be 1
    factors = (2 * place + 1, _mix(place ^ jnp.uint32(0x9E3779B9)) | 1)
    # integers wrap, so the order in which a backend adds them does not matter
    return jnp.stack([(mixed * factor).sum(dtype=jnp.uint32) for factor in factors])


def _mix(word: Any) -> Any:
    """Apply a bijection of 32-bit words: odd factors and shifted xors (lowbias32, C. Wellons)."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * jnp.uint32(0x846CA68B)
    return word ^ (word >> 16)


def _words(leaf: Any) -> Any:
    """Return the bits of an array as 32-bit words; smaller types take one word per element."""
    leaf = raw(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag])
    # not through 64-bit integers, which exist only with `jax_enable_x64`
    words = leaf if leaf.dtype.itemsize >= 4 else as_bits(leaf)[0]
    return jax.lax.bitcast_convert_type(words, jnp.uint32).reshape(-1)
