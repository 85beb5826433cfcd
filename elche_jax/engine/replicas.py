"""Replicas of a pytree: copy it to every device, take one copy back, compare the copies."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import jax
import numpy as np

from elche_jax import _check as check
from elche_jax.data.convert import check_plain, name_of, sorted_keys
from elche_jax.engine.bits import check_numbers, is_key, raw, with_type_of
from elche_jax.engine.checksum import checksums, differing
from elche_jax.engine.devices import listed
from elche_jax.engine.job import Job
from elche_jax.engine.lane import Fleet, Lanes, lanes_of
from elche_jax.engine.laned import LanedArray, LeadArray, Stacked, StackedArray, devices_of
from elche_jax.engine.shapes import named
from elche_jax.engine.talk import Talk

PyTree = Any


class ReplicaMismatch(RuntimeError):
    """Raised if replicas are not bitwise equal; the message names the leaf and the device."""


def replicate(tree: PyTree, devices: Sequence[jax.Device]) -> PyTree:
    """Copy a pytree to every device.

    Args:
        tree: Pytree of arrays, typed PRNG keys or scalars.
        devices: The devices, in rank order.

    Returns:
        The same structure; leaves `(len(devices),) + shape`, entry `d` on device `d`.
        No leaf shares memory with the argument. Over devices of several kinds, a leaf is an
        object that behaves like such an array.

    Raises:
        TypeError: If `devices` is not a sequence of devices, or a leaf is not numeric, or masked.
        ValueError: If there is no device, one appears twice, or an integer does not fit 32 bits
            and 64-bit types are disabled.

    Examples:
        >>> import jax, numpy as np
        >>> from elche_jax import replicate, unreplicate
        >>> tree = replicate({"w": np.ones(3)}, jax.devices()[:1])
        >>> tree["w"].shape, unreplicate(tree)["w"].shape
        ((1, 3), (3,))
    """
    return replicate_over(lanes_of(listed(devices, "replicate")), tree)


def replicate_over(fleet: Fleet, tree: PyTree) -> PyTree:
    """Copy a pytree to every device of a fleet, see `replicate`."""

    def copy(path: Any, leaf: Any) -> StackedArray:
        if is_key(leaf):
            return with_type_of(leaf, copy(path, raw(leaf)))
        check_plain(path, leaf, "replicate: tree")
        row = np.array(leaf)[None]  # a copy, as CPU devices may alias host memory
        check_numbers("replicate", name_of(path, "tree"), row)
        return fleet.copies(row)

    with sorted_keys("replicate", "tree"):
        return jax.tree_util.tree_map_with_path(copy, tree)


def hold_over(fleet: Fleet, tree: PyTree) -> PyTree:
    """Copy a pytree to the devices that must hold it: over several lanes, to the lead alone."""
    if not isinstance(fleet, Lanes):
        return replicate_over(fleet, tree)
    rows = replicate_over(lanes_of(fleet.lead.devices[:1]), tree)
    return jax.tree.map(lambda row: LeadArray(row, fleet.world_size), rows)


def unreplicate(tree: PyTree) -> PyTree:
    """Return one copy of a replicated pytree, the first device's.

    Only the first device's shard is read; nothing is gathered from the others.

    Args:
        tree: Pytree of stacked arrays, leaves `(world_size,) + shape`.

    Returns:
        The same structure with leaves `shape`, on the first device.

    Raises:
        ValueError: If a leaf is not stacked, for instance because it is already unreplicated, or
            its buffer was donated to a later call of the training step.
    """
    firsts = [_shards("unreplicate", name, leaf)[0].data[0] for name, leaf in named(tree)]
    return jax.tree.structure(tree).unflatten(firsts)


def check_replicas(tree: PyTree) -> None:
    """Check that the copies of a replicated pytree are bitwise equal.

    The devices compute checksums (see `elche_jax.engine.checksum`), in which a change within
    one element always shows. Only a leaf that differs is fetched.

    In a job of several processes, all must call it with their copies. The copies are compared
    across processes, and an error is raised in all of them.

    Args:
        tree: Pytree of stacked arrays, for instance a `TrainState`.

    Raises:
        ReplicaMismatch: If a copy differs from the first device's. The message names the first
            such leaf, the device, and how many elements differ, or the process whose copies
            differ from those of the first one.
        ValueError: If a leaf is not stacked, its buffer was donated to a later call of the
            training step, or processes pass different leaves.
        RuntimeError: If another process has raised an error.

    Examples:
        >>> import jax, numpy as np
        >>> from elche_jax import check_replicas, replicate
        >>> check_replicas(replicate({"w": np.ones(3)}, jax.devices()))
    """
    job = Job(tuple(jax.devices()))
    with Talk(job, "check_replicas") as talk:
        told = talk.tell(_copies(tree))
    for process, (text, _) in zip(job.ranks_of, told, strict=True):
        if text is not None:
            raise ReplicaMismatch(text if job.one_process else f"{text} In process {process}.")
    _, known = told[0]
    for process, (_, copies) in zip(job.ranks_of, told, strict=True):
        if [name for name, *_ in copies] != [name for name, *_ in known]:
            rule, got = (
                "have the same leaves in all processes",
                f"different ones in process {process}",
            )
            raise ValueError(check.message("check_replicas", "tree", rule, got))
        for (name, device, own), (_, first, sums) in zip(copies, known, strict=True):
            if own != sums:
                raise ReplicaMismatch(
                    f"check_replicas: all replicas must be bitwise equal, but leaf {name} on "
                    f"{device} of process {process} differs from {first} of process "
                    f"{next(iter(job.ranks_of))}."
                )


def _copies(tree: PyTree) -> tuple[str | None, list[tuple[str, str, bytes]]]:
    """Compare this process's copies of a pytree.

    Returns:
        A message that says where they differ, or None; and for each leaf its name, first device
        and checksum.
    """
    leaves = named(tree)
    groups: dict[Fleet, list[int]] = {}
    for i, (name, leaf) in enumerate(leaves):
        devices = [shard.device for shard in _shards("check_replicas", name, leaf)]
        if not isinstance(leaf, LeadArray):  # it has no copies
            lanes = leaf.ranks if isinstance(leaf, LanedArray) else [range(len(devices))]
            keys = {rank: at for at, ranks in enumerate(lanes) for rank in ranks}
            fleet = lanes_of(devices, [keys[rank] for rank in range(len(devices))])
            groups.setdefault(fleet, []).append(i)
    launched = [
        (ms, checksums(fleet.restack([leaves[i][1] for i in ms]), fleet))
        for fleet, ms in groups.items()
    ]
    # reading waits for the devices, so it comes after all launches
    found = [(ms[leaf], rank) for ms, sums in launched for leaf, rank in differing(sums)]
    if found:
        leaf, rank = min(found)
        return _difference(*leaves[leaf], rank), []
    firsts: dict[int, bytes] = {}
    for ms, sums in launched:
        firsts |= {i: row.tobytes() for i, row in zip(ms, np.asarray(sums)[0], strict=True)}
    return None, [
        (leaves[i][0], str(devices_of(leaves[i][1])[0]), firsts[i]) for i in sorted(firsts)
    ]


def mismatch(where: str, tree: PyTree, devices: Sequence[jax.Device], sums: Any) -> str | None:
    """Return an error message if the checksums of a replicated pytree differ, else None.

    Args:
        where: Where they were computed, for the message.
        tree: The pytree, or its shapes.
        devices: The devices.
        sums: Its `checksums`.
    """
    found = differing(sums)
    if not found:
        return None
    leaf, rank = found[0]
    others = f" ({len(found) - 1} more such pairs)" if len(found) > 1 else ""
    return (
        f"{where}: all replicas must be bitwise equal, but leaf {named(tree)[leaf][0]} on "
        f"{devices[rank]} differs from {devices[0]}{others}."
    )


def _difference(name: str, leaf: StackedArray, rank: int) -> str:
    shards = _shards("check_replicas", name, raw(leaf))
    first, other = shards[0], shards[rank]
    # bits, as NaN != NaN and -0.0 == 0.0
    count = int(np.any(_bits(other.data) != _bits(first.data), axis=-1).sum())
    return (
        f"check_replicas: all replicas must be bitwise equal, but leaf {name} on "
        f"{other.device} differs from {first.device} in {count} of {first.data.size} elements."
    )


def is_stacked(leaf: Any) -> TypeGuard[StackedArray]:
    """Return whether a leaf has one entry of its first axis on each of its devices."""
    if isinstance(leaf, Stacked):
        return True
    if not isinstance(leaf, jax.Array) or leaf.shape[:1] != (len(leaf.sharding.device_set),):
        return False
    # an array with as many rows as devices may be sharded along another axis, or not at all
    return leaf.sharding.shard_shape(leaf.shape) == (1, *leaf.shape[1:])


def _shards(where: str, name: str, leaf: Any) -> Any:
    """Return the shards of a stacked leaf in rank order, each `(1,) + shape` on its device."""
    if not is_stacked(leaf):
        shape = f"{type(leaf).__name__} of shape {np.shape(leaf)}"
        raise ValueError(
            f"{where}: every leaf must be a stacked array with one entry per device, but "
            f"leaf {name} is {shape}. Pass what replicate or a training step returned."
        )
    check_not_given_up(where, name, leaf)
    # sorted by rank, as JAX may list them in any order
    return sorted(leaf.addressable_shards, key=lambda shard: shard.index[0].start or 0)


def check_not_given_up(where: str, name: str, leaf: StackedArray) -> None:
    """Raise `ValueError` if the buffer of a leaf was donated to a later window.

    Args:
        where: The function the user called.
        name: Name of the leaf.
        leaf: The leaf.
    """
    if leaf.is_deleted():
        raise ValueError(
            f"{where}: every leaf must still be there, but the buffer of leaf {name} went to a "
            "later call of the training step. To keep parameters, take a copy before that call: "
            "elche_jax.unreplicate(state.params)."
        )


def _bits(array: jax.Array) -> np.ndarray:
    """Return the bytes of every element, shape `(size, itemsize)`."""
    flat = np.ascontiguousarray(np.asarray(array)).reshape(-1)
    return flat.view(np.uint8).reshape(flat.size, flat.dtype.itemsize)
