"""Counts in proportion to speed: the base classes of `ElChe` and of the rules for the anchor."""

import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

import numpy as np

from elche_jax.cadence.apportion import densest
from elche_jax.cadence.base import MAX_TOTAL, CheckedCadence, Verdict, WindowReport
from elche_jax.cadence.estimate import FloatArray, Times, as_array, as_times, update_ms
from elche_jax.cadence.state import State

DEAD_ZONE_PERCENT = 10
"""Percent of a count that a change must exceed, once calibrated."""

COUNT_CEILING = float(MAX_TOTAL)
"""Largest count: only a broken clock asks for more, and counts must fit an int64."""


@dataclass(frozen=True)
class ElCheState(State):
    """State of `ElChe`: plain numbers.

    Attributes:
        anchor: Count of the slowest device, at least 1.
        counts: Microbatches per device in the next window, at least 1 each.
        ms_per_batch: Smoothed milliseconds per microbatch of each device, ``None``
            if it was never measured.
        calibrated: Whether the counts follow measured times: true from the first update in
            which every device has an estimate.
        ceiling: Upper bound on the anchor after a *nudge down*, or 0 for no bound. It rises
            by 1 with every stable window and is lifted once the rule asks for a smaller anchor,
            or for a larger one within the bound.
    """

    anchor: int
    counts: tuple[int, ...]
    ms_per_batch: Times
    calibrated: bool
    # states of `ElChe` saved before it had a ceiling get the default, see `State`
    ceiling: int = field(default=0, kw_only=True, metadata={"low": 0})

    @property
    def total(self) -> int:
        """Microbatches in the next window, over all devices."""
        return sum(self.counts)

    @property
    def anchor_wall_ms(self) -> float | None:
        """Expected milliseconds of the slowest device in a window: ``anchor * ms``.

        ``None`` until a device has been measured.
        """
        known = [ms for ms in self.ms_per_batch if ms is not None]
        return self.anchor * max(known) if known else None


S = TypeVar("S", bound=ElCheState)


def round_up(value: float) -> int:
    """Round up, ignoring the rounding error of a product such as ``100 * 0.07``.

    Examples:
        >>> round_up(100 * 0.07), round_up(7.1)
        (7, 8)
    """
    return math.ceil(value * (1.0 - 1e-12))


def nudged(anchor: int, factor: float) -> int:
    """Return the anchor after a *nudge down*: multiplied, rounded up, at least 1.

    Examples:
        >>> nudged(10, 0.25)
        3
    """
    return max(1, round_up(anchor * factor))


def limited(state: ElCheState, wanted: int, verdict: Verdict) -> tuple[int, int]:
    """Return the anchor and the ceiling that a verdict allows.

    Args:
        state: The current state.
        wanted: The anchor that the cadence's rule asks for.
        verdict: The guard's verdict.
    """
    if verdict.action == "nudge_down":
        lower = min(nudged(state.anchor, cast(float, verdict.factor)), wanted)
        return lower, lower
    if verdict.action == "hold_growth":
        return min(wanted, state.anchor), state.ceiling
    ceiling = state.ceiling + 1 if state.ceiling else 0
    if not ceiling or wanted <= ceiling:
        # on target: the bound stays, as the next window may ask for much more
        return wanted, ceiling if wanted == state.anchor else 0
    return ceiling, ceiling


def fitting(state: ElCheState, anchor: int, ms: FloatArray) -> FloatArray:
    """Return the counts that fit an anchor and times, as whole numbers of at least 1.

    Args:
        state: The current state; its counts keep their proportions if a device was never
            measured.
        anchor: Count of the slowest device.
        ms: Milliseconds per microbatch, NaN for a device that was never measured.
    """
    if np.isnan(ms).any():
        ideal = np.array(state.counts, dtype=np.float64) * (anchor / state.anchor)
        # Half is rounded up; `rint` would round it to even.
        return np.minimum(np.maximum(np.floor(ideal + 0.5), 1.0), COUNT_CEILING)
    return densest(anchor, ms)


def whole(counts: FloatArray) -> tuple[int, ...]:
    """Return an array of counts as a tuple of integers."""
    return tuple(counts.astype(np.int64).tolist())


