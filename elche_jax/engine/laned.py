"""Stacked arrays over devices that no single `jax.Array` can span.

The devices of a `jax.Array` share a client and a platform. Over several lanes, the leaves of a
pytree are therefore the objects of this module, which behave like a stacked `jax.Array`: pytree
functions, `jax.device_get` and NumPy accept them, while `jax.jit` and `jax.numpy` reject them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

PyTree = Any


@dataclass(frozen=True, eq=False)
class Shard:
    """One device's entry of a stacked array, with attributes like those of `jax.Shard`."""

    device: jax.Device
    index: tuple[slice, ...]
    owner: "Stacked"
    rank: int

    @property
    def data(self) -> jax.Array:
        """The entry, `(1, ...)`."""
        return self.owner.addressable_data(self.rank)


class Stacked(ABC):
    """An object that behaves like a stacked `jax.Array`, `(world_size, ...)`."""

    is_fully_replicated = False

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape; the first axis is over devices."""

    @property
    @abstractmethod
    def arrays(self) -> Sequence[jax.Array]:
        """The `jax.Array`s that hold its entries."""

    @abstractmethod
    def addressable_data(self, rank: int) -> jax.Array:
        """Return the entry of a rank, `(1, ...)`."""

    @abstractmethod
    def map(self, fn: Callable[[jax.Array], jax.Array]) -> "Stacked":
        """Apply a function that keeps the first axis."""

    @property
    def dtype(self) -> Any:
        return self.arrays[0].dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @cached_property
    def addressable_shards(self) -> list[Shard]:
        """The entries of all devices, in rank order."""
        rest = (slice(None),) * (self.ndim - 1)
        return [
            Shard(self.device_of(rank), (slice(rank, rank + 1), *rest), self, rank)
            for rank in range(len(self))
        ]

    @abstractmethod
    def device_of(self, rank: int) -> jax.Device:
        """Return the device of a rank's entry."""

    def devices(self) -> set[jax.Device]:
        return {self.device_of(rank) for rank in range(len(self))}

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """Return one device's entry, on that device, for an integer; a host array otherwise."""
        if isinstance(index, int | np.integer):
            rank = range(len(self))[int(index)]  # handles negative numbers, and raises
            return self.addressable_data(rank)[0]
        return np.asarray(self)[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("an array over several devices can only be copied to the host.")
        self.copy_to_host_async()
        whole = np.concatenate([np.asarray(shard.data) for shard in self.addressable_shards])
        return whole if dtype is None else whole.astype(dtype)

    def __bool__(self) -> bool:
        return bool(np.asarray(self))  # NumPy raises if there are several elements

    def __eq__(self, other: object) -> Any:
        if not isinstance(other, COMPARED):
            return NotImplemented
        return np.asarray(self) == np.asarray(other)  # elementwise, as for arrays

    def __ne__(self, other: object) -> Any:
        if not isinstance(other, COMPARED):
            return NotImplemented
        return np.asarray(self) != np.asarray(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # as for arrays

    def __reduce__(self) -> Any:
        """Pickle as an array of the host: devices cannot be pickled."""
        return np.array, (np.asarray(self),)

    def __copy__(self) -> "Stacked":
        return self.copy()

    def tolist(self) -> Any:
        return np.asarray(self).tolist()

    def copy(self) -> "Stacked":
        """Return a copy that shares no memory with this one."""
        return self.map(lambda array: array.copy())

    def __deepcopy__(self, memo: dict[int, Any]) -> "Stacked":
        return self.copy()  # devices cannot be copied

    def block_until_ready(self) -> "Stacked":
        for array in self.arrays:
            array.block_until_ready()
        return self

    def is_ready(self) -> bool:
        return all(
            array.is_ready()  # pyright: ignore[reportAttributeAccessIssue]  # not in its stubs
            for array in self.arrays
        )

    def copy_to_host_async(self) -> None:
        for array in self.arrays:
            array.copy_to_host_async()

    def is_deleted(self) -> bool:
        return any(array.is_deleted() for array in self.arrays)

    def delete(self) -> None:
        for array in self.arrays:
            array.delete()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype})"


