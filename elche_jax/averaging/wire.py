"""The weighted sum of the devices' differences, and the types in which it travels."""

from typing import Any

import jax
import jax.numpy as jnp

from elche_jax.averaging.rules import Compression
from elche_jax.engine.exchange import packed_psum, psum_bfloat16

Leaves = list[Any]

LEVELS = 127
"""Largest number of an int8 that is sent."""


def sum_differences(
    differences: Leaves,
    error: Leaves,
    share: Any,
    compression: Compression | None,
    axis_name: str,
    world_size: int,
) -> tuple[Leaves, Leaves]:
    """`sum over devices of share * difference`, the same on all devices bit for bit.

    Args:
        differences: This device's, float32.
        error: What its earlier differences have lost, for `"int8"`; else empty.
        share: This device's share; where it is 0 nothing of the device is read.
        compression: Type on the wire.
        axis_name: Name of the mapped axis.
        world_size: Number of devices.

    Returns:
        The sums, and what this device's differences have lost now.
    """
    if compression == "int8":
        return _sum_int8(differences, error, share, axis_name)
    weighted = [jnp.where(share > 0, x * share, 0) for x in differences]
    if compression == "bfloat16":
        return psum_bfloat16(weighted, axis_name, world_size), error
    return packed_psum(weighted, axis_name), error


def wire_bytes(leaves: Leaves, compression: Compression | None) -> int:
    """Bytes that a device puts in for these arrays."""
    size = sum(leaf.size for leaf in leaves)
    return {None: 4 * size, "bfloat16": 2 * size, "int8": size + 4 * len(leaves)}[compression]


def _sum_int8(
    differences: Leaves, error: Leaves, share: Any, axis_name: str
) -> tuple[Leaves, Leaves]:
    worked = share > 0
    wanted = [jnp.where(worked, x + e, 0) for x, e in zip(differences, error, strict=True)]
    scales = [jnp.max(jnp.abs(x), initial=0) / LEVELS for x in wanted]
    sent = [_round(x, scale) for x, scale in zip(wanted, scales, strict=True)]
    lost = [x - _wide(q, scale) for x, q, scale in zip(wanted, sent, scales, strict=True)]
    lost = [jnp.where(worked, new, old) for new, old in zip(lost, error, strict=True)]
    flat = jnp.concatenate([q.reshape(-1) for q in sent])
    all_sent = jax.lax.all_gather(flat, axis_name)  # (devices, elements), int8
    factors = jax.lax.all_gather(jnp.stack(scales) * share, axis_name)  # (devices, arrays)
    sums, at = [], 0
    for i, x in enumerate(differences):
        rows = all_sent[:, at : at + x.size].astype(jnp.float32)
        sums.append((rows * factors[:, i, None]).sum(axis=0).reshape(x.shape))
        at += x.size
    return sums, lost


def _round(x: Any, scale: Any) -> Any:
    levels = jnp.where(scale > 0, x / jnp.where(scale > 0, scale, 1), 0)
    return jnp.round(levels).astype(jnp.int8)


def _wide(q: Any, scale: Any) -> Any:
    return q.astype(jnp.float32) * scale
