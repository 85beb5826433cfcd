"""Opens the user's data: checks, placement, and the copies kept on the devices."""

import operator
from typing import Any

import jax

from elche_jax import _check as check
from elche_jax._processes import noting_errors
from elche_jax.cadence import Cadence
from elche_jax.data.source import ArraySource, IterableSource, Source, as_source
from elche_jax.engine.devices import free_bytes
from elche_jax.engine.lane import Fleet
from elche_jax.engine.loss import check_mask_key
from elche_jax.engine.place import Placer, check_fits, choose_placement
from elche_jax.engine.replicas import replicate_over
from elche_jax.engine.runner import FleetRunner
from elche_jax.train.feed import Feed
from elche_jax.train.spec import DataPlan, check_batch_size, microbatch_shapes

PyTree = Any

WINDOW_BYTES = 256 * 2**20
"""Default limit in bytes of the data of one program call on a device."""


class Loading:
    """Opens data for one set of devices, and keeps the last resident data on them.

    Args:
        fleet: The devices.
    """

    def __init__(self, fleet: Fleet):
        self._fleet = fleet
        self._resident: tuple[PyTree, PyTree] | None = None
        self._unread: IterableSource | None = None

    @noting_errors
    def open(
        self,
        where: str,
        data: Any,
        batch_size: int | None,
        *,
        mask_key: str | None,
        placement: str,
        window_bytes: int,
        epochs: int | None = 1,
        seed: int = 0,
        shuffle: bool = False,
        drop_last: bool = False,
    ) -> DataPlan:
        """Check the data and how to read them, see `TrainStep.windows`.

        Args:
            where: The function the user called, for messages.
            data: The user's data.
            batch_size: Examples per microbatch; None for an iterable.
            mask_key: Name of the mask of valid examples in a microbatch, or None.
            placement: `"stream"`, `"resident"` or `"auto"`.
            window_bytes: Limit in bytes of the data of one program call on a device.
            epochs: Number of epochs; None for no end.
            seed: Seed of the order.
            shuffle: False keeps the order of the data.
            drop_last: Leave out the last microbatch if it is smaller.
        """
        seed = check.integer(where, "seed", seed, low=0, high=2**64 - 1)
        window_bytes = check.integer(where, "window_bytes", window_bytes, low=1)
        if epochs is not None:
            epochs = check.integer(where, "epochs", epochs, low=1)
        check.instance(where, "shuffle", shuffle, bool)
        check.instance(where, "drop_last", drop_last, bool)
        check.instance(where, "mask_key", mask_key, str | None, "be a string", brief=True)
        source = self._source(data)
        if isinstance(source, IterableSource):
            source.several = epochs != 1
        size = check_batch_size(source, batch_size, epochs, drop_last)
        shapes = microbatch_shapes(source, size)
        check_mask_key(mask_key, shapes)
        place = choose_placement(placement, source, free_bytes(self._fleet.devices))
        if placement == "auto" and self._kept(source) is not None:
            place = "resident"  # the free memory excludes the copy that is already there
        plan = DataPlan(
            source, size, epochs, seed, shuffle, drop_last, mask_key, place, window_bytes, shapes
        )
        if place == "stream" and window_bytes < plan.microbatch_bytes:
            raise ValueError(
                f"data: window_bytes must hold at least one microbatch ({plan.microbatch_bytes} "
                f"bytes), got {window_bytes}. Raise it, or lower batch_size."
            )
        return plan

    def feed(self, plan: DataPlan, runner: FleetRunner, cadence: Cadence[Any]) -> Feed:
        """Return a feed of these data for the programs of a runner."""
        resident = self._place(plan.source) if plan.placement == "resident" else None
        return Feed(plan, Placer(self._fleet), runner, resident, cadence)

    def release(self) -> None:
        """Drop the data on the devices, and an iterator that an epoch has begun to read."""
        self._resident = None
        if self._unread is not None and not self._unread.peeked:
            self._unread = None

    def _source(self, data: Any) -> Source:
        """Return the data as a source.

        The shapes of an iterator are read from its first item. If the call fails after that,
        the next call with the same iterator must still get this item.
        """
        unread, self._unread = self._unread, None
        if unread is not None and unread.iterable is data and unread.peeked:
            source: Source = unread
        else:
            source = as_source(data)
        if isinstance(source, IterableSource) and source.once:
            self._unread = source
        return source

    def _place(self, source: Source) -> PyTree:
        assert isinstance(source, ArraySource)  # choose_placement has checked it
        kept = self._kept(source)
        if kept is not None:
            return kept
        self._resident = None  # frees the old copy before the new one is made
        leaves = jax.tree.leaves(source.tree)
        for leaf in leaves:
            check_fits(leaf)
        placed = replicate_over(self._fleet, source.tree)
        # NumPy arrays may change in place between two calls; JAX arrays cannot
        if all(isinstance(leaf, jax.Array) for leaf in leaves):
            self._resident = (source.tree, placed)
        return placed

    def _kept(self, source: Source) -> PyTree | None:
        """Return the copy of these data that an earlier call put on the devices."""
        if self._resident is None or not isinstance(source, ArraySource):
            return None
        tree, placed = self._resident
        known, leaves = jax.tree.leaves(tree), jax.tree.leaves(source.tree)
        same = jax.tree.structure(tree) == jax.tree.structure(source.tree)  # the names, too
        # identity suffices, as only JAX arrays are kept, which cannot change
        return placed if same and all(map(operator.is_, known, leaves)) else None