class LanedArray(Stacked):
    """A stacked array over several lanes, one array per lane.

    Args:
        parts: For each lane, its stacked array, `(devices of the lane, ...)`.
        ranks: For each lane, the ranks of its devices.
    """

    def __init__(self, parts: Sequence["StackedArray"], ranks: Sequence[tuple[int, ...]]):
        self.parts, self.ranks = tuple(parts), tuple(ranks)

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(map(len, self.ranks)), *self.parts[0].shape[1:])

    @property
    def arrays(self) -> Sequence[jax.Array]:
        return [array for part in self.parts for array in arrays_of(part)]

    def addressable_data(self, rank: int) -> jax.Array:
        part, at = self._place(rank)
        return part.addressable_data(at)

    def device_of(self, rank: int) -> jax.Device:
        part, at = self._place(rank)
        return devices_of(part)[at]

    def _place(self, rank: int) -> tuple["StackedArray", int]:
        for part, ranks in zip(self.parts, self.ranks, strict=True):
            if rank in ranks:
                return part, ranks.index(rank)
        raise IndexError(f"rank {rank} is not one of {len(self)}")

    def map(self, fn: Callable[[jax.Array], jax.Array]) -> "LanedArray":
        parts = [part.map(fn) if isinstance(part, Stacked) else fn(part) for part in self.parts]
        return LanedArray(parts, self.ranks)


class LeadArray(Stacked):
    """A value that is the same for all devices and is held by one of them, the lead.

    Args:
        row: The value, `(1, ...)`, on the lead.
        world_size: Number of devices.
    """

    def __init__(self, row: jax.Array, world_size: int):
        self.row, self.world_size = row, world_size

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.world_size, *self.row.shape[1:])

    @property
    def arrays(self) -> Sequence[jax.Array]:
        return (self.row,)

    def addressable_data(self, rank: int) -> jax.Array:
        return self.row

    def device_of(self, rank: int) -> jax.Device:
        return devices_of(self.row)[0]

    def map(self, fn: Callable[[jax.Array], jax.Array]) -> "LeadArray":
        return LeadArray(fn(self.row), self.world_size)


class LateArray(Stacked):
    """The part of a lane at rest: copies of another device's entry, made when first read.

    Args:
        source: A stacked array whose first entry is the value.
        lane: The devices of the lane.
        copies: Copies an entry, `(1, ...)`, to the lane's devices, stacked.
    """

    def __init__(
        self,
        source: jax.Array,
        lane: Sequence[jax.Device],
        copies: Callable[[jax.Array], jax.Array],
    ):
        self._source, self._lane, self._copies = source, tuple(lane), copies

    @cached_property
    def made(self) -> jax.Array:
        """The copies. The first access waits for the source."""
        return self._copies(self._source.addressable_data(0))

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self._lane), *self._source.shape[1:])

    @property
    def arrays(self) -> Sequence[jax.Array]:
        return (self.made if "made" in vars(self) else self._source,)

    def device_of(self, rank: int) -> jax.Device:
        return self._lane[rank]

    def addressable_data(self, rank: int) -> jax.Array:
        return self.made.addressable_data(rank)

    def map(self, fn: Callable[[jax.Array], jax.Array]) -> "LateArray":
        return LateArray(fn(self._source), self._lane, self._copies)


COMPARED = (Stacked, jax.Array, np.ndarray, np.generic, int, float, complex, list, tuple)
"""Types with which stacked arrays are compared elementwise."""

StackedArray = jax.Array | Stacked
"""A stacked array, over the devices of one lane or of several."""


def devices_of(stacked: StackedArray) -> list[jax.Device]:
    """Return the devices of a stacked array, even a deleted one, in the order of its entries."""
    if isinstance(stacked, Stacked):
        return [stacked.device_of(rank) for rank in range(len(stacked))]
    placed = stacked.sharding.devices_indices_map(stacked.shape)
    return sorted(placed, key=lambda device: placed[device][0].start or 0)


def arrays_of(stacked: StackedArray) -> Sequence[jax.Array]:
    """Return the `jax.Array`s that hold the entries of a stacked array."""
    return stacked.arrays if isinstance(stacked, Stacked) else (stacked,)


def entries_of(tree: PyTree, rank: int) -> PyTree:
    """Return one device's entries of stacked arrays, leaves `(1, ...)`, on that device."""
    return jax.tree.map(lambda leaf: leaf.addressable_data(rank), tree)
