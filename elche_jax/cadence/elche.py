"""ElChe: the slowest device sets the pace, faster devices do more in the same time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elche_jax import _check as check
from elche_jax.cadence.apportion import densest
from elche_jax.cadence.base import MAX_TOTAL, Verdict, WindowReport
from elche_jax.cadence.estimate import as_array, update_ms
from elche_jax.cadence.hint import SpeedHint, checked_hint, hinted_speeds, speeds_of_kinds
from elche_jax.cadence.proportional import (
    COUNT_CEILING,
    ElCheState,
    Proportional,
    limited,
    nudged,
    round_up,
    whole,
)


@dataclass(frozen=True)
class ElChe(Proportional[ElCheState]):
    """Cadence for devices of different speeds: counts proportional to speed.

    The slowest device runs ``anchor`` microbatches between two synchronisations and a
    device ``r`` times as fast runs ``r * anchor``, so that all finish together. After every
    window, with ``ms`` the smoothed time per microbatch (see
    `elche_jax.cadence.estimate.update_ms`)::

        overhead = sync_ms / max(wall_ms)
        overhead > target      anchor = ceil(anchor * overhead / target)
        overhead < target / 2  anchor = max(anchor - max(1, floor(anchor / 10)), min_anchor)
        counts[d] = floor(window_ms / ms[d])

    with ``min_anchor = min(anchor, max_anchor)`` of this config. A raised anchor stays within
    ``[min_anchor, max_anchor]``. ``window_ms`` is ``anchor * max(ms)``, or the end of the next
    microbatch of a faster device, whichever gives the most microbatches per time (see
    `elche_jax.cadence.apportion.densest`). A count changes only if the change exceeds 10 % of
    it, except in the update that calibrates.

    The verdict *hold growth* keeps the anchor from rising. *Nudge down* lowers it to at most
    ``max(1, ceil(anchor * factor))``, which may be below ``min_anchor``. While the overhead asks
    for more, the anchor then rises by 1 with every stable window: a jump back would only cause
    the next *nudge down*.

    Until every device has been measured, the counts keep the proportions of `init` and
    change only with the anchor.

    With one device there is nothing to balance and nothing to exchange: every window is one
    microbatch, so that the same script runs on one device. Under an outer optimizer, which
    steps once per window, a window is ``anchor`` microbatches.

    Attributes:
        anchor: Count of the slowest device at the start, at least 1.
        overhead_target: Share of a window that synchronisation may take, in
            ``[0.01, 0.50]``.
        max_anchor: Largest anchor, at least 1; enforced from the first update on.
        max_batch_diff: Largest change of a count in one update after calibration, at
            least 1, or ``None`` for no bound.
        speed_hint: Known speeds, or ``None``. Either ``(slow_rank, ratio)``: the device
            ``slow_rank`` is the slowest and all others are ``ratio >= 1`` times as fast.
            Or one relative speed per device, above 0, larger is faster. Or, in a training step,
            one per kind of device: ``{"cpu": 1, "NVIDIA H200": 40}``. A **tuple of two that
            starts with an int** is always ``(slow_rank, ratio)``; write the speeds of
            two devices as a list or with a float first: ``(1, 2.3)`` says that device 1 is
            the slow one, ``[1, 2.3]`` and ``(1.0, 2.3)`` that device 1 is the fast one.
        rests: Whether devices of a kind may rest while the others are faster without them, see
            `Rest`. Used only with devices in several lanes.

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
        >>> ElChe(anchor=4).init(1).counts
        (1,)

        Synchronising takes 30 % of a window where the target is 10 %: the anchor triples,
        unless a guard holds it.

        >>> from elche_jax.cadence import HOLD_GROWTH
        >>> cadence = ElChe(anchor=10, overhead_target=0.1)
        >>> report = WindowReport((100.0, 50.0), (10, 10), sync_ms=30.0)
        >>> cadence.update(cadence.init(2), report).counts
        (30, 60)
        >>> cadence.update(cadence.init(2), report, HOLD_GROWTH).counts
        (10, 20)
    """

    state_type = ElCheState

    anchor: int = field(default=10, metadata={"low": 1, "high": MAX_TOTAL})
    overhead_target: float = field(default=0.10, metadata={"low": 0.01, "high": 0.5})
    max_anchor: int = field(default=200, metadata={"low": 1, "high": MAX_TOTAL})
    max_batch_diff: int | None = field(default=None, metadata={"low": 1, "high": MAX_TOTAL})
    speed_hint: SpeedHint | None = None
    rests: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check.instance("ElChe", "rests", self.rests, bool)
        object.__setattr__(self, "speed_hint", checked_hint("ElChe", self.speed_hint))

    def for_kinds(self, kinds: Sequence[str]) -> "ElChe":
        if not isinstance(self.speed_hint, Mapping):
            return self
        return replace(self, speed_hint=speeds_of_kinds("ElChe", self.speed_hint, kinds))

    @property
    def min_anchor(self) -> int:
        """The smallest anchor that the overhead rule sets."""
        return min(self.anchor, self.max_anchor)

    def _first(self, world_size: int) -> ElCheState:
        if world_size == 1:
            return ElCheState(1, (1,), (None,), False)
        speeds = hinted_speeds("ElChe.init", self.speed_hint, world_size)
        counts = whole(densest(self.anchor, min(speeds) / as_array(speeds)))
        return ElCheState(self.anchor, counts, (None,) * world_size, False)

    def _next(self, state: ElCheState, report: WindowReport, verdict: Verdict) -> ElCheState:
        if len(state.counts) == 1:
            return state
        anchor, ceiling = limited(state, self._wanted(state.anchor, report), verdict)
        after = self.recount(state, anchor, update_ms(state.ms_per_batch, report))
        return replace(after, ceiling=ceiling)

    def nudge_anchor_down(self, state: ElCheState, factor: float = 0.5) -> ElCheState:
        """Return the state with the anchor multiplied by ``factor``, rounded up.

        Args:
            state: The current state; it is not modified.
            factor: In ``(0, 1]``. The anchor stays at least 1.

        Returns:
            The state with the new anchor, from which it rises as after *nudge down*, and
            counts that follow it, subject to the same dead zone and ``max_batch_diff`` as in
            `update`.

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
        if len(state.counts) == 1:
            return state
        anchor = nudged(state.anchor, factor)
        after = self.recount(state, anchor, as_array(state.ms_per_batch))
        return replace(after, ceiling=anchor)

    def check_state(self, state: ElCheState) -> None:
        """Check that the anchor of a stored state is at most ``max_anchor`` or ``anchor``.

        Args:
            state: The state.

        Raises:
            ValueError: If it is larger than both.

        Examples:
            >>> ElChe().check_state(ElChe().init(2))
        """
        if state.anchor > max(self.max_anchor, self.anchor):
            rule = f"have an anchor of at most max_anchor ({self.max_anchor})"
            todo = "Start without the stored state."
            where = "ElChe.check_state"
            raise ValueError(check.message(where, "state", rule, state.anchor, todo))

    def _wanted(self, anchor: int, report: WindowReport) -> int:
        """Return the anchor that the overhead asks for."""
        wall_ms = max(report.wall_ms)
        # without a time the overhead counts as on target, which leaves the anchor as it is
        overhead = report.sync_ms / wall_ms if wall_ms > 0 else self.overhead_target
        if overhead > self.overhead_target:
            raised = min(anchor * overhead / self.overhead_target, COUNT_CEILING)
            anchor = max(round_up(raised), self.min_anchor)
        elif overhead < self.overhead_target / 2 and anchor > self.min_anchor:
            # A tenth less raises the overhead by a ninth: it stays below the target. With one less
            # per window, 190 long windows would follow a brief disturbance of the exchange.
            anchor = max(anchor - max(1, anchor // 10), self.min_anchor)
        return min(anchor, self.max_anchor)
