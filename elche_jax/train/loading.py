"""From data as the user gives them to a feed, and what is kept of them on the devices."""

import operator
from collections.abc import Sequence
from typing import Any

import jax

from elche_jax.data.place import Placement, Placer, check_fits, choose_placement
from elche_jax.data.source import ArraySource, IterableSource, Source, as_source
from elche_jax.engine.devices import free_bytes
from elche_jax.engine.mapped import stacked_sharding
from elche_jax.engine.replicas import replicate
from elche_jax.train.feed import DataPlan, Feed, Programs
from elche_jax.train.spec import check_window_bytes

PyTree = Any

WINDOW_BYTES = 256 * 2**20
"""Default limit of what the data of one program call may take on a device."""


class Loading:
    """Opens data for one set of devices; keeps the last resident data there.

    Args:
        devices: The devices, in rank order.
    """

    def __init__(self, devices: Sequence[jax.Device]):
        self._devices = tuple(devices)
        self._resident: tuple[list[jax.Array], PyTree] | None = None
        self._unread: IterableSource | None = None

    def source(self, data: Any) -> Source:
        """The data; an iterator that an earlier call took one item of goes on with that."""
        unread, self._unread = self._unread, None
        if unread is not None and unread.iterable is data and unread.peeked:
            source: Source = unread
        else:
            source = as_source(data)
        if isinstance(source, IterableSource) and source.once:
            self._unread = source
        return source

    def release(self) -> None:
        """Lets go of the data: those on the devices, and an iterator that was read."""
        self._resident = None
        if self._unread is not None and not self._unread.peeked:
            self._unread = None

    def placement(
        self, placement: str, source: Source, window_bytes: int, microbatch: PyTree
    ) -> Placement:
        """Where the data shall live; checks that a call may hold some of them."""
        where = choose_placement(placement, source, self._devices, free_bytes(self._devices))
        if placement == "auto" and self._kept(source) is not None:
            where = "resident"  # the copy that is there already is not counted twice
        if where == "stream":
            check_window_bytes(window_bytes, microbatch)
        return where

    def feed(
        self, plan: DataPlan, programs: Programs, adaptive: bool, largest_count: int | None
    ) -> Feed:
        """A feed of these data for these programs."""
        placer = Placer(self._devices, stacked_sharding(self._devices))
        resident = self._place(plan.source) if plan.placement == "resident" else None
        # one microbatch needs no loop, and windows of one device seldom grow
        several = len(self._devices) > 1
        return Feed(plan, placer, programs, resident, adaptive and several, several, largest_count)

    def _place(self, source: Source) -> PyTree:
        assert isinstance(source, ArraySource)  # choose_placement has checked it
        kept = self._kept(source)
        if kept is not None:
            return kept
        self._resident = None  # gives the old copy's memory back first
        leaves = jax.tree.leaves(source.tree)
        for leaf in leaves:
            check_fits(leaf)
        placed = replicate(source.tree, self._devices)
        if all(isinstance(leaf, jax.Array) for leaf in leaves):  # they cannot change
            self._resident = (leaves, placed)
        return placed

    def _kept(self, source: Source) -> PyTree | None:
        """The copy of these data that an earlier call put on the devices."""
        if self._resident is None or not isinstance(source, ArraySource):
            return None
        (known, placed), leaves = self._resident, jax.tree.leaves(source.tree)
        same = len(known) == len(leaves) and all(map(operator.is_, known, leaves))
        return placed if same else None
