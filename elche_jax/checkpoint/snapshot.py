"""Copies of a training state from the devices to the host and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elche_jax.checkpoint.leaves import LeafSpec, names_of
from elche_jax.engine.bits import raw, with_type_of
from elche_jax.engine.job import Job
from elche_jax.engine.lane import Fleet
from elche_jax.engine.laned import LeadArray, StackedArray
from elche_jax.engine.state import TrainState

WORK = tuple(f"averaging/{name}" for name in ("steps", "error", "pending"))
"""Prefixes of the names of leaves that hold what a device has not exchanged yet."""


@dataclass(frozen=True)
class Snapshot:
    """Copies of a state on the devices, possibly still being computed.

    Attributes:
        copies: By name of the leaf, one array `(1, ...)`, or one per device if their values differ.
        gathered: Host arrays with a row per device. In a job of several processes they replace the
            copies of leaves whose values differ.
    """

    copies: Mapping[str, list[jax.Array]]
    gathered: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def own(self) -> frozenset[str]:
        """Names of the leaves for which each device has its own value."""
        apart = {name for name, copies in self.copies.items() if len(copies) > 1}
        return frozenset(apart | {*self.gathered})

    def fetch(self) -> dict[str, np.ndarray]:
        """Wait for the devices, and return host arrays by name."""
        leaves = dict(self.gathered)
        for name, copies in self.copies.items():
            rows = [np.asarray(copy) for copy in copies]
            leaves[name] = rows[0][0] if len(rows) == 1 else np.concatenate(rows)
        return leaves


@jax.jit
def _copies(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(array) for array in arrays]


def take(state: TrainState, common: TrainState, job: Job) -> Snapshot:
    """Copy a state on the devices, so that training may reuse its buffers.

    In a job of several processes, all must call it: leaves that differ between devices are moved to
    the first process's host, in parts. The other processes get no copies.

    Args:
        state: The stacked state.
        common: The replicated part of the state, copied from the first device only.
        job: The devices of all processes.

    Returns:
        The copies. With one process, this does not wait for the devices.
    """
    arrays, own = _named(state), own_names(state, common)
    gathered: dict[str, np.ndarray] = {}
    if not job.one_process:
        apart = {name: np.asarray(array) for name, array in arrays.items() if name in own}
        gathered = job.rows_at_first(apart)
        if not job.first:
            return Snapshot({})
        _forget_work(gathered, job.members.lost)
    copies: dict[str, list[jax.Array]] = {}
    held: dict[jax.Device, list[tuple[str, int]]] = {}
    for name, array in arrays.items():
        if name in gathered:
            continue
        shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        shards = shards if name in own else shards[:1]
        copies[name] = [shard.data for shard in shards]
        for place, shard in enumerate(shards):
            held.setdefault(shard.device, []).append((name, place))
    for places in held.values():  # one program per device
        made = _copies([copies[name][place] for name, place in places])
        for (name, place), copy in zip(places, made, strict=True):
            copies[name][place] = copy
    return Snapshot(copies, gathered)


def _forget_work(gathered: Mapping[str, np.ndarray], lost: Sequence[int]) -> None:
    """Exclude lost devices from what the others have yet to exchange.

    Their rows are copies of the first device's. A run that resumes with as many devices would count
    its steps, its rounding errors and its updates of pending windows once more for each of them.

    Args:
        gathered: Arrays with a row per device, by name of the leaf; changed in place.
        lost: Ranks of the lost devices.
    """
    for name, rows in gathered.items():
        if name.startswith(WORK):
            rows[list(lost)] = name.endswith("/own")


def difference(like: TrainState, specs: Mapping[str, LeafSpec]) -> str:
    """Describe the first difference between a state and a saved one; empty if there is none.

    Args:
        like: A stacked state.
        specs: Descriptions of the saved leaves.
    """
    shapes = {
        name: (tuple(leaf.shape[1:]), np.dtype(leaf.dtype).name)
        for name, leaf in _named(like).items()
    }
    for name, (shape, dtype) in shapes.items():
        if name not in specs:
            return f"leaf {name} of this run is not in it"
        spec = specs[name]
        saved = (spec.shape[1:] if spec.own else spec.shape, spec.dtype)
        if saved != (shape, dtype):
            return f"leaf {name} is {saved[1]}{list(saved[0])} there and {dtype}{list(shape)} here"
    gone = next((name for name in specs if name not in shapes), None)
    return "" if gone is None else f"its leaf {gone} is not in this run"


def stacked(
    like: TrainState,
    leaves: Mapping[str, np.ndarray],
    specs: Mapping[str, LeafSpec],
    world_size: int,
) -> TrainState:
    """Return saved leaves in the structure of a state, with one row per device of the saved run.

    Leaves are host arrays `(world_size, ...)`; typed keys are their raw data.
    """
    rows = [
        leaves[name] if specs[name].own else repeated(leaves[name], world_size)
        for name in names_of(like)
    ]
    return jax.tree.structure(like).unflatten(rows)


def own_names(state: TrainState, common: TrainState) -> set[str]:
    """Return the names of the leaves for which each device has its own value."""
    # `common` omits leaves but copies none, so the remaining ones are the same objects
    same = set(map(id, jax.tree.leaves(common)))
    leaves = zip(names_of(state), jax.tree.leaves(state), strict=True)
    return {name for name, leaf in leaves if id(leaf) not in same}


def repeated(leaf: np.ndarray, world_size: int) -> np.ndarray:
    """Repeat the host array of one device as rows for several devices."""
    # a view: `put` copies one row at a time
    return np.broadcast_to(leaf, (world_size, *leaf.shape))


def put(like: TrainState, rows: TrainState, fleet: Fleet) -> TrainState:
    """Place rows of host arrays, `(world_size, ...)`, on this process's devices like a state."""
    places = list(zip(fleet.job.ranks, fleet.devices, strict=True))

    def place(leaf: StackedArray, array: np.ndarray) -> StackedArray:
        if isinstance(leaf, LeadArray):
            (device,) = leaf.row.devices()
            row = jax.device_put(np.array(array[0])[None], device)
            return with_type_of(leaf, LeadArray(row, fleet.world_size))
        # copied: the CPU backend aliases host memory
        shards = [jax.device_put(np.array(array[rank])[None], device) for rank, device in places]
        return with_type_of(leaf, fleet.stack(shards))

    return jax.tree.map(place, like, rows)


def _named(state: TrainState) -> dict[str, Any]:
    """Return the leaves by name; typed keys as their raw data."""
    return dict(zip(names_of(state), map(raw, jax.tree.leaves(state)), strict=True))
