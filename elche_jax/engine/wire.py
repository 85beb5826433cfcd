"""The types in which arrays travel between devices."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elche_jax.averaging.rules import Compression
from elche_jax.engine.exchange import Packing
from elche_jax.engine.mapped import AXIS

Leaves = list[Any]

LEVELS = 127
"""Largest number of an int8 that is sent."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Encoded:
    """Arrays as they travel.

    Attributes:
        arrays: In the type on the wire.
        scales: What one level of every int8 array stands for, float32, `(arrays,)`; else None.
    """

    arrays: Leaves
    scales: Any = None

    @property
    def bytes(self) -> int:
        """How many there are."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))


def encode(
    leaves: Leaves, error: Leaves, worked: Any, compression: Compression | None
) -> tuple[Encoded, Leaves]:
    """Puts a device's arrays into the type on the wire.

    `"bfloat16"` rounds. `"int8"` sends `round(127 * v / max|v|)` of every array `v`, what
    earlier ones have lost included, and keeps what is rounded off (error feedback, Seide et
    al. 2014).

    Args:
        leaves: The arrays, float32.
        error: What earlier ones have lost; empty unless `"int8"`.
        worked: Whether the device has a part in the sum; else nothing is lost.
        compression: The type; None for float32.

    Returns:
        The arrays, and what is lost now.
    """
    if compression is None:
        return Encoded(leaves), error
    if compression == "bfloat16":
        return Encoded([x.astype(jnp.bfloat16) for x in leaves]), error
    wanted = [jnp.where(worked, x + e, 0) for x, e in zip(leaves, error, strict=True)]
    scales = [jnp.max(jnp.abs(x), initial=0) / LEVELS for x in wanted]
    levels = [_round(x, scale) for x, scale in zip(wanted, scales, strict=True)]
    sent = Encoded(levels, jnp.stack(scales))
    lost = [x - y for x, y in zip(wanted, decoded(sent), strict=True)]
    return sent, [jnp.where(worked, new, old) for new, old in zip(lost, error, strict=True)]


def decoded(sent: Encoded) -> Leaves:
    """The arrays that were sent, float32."""
    if sent.scales is None:
        return [x if x.dtype == np.float32 else x.astype(np.float32) for x in sent.arrays]
    return [q.astype(np.float32) * scale for q, scale in zip(sent.arrays, sent.scales, strict=True)]


def sum_int8(sent: Encoded, weight: Any | None, size: int) -> Leaves:
    """`sum over devices of weight * array`, the same on all devices; in a mapped function.

    Args:
        sent: What the device sends.
        weight: Its weight; None where all count alike.
        size: Number of devices.
    """
    del size
    flat = jnp.concatenate([q.reshape(-1) for q in sent.arrays])
    everyone = jax.lax.all_gather(flat, AXIS)  # (devices, elements), int8
    scales = sent.scales if weight is None else sent.scales * weight
    factors = jax.lax.all_gather(scales, AXIS)  # (devices, arrays)
    sums, at = [], 0
    for i, q in enumerate(sent.arrays):
        rows = everyone[:, at : at + q.size].astype(jnp.float32)
        sums.append((rows * factors[:, i, None]).sum(axis=0).reshape(q.shape))
        at += q.size
    return sums


def sum_bfloat16(sent: Encoded, weight: Any | None, size: int) -> Leaves:
    """The same with two bytes per number on the wire.

    Every device sums its part of the numbers in float32, and the sums travel as bfloat16
    again: each number is rounded once before and once after, by at most 2**-8 of its size,
    whatever the number of devices.
    """
    packing = Packing.of(sent.arrays)
    buffers = packing.pack(sent.arrays)
    if not sum(buffer.size for buffer in buffers):
        return decoded(sent)
    flat = jnp.concatenate([buffer.reshape(-1) for buffer in buffers])
    padded = jnp.pad(flat, (0, -flat.size % size))
    mine = jax.lax.all_to_all(padded.reshape(size, -1), AXIS, 0, 0).astype(jnp.float32)
    if weight is not None:
        weights = jax.lax.all_gather(weight, AXIS)[:, None]
        mine = jnp.where(weights > 0, mine * weights, 0)
    part = mine.sum(axis=0).astype(jnp.bfloat16)
    whole = jax.lax.all_gather(part, AXIS, tiled=True).astype(jnp.float32)
    ends = np.cumsum([0, *(buffer.size for buffer in buffers)])
    summed = [
        whole[begin:end].reshape(buffer.shape)
        for buffer, begin, end in zip(buffers, ends[:-1], ends[1:], strict=True)
    ]
    return packing.unpack(summed, AXIS)


def _round(x: Any, scale: Any) -> Any:
    levels = jnp.where(scale > 0, x / jnp.where(scale > 0, scale, 1), 0)
    return jnp.round(levels).astype(jnp.int8)
