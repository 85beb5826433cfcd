"""FixedTotal: a constant global batch size, in the best integer split."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from elche_jax.cadence.apportion import split
from elche_jax.cadence.base import ConstantTotal, Verdict, WindowReport
from elche_jax.cadence.estimate import (
    FloatArray,
    Times,
    as_array,
    as_times,
    measured_ms,
    update_ms,
)
from elche_jax.cadence.state import State

MIN_GAIN = 0.02
"""Share of a window's time that a different split must save to replace the current one."""

SUDDEN = 2.0
"""Ratio of a time to its estimate, or of the estimate to it, above which it may be a pause."""

# in reports; a long run has one for six windows, so this is about 100 windows
RETRY_AFTER = 16
"""Reports without work after which a device is tried again, and again whenever they double."""

TRY_COST = 0.05
"""Largest share of the time since a device last had work that a microbatch to try it may take."""


@dataclass(frozen=True)
class FixedTotalState(State):
    """State of `FixedTotal`: plain numbers.

    Attributes:
        counts: Microbatches per device in the next window; a device may have 0.
        ms_per_batch: Smoothed milliseconds per microbatch of each device, ``None``
            if it was never measured.
        idle: For each device, the number of reports for which it has been too slow for any
            microbatch; empty if no device is.
    """

    counts: tuple[int, ...]
    ms_per_batch: Times
    # states saved before devices were tried again get the default, see `State`
    idle: tuple[int, ...] = field(default=(), kw_only=True, metadata={"low": 0})


@dataclass(frozen=True)
class FixedTotal(ConstantTotal[FixedTotalState]):
    """Cadence with a constant number of microbatches per window.

    Hyper-parameters mean the same on any machine, as the global batch size does not depend
    on the devices. The split minimises ``max(counts * ms_per_batch)`` over the integers,
    exactly (see `elche_jax.cadence.apportion.apportion`), with times smoothed as in
    `elche_jax.cadence.estimate.update_ms`.

    - The current split stays unless a different one ends the window more than 2 % sooner, so
      that noise does not move counts back and forth.
    - The split also stays until every device has been measured. If an unmeasured device
      has no microbatch in it (``total`` is below the number of devices), the next window
      gives one to each of as many unmeasured devices as possible, the lower ranks first,
      and the rest to the measured ones. All devices are thus measured after
      ``ceil(devices / total)`` windows.
    - A device too slow for any microbatch keeps its last estimate. It is tried again, with one
      microbatch, after 16, 32, 64, ... reports, if the microbatch takes at most 5 % of the time
      since the device last had work, and after `recalibrate`.
    - A device that would lose all its work keeps one microbatch as long as its times are more
      than twice its estimate, or less than half of it: a single pause is no reason to leave it
      without work.
    - Verdicts have no effect, as the total is constant.

    Attributes:
        total: Microbatches per window over all devices, at least 1.

    Raises:
        TypeError: If ``total`` is not an integer.
        ValueError: If ``total`` is below 1.

    Examples:
        >>> cadence = FixedTotal(8)
        >>> state = cadence.init(3)
        >>> state.counts
        (3, 3, 2)
        >>> report = WindowReport((30.0, 30.0, 10.0), state.counts, sync_ms=1.0)
        >>> cadence.update(state, report).counts
        (2, 2, 4)
    """

    state_type = FixedTotalState
    estimates = True

    def _first(self, world_size: int) -> FixedTotalState:
        """Return counts that differ by at most 1, the larger ones at the lower ranks."""
        each, more = divmod(self.total, world_size)
        counts = tuple(each + (rank < more) for rank in range(world_size))
        return FixedTotalState(counts, (None,) * world_size)

    def _next(
        self, state: FixedTotalState, report: WindowReport, verdict: Verdict
    ) -> FixedTotalState:
        now = np.array(state.counts, dtype=np.int64)
        idle = np.array(state.idle or (0,) * len(now), dtype=np.int64)
        ms, measured = update_ms(state.ms_per_batch, report), measured_ms(report)
        # the last estimate of a device that is tried again is outdated
        ms = np.where((idle > 0) & ~np.isnan(measured), measured, ms)
        unknown = np.isnan(ms)
        if unknown.any():
            # planned work, but no measurement: the end of the data cut the window short
            planned = (now[unknown] > 0).all() or unknown.all()
            counts = now if planned else self._with_one(now, unknown, ms)
        else:
            counts = split(self.total, ms)
            # a time that the estimate does not explain; false where either is unknown
            old = as_array(state.ms_per_batch)
            sudden = (measured > SUDDEN * old) | (old > SUDDEN * measured)
            # the old estimate of a device that is tried again explains nothing
            kept = sudden & (idle == 0) & (now > 0) & (counts == 0)
            counts = self._with_one(counts, kept, ms)
            # the first split by measured times replaces a guess, however little it gains
            first = None in state.ms_per_batch
            gained = (counts * ms).max() < (1 - MIN_GAIN) * (now * ms).max()
            if not (first or gained):
                counts = now
            idle = np.where(counts > 0, 0, idle + 1)
            due, later = self._due(idle, ms, float((counts * ms).max()))
            idle -= later
            if due.any():
                counts = self._with_one(counts, due | (kept & (counts > 0)), ms)
        own = tuple(idle.tolist()) if idle.any() else ()
        return FixedTotalState(tuple(counts.tolist()), as_times(ms), idle=own)

    def _due(
        self, idle: NDArray[np.int64], ms: FloatArray, window_ms: float
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which devices are tried now, and which at the next report, for lack of work."""
        due = (idle >= RETRY_AFTER) & (idle & (idle - 1) == 0)
        due &= ms <= TRY_COST * idle * window_ms
        later = np.zeros_like(due)
        later[np.flatnonzero(due)[self.total :]] = True
        return due & ~later, later

    def _with_one(
        self, counts: NDArray[np.int64], who: NDArray[np.bool_], ms: FloatArray
    ) -> NDArray[np.int64]:
        """Return the split with one microbatch for each of these devices, up to the total."""
        if not who.any():
            return counts
        counts = np.zeros_like(counts)
        counts[np.flatnonzero(who)[: self.total]] = 1
        if not who.all():
            counts[~who] = split(self.total - int(counts.sum()), ms[~who])
        return counts

    def without(self, state: FixedTotalState, ranks: Collection[int]) -> FixedTotalState:
        """Return the state for the remaining devices, which share the same total.

        Args:
            state: The current state; it is not modified.
            ranks: Ranks of the lost devices; at least one device remains.

        Examples:
            >>> FixedTotal(6).without(FixedTotalState((1, 2, 3), (6.0, 3.0, 2.0)), [2]).counts
            (2, 4)
        """
        left = super().without(state, ranks)
        if None in left.ms_per_batch:
            return self.init(len(left.counts))
        return replace(left, counts=tuple(split(self.total, as_array(left.ms_per_batch)).tolist()))

    def recalibrate(self, state: FixedTotalState) -> FixedTotalState:
        """Return the state with the time estimates forgotten; the counts stay.

        Args:
            state: The current state; it is not modified.

        Returns:
            The state as if no device had been measured.

        Examples:
            >>> state = FixedTotalState((1, 3), (3.0, 1.0))
            >>> FixedTotal(4).recalibrate(state).ms_per_batch
            (None, None)
        """
        return replace(state, ms_per_batch=(None,) * len(state.counts))
