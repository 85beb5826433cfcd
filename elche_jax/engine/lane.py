"""Lanes: devices of one kind, served by one mapped program. A single device is also a lane.

All differences between one device and several, and between one kind and several, are handled here:
how functions are compiled, how arrays are placed, and how windows are timed. Code above a lane does
not distinguish these cases, except in the few places that `tests/test_layers.py` lists.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import jax
import numpy as np
from jax.extend.backend import backends
from jax.sharding import Sharding

from elche_jax.engine.job import Job
from elche_jax.engine.laned import LanedArray, LateArray, LeadArray, Stacked, StackedArray
from elche_jax.engine.mapped import Mapped, PerDevice, stacked_sharding
from elche_jax.engine.shapes import shapes_of

PyTree = Any


class MappedFunction(Protocol):
    """A function of per-device values mapped over devices, see `Mapped`."""

    def __call__(self, *args: PyTree) -> tuple[PyTree, PyTree]: ...

    def lower(self, *args: PyTree) -> Any: ...

    def finish(self, lowered: Any) -> PerDevice: ...


class Fleet(ABC):
    """The devices of a job in this process, as one lane or several.

    Attributes:
        devices: The devices in rank order.
    """

    devices: tuple[jax.Device, ...]

    @abstractmethod
    def in_lanes(self) -> tuple["Lane", ...]:
        """Return the lanes, in the order of their first rank."""

    @abstractmethod
    def mapped(self, fn: PerDevice, donate: tuple[int, ...] = ()) -> MappedFunction:
        """Map a function of per-device values over the devices, see `Mapped`."""

    @abstractmethod
    def stack(self, shards: Sequence[jax.Array]) -> StackedArray:
        """Assemble a stacked array from the devices' entries `(1, ...)`, without a copy."""

    @abstractmethod
    def put(self, rows: PyTree) -> PyTree:
        """Place row `d` of host arrays on device `d`."""

    @abstractmethod
    def restack(self, tree: PyTree) -> PyTree:
        """Return stacked arrays over these devices in this fleet's lanes, without a copy."""

    def copies(self, tree: PyTree) -> PyTree:
        """Copy one device's entries, leaves `(1, ...)`, to all devices; return them stacked."""
        copies = jax.device_put([tree] * self.world_size, list(self.devices))
        return jax.tree.map(lambda *rows: self.stack(rows), *copies)

    @cached_property
    def job(self) -> Job:
        """The devices of all processes."""
        return Job(self.devices)

    @property
    def world_size(self) -> int:
        """Number of devices in this process."""
        return len(self.devices)

    @property
    def alone(self) -> bool:
        """Whether there is a single device, whose work and synchronization are not timed apart."""
        return self.job.world_size == 1


