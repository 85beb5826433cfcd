"""Reductions over devices: inside a mapped function, on one device, or on the host.

Formulas over several devices are written once, for any axis. `xp` is the array module.
A *per-device value* is the device's own value inside a mapped function; elsewhere it is a list
with one entry per device that has delivered.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from types import ModuleType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from elche_jax.engine.bits import is_float, wide_dtype
from elche_jax.engine.collectives import broadcast_from
from elche_jax.engine.exchange import Packed, Packing, packed_psum
from elche_jax.engine.job import Job, places_of
from elche_jax.engine.mapped import AXIS
from elche_jax.engine.wire import Encoded, decoded, sum_bfloat16, sum_int8

PyTree = Any
PerDevice = Any
"""A per-device value; see the module docstring."""


@dataclass(frozen=True)
class DeviceAxis:
    """The axis of a mapped function; with one device there is no axis.

    Attributes:
        size: Number of devices.
        xp: The module of array functions.
    """

    size: int
    xp: ClassVar[ModuleType] = jnp

    def each(self, fn: Callable[..., Any], *values: PerDevice) -> PerDevice:
        """Apply `fn` to each device's values."""
        return fn(*values)

    def rows(self, value: PerDevice) -> Any:
        """Stack into an array with one row per device, zeros for devices that did not deliver."""
        return value[None] if self.size == 1 else jax.lax.all_gather(value, AXIS)

    def mine(self, rows: Any) -> PerDevice:
        """Return each device's own row of an array made by `rows`."""
        return rows[0] if self.size == 1 else rows[jax.lax.axis_index(AXIS)]

    def any(self, value: PerDevice) -> Any:
        """Return a value that is the same on all devices."""
        return value

    def sums(self, *terms: tuple[PerDevice, PerDevice | None]) -> tuple[PyTree, ...]:
        """Return `sum over devices of weight * tree`, for every `(tree, weight)`.

        A tree of weight 0 is ignored, even if it is not finite. A weight of None means 1.
        """
        if self.size == 1:
            return tuple(tree if weight is None else _times(tree, weight) for tree, weight in terms)
        # one buffer per term, not one for all: gradients are checked in their own buffer
        packings = [Packing.of(tree) for tree, _ in terms]
        packed = [
            packing.pack(tree) if weight is None else _times(packing.pack(tree), weight)
            for packing, (tree, weight) in zip(packings, terms, strict=True)
        ]
        summed = jax.lax.psum(packed, AXIS)
        pairs = zip(packings, summed, strict=True)
        rank = jax.lax.axis_index(AXIS)
        return tuple(Packed(packing, buffers, rank).tree() for packing, buffers in pairs)

    def decoded_sum(self, sent: PerDevice, weight: PerDevice | None) -> list[Any]:
        """Return the weighted sum of encoded arrays, see `elche_jax.engine.wire`."""
        if self.size == 1:
            return decoded(sent) if weight is None else _times(decoded(sent), weight)
        return (sum_bfloat16 if sent.scales is None else sum_int8)(sent, weight)

    def largest(self, leaf: PerDevice, worked: PerDevice) -> Any:
        """Return the elementwise maximum over the devices that worked."""
        if self.size == 1:
            return leaf
        if leaf.dtype == jnp.bool_:
            return self.largest(leaf.astype(jnp.int32), worked).astype(jnp.bool_)
        lowest = -jnp.inf if is_float(leaf) else jnp.iinfo(leaf.dtype).min
        return jax.lax.pmax(jnp.where(worked, leaf, jnp.asarray(lowest, leaf.dtype)), AXIS)

    def first(self, leaf: PerDevice, worked: PerDevice) -> Any:
        """Return the value of the lowest rank that worked."""
        if self.size == 1:
            return leaf
        none = jnp.iinfo(jnp.int32).max  # broadcasting from a rank that does not exist gives zeros
        rank = jnp.where(worked, jax.lax.axis_index(AXIS), none)
        return broadcast_from(leaf, jax.lax.pmin(rank, AXIS), AXIS)


