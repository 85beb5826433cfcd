"""Base of the cadences in which a rule sets the anchor and measured speeds set the counts."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from elche_jax.cadence.base import Verdict, WindowReport
from elche_jax.cadence.estimate import update_ms
from elche_jax.cadence.proportional import ElCheState, Proportional, limited


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


S = TypeVar("S", bound=AnchorRuleState)


class AnchorRule(Proportional[S]):
    """Base of `QSR`, `PostLocal` and `AdaComm`: counts as in `ElChe`, the anchor from a rule.

    The verdict *hold growth* keeps the anchor from rising. *Nudge down* multiplies the current
    anchor by its factor (rounded up, at least 1), and the result bounds the rule from above;
    every stable window raises the bound by 1.
    """

    state_type = AnchorRuleState
    counts_windows = True

    @abstractmethod
    def target_anchor(self, state: S) -> int:
        """Return the anchor of the next window, at least 1.

        Args:
            state: The state, with the last window added.
        """

    def count_window(self, state: S, report: WindowReport) -> S:
        """Return the state with the window added to its counters."""
        steps = state.steps + max(report.counts)
        return replace(state, windows=state.windows + 1, steps=steps)

    def _first(self, world_size: int) -> S:
        unknown = (None,) * world_size
        # the rule needs a state, for its counters, before there is an anchor
        state = cast(type[S], self.state_type)(1, (1,) * world_size, unknown, False)
        anchor = self.target_anchor(state)
        return replace(state, anchor=anchor, counts=(anchor,) * world_size)

    def _next(self, state: S, report: WindowReport, verdict: Verdict) -> S:
        state = self.count_window(state, report)
        anchor, ceiling = limited(state, self.target_anchor(state), verdict)
        ms = update_ms(state.ms_per_batch, report)
        return replace(self.recount(state, anchor, ms), ceiling=ceiling)
