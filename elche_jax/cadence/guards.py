"""Guards: opinions about how far the devices drift apart, handed to the cadence.

A guard is an object with one method, `verdict(history) -> Verdict`, where `history` holds
the last windows' `Divergence`, oldest first. It is asked once per window and keeps no
state.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from elche_jax import _check as check
from elche_jax.cadence import knobs
from elche_jax.cadence.base import HOLD_GROWTH, STABLE, Verdict, nudge_down
from elche_jax.cadence.window import Divergence

HISTORY = 64
"""Windows that a guard sees."""

LEVEL_AFTER = 3
"""Windows that it takes to say that divergence is level."""

LEVEL_SLACK = 1.1
"""By how much the last of them may exceed the first."""


@runtime_checkable
class Guard(Protocol):
    """What a guard must do; a user's own class needs no base class.

    Examples:
        >>> from elche_jax.cadence.guards import Guard
        >>> from elche_jax import HOLD_GROWTH, STABLE
        >>> class Opposed:
        ...     def verdict(self, history):
        ...         return HOLD_GROWTH if min(history[-1].cosine) < 0 else STABLE
        >>> isinstance(Opposed(), Guard)
        True
    """

    def verdict(self, history: Sequence[Divergence]) -> Verdict:
        """Returns the opinion after a window; `history` holds at least that one."""
        ...


@dataclass(frozen=True)
class NoGuard:
    """No opinion, and none is asked for: only the cadence's own bound holds the anchor.

    Examples:
        >>> NoGuard().verdict([])
        Verdict(action='stable', factor=None)
    """

    def verdict(self, history: Sequence[Divergence]) -> Verdict:
        """Returns *stable*."""
        del history
        return STABLE


@dataclass(frozen=True)
class TrendGuard:
    """Speaks when the largest distance rises.

    - *Nudge down* by `factor` if the last distance is above twice the threshold.
    - *Hold growth* if the last three rise and the last is above the threshold.

    Attributes:
        threshold: Distance, relative to the parameters' norm, above 0.
        factor: What the anchor is multiplied by, in `(0, 1]`.

    Raises:
        TypeError: An argument is no number.
        ValueError: An argument is out of range.

    Examples:
        >>> from elche_jax.cadence.guards import Divergence, TrendGuard
        >>> def seen(*distances):
        ...     return [Divergence(0, (1,), (d,), (1.0,), (1.0,), (1.0,)) for d in distances]
        >>> TrendGuard(0.05).verdict(seen(0.04, 0.05, 0.06)).action
        'hold_growth'
        >>> TrendGuard(0.05).verdict(seen(0.11)).action
        'nudge_down'
    """

    threshold: float = 0.05
    factor: float = 0.5

    def __post_init__(self) -> None:
        knobs.real(self, "threshold", above=0)
        knobs.real(self, "factor", above=0, high=1)

    def verdict(self, history: Sequence[Divergence]) -> Verdict:
        """Returns the opinion after a window."""
        values = [each.largest for each in history[-3:]]
        last = values[-1]
        if last > 2 * self.threshold:
            return nudge_down(self.factor)
        rising = len(values) == 3 and values[0] < values[1] < last
        return HOLD_GROWTH if rising and last > self.threshold else STABLE


@dataclass(frozen=True)
class LevelGuard:
    """Keeps the largest distance below a level, whether it rises or not.

    - *Nudge down* by `factor` if the mean of the last windows is above twice the level.
    - *Hold growth* if it is above the level.

    Attributes:
        level: Distance, relative to the parameters' norm, above 0.
        windows: Windows to take the mean of, 1 to 64.
        factor: What the anchor is multiplied by, in `(0, 1]`.

    Raises:
        TypeError: An argument is no number.
        ValueError: An argument is out of range.

    Examples:
        >>> from elche_jax.cadence.guards import Divergence, LevelGuard
        >>> def seen(*distances):
        ...     return [Divergence(0, (1,), (d,), (1.0,), (1.0,), (1.0,)) for d in distances]
        >>> LevelGuard(0.05, windows=2).verdict(seen(0.2, 0.06, 0.05)).action
        'hold_growth'
    """

    level: float = 0.05
    windows: int = 5
    factor: float = 0.5

    def __post_init__(self) -> None:
        knobs.real(self, "level", above=0)
        knobs.integer(self, "windows", low=1, high=HISTORY)
        knobs.real(self, "factor", above=0, high=1)

    def verdict(self, history: Sequence[Divergence]) -> Verdict:
        """Returns the opinion after a window."""
        values = [each.largest for each in history[-self.windows :]]
        values = [value for value in values if not math.isnan(value)]
        mean = sum(values) / len(values) if values else math.nan
        if mean > 2 * self.level:
            return nudge_down(self.factor)
        return HOLD_GROWTH if mean > self.level else STABLE


def is_level(history: Sequence[Divergence]) -> bool:
    """Whether the last windows show that divergence does not rise.

    Silence is no evidence: it takes three windows with a distance each, of which the last
    is not more than a tenth above the first.

    Examples:
        >>> from elche_jax.cadence.guards import is_level
        >>> is_level([])
        False
    """
    values = [each.largest for each in history[-LEVEL_AFTER:]]
    if len(values) < LEVEL_AFTER or any(map(math.isnan, values)):
        return False
    return values[-1] <= LEVEL_SLACK * values[0]


def judge(guard: Guard, history: Sequence[Divergence]) -> Verdict:
    """The verdict that a cadence is told: growth takes evidence.

    If a guard says *stable* and the divergence is not level, the cadence is told *hold
    growth*: a guard that never speaks does not let windows grow while devices drift apart.
    `NoGuard` alone means what it says.

    Args:
        guard: The guard.
        history: The last windows, oldest first, at least one.

    Raises:
        TypeError: The guard returned no verdict.
    """
    verdict = guard.verdict(history)
    if not isinstance(verdict, Verdict):
        rule = "return a Verdict (STABLE, HOLD_GROWTH or nudge_down(factor))"
        got = check.describe(verdict)
        raise TypeError(check.message(type(guard).__name__, "verdict", rule, got))
    silent = verdict.action == "stable" and not isinstance(guard, NoGuard)
    return HOLD_GROWTH if silent and not is_level(history) else verdict
