"""FixedTotal: a constant global batch size, in the best integer split."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from elche_jax.cadence.apportion import split
from elche_jax.cadence.base import ConstantTotal, State, Verdict, WindowReport
from elche_jax.cadence.estimate import (
    FloatArray,
    Times,
    as_array,
    as_times,
    measured_ms,
    update_ms,
)

MIN_GAIN = 0.02
"""Share of a window's time that another split must save to replace the current one."""

SUDDEN = 2.0
"""Ratio of a time to its estimate, or the other way round, above which it may be a pause."""


@dataclass(frozen=True)
class FixedTotalState(State):
    """State of `FixedTotal`: plain numbers.

    Attributes:
        counts: Microbatches per device in the next window; a device may have 0.
        ms_per_batch: Smoothed milliseconds per microbatch of each device, ``None``
            if it was never measured.
    """

    counts: tuple[int, ...]
    ms_per_batch: Times


@dataclass(frozen=True)
class FixedTotal(ConstantTotal[FixedTotalState]):
    """Cadence with a constant number of microbatches per window.

    Hyper-parameters mean the same on any machine, as the global batch size does not depend
    on the devices. The split minimises ``max(counts * ms_per_batch)`` over the integers,
    exactly (see `elche_jax.cadence.apportion.apportion`), with times smoothed as in
    `elche_jax.cadence.estimate.update_ms`.

    - The current split stays unless another one ends the window more than 2 % sooner, so
      that noise does not move counts back and forth.
    - The split also stays until every device has been measured. If an unmeasured device
      has no microbatch in it (``total`` is below the number of devices), the next window
      gives one to each of as many unmeasured devices as possible, the lower ranks first,
      and the rest to the measured ones. All devices are thus measured after
      ``ceil(devices / total)`` windows.
    - A device too slow for any microbatch keeps its last estimate; after `recalibrate` it
      is tried again. So it keeps one microbatch as long as its times are more than twice its
      estimate, or less than half of it: a single pause is no reason to leave it without work.
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
        ms = update_ms(state.ms_per_batch, report)
        unknown = np.isnan(ms)
        if unknown.any():
            counts = self._probe(now, ms, unknown)
        else:
            counts = self._keeping(now, split(self.total, ms), ms, self._sudden(state, report))
            # the first split by measured times replaces a guess, however little it gains
            first = None in state.ms_per_batch
            gained = (counts * ms).max() < (1 - MIN_GAIN) * (now * ms).max()
            if not (first or gained):
                counts = now
        return FixedTotalState(tuple(counts.tolist()), as_times(ms))

    def _sudden(self, state: FixedTotalState, report: WindowReport) -> NDArray[np.bool_]:
        """Return which devices took a time that their estimates do not explain."""
        old, new = as_array(state.ms_per_batch), measured_ms(report)
        # false where one of them is not known
        return (new > SUDDEN * old) | (old > SUDDEN * new)

    def _keeping(
        self,
        now: NDArray[np.int64],
        counts: NDArray[np.int64],
        ms: FloatArray,
        sudden: NDArray[np.bool_],
    ) -> NDArray[np.int64]:
        """Return the split with one microbatch for devices that would lose their last ones."""
        kept = sudden & (now > 0) & (counts == 0)
        if not kept.any():
            return counts
        counts = kept.astype(np.int64)
        counts[~kept] = split(self.total - int(kept.sum()), ms[~kept])
        return counts

    def _probe(
        self, now: NDArray[np.int64], ms: FloatArray, unknown: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """Return the split to run until every device has been measured."""
        known = ~unknown
        # with work in the plan, and yet not measured: the end of the data cut the window short
        if (now[unknown] > 0).all() or not known.any():
            return now
        counts = np.zeros_like(now)
        counts[np.flatnonzero(unknown)[: self.total]] = 1
        counts[known] = split(self.total - int(counts.sum()), ms[known])
        return counts

    def without(self, state: FixedTotalState, ranks: Collection[int]) -> FixedTotalState:
        """Return the state for the devices that are left, which share out the same total.

        Args:
            state: The current state; it is not modified.
            ranks: Ranks of the devices that are lost, not all of them.

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
