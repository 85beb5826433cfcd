"""Getting the data of a window onto the devices. The only file of `data` that places.

Streamed, only real microbatches cross: a device's share goes over as pieces whose lengths
are the binary digits of its count (`data.split`). Where a device has no piece of some
length, the program gets a block of zeros that was put there once and is never read.
Resident, the whole data set is on every device and only example numbers cross.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Sharding

from elche_jax.data.reader import IndexedReader, Partial, Reader
from elche_jax.data.source import ArraySource, Source
from elche_jax.data.split import Range, piece_lengths

PyTree = Any
Placement = Literal["resident", "stream"]

RESIDENT_SHARE = 0.25
"""Largest share of a device's free memory that `placement="auto"` gives to the data."""


def choose_placement(
    placement: str, source: Source, devices: Sequence[jax.Device], free: int | None
) -> Placement:
    """Decides where the data lives.

    Args:
        placement: `"resident"`, `"stream"`, or `"auto"`: resident when the source is a
            pytree of arrays that fits a quarter of the free memory.
        source: The data.
        devices: The devices; those of platform cpu share the host's memory.
        free: Free bytes for all copies together; None when not known: then stream.

    Raises:
        ValueError: Another word, or `"resident"` for data that is not a pytree of arrays.
    """
    if placement not in ("auto", "resident", "stream"):
        raise ValueError(
            f"windows: placement must be 'auto', 'resident' or 'stream', got {placement!r}."
        )
    if placement == "stream":
        return "stream"
    if not isinstance(source, ArraySource):
        if placement == "resident":
            raise ValueError(
                "windows: placement='resident' needs data that is a pytree of arrays, got "
                f"a {type(source).__name__}. Use placement='stream'."
            )
        return "stream"
    if placement == "resident":
        return "resident"
    copies = len(devices) if devices[0].platform == "cpu" else 1
    fits = free is not None and source.nbytes * copies <= RESIDENT_SHARE * free
    return "resident" if fits else "stream"


class Placer:
    """Puts the data of program calls onto the devices of one group.

    Args:
        devices: The devices in rank order.
        sharding: The sharding of stacked arrays over these devices.
    """

    def __init__(self, devices: Sequence[jax.Device], sharding: Sharding):
        self._devices = tuple(devices)
        self._sharding = sharding
        self._blanks: dict[tuple[Any, ...], list[jax.Array]] = {}

    def everywhere(self, tree: PyTree) -> PyTree:
        """Copies a pytree of arrays to every device; leaves `(world_size, ...)`.

        No leaf shares memory with the argument, which the user may change meanwhile.
        """

        def copy(leaf: Any) -> jax.Array:
            row = np.array(leaf)[None]  # a copy, as the CPU may read it in place
            return self._stack(jax.device_put([row] * len(self._devices), list(self._devices)))

        return jax.tree.map(copy, tree)

    def pieces(
        self, reader: Reader, first: int, ranges: Sequence[Range], capacity: int, spec: PyTree
    ) -> tuple[PyTree, ...]:
        """The pieces of one call, longest first.

        Args:
            reader: The epoch.
            first: Number of the window's first microbatch in the epoch.
            ranges: What each device gets, as places in the window.
            capacity: Capacity of the program.
            spec: Shapes of one microbatch.

        Returns:
            One pytree per length, leaves `(world_size, length, batch, ...)`.

        Raises:
            ValueError: The source gave something unlike `spec`.
        """
        lengths = piece_lengths(capacity)
        leaves_spec, structure = jax.tree.flatten(spec)
        rows: list[np.ndarray] = []
        where: list[tuple[int, int]] = []
        for rank, share in enumerate(ranges):
            for length, start in share.pieces().items():
                block = reader.block(first + start, length)
                _check_like(spec, block, first + start)
                rows += [np.asarray(leaf)[None] for leaf in jax.tree.leaves(block)]
                where.append((lengths.index(length), rank))
        targets = [self._devices[rank] for _, rank in where for _ in leaves_spec]
        placed = iter(jax.device_put(rows, targets))
        parts = [
            [list(self._blank((length, *leaf.shape), leaf.dtype)) for leaf in leaves_spec]
            for length in lengths
        ]
        for at, rank in where:
            for leaf in parts[at]:
                leaf[rank] = next(placed)
        return tuple(
            jax.tree.unflatten(structure, [self._stack(leaf) for leaf in part]) for part in parts
        )

    def index(
        self, reader: IndexedReader, first: int, ranges: Sequence[Range], capacity: int
    ) -> jax.Array:
        """Example numbers of one call, `(world_size, capacity, batch)`, int32."""
        width = reader.index(first, 0).shape[1]
        numbers = np.zeros((len(ranges), capacity, width), np.int32)
        for rank, share in enumerate(ranges):
            numbers[rank, : share.count] = reader.index(first + share.start, share.count)
        return self.rows(numbers)

    def orders(
        self, ranges: Sequence[Range], first: int, fresh: bool, partial: Partial | None
    ) -> jax.Array:
        """What each device is to do in one call, `(world_size, 5)`, int32."""
        place, valid = -1, 0
        if partial is not None:
            place, valid = partial.microbatch - first, partial.valid
        numbers = [(r.count, r.start, int(fresh), place, valid) for r in ranges]
        return self.rows(np.array(numbers, np.int32))

    def rows(self, array: np.ndarray) -> jax.Array:
        """Puts row `d` of a host array on device `d`."""
        return jax.device_put(array, self._sharding)

    def _stack(self, shards: list[jax.Array]) -> jax.Array:
        if len(shards) == 1:
            return shards[0]
        shape = (len(shards), *shards[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._sharding, shards)

    def _blank(self, shape: tuple[int, ...], dtype: Any) -> list[jax.Array]:
        key = (shape, np.dtype(dtype))
        if key not in self._blanks:
            zeros = np.zeros((1, *shape), dtype)
            self._blanks[key] = jax.device_put([zeros] * len(self._devices), list(self._devices))
        return self._blanks[key]


def _check_like(spec: PyTree, block: PyTree, first: int) -> None:
    """Raises where microbatches from number `first` on do not look like `spec`."""
    want, got = jax.tree.structure(spec), jax.tree.structure(block)
    if got != want:
        raise ValueError(
            f"windows: every microbatch of data must have the structure of the first one "
            f"({want}), microbatch {first} has {got}."
        )
    for like, leaf in zip(jax.tree.leaves(spec), jax.tree.leaves(block), strict=True):
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        if leaf.shape[1:] != like.shape or dtype != like.dtype:
            raise ValueError(
                f"windows: every microbatch of data must have the shapes and dtypes of the "
                f"first one ({like.shape}, {like.dtype}), microbatch {first} has "
                f"{leaf.shape[1:]}, {dtype}."
            )
