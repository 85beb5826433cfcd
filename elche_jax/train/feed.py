"""Loading and placing windows: the data, the layout on the devices, the capacity."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from elche_jax.data.order import Cursor
from elche_jax.data.place import Placement, Placer
from elche_jax.data.reader import IndexedReader, Reader, open_epoch
from elche_jax.data.source import Source
from elche_jax.data.split import capacity_for, piece_lengths, split_window
from elche_jax.engine.fetch import CallArgs, Payload, Pieces, Rows
from elche_jax.engine.lane import Lane
from elche_jax.engine.runner import Call

PyTree = Any

APPROACH = 0.75
"""Share of the largest capacity at which the next one is compiled ahead."""

ROOM = 4
"""How much larger than the first plan the first capacity is, where plans adapt."""


@dataclass(frozen=True)
class DataPlan:
    """How the user wants the data read; checked by `build_train_step(...).windows`.

    Attributes:
        source: The data.
        batch_size: Examples per microbatch.
        seed: Seed of the order.
        shuffle: False keeps the order of the source.
        drop_last: Leave out the last microbatch where it is smaller.
        placement: Where the data lives.
        window_bytes: Bytes that the data of one call may take on a device.
        microbatch: Shapes of one microbatch.
        row_bytes: Bytes that the results of one microbatch take, where they are kept.
    """

    source: Source
    batch_size: int
    seed: int
    shuffle: bool
    drop_last: bool
    placement: Placement
    window_bytes: int
    microbatch: PyTree
    row_bytes: int = 0


class Programs(Protocol):
    """What a feed asks of a runner: which programs are compiled."""

    lane: Lane
    capacities: dict[Hashable, set[int]]

    def ready(self, payload: Payload) -> bool:
        """Whether the program for data of these shapes is compiled."""
        ...

    def prepare(self, payload: Payload) -> None:
        """Compiles it, in background."""
        ...


class Feed:
    """Makes the calls of a window: capacity chosen, data read, placed on the devices.

    Args:
        plan: How the data is read.
        placer: Puts arrays onto the devices.
        programs: Which capacities there are.
        resident: The data set on the devices, leaves `(world_size, examples, ...)`, for
            `placement="resident"`; else None.
        adaptive: Whether counts change, so that a larger capacity pays.
        ahead: Whether larger capacities are compiled before they are needed.
        largest_count: The largest count that will come, where it is known.
    """

    def __init__(
        self,
        plan: DataPlan,
        placer: Placer,
        programs: Programs,
        resident: PyTree,
        adaptive: bool,
        ahead: bool,
        largest_count: int | None,
    ):
        self._plan, self._placer, self._programs = plan, placer, programs
        self._resident, self._adaptive, self._ahead = resident, adaptive, ahead
        self._largest_count = largest_count
        shapes = jax.tree.leaves((plan.microbatch, resident))
        layout = (plan.placement, *((leaf.shape, leaf.dtype) for leaf in shapes))
        self._capacities = programs.capacities.setdefault(layout, set())
        self._largest = self._largest_capacity()
        self.devices: Sequence[jax.Device] = programs.lane.devices
        self.world_size = programs.lane.world_size

    def open_epoch(self, cursor: Cursor) -> Reader:
        """A reader of the cursor's epoch, from its microbatch on."""
        plan = self._plan
        return open_epoch(
            plan.source,
            plan.batch_size,
            seed=plan.seed,
            epoch=cursor.epoch,
            start=cursor.microbatch,
            shuffle=plan.shuffle,
            drop_last=plan.drop_last,
        )

    def load(
        self, counts: tuple[int, ...], first: int, reader: Reader
    ) -> tuple[int, tuple[Call, ...]]:
        """Reads and places the microbatches of a window.

        Args:
            counts: Microbatches per device.
            first: Number of the first one in the epoch.
            reader: The epoch.

        Returns:
            Number of valid examples, and the calls.
        """
        capacity = self.capacity(max(counts))
        totals = sum(counts), self._examples(first, sum(counts), reader)
        calls = []
        for ranges in split_window(counts, capacity):
            payload: Payload
            if self._resident is None:
                spec = self._plan.microbatch
                pieces = self._placer.pieces(reader, first, ranges, capacity, spec)
                payload = Pieces(pieces)
            else:
                assert isinstance(reader, IndexedReader)  # resident data is an array
                index = self._placer.index(reader, first, ranges, capacity)
                payload = Rows(self._resident, index)
            call_args = self._placer.call_args(ranges, first, not calls, reader.partial, totals)
            calls.append(Call(payload, CallArgs(call_args), ranges))
        return totals[1], tuple(calls)

    def capacity(self, count: int) -> int:
        """The capacity for a window whose largest count is this.

        The smallest compiled one that holds it; else the largest compiled one, called
        several times, while a larger is compiled in the background.
        """
        want = min(capacity_for(count), self._largest)
        known = {c for c in self._capacities if c <= self._largest}
        if not known:
            room = self._largest_count or (ROOM * count if self._adaptive else count)
            first = min(capacity_for(room), self._largest)
            self._capacities.add(first)
            return first
        ahead = min(capacity_for(int(count / APPROACH)), self._largest)
        if self._ahead and ahead > max(known):
            self._programs.prepare(self._payload_shape(ahead))
            self._capacities.add(ahead)
        ready = [c for c in known if self._is_ready(c)]
        if not ready:  # the first one is still being compiled by the loop
            return min(known)
        return min((c for c in ready if c >= want), default=max(ready))

    def _is_ready(self, capacity: int) -> bool:
        return self._programs.ready(self._payload_shape(capacity))

    def _largest_capacity(self) -> int:
        leaves = jax.tree.leaves(self._plan.microbatch)
        size = sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
        if self._resident is not None:
            size = 4 * self._plan.batch_size
        size = max(size, self._plan.row_bytes)
        fit = max(1, self._plan.window_bytes // max(1, size))  # rows of numbers may be larger
        return (1 << (fit + 1).bit_length() - 1) - 1

    def _payload_shape(self, capacity: int) -> Payload:
        n = self.world_size
        if self._resident is not None:
            index = jax.ShapeDtypeStruct((n, capacity, self._plan.batch_size), jnp.int32)
            return Rows(self._resident, index)

        def piece(length: int) -> PyTree:
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((n, length, *x.shape), x.dtype),
                self._plan.microbatch,
            )

        return Pieces(tuple(piece(length) for length in piece_lengths(capacity)))

    def _examples(self, first: int, count: int, reader: Reader) -> int:
        total = count * self._plan.batch_size
        partial = reader.partial
        if partial is not None and first <= partial.microbatch < first + count:
            total -= self._plan.batch_size - partial.valid
        return total
