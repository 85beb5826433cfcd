"""What the cadences share whose rule sets the anchor, while the speeds set the counts."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar, cast

from elche_jax.cadence.base import State, Verdict, WindowReport
from elche_jax.cadence.estimate import update_ms
from elche_jax.cadence.proportional import ElCheState, Proportional, nudged


@dataclass(frozen=True)
class AnchorRuleState(ElCheState):
    """State of a cadence whose rule sets the anchor: plain numbers.

    Attributes:
        windows: Windows so far, those included whose times are not known.
        steps: Sum over them of the largest count: what an optimizer's counter of steps
            shows when the devices' counters are joined by their maximum.
        ceiling: What a guard has nudged the anchor down to; rises by 1 with every stable
            window until the rule is below it. 0: nothing.
    """

    windows: int = 0
    steps: int = 0
    ceiling: int = 0


S = TypeVar("S", bound=AnchorRuleState)


class AnchorRule(Proportional[S]):
    """Base of `QSR`, `PostLocal` and `AdaComm`: the counts of `ElChe`, with the anchor of a rule.

    A verdict *hold growth* forbids a raise; *nudge down* multiplies the anchor in force by
    its factor (rounded up, at least 1) and holds the rule below that; with every stable
    window by one less.
    """

    state_type: ClassVar[type[State] | None] = AnchorRuleState
    counts_windows: ClassVar[bool] = True

    @abstractmethod
    def wanted(self, state: S) -> int:
        """Return the anchor of the next window, at least 1.

        Args:
            state: The state with the last window counted in.
        """

    def counted(self, state: S, report: WindowReport) -> S:
        """Return the state with a window counted in."""
        steps = state.steps + max(report.counts)
        return replace(state, windows=state.windows + 1, steps=steps)

    def _first(self, world_size: int) -> S:
        unknown = (None,) * world_size
        state = cast(type[S], self.state_type)(1, (1,) * world_size, unknown, False)
        anchor = self.wanted(state)
        return replace(state, anchor=anchor, counts=(anchor,) * world_size)

    def _next(self, state: S, report: WindowReport, verdict: Verdict) -> S:
        state = self.counted(state, report)
        anchor, ceiling = self._obeying(state, self.wanted(state), verdict)
        ms = update_ms(state.ms_per_batch, report)
        return replace(self.recount(state, anchor, ms), ceiling=ceiling)

    def _obeying(self, state: S, wanted: int, verdict: Verdict) -> tuple[int, int]:
        """The anchor and the ceiling under a verdict."""
        if verdict.action == "nudge_down":
            lower = min(nudged(state.anchor, cast(float, verdict.factor)), wanted)
            return lower, lower
        if verdict.action == "hold_growth":
            return min(wanted, state.anchor), state.ceiling
        ceiling = state.ceiling + 1 if state.ceiling else 0
        if not ceiling or wanted <= ceiling:
            return wanted, 0
        return ceiling, ceiling
