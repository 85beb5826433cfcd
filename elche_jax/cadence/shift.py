"""Shift: detects lasting changes in the devices' speeds.

The smoothed estimate corrects at most 0.8 of its error per window, and less the closer it
gets, so after a threefold slow-down the last few percent take many windows. A deviation in
several consecutive windows that exceeds the usual variation of the device's times is not noise:
it is then better to forget the estimates (a cadence's ``recalibrate``) and measure again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from elche_jax import _check as check
from elche_jax.cadence.estimate import FloatArray, as_array
from elche_jax.cadence.state import State


@dataclass(frozen=True)
class ShiftState(State):
    """State of `Shift`.

    Attributes:
        runs: For each device, the number of consecutive windows that deviated in the same
            direction: positive if slower than expected, negative if faster, 0 if as expected.
        deviations: For each device, its smoothed relative deviation; empty before the first
            window.
    """

    runs: tuple[int, ...]
    # states saved before deviations were kept get the default, see `State`
    deviations: tuple[float, ...] = field(default=(), metadata={"low": 0})


MOST_NOISE = 0.5
"""Relative deviation beyond which a window deviates, however much a device's times vary."""

SMOOTHING = 0.1
"""Weight of a window in the smoothed deviation."""


@dataclass(frozen=True)
class Shift(check.CheckedFields):
    """Detector of lasting changes in the devices' speeds.

    A device deviates in a window if ``|measured - expected| > limit * expected``, where ``limit``
    is ``threshold`` or, if its times vary more, ``noise`` times its smoothed deviation, at most
    0.5. ``confirm`` consecutive deviations of one device in the same direction are a shift.

    Attributes:
        threshold: Smallest relative deviation that counts, above 0.
        confirm: Number of consecutive deviations that make a shift, at least 1.
        noise: Multiple of the smoothed deviation that counts as noise, at least 0; with 0,
            ``threshold`` alone decides.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range.

    Examples:
        >>> detector = Shift(threshold=0.10, confirm=2)
        >>> state = detector.init(2)
        >>> state, shifted = detector.update(state, (10.0, 10.0), (30.0, 10.0))
        >>> state.runs, shifted
        ((1, 0), False)
        >>> state, shifted = detector.update(state, (26.0, 10.0), (30.0, 10.0))
        >>> state.runs, shifted
        ((0, 0), True)
    """

    threshold: float = field(default=0.10, metadata={"above": 0})
    # Not 1: a single odd window, as after a pause, must not discard good estimates.
    confirm: int = field(default=2, metadata={"low": 1})
    noise: float = field(default=3.0, metadata={"low": 0})

    def init(self, world_size: int) -> ShiftState:
        """Return the state before the first window.

        Args:
            world_size: Number of devices, at least 1.

        Returns:
            The state.

        Raises:
            TypeError: If ``world_size`` is not an integer.
            ValueError: If it is below 1.

        Examples:
            >>> Shift().init(3).runs
            (0, 0, 0)
        """
        return ShiftState((0,) * check.integer("Shift.init", "world_size", world_size, low=1))

    def update(
        self,
        state: ShiftState,
        expected_ms: Sequence[float | None] | FloatArray,
        measured_ms: Sequence[float | None] | FloatArray,
    ) -> tuple[ShiftState, bool]:
        """Return the state after one more window, and whether there was a shift.

        Args:
            state: The current state; it is not modified.
            expected_ms: Estimated milliseconds per microbatch of each device, **without**
                this window, above 0. ``None`` (or NaN, in an array) if there is no estimate.
            measured_ms: Measured milliseconds per microbatch, above 0; ``None`` (or NaN) if
                the device was not measured. A device with either of them missing keeps its
                run.

        Returns:
            The next state, with all runs 0 after a shift; and ``True`` if a device has
            reached ``confirm``.

        Raises:
            TypeError: If an entry is not a number.
            ValueError: If an argument is for a different number of devices, or a time is
                infinite or not above 0.

        Examples:
            >>> detector = Shift(confirm=1)
            >>> detector.update(detector.init(2), (10.0, None), (8.0, 5.0))[1]
            True
        """
        size = len(state.runs)
        expected = _checked_times("expected_ms", expected_ms, size)
        measured = _checked_times("measured_ms", measured_ms, size)
        off = measured - expected
        usual = np.array(state.deviations or (0.0,) * size)
        limit = np.maximum(self.threshold, np.minimum(self.noise * usual, MOST_NOISE))
        # -1, 0 or 1; NaN becomes 0, as every comparison with it is false
        side = np.where(np.abs(off) > limit * expected, np.sign(off), 0)
        # bounded, so that a change of speed hardly counts as noise
        away = np.minimum(np.abs(off) / expected, limit)
        usual = np.where(np.isnan(off), usual, usual + SMOOTHING * (away - usual))
        old = np.array(state.runs)
        runs = np.where(np.isnan(off), old, np.where(old * side > 0, old + side, side))
        shifted = bool((np.abs(runs) >= self.confirm).any())
        if shifted:
            # For all devices, as a shift of one makes the cadence forget the estimates of all.
            runs = np.zeros_like(runs)
        return ShiftState(tuple(runs.astype(np.int64).tolist()), tuple(usual.tolist())), shifted

    def first_deviations(self, state: ShiftState) -> tuple[bool, ...]:
        """Return which devices deviated in the last window only, with otherwise steady times.

        Args:
            state: The state after the window.

        Examples:
            >>> detector = Shift()
            >>> state, _ = detector.update(detector.init(2), (10.0, 10.0), (50.0, 10.0))
            >>> detector.first_deviations(state)
            (True, False)
            >>> detector.first_deviations(detector.update(state, (10.0, 10.0), (10.0, 10.0))[0])
            (False, False)
        """
        usual = state.deviations or (0.0,) * len(state.runs)
        return tuple(
            abs(run) == 1 and self.noise * deviation <= self.threshold
            for run, deviation in zip(state.runs, usual, strict=True)
        )


def _checked_times(
    argument: str, times: Sequence[float | None] | FloatArray, size: int
) -> FloatArray:
    where = "Shift.update"
    entries = check.items(where, argument, times, "numbers or None")
    for rank, entry in enumerate(entries):
        # Floats are skipped: they may be NaN here, which `check.real` rejects.
        if entry is not None and type(entry) is not float:
            check.real(where, f"{argument}[{rank}]", entry)
    array = as_array(entries)
    check.per_device(where, argument, len(array), size)
    # NaN means unknown, and neither comparison holds for it.
    bad = np.flatnonzero((array <= 0) | (array == np.inf))
    if len(bad):
        rule = "be above 0 and finite"
        name = f"{argument}[{bad[0]}]"
        raise ValueError(check.message(where, name, rule, float(array[bad[0]])))
    return array
