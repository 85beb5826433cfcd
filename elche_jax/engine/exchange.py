"""Sums over devices: which arrays travel together, and in which type.

A sum over devices costs a little per array and a little per byte. Small arrays are packed
into buffers, large ones are summed where they lie: copying them into a buffer and back would
cost more than it saves (docs/design/0006-exchange.md has the figures).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any

PACK_BELOW = 64 * 2**10
"""Bytes of an array below which it is packed with others."""

SUM_BELOW = 8 * 2**10
"""Bytes of an array below which the gradients of microbatches are summed with others: of a larger
one the copy into the buffer costs more than an array less does."""

BASE = 16
"""Of the numbers that `_numbers` makes."""


def packed_psum(tree: PyTree, axis_name: str) -> PyTree:
    """`jax.lax.psum` of a pytree of arrays, small ones packed into one buffer per dtype.

    The same values as `jax.lax.psum`, bit for bit.
    """
    packing = Packing.of(tree)
    return packing.unpack(jax.lax.psum(packing.pack(tree), axis_name), axis_name)


@dataclass(frozen=True)
class Packing:
    """Which arrays of a pytree travel together.

    Attributes:
        like: The pytree, shapes and dtypes.
        packs: Numbers of leaves: large ones alone, small ones of a dtype together, those of
            one shape side by side.
    """

    like: PyTree
    packs: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, tree: PyTree, below: int = PACK_BELOW) -> "Packing":
        """That of a pytree of arrays; smaller ones than so many bytes travel with others."""
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        leaves = jax.tree.leaves(like)
        large = [x.size * x.dtype.itemsize >= below for x in leaves]
        small = [i for i, alone in enumerate(large) if not alone]
        small.sort(key=lambda i: (str(leaves[i].dtype), leaves[i].shape))
        together = [tuple(pack) for _, pack in groupby(small, key=lambda i: leaves[i].dtype)]
        return cls(like, (*((i,) for i, alone in enumerate(large) if alone), *together))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Those of the buffers."""
        leaves = jax.tree.leaves(self.like)
        return [
            leaves[pack[0]].shape if len(pack) == 1 else (sum(leaves[i].size for i in pack),)
            for pack in self.packs
        ]

    def pack(self, tree: PyTree) -> list[Any]:
        """The buffers, one per pack; of an array that travels alone the array."""
        leaves = jax.tree.leaves(tree)
        return [
            leaves[pack[0]]
            if len(pack) == 1
            else jnp.concatenate([leaves[i].reshape(-1) for i in pack])
            for pack in self.packs
        ]

    def unpack(self, buffers: Sequence[Any], axis_name: str) -> PyTree:
        """The pytree of such buffers; inside a mapped function."""
        like, structure = jax.tree.flatten(self.like)
        leaves: list[Any] = [None] * len(like)
        for buffer, pack in zip(buffers, self.packs, strict=True):
            if len(pack) == 1:
                leaves[pack[0]] = buffer
                continue
            numbers, at = _numbers(len(pack), axis_name), 0
            for shape, alike in groupby(pack, key=lambda i: like[i].shape):
                members = list(alike)
                size, count = like[members[0]].size, len(members)
                rows = buffer[at : at + count * size].reshape(count, size)
                for number, i in zip(numbers, members, strict=False):
                    row = jax.lax.dynamic_slice(
                        rows, (number, np.int32(0)), (1, size), allow_negative_indices=False
                    )
                    leaves[i] = row.reshape(shape)
                at += count * size
        return structure.unflatten(leaves)


def _numbers(count: int, axis_name: str) -> list[Any]:
    """The numbers from 0 on, which only the running program knows to be these.

    XLA compiles a kernel once for all arrays that it treats alike. Where arrays lie at
    constant places in a buffer no two are alike, and their kernels, which hold whatever is
    made of the arrays, are most of what a first window takes. A sort keeps its results from
    being constants, and from being computed within those kernels. A number is made of its
    digits, each in an array of its own, so that all numbers are made alike.
    """
    rank = jax.lax.axis_index(axis_name)
    key = jnp.stack([rank, rank + 1])  # in order already
    powers = [BASE**n for n in range(len(np.base_repr(count - 1, BASE)))]
    values = [np.full(2, power * digit, np.int32) for power in powers for digit in range(BASE)]
    _, *values = jax.lax.sort((key, *map(jnp.asarray, values)), num_keys=1)
    digits = [value[0] for value in values]
    rows = [digits[n * BASE : (n + 1) * BASE] for n in range(len(powers))]
    return [
        sum(row[number // power % BASE] for row, power in zip(rows, powers, strict=True))
        for number in range(count)
    ]
