"""QSR: windows grow with the inverse square of the learning rate."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from elche_jax import _check as check
from elche_jax.cadence.proportional import AnchorRule, AnchorRuleState

CEILING = 2**31 - 1
"""Largest anchor: at a learning rate of 0 the rule itself has no bound."""

ROUNDING = 1e-6
"""Relative error allowed for a schedule in float32: 3.9999999 must not become 3."""


@dataclass(frozen=True)
class QSR(AnchorRule[AnchorRuleState]):
    """The quadratic synchronisation rule (Gu et al. 2024, arXiv:2310.14423).

        anchor = max(base, floor((alpha / learning_rate) ** 2))

    in local steps of the slowest device. Late in a run, when the learning rate is small,
    infrequent synchronisation does not cost accuracy and may improve it.

    Attributes:
        alpha: The growth coefficient, above 0; the paper finds it between 0.0175 and
            0.3 for AdamW on ImageNet.
        base: Smallest anchor, at least 1.
        learning_rate: The optimizer's learning rate: a number above 0, or its schedule, a
            function of the number of optimizer steps, counted as in
            ``AnchorRuleState.steps``.
        max_anchor: Largest anchor, at least ``base``; the paper has no such bound.
        warmup: Steps of the learning rate's warm-up, at least 0. During the warm-up the rule
            uses the rate at its end, as the small rates at the start do not call for long
            windows.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range; in ``init`` and ``update``, if the
            schedule returns a number that is below 0 or not finite.

    Examples:
        >>> rule = QSR(alpha=0.1, base=4, learning_rate=lambda step: 0.05 / (1 + step))
        >>> state = rule.init(2)
        >>> state.counts
        (4, 4)
        >>> from elche_jax.cadence import WindowReport
        >>> rule.update(state, WindowReport((8.0, 8.0), (4, 4), 0.1)).counts
        (100, 100)
    """

    alpha: float = field(metadata={"above": 0})
    base: int = field(metadata={"low": 1, "high": CEILING})
    learning_rate: float | Callable[[int], float]
    max_anchor: int = field(default=1000, metadata={"high": CEILING})
    warmup: int = field(default=0, metadata={"low": 0})

    def __post_init__(self) -> None:
        super().__post_init__()
        check.keep_checked(self, "max_anchor", check.integer, low=self.base)
        if not callable(self.learning_rate):
            check.keep_checked(self, "learning_rate", check.real, above=0)

    def target_anchor(self, state: AnchorRuleState) -> int:
        """Return the anchor for the learning rate at the state's step."""
        rate = self.learning_rate
        if callable(rate):
            step = max(state.steps, self.warmup)
            rate = check.real("QSR", f"learning_rate({step})", rate(step), low=0)
        ratio = self.alpha / rate if rate > 0 else math.inf
        # a larger ratio exceeds the ceiling anyway, and its square may overflow
        grown = ratio**2 if ratio < 2**16 else math.inf
        grown = min(grown * (1 + ROUNDING), CEILING)
        return min(max(self.base, math.floor(grown)), self.max_anchor)
