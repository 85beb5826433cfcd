"""Guards: verdicts on how far the devices drift apart, for the cadence.

A guard is an object with one method, `verdict(history) -> Verdict`, where `history` holds
the `Divergence` of the last windows, oldest first. It is called once per window and keeps
no state.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from elche_jax import _check as check
from elche_jax.cadence.base import HOLD_GROWTH, STABLE, Verdict, nudge_down
from elche_jax.cadence.window import Divergence

HISTORY = 64
"""Number of windows in a guard's history."""

LEVEL_AFTER = 3
"""Windows needed to tell that the divergence is level."""

LEVEL_SLACK = 1.1
"""Largest ratio of the last of these windows' distances to the first that counts as level."""


@runtime_checkable
class Guard(Protocol):
    """Protocol of a guard; a user's class needs no base class.

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
        """Return the verdict after a window; `history` holds at least that window."""
        ...


@dataclass(frozen=True)
class NoGuard:
    """Guard that never objects: only the cadence's own rule limits the anchor.

    Examples:
        >>> NoGuard().verdict([])
        Verdict(action='stable', factor=None)
    """

    def verdict(self, history: Sequence[Divergence]) -> Verdict:
        """Return *stable*."""
        del history
        return STABLE


@dataclass(frozen=True)
class TrendGuard(check.CheckedFields):
    """Guard that objects when the largest distance rises.

    - *Nudge down* by `factor` if the last distance is above twice the threshold.
    - *Hold growth* if the last three distances rise and the last is above the threshold.

    Attributes:
        threshold: Distance, relative to the parameters' norm, above 0.
        factor: Factor of the anchor in a *nudge down*, in `(0, 1]`.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is out of range.

    Examples:
        >>> from elche_jax.cadence.guards import Divergence, TrendGuard
        >>> def seen(*distances):
        ...     return [Divergence(0, (1,), (d,), (1.0,), (1.0,), (1.0,)) for d in distances]
        >>> TrendGuard(0.05).verdict(seen(0.04, 0.05, 0.06)).action
        'hold_growth'
        >>> TrendGuard(0.05).verdict(seen(0.11)).action
        'nudge_down'
    """

    threshold: float = field(default=0.05, metadata={"above": 0})
    factor: float = field(default=0.5, metadata={"above": 0, "high": 1})

    def verdict(self, history: Sequence[Divergence]) -> Verdict:
        """Return the verdict after a window."""
        # NaN, if every device was left out, fails each comparison: no objection
        values = [each.largest for each in history[-3:]]
        last = values[-1]
        if last > 2 * self.threshold:
            return nudge_down(self.factor)
        rising = len(values) == 3 and values[0] < values[1] < last
        return HOLD_GROWTH if rising and last > self.threshold else STABLE


@dataclass(frozen=True)
class LevelGuard(check.CheckedFields):
    """Guard that keeps the largest distance below a level, whether it rises or not.

    - *Nudge down* by `factor` if the mean over the last windows is above twice the level.
    - *Hold growth* if that mean is above the level.

    Attributes:
        level: Distance, relative to the parameters' norm, above 0.
        windows: Number of windows in the mean, 1 to 64.
        factor: Factor of the anchor in a *nudge down*, in `(0, 1]`.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is out of range.

    Examples:
        >>> from elche_jax.cadence.guards import Divergence, LevelGuard
        >>> def seen(*distances):
        ...     return [Divergence(0, (1,), (d,), (1.0,), (1.0,), (1.0,)) for d in distances]
        >>> LevelGuard(0.05, windows=2).verdict(seen(0.2, 0.06, 0.05)).action
        'hold_growth'
    """

    level: float = field(default=0.05, metadata={"above": 0})
    windows: int = field(default=5, metadata={"low": 1, "high": HISTORY})
    factor: float = field(default=0.5, metadata={"above": 0, "high": 1})

    def verdict(self, history: Sequence[Divergence]) -> Verdict:
        """Return the verdict after a window."""
        values = [each.largest for each in history[-self.windows :]]
        values = [value for value in values if not math.isnan(value)]
        mean = sum(values) / len(values) if values else math.nan
        if mean > 2 * self.level:
            return nudge_down(self.factor)
        return HOLD_GROWTH if mean > self.level else STABLE


def is_level(history: Sequence[Divergence]) -> bool:
    """Return whether the last windows show that the divergence does not rise.

    This takes three windows with known distances, the last at most a tenth above the first.
    With fewer, there is no evidence.

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
    """Return the guard's verdict, or *hold growth* if growth is not justified.

    If a guard returns *stable* while the divergence is not level, the cadence gets *hold
    growth*, so that a guard that never objects does not let windows grow while the devices
    drift apart. Only the *stable* of `NoGuard` is passed on as is.

    Args:
        guard: The guard.
        history: The last windows, oldest first, at least one.

    Raises:
        TypeError: If the guard does not return a verdict.
    """
    verdict = guard.verdict(history)
    rule = "return a Verdict (STABLE, HOLD_GROWTH or nudge_down(factor))"
    check.instance(type(guard).__name__, "verdict", verdict, Verdict, rule)
    unopposed = verdict.action == "stable" and not isinstance(guard, NoGuard)
    return HOLD_GROWTH if unopposed and not is_level(history) else verdict
