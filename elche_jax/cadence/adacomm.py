"""AdaComm: windows get shorter as the loss falls."""

import math
from dataclasses import dataclass, field, replace

from elche_jax import _check as check
from elche_jax.cadence.base import MAX_TOTAL, WindowReport
from elche_jax.cadence.proportional import AnchorRule, AnchorRuleState, round_up


@dataclass(frozen=True)
class AdaCommState(AnchorRuleState):
    """State of `AdaComm`: plain numbers.

    Attributes:
        first_loss: Mean loss of the first interval, ``None`` until it is over.
        sum_loss: Sum of the losses in the current interval.
        losses: Number of losses in that sum.
        rule: The anchor chosen by the rule, 0 before the first interval is over.
    """

    first_loss: float | None = None
    sum_loss: float = 0.0
    losses: int = 0
    rule: int = 0


@dataclass(frozen=True)
class AdaComm(AnchorRule[AdaCommState]):
    """Adaptive communication (Wang and Joshi 2019, arXiv:1810.08313).

    After every ``interval`` windows the anchor ``current`` is updated. With ``F`` the mean
    loss of the last interval, ``F0`` that of the first interval, and ``anchor`` the initial
    anchor,

        new     = ceil(sqrt(F / F0) * anchor)
        current = new                               if new < current
        current = max(1, ceil(shrink * current))    otherwise

    Infrequent synchronisation is fast early in training, but costs accuracy towards the end.

    Attributes:
        anchor: Count of the slowest device at the start, at least 1.
        interval: Windows between two changes of the anchor, at least 1.
        shrink: Factor applied to the anchor if the loss does not fall enough, in ``(0, 1]``.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range; in ``update``, if the report has no
            loss, or a negative one.

    Examples:
        >>> rule = AdaComm(anchor=16, interval=1)
        >>> state = rule.init(2)
        >>> for loss in (4.0, 1.0):
        ...     state = rule.update(state, WindowReport((9.0, 9.0), state.counts, 0.1, loss))
        >>> state.counts
        (8, 8)
    """

    state_type = AdaCommState
    uses_loss = True

    anchor: int = field(default=16, metadata={"low": 1, "high": MAX_TOTAL})
    interval: int = field(default=10, metadata={"low": 1})
    shrink: float = field(default=0.5, metadata={"above": 0, "high": 1})

    def target_anchor(self, state: AdaCommState) -> int:
        """Return the anchor of the current interval."""
        return state.rule or self.anchor

    def count_window(self, state: AdaCommState, report: WindowReport) -> AdaCommState:
        """Return the state with the window and its loss added."""
        if report.loss is None or report.loss < 0:
            rule = "have a loss of at least 0"
            raise ValueError(check.message("AdaComm.update", "report", rule, report.loss))
        state = super().count_window(state, report)
        total, losses = state.sum_loss + report.loss, state.losses + 1
        if losses < self.interval:
            return replace(state, sum_loss=total, losses=losses)
        mean, rule = total / losses, self.target_anchor(state)
        first = mean if state.first_loss is None else state.first_loss
        if state.first_loss is not None:
            # no loss is below a first loss of 0: the anchor shrinks by the factor
            new = round_up(math.sqrt(mean / first) * self.anchor) if first > 0 else rule
            rule = max(1, new if new < rule else round_up(self.shrink * rule))
        return replace(state, first_loss=first, sum_loss=0.0, losses=0, rule=rule)