@dataclass(frozen=True)
class Lane(Fleet):
    """Devices of one kind, served by one mapped program.

    Attributes:
        devices: The devices in rank order.
        ranks: Their ranks in the job.
    """

    devices: tuple[jax.Device, ...]
    ranks: tuple[int, ...]

    def in_lanes(self) -> tuple["Lane", ...]:
        return (self,)

    def mapped(self, fn: PerDevice, donate: tuple[int, ...] = ()) -> Mapped:
        return Mapped(fn, self.devices, donate)

    @cached_property
    def sharding(self) -> Sharding:
        """The sharding of arrays with one entry per device."""
        # cached: JAX compares an object faster with itself than with an equal one
        return stacked_sharding(self.devices)

    def stack(self, shards: Sequence[jax.Array]) -> jax.Array:
        if len(shards) == 1:
            return shards[0]
        shape = (len(shards), *shards[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.sharding, list(shards))

    def put(self, rows: PyTree) -> PyTree:
        # explicit, as a guard against implicit transfers may be set for all threads
        return jax.device_put(rows, self.sharding)

    def restack(self, tree: PyTree) -> PyTree:
        def over(leaf: StackedArray) -> jax.Array:
            if not isinstance(leaf, Stacked):
                return leaf
            return self.stack([leaf.addressable_data(rank) for rank in range(len(leaf))])

        return jax.tree.map(over, tree)


@dataclass(frozen=True)
class Lanes(Fleet):
    """Devices in several lanes; stacked arrays are `LanedArray`s.

    In a job of several processes, ranks are positions among this process's devices.

    Attributes:
        devices: The devices in rank order.
        lanes: The lanes, in the order of their first rank.
        across: The devices of all processes; None if there is only one process.
    """

    devices: tuple[jax.Device, ...]
    lanes: tuple[Lane, ...]
    across: Job | None = None

    @cached_property
    def job(self) -> Job:
        return self.across or Job(self.devices)

    def in_lanes(self) -> tuple[Lane, ...]:
        return self.lanes

    @cached_property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """For each lane, the ranks of its devices."""
        return tuple(lane.ranks for lane in self.lanes)

    @cached_property
    def lead_order(self) -> tuple[int, ...]:
        """Indices of the lanes that may lead, in order of preference.

        The first device of the lane that leads computes what all devices agree on. Lanes of
        accelerators come first, as they are faster. A lane may lead only if it has at least as
        much memory as the first one, as what only the lead holds may be large.
        """
        firsts = [lane.devices[0] for lane in self.lanes]
        order = sorted(range(len(firsts)), key=lambda at: firsts[at].platform == "cpu")
        least = memory_limit(firsts[order[0]])
        return tuple(at for at in order if memory_limit(firsts[at]) >= least)

    @property
    def lead(self) -> Lane:
        """The lane that leads while it has work."""
        return self.lanes[self.lead_order[0]]

    def mapped(self, fn: PerDevice, donate: tuple[int, ...] = ()) -> "MappedLanes":
        # `Mapped` makes a function object per lane, as the key of JAX's caches lacks the kind of
        # the devices
        return MappedLanes([lane.mapped(fn, donate) for lane in self.lanes], self)

    def stack(self, shards: Sequence[jax.Array]) -> LanedArray:
        parts = [lane.stack([shards[rank] for rank in lane.ranks]) for lane in self.lanes]
        return LanedArray(parts, self.ranks)

    def put(self, rows: PyTree) -> PyTree:
        return self.join(
            [
                lane.put(jax.tree.map(lambda leaf, at=list(lane.ranks): leaf[at], rows))
                for lane in self.lanes
            ]
        )

    def split(self, tree: PyTree) -> list[PyTree]:
        """Return each lane's part of a pytree of stacked arrays, on the host or in any lanes."""
        return [self.part(tree, at) for at in range(len(self.lanes))]

    def part(self, tree: PyTree, at: int) -> PyTree:
        """Return the part of the lane with this index, see `split`."""
        return jax.tree.map(partial(self._part, at), tree)

    def join(self, parts: Sequence[PyTree]) -> PyTree:
        """Invert `split`."""
        return jax.tree.map(lambda *own: LanedArray(own, self.ranks), *parts)

    def restack(self, tree: PyTree) -> PyTree:
        return self.join(self.split(tree))

    def place(self, tree: PyTree) -> PyTree:
        """Place each entry of arrays with a leading axis over devices on its device.

        A program whose arguments are all on the host would run on JAX's default device.
        """

        def placed(leaf: Any) -> StackedArray:
            if isinstance(leaf, LanedArray) and leaf.ranks == self.ranks:
                return leaf
            if isinstance(leaf, np.ndarray):
                return self.put(leaf)
            rows = [leaf[rank : rank + 1] for rank in range(self.world_size)]
            return self.stack(jax.device_put(rows, list(self.devices)))

        return jax.tree.map(placed, tree)

    def _part(self, at: int, leaf: Any) -> Any:
        lane = self.lanes[at]
        if isinstance(leaf, LanedArray) and leaf.ranks == self.ranks:
            part = leaf.parts[at]
            return part.made if isinstance(part, LateArray) else part
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((lane.world_size, *leaf.shape[1:]), leaf.dtype)
        if isinstance(leaf, np.ndarray):
            return leaf[list(lane.ranks)]
        if isinstance(leaf, LeadArray):
            return lane.copies(leaf.row)
        return lane.stack([leaf.addressable_data(rank) for rank in lane.ranks])


class MappedLanes:
    """A function mapped over several lanes, with one program for each.

    Its second result must be None, as lanes share nothing but the host.

    Args:
        each: For each lane, the function mapped over it.
        lanes: The lanes.
    """

    def __init__(self, each: Sequence[Mapped], lanes: Lanes):
        self._each, self._lanes = each, lanes

    def __call__(self, *args: PyTree) -> tuple[PyTree, PyTree]:
        """Call the function; it compiles at the first call with these shapes."""
        return self._run(self._each, args)

    def lower(self, *args: PyTree) -> list[jax.stages.Lowered]:
        """Trace and lower for these arguments, under the JAX settings of this thread."""
        parts = self._lanes.split(shapes_of(args))
        return [mapped.lower(*own) for mapped, own in zip(self._each, parts, strict=True)]

    def finish(self, lowered: Sequence[jax.stages.Lowered]) -> PerDevice:
        """Compile the lowered programs; may be called in any thread."""
        programs = [m.finish(one) for m, one in zip(self._each, lowered, strict=True)]
        return lambda *args: self._run(programs, args)

    def _run(self, programs: Sequence[Any], args: PyTree) -> tuple[PyTree, PyTree]:
        parts = self._lanes.split(args)
        results = [program(*own) for program, own in zip(programs, parts, strict=True)]
        assert all(common is None for _, common in results)
        return self._lanes.join([stacked for stacked, _ in results]), None


def lanes_of(devices: Sequence[jax.Device], keys: Sequence[Hashable] | None = None) -> Fleet:
    """Group devices into lanes, by client, platform and kind.

    Args:
        devices: The devices in rank order.
        keys: A key for each device; devices with different keys are in different lanes. None to
            group by kind only. Devices of several kinds never share a lane.
    """
    lanes = _grouped(devices, keys)
    return lanes[0] if len(lanes) == 1 else Lanes(tuple(devices), lanes)


def lanes_across(job: Job, keys: Sequence[Hashable] | None = None) -> Lanes:
    """Group this process's devices of a job into lanes, see `lanes_of`.

    Args:
        job: The devices of several processes.
        keys: A key for each device of the job, or None, see `lanes_of`.
    """
    own = keys and [keys[rank] for rank in job.ranks]
    return Lanes(job.local, _grouped(job.local, own), job)


def _grouped(devices: Sequence[jax.Device], keys: Sequence[Hashable] | None) -> tuple[Lane, ...]:
    ranks: dict[Hashable, list[int]] = {}
    for rank, device in enumerate(devices):
        # a mapped program requires devices of one client and platform
        kind: Hashable = (id(device.client), device.platform, device.device_kind)
        ranks.setdefault((kind, None if keys is None else keys[rank]), []).append(rank)
    return tuple(Lane(tuple(devices[r] for r in rs), tuple(rs)) for rs in ranks.values())


def memory_limit(device: jax.Device) -> int:
    """Return the bytes that JAX may allocate on a device; 0 if unknown, as for a CPU."""
    if device.platform == "cpu":
        return 0
    return int((device.memory_stats() or {}).get("bytes_limit", 0))


def kinds_of(devices: Sequence[jax.Device]) -> tuple[str, ...]:
    """Return the kind of every device, as users tell them apart.

    This is `device_kind`, or the backend's name if several backends have devices of that kind.
    """
    names: Mapping[int, str] = {id(client): name for name, client in backends().items()}
    clients: dict[str, set[int]] = {}
    for device in devices:
        clients.setdefault(device.device_kind, set()).add(id(device.client))
    return tuple(
        device.device_kind if len(clients[device.device_kind]) == 1 else names[id(device.client)]
        for device in devices
    )