@dataclass(frozen=True)
class ListAxis(ABC):
    """Devices whose values are in a list; methods are those of `DeviceAxis`.

    Attributes:
        size: Number of devices in the job.
        xp: The module of array functions.
    """

    size: int
    xp: ClassVar[ModuleType]

    def each(self, fn: Callable[..., Any], *values: PerDevice) -> PerDevice:
        return [fn(*one) for one in zip(*values, strict=True)]

    def any(self, value: PerDevice) -> Any:
        return value[0]

    def sums(self, *terms: tuple[PerDevice, PerDevice | None]) -> tuple[PyTree, ...]:
        return tuple(self._sum(trees, weights) for trees, weights in terms)

    def decoded_sum(self, sent: PerDevice, weight: PerDevice | None) -> list[Any]:
        (total,) = self.sums(([decoded(one) for one in sent], weight))
        return total

    def largest(self, leaf: PerDevice, worked: PerDevice) -> Any:
        """See `DeviceAxis.largest`; the value of the first device if none worked."""
        values, known = self.xp.stack(leaf), self.xp.stack(worked)
        has = known.reshape(-1, *[1] * (values.ndim - 1))
        # devices without work get the value of the first that worked: no value is the lowest in
        # every dtype
        return self.xp.where(has, values, values[self.xp.argmax(known)]).max(axis=0)

    def first(self, leaf: PerDevice, worked: PerDevice) -> Any:
        """See `DeviceAxis.first`; the value of the first device if none worked."""
        return self.xp.stack(leaf)[self.xp.argmax(self.xp.stack(worked))]

    @abstractmethod
    def _sum(self, trees: PerDevice, weights: PerDevice | None) -> PyTree:
        """Return the sum over the list."""


@dataclass(frozen=True)
class HostAxis(ListAxis):
    """The devices whose deliveries have reached the host.

    Attributes:
        ranks: Ranks that have delivered, ascending.
        xp: The module of array functions.
    """

    ranks: Sequence[int]
    xp: ClassVar[ModuleType] = np

    def rows(self, value: PerDevice) -> Any:
        rows = np.zeros((self.size, *np.shape(value[0])), np.result_type(value[0]))
        rows[list(self.ranks)] = value
        return rows

    def mine(self, rows: Any) -> PerDevice:
        return [rows[rank] for rank in self.ranks]

    def _sum(self, trees: PerDevice, weights: PerDevice | None) -> PyTree:
        if weights is None:
            weights = [np.float32(1)] * len(trees)

        def total(*leaves: Any) -> np.ndarray:
            parts = (
                np.multiply(leaf, weight, dtype=wide_dtype(leaf))
                for leaf, weight in zip(leaves, weights, strict=True)
                if weight  # not 0 * NaN
            )
            out = next(parts, None)
            if out is None:
                return np.zeros(np.shape(leaves[0]), wide_dtype(leaves[0]))
            return reduce(lambda a, b: np.add(a, b, out=a), parts, np.asarray(out))

        return jax.tree.map(total, *trees)


@dataclass(frozen=True)
class HostProcessAxis(HostAxis):
    """The devices of several processes; each process holds those that have delivered to its host.

    Every method that combines devices is an exchange between processes: all must call it.

    Attributes:
        job: The processes.
    """

    job: Job

    def rows(self, value: PerDevice) -> Any:
        found = self.job.gather(super().rows(value))  # (processes, devices, ...)
        rows = np.zeros_like(found[0])
        for own, ranks in zip(found, self.job.ranks_of.values(), strict=True):
            rows[list(ranks)] = own[list(ranks)]
        return rows

    def sums(self, *terms: tuple[PerDevice, PerDevice | None]) -> tuple[PyTree, ...]:
        leaves, structure = jax.tree.flatten(super().sums(*terms))
        flat = self.job.sum(np.concatenate([np.ravel(leaf) for leaf in leaves]))
        parts = np.split(flat, np.cumsum([np.size(leaf) for leaf in leaves])[:-1])
        shaped = [
            part.reshape(np.shape(leaf)).astype(leaf.dtype, copy=False)  # from the widest
            for part, leaf in zip(parts, leaves, strict=True)
        ]
        return structure.unflatten(shaped)

    def largest(self, leaf: PerDevice, worked: PerDevice) -> Any:
        known = self.rows(worked)
        return np.maximum.reduce(self.rows(leaf)[known if known.any() else slice(None)])

    def first(self, leaf: PerDevice, worked: PerDevice) -> Any:
        return self.rows(leaf)[np.argmax(self.rows(worked))]


