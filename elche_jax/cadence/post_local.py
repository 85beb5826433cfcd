"""PostLocal: synchronise after every microbatch at first, later after windows of local steps."""

from dataclasses import dataclass, field, replace

from elche_jax.cadence.base import MAX_TOTAL, Verdict, WindowReport
from elche_jax.cadence.proportional import AnchorRule, AnchorRuleState


@dataclass(frozen=True)
class PostLocal(AnchorRule[AnchorRuleState]):
    """Post-local SGD (Lin et al. 2020, arXiv:1808.07217): local steps after a switch.

    The first ``switch`` windows are one microbatch on every device, whatever their speeds.
    With SGD this is equivalent to combining gradients, also with momentum under
    ``optimizer_state="average"``. Later windows have ``anchor`` microbatches on the slowest
    device and more on the others. In training, windows are planned one ahead, so one more
    window has one microbatch per device.

    Attributes:
        switch: Windows before the switch, at least 0.
        anchor: Count of the slowest device after the switch, at least 1.

    Raises:
        TypeError: If an argument is not an integer.
        ValueError: If an argument is out of range.

    Examples:
        >>> rule = PostLocal(switch=2, anchor=8)
        >>> state = rule.init(2)
        >>> for _ in range(2):
        ...     print(state.counts)
        ...     state = rule.update(state, WindowReport((6.0, 2.0), state.counts, 0.1))
        (1, 1)
        (1, 1)
        >>> state.counts
        (8, 24)
    """

    switch: int = field(metadata={"low": 0})
    anchor: int = field(default=10, metadata={"low": 1, "high": MAX_TOTAL})

    def target_anchor(self, state: AnchorRuleState) -> int:
        """Return 1 before the switch and the anchor after it."""
        return 1 if state.windows < self.switch else self.anchor

    def _next(
        self, state: AnchorRuleState, report: WindowReport, verdict: Verdict
    ) -> AnchorRuleState:
        new = super()._next(state, report, verdict)
        if new.windows >= self.switch:
            return new
        # uncalibrated, so that the dead zone does not apply to the first counts by speed
        return replace(new, counts=(1,) * len(new.counts), calibrated=False)
