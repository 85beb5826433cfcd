"""What cadences share whose rule sets the anchor, while the speeds set the counts."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar, cast

from elche_jax import _check as check
from elche_jax.cadence.base import STABLE, Cadence, State, Verdict, WindowReport, check_update
from elche_jax.cadence.elche import ElCheState, forget, recount, refit, round_up
from elche_jax.cadence.estimate import update_ms


@dataclass(frozen=True)
class AnchorRuleState(ElCheState):
    """State of a cadence whose rule sets the anchor: plain numbers.

    Attributes:
        windows: Windows so far, those included whose times are not known.
        steps: Sum over them of the largest count: what an optimizer's counter of steps
            shows where the devices' counters are joined by their maximum.
        ceiling: What a guard has nudged the anchor down to; rises by 1 with every stable
            window until the rule is below it. 0: nothing.
    """

    windows: int = 0
    steps: int = 0
    ceiling: int = 0


S = TypeVar("S", bound=AnchorRuleState)


class AnchorRule(Cadence[AnchorRuleState]):
    """Base of `QSR`, `PostLocal` and `AdaComm`.

    In every update, with ``ms`` the smoothed times (see `elche_jax.cadence.estimate`),

        counts[d] = max(1, round(anchor * max(ms) / ms[d]))

    as in `ElChe`, with the anchor that the rule wants. A verdict *hold growth* forbids a
    raise; *nudge down* multiplies the anchor in force by its factor (rounded up, at least
    1) and holds the rule below that; with every stable window by one less.
    """

    state_type: ClassVar[type[State] | None] = AnchorRuleState
    estimates: ClassVar[bool] = True
    counts_windows: ClassVar[bool] = True

    @abstractmethod
    def wanted(self, state: AnchorRuleState) -> int:
        """Return the anchor of the next window, at least 1.

        Args:
            state: The state with the last window counted in.
        """

    def init(self, world_size: int) -> AnchorRuleState:
        """Return the state before the first window: all counts at the anchor.

        Args:
            world_size: Number of devices, at least 1.

        Returns:
            The state.

        Raises:
            TypeError: If ``world_size`` is not an integer.
            ValueError: If it is below 1.

        Examples:
            >>> from elche_jax.cadence import PostLocal
            >>> PostLocal(switch=100, anchor=8).init(2).counts
            (1, 1)
        """
        where = f"{type(self).__name__}.init"
        world_size = check.integer(where, "world_size", world_size, low=1)
        unknown = (None,) * world_size
        state = cast(type[AnchorRuleState], self.state_type)(1, (1,) * world_size, unknown, False)
        anchor = self.wanted(state)
        return replace(state, anchor=anchor, counts=(anchor,) * world_size)

    def update(
        self, state: AnchorRuleState, report: WindowReport, verdict: Verdict = STABLE
    ) -> AnchorRuleState:
        """Return the state for the next window.

        Args:
            state: The state so far; it stays as it is.
            report: What was measured.
            verdict: The guard's opinion.

        Returns:
            The state with new estimates, anchor and counts.

        Raises:
            TypeError: If the report or the verdict is of another class.
            ValueError: If the report has another number of devices.

        Examples:
            >>> from elche_jax.cadence import PostLocal
            >>> rule = PostLocal(switch=1, anchor=8)
            >>> report = WindowReport((6.0, 2.0), (1, 1), 0.1)
            >>> rule.update(rule.init(2), report).counts
            (8, 24)
        """
        check_update(f"{type(self).__name__}.update", len(state.counts), report, verdict)
        state = self.counted(state, report)
        anchor, ceiling = self._obeying(state, self.wanted(state), verdict)
        ms = update_ms(state.ms_per_batch, report)
        return replace(recount(state, anchor, ms), ceiling=ceiling)

    def counted(self, state: AnchorRuleState, report: WindowReport) -> AnchorRuleState:
        """Return the state with a window counted in."""
        steps = state.steps + max(report.counts)
        return replace(state, windows=state.windows + 1, steps=steps)

    def recalibrate(self, state: S) -> S:
        """Return the state with the time estimates forgotten; the counts stay.

        Args:
            state: The state so far; it stays as it is.

        Returns:
            The uncalibrated state.

        Examples:
            >>> from elche_jax.cadence import PostLocal
            >>> rule = PostLocal(switch=1, anchor=8)
            >>> rule.recalibrate(rule.init(2)).ms_per_batch
            (None, None)
        """
        return forget(state)

    def replan(self, state: S) -> S:
        """Return the state with counts that fit the estimates, without dead zone.

        Args:
            state: The state so far; it stays as it is.

        Returns:
            The state; the same where a device was never measured.

        Examples:
            >>> from elche_jax.cadence import PostLocal
            >>> rule = PostLocal(switch=1, anchor=8)
            >>> rule.replan(rule.init(2)) == rule.init(2)
            True
        """
        return refit(state)

    def anchor_of(self, state: AnchorRuleState) -> int:
        """Return the anchor of a state."""
        return state.anchor

    def _obeying(self, state: AnchorRuleState, wanted: int, verdict: Verdict) -> tuple[int, int]:
        """The anchor and the ceiling under a verdict."""
        if verdict.action == "nudge_down":
            lower = max(1, round_up(state.anchor * cast(float, verdict.factor)))
            return min(lower, wanted), min(lower, wanted)
        if verdict.action == "hold_growth":
            return min(wanted, state.anchor), state.ceiling
        ceiling = state.ceiling + 1 if state.ceiling else 0
        if not ceiling or wanted <= ceiling:
            return wanted, 0
        return ceiling, ceiling