@dataclass(frozen=True)
class LeadAxis(ListAxis):
    """The devices of several lanes whose contributions have reached the lead.

    A tree without arrays counts as 0: another tree of its lane holds the sum over the lane.

    Attributes:
        xp: The module of array functions.
    """

    xp: ClassVar[ModuleType] = jnp

    def rows(self, value: PerDevice) -> Any:
        return jnp.stack(value)

    def mine(self, rows: Any) -> PerDevice:
        return list(rows)

    def _sum(self, trees: PerDevice, weights: PerDevice | None) -> PyTree:
        if weights is not None:
            trees = [_times(tree, weight) for tree, weight in zip(trees, weights, strict=True)]
        there = [tree for tree in trees if jax.tree.leaves(tree)]
        return jax.tree.map(lambda *leaves: reduce(jnp.add, leaves), *(there or trees[:1]))


@dataclass(frozen=True)
class ProcessAxis(LeadAxis):
    """The devices of several processes: a list on each process's lead, the leads a mapped axis.

    The list of a process with fewer devices than others is padded with values of devices without
    work.

    Attributes:
        ranks: For each live process, the ranks of its devices, ascending. Rows of other devices
            are 0.
    """

    ranks: tuple[tuple[int, ...], ...]

    @property
    def width(self) -> int:
        """Number of values on each lead."""
        return max(map(len, self.ranks))

    def rows(self, value: PerDevice) -> Any:
        rows = jax.lax.all_gather(jnp.stack(value), AXIS, tiled=True)
        places = places_of(self.ranks, self.width, self.size)
        if max(places) == len(rows):  # the place of lost devices: a row of zeros
            rows = jnp.concatenate([rows, jnp.zeros_like(rows[:1])])
        return rows[np.array(places)]

    def mine(self, rows: Any) -> PerDevice:
        # one more row, of zeros, for the padding
        rows = jnp.concatenate([rows, jnp.zeros_like(rows[:1])])
        return list(rows[self._own(self.size)])

    def sums(self, *terms: tuple[PerDevice, PerDevice | None]) -> tuple[PyTree, ...]:
        return tuple(packed_psum(own, AXIS) for own in super().sums(*terms))

    def decoded_sum(self, sent: PerDevice, weight: PerDevice | None) -> list[Any]:
        if len(sent) == 1:
            own = None if weight is None else weight[0]
            return DeviceAxis(len(self.ranks)).decoded_sum(sent[0], own)
        if sent[0].scales is None:  # rounded once more, as each process sends one sum
            own = self._sum([decoded(one) for one in sent], weight)
            return sum_bfloat16(Encoded([x.astype(jnp.bfloat16) for x in own]), None)
        # sent as encoded: a second rounding would have no error feedback
        weights = [1.0] * len(sent) if weight is None else weight
        # not 0 * NaN
        scales = [
            jnp.where(jnp.asarray(own) > 0, one.scales * own, 0)
            for one, own in zip(sent, weights, strict=True)
        ]
        levels = [level for one in sent for level in one.arrays]
        parts = sum_int8(Encoded(levels, jnp.concatenate(scales)), None)
        arrays = len(sent[0].arrays)
        return [reduce(jnp.add, parts[at::arrays]) for at in range(arrays)]

    def largest(self, leaf: PerDevice, worked: PerDevice) -> Any:
        # padding, all zeros, must not count, even if no device has worked and so all others count
        worked = list(jnp.stack(worked) & (self._own(self.size) < self.size))
        own = super().largest(leaf, worked)
        return DeviceAxis(len(self.ranks)).largest(own, reduce(jnp.logical_or, worked))

    def first(self, leaf: PerDevice, worked: PerDevice) -> Any:
        none = jnp.iinfo(jnp.int32).max
        rank = jnp.where(jnp.stack(worked), self._own(none), none).min()
        here = rank == jax.lax.pmin(rank, AXIS)
        source = jax.lax.pmin(jnp.where(here, jax.lax.axis_index(AXIS), none), AXIS)
        return broadcast_from(super().first(leaf, worked), source, AXIS)

    def _own(self, none: int) -> Any:
        """Return the ranks of this process's devices, padded with ``none``."""
        table = [(*own, *[none] * (self.width - len(own))) for own in self.ranks]
        return jnp.array(table, jnp.int32)[jax.lax.axis_index(AXIS)]


Axis = DeviceAxis | HostAxis | LeadAxis
"""The devices over which values are combined."""


def _times(tree: PyTree, weight: Any) -> PyTree:
    return jax.tree.map(lambda x: jnp.where(weight > 0, x * weight.astype(x.dtype), 0), tree)
