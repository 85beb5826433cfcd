"""FixedTotal: a constant global batch in the best integer split."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from elche_jax import _check as check
from elche_jax.cadence.apportion import MAX_TOTAL, split
from elche_jax.cadence.base import (
    STABLE,
    Cadence,
    State,
    Verdict,
    WindowReport,
    check_total,
    check_update,
)
from elche_jax.cadence.estimate import FloatArray, Times, as_times, update_ms

MIN_GAIN = 0.02


@dataclass(frozen=True)
class FixedTotalState(State):
    """State of `FixedTotal`: plain numbers.

    Attributes:
        counts: Microbatches per device in the next window; a device may have 0.
        ms_per_batch: Smoothed milliseconds per microbatch of each device, ``None``
            where never measured.
    """

    counts: tuple[int, ...]
    ms_per_batch: Times


@dataclass(frozen=True)
class FixedTotal(Cadence[FixedTotalState]):
    """Cadence with a constant number of microbatches per window.

    Hyper-parameters mean the same on any machine, since the global batch does not
    depend on the devices. The split minimises ``max(counts * ms_per_batch)`` over
    the integers, exactly (see `elche_jax.cadence.apportion.apportion`), with times
    smoothed as in `elche_jax.cadence.estimate.update_ms`.

    - The split in use stays unless another one ends the window more than 2 %
      sooner, so that noise does not move counts to and fro.
    - While a device was never measured, the split stays as it is. If a device has
      no microbatch there (``total`` is below the number of devices), the next
      window gives one to each of as many unmeasured devices as possible, the lower
      ranks first, and the rest to the measured ones; thus all are known after
      ``ceil(devices / total)`` windows.
    - A device too slow for any microbatch keeps its last estimate; `recalibrate`
      makes it tried again.
    - Verdicts change nothing: the total is constant.

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

    state_type: ClassVar[type[State] | None] = FixedTotalState
    estimates: ClassVar[bool] = True

    total: int

    def __post_init__(self) -> None:
        total = check.integer("FixedTotal", "total", self.total, low=1, high=MAX_TOTAL)
        object.__setattr__(self, "total", total)

    def init(self, world_size: int) -> FixedTotalState:
        """Return the state before the first window: as equal as possible.

        Args:
            world_size: Number of devices, at least 1.

        Returns:
            A state whose counts differ by at most 1, the lower ranks first.

        Raises:
            TypeError: If ``world_size`` is not an integer.
            ValueError: If it is below 1.

        Examples:
            >>> FixedTotal(2).init(3).counts
            (1, 1, 0)
        """
        where = "FixedTotal.init"
        world_size = check.integer(where, "world_size", world_size, low=1)
        each, more = divmod(self.total, world_size)
        counts = tuple(each + (rank < more) for rank in range(world_size))
        return FixedTotalState(counts, (None,) * world_size)

    def update(
        self, state: FixedTotalState, report: WindowReport, verdict: Verdict = STABLE
    ) -> FixedTotalState:
        """Return the state for the next window.

        Args:
            state: The state so far; it stays as it is.
            report: What was measured.
            verdict: The guard's opinion; checked, not used.

        Returns:
            The state with new estimates and the best split for them.

        Raises:
            TypeError: If the report or the verdict is of another class.
            ValueError: If the report has another number of devices.

        Examples:
            >>> cadence = FixedTotal(4)
            >>> report = WindowReport((6.0, 2.0), (2, 2), sync_ms=0.1)
            >>> cadence.update(cadence.init(2), report).counts
            (1, 3)
        """
        check_update("FixedTotal.update", len(state.counts), report, verdict)
        now = np.array(state.counts, dtype=np.int64)
        ms = update_ms(state.ms_per_batch, report)
        unknown = np.isnan(ms)
        if unknown.any():
            counts = self._probe(now, ms, unknown)
        else:
            counts = split(self.total, ms)
            first = None in state.ms_per_batch
            gained = (counts * ms).max() < (1 - MIN_GAIN) * (now * ms).max()
            if not (first or gained):
                counts = now
        return FixedTotalState(tuple(counts.tolist()), as_times(ms))

    def _probe(
        self, now: NDArray[np.int64], ms: FloatArray, unknown: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """Return the split to run while some device was never measured."""
        known = ~unknown
        if (now[unknown] > 0).all() or not known.any():
            return now
        counts = np.zeros_like(now)
        counts[np.flatnonzero(unknown)[: self.total]] = 1
        counts[known] = split(self.total - int(counts.sum()), ms[known])
        return counts

    def check_state(self, state: FixedTotalState) -> None:
        """Check that a stored state is of a cadence with this total.

        Args:
            state: The state.

        Raises:
            ValueError: If it is not.

        Examples:
            >>> FixedTotal(8).check_state(FixedTotal(8).init(2))
        """
        check_total("FixedTotal.check_state", state.counts, self.total)

    def recalibrate(self, state: FixedTotalState) -> FixedTotalState:
        """Return the state with the time estimates forgotten; the counts stay.

        Args:
            state: The state so far; it stays as it is.

        Returns:
            The state as if no device had been measured.

        Examples:
            >>> state = FixedTotalState((1, 3), (3.0, 1.0))
            >>> FixedTotal(4).recalibrate(state).ms_per_batch
            (None, None)
        """
        return replace(state, ms_per_batch=(None,) * len(state.counts))
