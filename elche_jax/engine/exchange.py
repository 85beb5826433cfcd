"""Packing of small arrays into buffers for sums over devices.

A sum over devices has a cost per array and a cost per byte. Small arrays are packed into
buffers; large ones are summed in place, as copying them into a buffer and back would cost more
than it saves (see docs/design/0006-exchange.md for measurements).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elche_jax.engine.bundles import row_length, rows_of

PyTree = Any

# 200 arrays on four CPU devices, with and without packing: 11 and 28 ms at 32 KiB, 32 and 34 at
# 64 KiB, 68 and 48 at 128 KiB
PACK_BELOW = 64 * 2**10
"""Arrays smaller than this, in bytes, are packed for an exchange."""

# with 64 KiB, a microbatch took up to 1.2 times as long
SUM_BELOW = 8 * 2**10
"""Gradients smaller than this, in bytes, are packed when they are summed over microbatches. Copying
a larger one into the buffer costs more than having one array fewer saves."""

BASE = 16
"""Base of the digits of which `_numbers` builds its numbers."""


def packed_psum(tree: PyTree, axis_name: str) -> PyTree:
    """Compute `jax.lax.psum` of a pytree, with small arrays packed into one buffer per dtype.

    The result is bitwise equal to that of `jax.lax.psum`.
    """
    packing = Packing.of(tree)
    summed = jax.lax.psum(packing.pack(tree), axis_name)
    # not the device's index: `jax.shard_map` would infer that the result varies over devices
    known = (x.reshape(-1)[0].astype(jnp.int32) for x in summed if x.size)
    return Packed(packing, summed, next(known, np.int32(0))).tree()


@dataclass(frozen=True)
class Packing:
    """A packing of the leaves of a pytree into buffers.

    Attributes:
        like: Shapes and dtypes of the pytree.
        packs: Indices of the leaves of each buffer. Large leaves are alone; small ones of one
            dtype share a buffer, with leaves of one shape side by side.
    """

    like: PyTree
    packs: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, tree: PyTree, below: int = PACK_BELOW, alike: bool = False) -> "Packing":
        """Choose the packing of a pytree of arrays.

        Args:
            tree: The arrays.
            below: Arrays of fewer bytes share buffers.
            alike: Whether only arrays of one shape share a buffer.
        """
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        leaves = jax.tree.leaves(like)
        large = [x.size * x.dtype.itemsize >= below for x in leaves]
        small = [i for i, alone in enumerate(large) if not alone]
        small.sort(key=lambda i: (str(leaves[i].dtype), leaves[i].shape))
        kinds = {i: (leaves[i].dtype, leaves[i].shape if alike else None) for i in small}
        together = [tuple(pack) for _, pack in groupby(small, kinds.__getitem__)]
        return cls(like, (*((i,) for i, alone in enumerate(large) if alone), *together))

    @property
    def buffers(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the buffers."""
        like = jax.tree.leaves(self.like)
        return [
            like[pack[0]]
            if len(pack) == 1
            else jax.ShapeDtypeStruct((sum(like[i].size for i in pack),), like[pack[0]].dtype)
            for pack in self.packs
        ]

    def pack(self, tree: PyTree) -> list[Any]:
        """Return one buffer per pack; an array alone in its pack is used as it is."""
        leaves = jax.tree.leaves(tree)
        return [
            leaves[pack[0]]
            if len(pack) == 1
            else jnp.concatenate([leaves[i].reshape(-1) for i in pack])
            for pack in self.packs
        ]


@dataclass(frozen=True)
class Packed:
    """The buffers of a packing.

    Attributes:
        packing: The packing.
        buffers: The buffers.
        unknown: Any integer on the device that XLA cannot treat as a constant.
    """

    packing: Packing
    buffers: Sequence[Any]
    unknown: Any

    @property
    def like(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the leaves."""
        return jax.tree.leaves(self.packing.like)

    def bundles(self) -> dict[tuple[int, ...], Any]:
        """Return the leaves of shared buffers as bundles of one shape, by the leaves' indices."""
        bundles, like = {}, self.like
        for buffer, pack in zip(self.buffers, self.packing.packs, strict=True):
            at = 0
            for shape, alike in groupby(pack if len(pack) > 1 else (), lambda i: like[i].shape):
                members = tuple(alike)
                size = like[members[0]].size * len(members)
                bundles[members] = buffer[at : at + size].reshape(len(members), *shape)
                at += size
        return bundles

    def alone(self) -> dict[int, Any]:
        """Return the leaves that have a buffer of their own, by their indices."""
        pairs = zip(self.packing.packs, self.buffers, strict=True)
        return {pack[0]: buffer for pack, buffer in pairs if len(pack) == 1}

    def leaves(self) -> dict[int, Any]:
        """Return all leaves, by their indices."""
        bundles, leaves = self.bundles(), self.alone()
        numbers = _numbers(max(map(len, bundles), default=0), self.unknown)
        for members, bundle in bundles.items():
            length = np.int32(row_length(bundle))
            starts = [jax.lax.mul(number, length) for number in numbers[: len(members)]]
            leaves |= dict(zip(members, rows_of(bundle, starts), strict=True))
        return leaves

    def tree(self) -> PyTree:
        """Return the tree that was packed."""
        leaves, structure = self.leaves(), jax.tree.structure(self.packing.like)
        return structure.unflatten([leaves[i] for i in range(len(leaves))])


def _numbers(count: int, unknown: Any) -> list[Any]:
    """Return the numbers `0, ..., count - 1` as values that XLA cannot fold into constants.

    XLA compiles one kernel for all arrays that are processed alike. With constant offsets into
    a buffer no two slices are alike. XLA fuses everything computed from a slice into its kernel,
    and compiling all these kernels takes most of the time of a first window. The results of a
    sort are neither constants nor fused into those kernels. Each number is the sum of its digits,
    which are separate arrays, so all numbers are computed alike.
    """
    if count == 0:
        return []
    key = jnp.stack([unknown, unknown])  # the sorted operands are pairs of equal numbers
    powers = [BASE**n for n in range(len(np.base_repr(count - 1, BASE)))]
    places = [[(power, number // power % BASE) for power in powers] for number in range(count)]
    digits = dict.fromkeys(digit for own in places for digit in own)
    pairs = [jnp.asarray(np.full(2, power * digit, np.int32)) for power, digit in digits]
    _, *values = jax.lax.sort((key, *pairs), num_keys=1)
    known = {digit: value[0] for digit, value in zip(digits, values, strict=True)}
    return [sum(known[digit] for digit in own) for own in places]
