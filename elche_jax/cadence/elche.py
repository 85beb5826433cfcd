"""ElChe: the slowest device sets the pace, faster ones do more in the same time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar, cast

import numpy as np

from elche_jax import _check as check
from elche_jax.cadence.base import (
    STABLE,
    Cadence,
    State,
    Verdict,
    WindowReport,
    check_update,
)
from elche_jax.cadence.estimate import (
    FloatArray,
    Times,
    as_array,
    as_times,
    update_ms,
)
from elche_jax.cadence.hint import checked_hint, hinted_speeds

DEAD_ZONE_PERCENT = 10

# A count beyond this is a broken clock, not a speed; it must still fit an int64.
_COUNT_CEILING = float(2**53)


@dataclass(frozen=True)
class ElCheState(State):
    """State of `ElChe`: plain numbers.

    Attributes:
        anchor: Count of the slowest device, at least 1.
        counts: Microbatches per device in the next window, at least 1 each.
        ms_per_batch: Smoothed milliseconds per microbatch of each device, ``None``
            where never measured.
        calibrated: Whether the counts follow measured times: true from the first
            update after which every device has an estimate.
    """

    anchor: int
    counts: tuple[int, ...]
    ms_per_batch: Times
    calibrated: bool

    @property
    def total(self) -> int:
        """Microbatches in the next window, over all devices."""
        return sum(self.counts)

    @property
    def anchor_wall_ms(self) -> float | None:
        """Expected milliseconds of a window, ``anchor * ms`` of the slowest device.

        ``None`` until some device was measured.
        """
        known = [ms for ms in self.ms_per_batch if ms is not None]
        return self.anchor * max(known) if known else None


def round_up(value: float) -> int:
    """Round up, but not for the rounding error of a product (100 * 0.07)."""
    return math.ceil(value * (1.0 - 1e-12))


def _round(value: float) -> int:
    """Round half away from zero (of positive numbers)."""
    return math.floor(value + 0.5)


S = TypeVar("S", bound=ElCheState)


def recount(
    state: S,
    anchor: int,
    ms: FloatArray,
    max_batch_diff: int | None = None,
    dead_zone: int = DEAD_ZONE_PERCENT,
) -> S:
    """Return the state with this anchor and these times, and counts that follow them.

    Args:
        state: The state so far; it stays as it is.
        anchor: Count of the slowest device, at least 1.
        ms: Milliseconds per microbatch, NaN where never measured; then counts keep
            their proportions.
        max_batch_diff: Largest change of a count, or ``None``.
        dead_zone: Percent of a count that a change must exceed.

    Examples:
        >>> import numpy as np
        >>> recount(ElChe().init(2), 10, np.array([30.0, 10.0])).counts
        (10, 30)
    """
    now = np.array(state.counts, dtype=np.float64)
    slow_ms = ms.max()  # NaN as soon as one device was never measured
    known = not math.isnan(slow_ms)
    with np.errstate(over="ignore"):
        ideal = anchor * slow_ms / ms if known else now * (anchor / state.anchor)
    ideal = np.minimum(np.maximum(np.floor(ideal + 0.5), 1.0), _COUNT_CEILING)
    if state.calibrated:
        change = ideal - now
        # In whole numbers, so that exactly 10 % does not depend on rounding.
        moves = np.abs(change) * 100 > now * dead_zone
        if max_batch_diff is not None:
            most = float(max_batch_diff)
            change = np.minimum(np.maximum(change, -most), most)
        ideal = np.where(moves, now + change, now)
    counts = tuple(ideal.astype(np.int64).tolist())
    return replace(state, anchor=anchor, counts=counts, ms_per_batch=as_times(ms), calibrated=known)


def refit(state: S, max_batch_diff: int | None = None) -> S:
    """Return the state with counts that fit its estimates, without dead zone.

    Args:
        state: The state so far; it stays as it is, and is returned where a device was
            never measured.
        max_batch_diff: Largest change of a count, or ``None``.

    Examples:
        >>> refit(ElCheState(10, (10, 28), (3.0, 1.0), True)).counts
        (10, 30)
    """
    if not state.calibrated:
        return state
    ms = as_array(state.ms_per_batch)
    return recount(state, state.anchor, ms, max_batch_diff, dead_zone=0)


def forget(state: S) -> S:
    """Return the state as if no device had been measured; anchor and counts stay.

    Examples:
        >>> forget(ElCheState(10, (10, 28), (3.0, 1.0), True)).ms_per_batch
        (None, None)
    """
    return replace(state, ms_per_batch=(None,) * len(state.counts), calibrated=False)


@dataclass(frozen=True)
class ElChe(Cadence[ElCheState]):
    """Cadence for devices of different speed: counts proportional to speed.

    The slowest device runs ``anchor`` microbatches between two synchronisations, a
    device ``r`` times as fast runs ``r * anchor``, so all end together. After every
    window, with ``ms`` the smoothed time per microbatch (see
    `elche_jax.cadence.estimate.update_ms`)::

        overhead = sync_ms / max(wall_ms)
        overhead > target      anchor = ceil(anchor * overhead / target)
        overhead < target / 2  anchor = anchor - 1, while above min_anchor
        counts[d] = max(1, round(anchor * max(ms) / ms[d]))

    with ``min_anchor = min(anchor, max_anchor)`` of this config. The raised anchor
    is kept within ``[min_anchor, max_anchor]``. A count moves only if the change
    exceeds 10 % of it, except in the update that calibrates.

    A verdict *hold growth* forbids the raise. *Nudge down* takes the place of the
    overhead rule: ``anchor = max(1, ceil(anchor * factor))``, also below
    ``min_anchor``, where it stays until the overhead exceeds the target again.

    Until every device was measured, the counts keep the proportions of `init` and
    move only with the anchor.

    With one device there is nothing to balance and no exchange to pay for: every window
    is one microbatch, so that a script runs unchanged on one; under an outer optimizer,
    which needs windows to step after, it is ``anchor`` microbatches.

    Attributes:
        anchor: Count of the slowest device at the start, at least 1.
        overhead_target: Share of a window that synchronising may cost, in
            ``[0.01, 0.50]``.
        max_anchor: Ceiling of the anchor, at least 1; it binds from the first
            update on.
        max_batch_diff: Largest change of a count in one update once calibrated, at
            least 1, or ``None`` for no bound.
        speed_hint: What is known about the speeds beforehand, or ``None``. Either
            ``(slow_rank, ratio)``: the device ``slow_rank`` is the slowest and all
            others are ``ratio >= 1`` times as fast. Or one relative speed per
            device, above 0, larger is faster. A **tuple of two that starts with an
            int** is always ``(slow_rank, ratio)``; write the speeds of two devices
            as a list or with a float first: ``(1, 2.3)`` says that device 1 is the
            slow one, ``[1, 2.3]`` and ``(1.0, 2.3)`` that device 1 is the fast one.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range.

    Examples:
        >>> from elche_jax.cadence import WindowReport
        >>> cadence = ElChe(anchor=10)
        >>> state = cadence.init(2)
        >>> state.counts
        (10, 10)
        >>> report = WindowReport(wall_ms=(300.0, 100.0), counts=(10, 10), sync_ms=5)
        >>> state = cadence.update(state, report)
        >>> state.counts, state.ms_per_batch
        ((10, 30), (30.0, 10.0))
        >>> ElChe(anchor=10, speed_hint=(1, 2.3)).init(3).counts
        (23, 10, 23)
        >>> ElChe(anchor=10, speed_hint=[1, 2.3]).init(2).counts
        (10, 23)
    """

    state_type: ClassVar[type[State] | None] = ElCheState
    estimates: ClassVar[bool] = True

    anchor: int = 10
    overhead_target: float = 0.10
    max_anchor: int = 200
    max_batch_diff: int | None = None
    speed_hint: Sequence[float] | None = None

    def __post_init__(self) -> None:
        checked = {
            "anchor": check.integer("ElChe", "anchor", self.anchor, low=1),
            "overhead_target": check.real(
                "ElChe", "overhead_target", self.overhead_target, low=0.01, high=0.5
            ),
            "max_anchor": check.integer("ElChe", "max_anchor", self.max_anchor, low=1),
            "max_batch_diff": self.max_batch_diff,
            "speed_hint": self.speed_hint,
        }
        if self.max_batch_diff is not None:
            checked["max_batch_diff"] = check.integer(
                "ElChe", "max_batch_diff", self.max_batch_diff, low=1
            )
        if self.speed_hint is not None:
            checked["speed_hint"] = checked_hint("ElChe", self.speed_hint)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def min_anchor(self) -> int:
        """The anchor the overhead rule does not go below."""
        return min(self.anchor, self.max_anchor)

    def init(self, world_size: int) -> ElCheState:
        """Return the state before the first window.

        Args:
            world_size: Number of devices, at least 1.

        Returns:
            A state with every count at the anchor, or as ``speed_hint`` says.

        Raises:
            TypeError: If ``world_size`` is not an integer.
            ValueError: If it is below 1 or does not fit ``speed_hint``.

        Examples:
            >>> ElChe(anchor=4, speed_hint=(1.0, 2.0, 1.5)).init(3).counts
            (4, 8, 6)
            >>> ElChe(anchor=4).init(1).counts
            (1,)
        """
        where = "ElChe.init"
        world_size = check.integer(where, "world_size", world_size, low=1)
        if world_size == 1:
            return ElCheState(1, (1,), (None,), False)
        counts = (self.anchor,) * world_size
        if self.speed_hint is not None:
            speeds = hinted_speeds(where, self.speed_hint, world_size)
            slowest = min(speeds)
            counts = tuple(_round(self.anchor * (speed / slowest)) for speed in speeds)
        return ElCheState(self.anchor, counts, (None,) * world_size, False)

    def update(
        self, state: ElCheState, report: WindowReport, verdict: Verdict = STABLE
    ) -> ElCheState:
        """Return the state for the next window.

        Args:
            state: The state so far; it stays as it is.
            report: What was measured. Its counts are those really run, which may
                differ from the plan.
            verdict: The guard's opinion.

        Returns:
            The state with new estimates, anchor and counts.

        Raises:
            TypeError: If the report or the verdict is of another class.
            ValueError: If the report has another number of devices.

        Examples:
            Synchronising costs 30 % where 10 % are wanted: the anchor triples.

            >>> from elche_jax.cadence import HOLD_GROWTH
            >>> cadence = ElChe(anchor=10, overhead_target=0.1)
            >>> report = WindowReport((100.0, 50.0), (10, 10), sync_ms=30.0)
            >>> cadence.update(cadence.init(2), report).counts
            (30, 60)
            >>> cadence.update(cadence.init(2), report, HOLD_GROWTH).counts
            (10, 20)
        """
        check_update("ElChe.update", len(state.counts), report, verdict)
        if len(state.counts) == 1:
            return state
        anchor = self._next_anchor(state.anchor, report, verdict)
        ms = update_ms(state.ms_per_batch, report)
        return recount(state, anchor, ms, self.max_batch_diff)

    def nudge_anchor_down(self, state: ElCheState, factor: float = 0.5) -> ElCheState:
        """Return the state with the anchor multiplied by ``factor``, rounded up.

        Args:
            state: The state so far; it stays as it is.
            factor: In ``(0, 1]``. The anchor stays at least 1.

        Returns:
            The state with the new anchor, its counts under the same dead zone and
            ``max_batch_diff`` as in `update`.

        Raises:
            TypeError: If ``factor`` is not a number.
            ValueError: If it is out of range.

        Examples:
            >>> cadence = ElChe(anchor=10)
            >>> cadence.nudge_anchor_down(cadence.init(2), 0.5).counts
            (5, 5)
        """
        where = "ElChe.nudge_anchor_down"
        factor = check.real(where, "factor", factor, above=0, high=1)
        anchor = max(1, round_up(state.anchor * factor))
        return recount(state, anchor, as_array(state.ms_per_batch), self.max_batch_diff)

    def recalibrate(self, state: ElCheState) -> ElCheState:
        """Return the state with the time estimates forgotten.

        Anchor and counts stay. The next report is taken as it is, as if it were the
        first, without dead zone and ``max_batch_diff``.

        Args:
            state: The state so far; it stays as it is.

        Returns:
            The uncalibrated state.

        Examples:
            >>> cadence = ElChe()
            >>> state = ElCheState(10, (10, 30), (3.0, 1.0), True)
            >>> cadence.recalibrate(state).ms_per_batch
            (None, None)
        """
        return forget(state)

    def anchor_of(self, state: ElCheState) -> int:
        """Return the anchor of a state."""
        return state.anchor

    def check_state(self, state: ElCheState) -> None:
        """Check that a stored state is of a cadence with these knobs.

        Args:
            state: The state.

        Raises:
            ValueError: If it is not.

        Examples:
            >>> ElChe().check_state(ElChe().init(2))
        """
        if state.anchor > max(self.max_anchor, self.anchor):
            rule = f"have an anchor of at most max_anchor ({self.max_anchor})"
            todo = "Begin without the stored state."
            where = "ElChe.check_state"
            raise ValueError(check.message(where, "state", rule, state.anchor, todo))

    def replan(self, state: ElCheState) -> ElCheState:
        """Return the state with counts that fit the estimates, without dead zone.

        Estimates and anchor stay; ``max_batch_diff`` holds.

        Args:
            state: The state so far; it stays as it is.

        Returns:
            The state with counts ``round(anchor * slow_ms / ms)``; the same where a
            device was never measured.

        Examples:
            >>> state = ElCheState(10, (10, 28), (3.0, 1.0), True)
            >>> ElChe().replan(state).counts
            (10, 30)
        """
        return refit(state, self.max_batch_diff)

    def _next_anchor(self, anchor: int, report: WindowReport, verdict: Verdict) -> int:
        if verdict.action == "nudge_down":
            factor = cast(float, verdict.factor)
            return min(max(1, round_up(anchor * factor)), self.max_anchor)
        wall_ms = max(report.wall_ms)
        overhead = report.sync_ms / wall_ms if wall_ms > 0 else self.overhead_target
        if overhead > self.overhead_target:
            if verdict.action == "stable":
                raised = min(anchor * overhead / self.overhead_target, _COUNT_CEILING)
                anchor = max(round_up(raised), self.min_anchor)
        elif overhead < self.overhead_target / 2 and anchor > self.min_anchor:
            anchor -= 1
        return min(anchor, self.max_anchor)
