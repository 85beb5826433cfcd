"""Compressed types in which devices exchange arrays."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elche_jax.averaging.rules import Compression
from elche_jax.engine.bits import wide
from elche_jax.engine.exchange import Packed, Packing
from elche_jax.engine.mapped import AXIS

Leaves = list[Any]

LEVELS = 127
"""Largest magnitude of an int8 level."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Encoded:
    """Arrays in the type on the wire.

    Attributes:
        arrays: The arrays.
        scales: The value of one level of each int8 array, float32, `(arrays,)`; None for other
            types.
    """

    arrays: Leaves
    scales: Any = None

    @property
    def bytes(self) -> int:
        """Bytes on the wire."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))


def encode(
    leaves: Leaves, error: Leaves, worked: Any, compression: Compression | None
) -> tuple[Encoded, Leaves]:
    """Encode a device's arrays for the wire.

    `"bfloat16"` rounds. `"int8"` adds the rounding error of earlier exchanges to every array and
    sends `round(127 * v / max|v|)` for the sum `v` (error feedback, Seide et al. 2014).

    Args:
        leaves: The arrays, float32 or float64.
        error: Rounding errors of earlier exchanges; empty unless `"int8"`.
        worked: Whether the device takes part in the sum; if not, its error stays as it is.
        compression: The type on the wire; None to keep the arrays' own.

    Returns:
        The encoded arrays, and the new rounding errors.
    """
    if compression is None:
        return Encoded(leaves), error
    if compression == "bfloat16":
        return Encoded([x.astype(jnp.bfloat16) for x in leaves]), error
    # zeros if it takes no part: NaNs would make the scale NaN, which `sum_int8` multiplies by 0
    wanted = [
        jnp.where(worked, x.astype(jnp.float32) + e, 0) for x, e in zip(leaves, error, strict=True)
    ]
    # `initial` is for arrays without elements
    scales = [jnp.max(jnp.abs(x), initial=0) / LEVELS for x in wanted]
    levels = [_round(x, scale) for x, scale in zip(wanted, scales, strict=True)]
    sent = Encoded(levels, jnp.stack(scales))
    lost = [x - y for x, y in zip(wanted, decoded(sent), strict=True)]
    return sent, [jnp.where(worked, new, old) for new, old in zip(lost, error, strict=True)]


def decoded(sent: Encoded) -> Leaves:
    """Decode arrays to the dtype of sums."""
    if sent.scales is None:
        return list(map(wide, sent.arrays))
    return [q.astype(np.float32) * scale for q, scale in zip(sent.arrays, sent.scales, strict=True)]


def sum_int8(sent: Encoded, weight: Any | None) -> Leaves:
    """Sum int8 arrays over devices, weighted and in float32, inside a mapped function.

    Args:
        sent: The device's encoded arrays.
        weight: Its weight; None for 1.

    Returns:
        `sum over devices of weight * array`, the same on all devices.
    """
    flat = jnp.concatenate([q.reshape(-1) for q in sent.arrays])
    # gathered, as levels of different scales cannot be summed on the wire
    everyone = jax.lax.all_gather(flat, AXIS)  # (devices, elements), int8
    scales = sent.scales if weight is None else sent.scales * weight.astype(jnp.float32)
    factors = jax.lax.all_gather(scales, AXIS)  # (devices, arrays)
    levels = jnp.split(everyone, np.cumsum([q.size for q in sent.arrays])[:-1], axis=1)
    return [
        (rows.astype(jnp.float32) * factors[:, i, None]).sum(axis=0).reshape(q.shape)
        for i, (rows, q) in enumerate(zip(levels, sent.arrays, strict=True))
    ]


def sum_bfloat16(sent: Encoded, weight: Any | None) -> Leaves:
    """Sum bfloat16 arrays over devices, with two bytes per number on the wire.

    Every device sums one slice of the numbers in float32, and the sums are exchanged as
    bfloat16: each number is rounded once before and once after the sum, by at most 2**-8
    of its magnitude, for any number of devices. Arguments and result as in `sum_int8`.
    """
    packing = Packing.of(sent.arrays)
    buffers = packing.pack(sent.arrays)
    # XLA refuses to gather nothing
    if not sum(buffer.size for buffer in buffers):
        return decoded(sent)
    # one exchange for all: on a slow link every collective costs its latency
    flat = jnp.concatenate([buffer.reshape(-1) for buffer in buffers])
    size = jax.lax.axis_size(AXIS)
    padded = jnp.pad(flat, (0, -flat.size % size))
    mine = jax.lax.all_to_all(padded.reshape(size, -1), AXIS, 0, 0).astype(jnp.float32)
    if weight is not None:
        weights = jax.lax.all_gather(weight, AXIS)[:, None]
        mine = jnp.where(weights > 0, mine * weights.astype(jnp.float32), 0)
    part = mine.sum(axis=0).astype(jnp.bfloat16)
    whole = jax.lax.all_gather(part, AXIS, tiled=True).astype(jnp.float32)
    ends = np.cumsum([buffer.size for buffer in buffers])
    parts = jnp.split(whole[: flat.size], ends[:-1])
    summed = [x.reshape(buffer.shape) for x, buffer in zip(parts, buffers, strict=True)]
    return Packed(packing, summed, jax.lax.axis_index(AXIS)).tree()


def _round(x: Any, scale: Any) -> Any:
    levels = jnp.where(scale > 0, x / jnp.where(scale > 0, scale, 1), 0)
    return jnp.round(levels).astype(jnp.int8)