class Proportional(CheckedCadence[S]):
    """Base of the cadences with an anchor, whose counts are proportional to speed.

    With ``ms`` the smoothed times per microbatch (see `elche_jax.cadence.estimate`),

        counts[d] = floor(window_ms / ms[d])

    with ``window_ms`` as in `ElChe`.

    Attributes:
        max_batch_diff: Largest change of a count in one update after calibration, or
            ``None`` for no bound.
    """

    estimates = True
    max_batch_diff: int | None = None

    def recount(
        self, state: S, anchor: int, ms: FloatArray, dead_zone: int = DEAD_ZONE_PERCENT
    ) -> S:
        """Return the state with the given anchor and times, and counts that follow from them.

        Args:
            state: The current state.
            anchor: Count of the slowest device, at least 1.
            ms: Milliseconds per microbatch. If a device was never measured (NaN), the counts
                keep their proportions.
            dead_zone: Percent of a count that a change must exceed, once calibrated.

        Examples:
            >>> import numpy as np
            >>> from elche_jax.cadence import ElChe
            >>> ElChe().recount(ElChe().init(2), 10, np.array([30.0, 10.0])).counts
            (10, 30)
        """
        now, ideal = np.array(state.counts, dtype=np.float64), fitting(state, anchor, ms)
        if state.calibrated:
            change = ideal - now
            # In whole numbers, so that a change of exactly 10 % does not depend on rounding.
            moves = np.abs(change) * 100 > now * dead_zone
            if self.max_batch_diff is not None:
                most = float(self.max_batch_diff)
                change = np.minimum(np.maximum(change, -most), most)
            ideal = np.where(moves, now + change, now)
        times, known = as_times(ms), not np.isnan(ms).any()
        counts = whole(ideal)
        return replace(state, anchor=anchor, counts=counts, ms_per_batch=times, calibrated=known)

    def aim(self, state: S) -> tuple[int, ...]:
        """Return the counts that fit the anchor, without the bound ``max_batch_diff``.

        Examples:
            >>> from elche_jax.cadence import ElChe
            >>> cadence = ElChe(max_batch_diff=2)
            >>> cadence.aim(ElCheState(50, (10, 20), (1.0, 0.5), True))
            (50, 100)
        """
        if self.max_batch_diff is None or not state.calibrated:
            return state.counts
        return whole(fitting(state, state.anchor, as_array(state.ms_per_batch)))

    def recalibrate(self, state: S) -> S:
        """Return the state with the time estimates forgotten; anchor and counts stay.

        The next report is then treated like the first one: without smoothing, dead zone and
        ``max_batch_diff``.

        Examples:
            >>> from elche_jax.cadence import ElChe
            >>> ElChe().recalibrate(ElCheState(10, (10, 30), (3.0, 1.0), True)).ms_per_batch
            (None, None)
        """
        return replace(state, ms_per_batch=(None,) * len(state.counts), calibrated=False)

    def replan(self, state: S) -> S:
        """Return the state with counts that fit the estimates, without a dead zone.

        Estimates and anchor stay, and ``max_batch_diff`` applies. If a device was never
        measured, the state is returned unchanged.

        Examples:
            >>> from elche_jax.cadence import ElChe
            >>> ElChe().replan(ElCheState(10, (10, 28), (3.0, 1.0), True)).counts
            (10, 30)
        """
        if not state.calibrated:
            return state
        return self.recount(state, state.anchor, as_array(state.ms_per_batch), dead_zone=0)

    def anchor_of(self, state: S) -> int:
        """Return the anchor of a state."""
        return state.anchor


@dataclass(frozen=True)
class AnchorRuleState(ElCheState):
    """State of a cadence whose rule sets the anchor: plain numbers.

    Attributes:
        windows: Windows so far, including those whose times are unknown.
        steps: Sum of the largest counts of these windows: the optimizer's step counter, if
            the devices' counters are merged by their maximum.
    """

    windows: int = 0
    steps: int = 0


A = TypeVar("A", bound=AnchorRuleState)


class AnchorRule(Proportional[A]):
    """Base of `QSR`, `PostLocal` and `AdaComm`: counts as in `ElChe`, the anchor from a rule.

    The verdict *hold growth* keeps the anchor from rising. *Nudge down* multiplies the current
    anchor by its factor (rounded up, at least 1), and the result bounds the rule from above;
    every stable window raises the bound by 1.
    """

    state_type = AnchorRuleState
    counts_windows = True

    @abstractmethod
    def target_anchor(self, state: A) -> int:
        """Return the anchor of the next window, at least 1.

        Args:
            state: The state, with the last window added.
        """

    def count_window(self, state: A, report: WindowReport) -> A:
        """Return the state with the window added to its counters."""
        steps = state.steps + max(report.counts)
        return replace(state, windows=state.windows + 1, steps=steps)

    def _first(self, world_size: int) -> A:
        unknown = (None,) * world_size
        # the rule needs a state, for its counters, before there is an anchor
        state = cast(type[A], self.state_type)(1, (1,) * world_size, unknown, False)
        anchor = self.target_anchor(state)
        return replace(state, anchor=anchor, counts=(anchor,) * world_size)

    def _next(self, state: A, report: WindowReport, verdict: Verdict) -> A:
        state = self.count_window(state, report)
        anchor, ceiling = limited(state, self.target_anchor(state), verdict)
        ms = update_ms(state.ms_per_batch, report)
        return replace(self.recount(state, anchor, ms), ceiling=ceiling)
