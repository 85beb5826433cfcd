"""Loads the data of windows, and places them on the devices."""

from collections.abc import Sequence
from threading import Event, Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elche_jax import _progress
from elche_jax._settings import settings
from elche_jax.cadence import Cadence
from elche_jax.data.order import Cursor
from elche_jax.data.reader import IndexedReader, Reader, open_epoch
from elche_jax.data.source import IterableSource
from elche_jax.data.split import Range, capacity_for, piece_lengths, split_window
from elche_jax.engine.fetch import CallArgs, Payload, Pieces, Rows
from elche_jax.engine.place import Placer
from elche_jax.engine.runner import Call, FleetRunner
from elche_jax.engine.shapes import stacked
from elche_jax.train.spec import DataPlan

PyTree = Any

APPROACH = 0.75
"""Fill level of the largest capacity at which a larger one is compiled ahead, unless the cadence's
largest count is known and fits."""

# large enough that nothing is compiled while speeds are being found
ROOM = 4
"""Factor by which the first capacity exceeds the first plan's largest count, if plans adapt."""


class Feed:
    """Makes the program calls of a window: chooses a capacity, reads and places the data.

    Attributes:
        fleet: The devices.
        epochs: Number of epochs; None for no end.

    Args:
        plan: How the data are read.
        placer: Puts arrays onto the devices.
        runner: Knows which programs are compiled.
        resident: The data set on the devices, leaves `(world_size, examples, ...)`, for
            `placement="resident"`; else None.
        cadence: Decides the counts.
    """

    def __init__(
        self,
        plan: DataPlan,
        placer: Placer,
        runner: FleetRunner,
        resident: PyTree,
        cadence: Cadence[Any],
    ):
        self._plan, self._placer, self._runner = plan, placer, runner
        self._resident, self._adaptive = resident, cadence.adaptive
        self._largest_count = cadence.largest_count
        # one device: a single microbatch needs no loop, and windows seldom grow
        self._grows = not runner.fleet.alone
        shapes = jax.tree.leaves((plan.microbatch, resident))
        layout = (plan.placement, *((leaf.shape, leaf.dtype) for leaf in shapes))
        # kept by the runner, so that a later call of `windows` does not compile again
        self._capacities = runner.capacities.setdefault((settings(), layout), set())
        self._largest = self._largest_capacity()
        self._shapes: dict[int, Payload] = {}  # of payloads, by capacity
        # after the loss of a process the loop loads a window again, while others are read ahead
        self._lock = Lock()
        self.fleet = runner.fleet
        self.epochs = plan.epochs

    @property
    def rereads(self) -> bool:
        """Whether a window's data can be read a second time."""
        return not isinstance(self._plan.source, IterableSource)

    def open_epoch(self, cursor: Cursor, stop: Event | None = None) -> Reader:
        """Return a reader of the cursor's epoch that starts at its microbatch.

        Args:
            cursor: Where in the data to begin.
            stop: Once set, nothing more is read.
        """
        plan = self._plan
        with _progress.phase("data", cursor.window):
            return open_epoch(plan.source, plan.reading, cursor, stop)

    def load(
        self, counts: tuple[int, ...], first: int, reader: Reader
    ) -> tuple[int, tuple[Call, ...]]:
        """Read and place the microbatches of a window.

        Args:
            counts: Microbatches per device.
            first: Number of the window's first microbatch in the epoch.
            reader: The epoch.

        Returns:
            The number of valid examples, and the program calls.
        """
        with self._lock:
            ranks = self.fleet.job.ranks
            capacity = self.capacity(max(counts[rank] for rank in ranks))
            totals = sum(counts), self._examples(first, sum(counts), reader)
            calls = []
            # each call gets an even share: where a program starts on all devices at once, filling
            # one call after the other made the window 1.4 times as long
            for ranges in split_window(counts, capacity, ranks):
                call_args = self._placer.call_args(ranges, first, not calls, reader.partial, totals)
                payload, placed = self._place(first, ranges, capacity, reader, call_args)
                _ = payload.signature  # computed here and kept, to spare the loop's thread
                calls.append(Call(payload, placed, ranges))
            return totals[1], tuple(calls)

    def _place(
        self, first: int, ranges: Sequence[Range], capacity: int, reader: Reader,
        call_args: np.ndarray,
    ) -> tuple[Payload, CallArgs]:  # fmt: skip
        if self._resident is None:
            spec = self._plan.microbatch
            return self._placer.pieces(reader, first, ranges, capacity, spec, call_args)
        assert isinstance(reader, IndexedReader)  # resident data is an array
        index, placed = self._placer.index(reader, first, ranges, capacity, call_args)
        return Rows(self._resident, index), placed

    def capacity(self, count: int) -> int:
        """Return the capacity for a window with this largest count.

        It is the smallest compiled capacity that holds the count. If there is none, it is the
        largest compiled one, called several times, while a larger one is compiled in the
        background: a resize never waits for a compile.
        """
        want = min(capacity_for(count), self._largest)
        # a copy: an earlier loop may still read ahead, and add to the same set
        known = {c for c in self._capacities.copy() if c <= self._largest}
        if not known:
            factor = ROOM if self._grows and self._adaptive else 1
            # a recording knows its largest window: one capacity serves the whole replay
            room = self._largest_count or factor * count
            first = min(capacity_for(room), self._largest)
            self._capacities.add(first)
            return first
        soon, most = int(count / APPROACH), self._largest_count
        if most is not None and count <= most:
            soon = min(soon, most)
        ahead = min(capacity_for(soon), self._largest)
        if self._grows and ahead > max(known):
            self._runner.prepare(self._payload_shape(ahead))
            self._capacities.add(ahead)
        ready = [c for c in known if self._runner.ready(self._payload_shape(c))]
        if not ready:  # the loop is still compiling the first one
            return min(known)
        return min((c for c in ready if c >= want), default=max(ready))

    def _largest_capacity(self) -> int:
        # resident data send one int32 index per example
        index_bytes = 4 * self._plan.batch_size
        size = self._plan.microbatch_bytes if self._resident is None else index_bytes
        # outputs that a call keeps may be larger than its data
        size = max(1, size, self._plan.row_bytes)
        # at least 1: only streamed data were checked against the limit
        fit = max(1, self._plan.window_bytes // size)
        return (1 << (fit + 1).bit_length() - 1) - 1  # a capacity is 2**k - 1

    def _payload_shape(self, capacity: int) -> Payload:
        """Return the shapes of a payload, cached because every window needs them."""
        if capacity not in self._shapes:
            self._shapes[capacity] = self._new_payload_shape(capacity)
        return self._shapes[capacity]

    def _new_payload_shape(self, capacity: int) -> Payload:
        n, microbatch = self.fleet.world_size, self._plan.microbatch
        if self._resident is not None:
            index = jax.ShapeDtypeStruct((n, capacity, self._plan.batch_size), jnp.int32)
            return Rows(self._resident, index)
        pieces = tuple(stacked(microbatch, length) for length in piece_lengths(capacity))
        return Pieces(stacked(pieces, n))

    def _examples(self, first: int, count: int, reader: Reader) -> int:
        total = count * self._plan.batch_size
        partial = reader.partial
        if partial is not None and first <= partial.microbatch < first + count:
            total -= self._plan.batch_size - partial.valid
        return total
