"""Balanced: a constant total, split by throughput that is re-measured every N windows."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from elche_jax import _check as check
from elche_jax.cadence.apportion import shard_sizes
from elche_jax.cadence.base import ConstantTotal, Verdict, WindowReport, entries_of
from elche_jax.cadence.estimate import FloatArray, Times, as_array, as_times, measured_ms, smoothed
from elche_jax.cadence.hint import SpeedHint, checked_hint, hinted_speeds, speeds_of_kinds
from elche_jax.cadence.state import State

# Ratios are whole multiples of 1/_GRID, so their sum is exact in any order.
_GRID = 2**52


@dataclass(frozen=True)
class BalancedState(State):
    """State of `Balanced`: plain numbers.

    Attributes:
        counts: Microbatches per device in the next window.
        ratios: Share of each device; they sum to exactly 1.
        throughput: Smoothed microbatches per millisecond of each device, ``None``
            if it was never measured.
        windows: Windows reported so far.
        next_rebalance: Number of reported windows at which the ratios change next.
    """

    counts: tuple[int, ...]
    ratios: tuple[float, ...]
    throughput: Times
    windows: int
    next_rebalance: int


@dataclass(frozen=True)
class Balanced(ConstantTotal[BalancedState]):
    """Cadence that splits ``total`` microbatches by measured throughput.

    Throughput is an exponential moving average, ``weight * new + (1 - weight) * old`` with
    ``new = counts / wall_ms`` and ``weight = alpha * share``, where ``share`` is below 1 for a
    window cut short; the first measurement is taken as is. The ratios change after
    ``calibration_windows`` windows and then every ``rebalance_every`` windows. They are
    proportional to throughput, at least ``min_ratio`` each, and sum to exactly 1. The counts
    are `elche_jax.cadence.apportion.shard_sizes` of the ratios.

    When the ratios change, a device that was never measured is assumed to be as fast as the
    mean of the measured devices. If no device was measured, the change waits for the next
    report. Windows whose times are unknown count, too. Verdicts have no effect, as the total is
    constant.

    With ``speed_hint`` the first ratios are proportional to the hinted speeds, and the first
    report with a measurement replaces them by measured ones: a wrong hint costs one window.
    Later changes happen at the same windows as without a hint.

    Attributes:
        total: Microbatches per window over all devices, at least 1. Preferably many times the
            number of devices, as the last device gets what the rounding of the others leaves.
        alpha: Weight of the newest measurement, in ``(0, 1]``.
        calibration_windows: Windows before the first change, at least 1.
        rebalance_every: Windows between later changes, at least 1.
        min_ratio: Smallest share of a device, in ``[0, 1 / world_size]``.
        speed_hint: Known speeds, or ``None``, in any form that `ElChe` accepts:
            ``(slow_rank, ratio)``, one speed per device, or one per kind of device.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range.

    Examples:
        >>> cadence = Balanced(total=8, calibration_windows=1)
        >>> state = cadence.init(2)
        >>> state.counts
        (4, 4)
        >>> state = cadence.update(state, WindowReport((60.0, 20.0), (4, 4), 1.0))
        >>> state.counts, state.ratios
        ((2, 6), (0.25, 0.75))

        A wrong hint, and the window that corrects it:

        >>> cadence = Balanced(total=8, speed_hint=(1, 3.0))
        >>> state = cadence.init(2)
        >>> state.counts
        (6, 2)
        >>> cadence.update(state, WindowReport((90.0, 10.0), (6, 2), 1.0)).counts
        (2, 6)
    """

    state_type = BalancedState
    counts_windows = True

    alpha: float = field(default=0.3, metadata={"above": 0, "high": 1})
    calibration_windows: int = field(default=10, metadata={"low": 1})
    rebalance_every: int = field(default=50, metadata={"low": 1})
    min_ratio: float = field(default=0.05, metadata={"low": 0, "high": 1})
    speed_hint: SpeedHint | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "speed_hint", checked_hint("Balanced", self.speed_hint))

    def for_kinds(self, kinds: Sequence[str]) -> "Balanced":
        if not isinstance(self.speed_hint, Mapping):
            return self
        return replace(self, speed_hint=speeds_of_kinds("Balanced", self.speed_hint, kinds))

    def _first(self, world_size: int) -> BalancedState:
        where = "Balanced.init"
        # the user may write 1 / world_size as a decimal that is rounded up: 0.33333333334
        if self.min_ratio * world_size > 1 + 1e-9:
            rule = f"be at most 1 / world_size ({world_size} devices)"
            todo = "Lower min_ratio."
            raise ValueError(check.message(where, "min_ratio", rule, self.min_ratio, todo))
        speeds = as_array(hinted_speeds(where, self.speed_hint, world_size))
        # scaled, as the sum of very large speeds would overflow
        ratios = _ratios(speeds / speeds.max(), self.min_ratio)
        return BalancedState(
            counts=shard_sizes(ratios, self.total),
            ratios=ratios,
            throughput=(None,) * world_size,
            windows=0,
            next_rebalance=self.calibration_windows if self.speed_hint is None else 1,
        )

    def _next(self, state: BalancedState, report: WindowReport, verdict: Verdict) -> BalancedState:
        windows = state.windows + 1
        state = replace(self.learn(state, report), windows=windows)
        speed = as_array(state.throughput)
        unknown = np.isnan(speed)
        if windows < state.next_rebalance or unknown.all():
            return state
        ratios = _ratios(np.where(unknown, speed[~unknown].mean(), speed), self.min_ratio)
        # The correction of a hint comes early and must not delay the calibration.
        calibrated = windows >= self.calibration_windows
        following = windows + self.rebalance_every if calibrated else self.calibration_windows
        counts = shard_sizes(ratios, self.total)
        return replace(state, counts=counts, ratios=ratios, next_rebalance=following)

    def learn(self, state: BalancedState, report: WindowReport) -> BalancedState:
        """Return the state updated with a window's times; the counts stay.

        Args:
            state: The current state; it is not modified.
            report: The measurements of a window.

        Examples:
            >>> cadence, report = Balanced(total=8), WindowReport((8.0, 4.0), (4, 4), 1.0)
            >>> cadence.learn(cadence.init(2), report).throughput
            (0.5, 1.0)
        """
        old, new = as_array(state.throughput), 1.0 / measured_ms(report)
        return replace(state, throughput=as_times(smoothed(old, new, self.alpha * report.share)))

    def without(self, state: BalancedState, ranks: Collection[int]) -> BalancedState:
        """Return the state for the remaining devices, which share the same total.

        Args:
            state: The current state; it is not modified.
            ranks: Ranks of the lost devices; at least one device remains.

        Examples:
            >>> cadence = Balanced(total=8, speed_hint=[1.0, 1.0, 3.0])
            >>> cadence.without(cadence.init(3), [0]).counts
            (2, 6)
        """
        left = entries_of(state, [rank for rank in range(len(state.counts)) if rank not in ranks])
        ratios = _ratios(np.array(left.ratios) / max(left.ratios), self.min_ratio)
        return replace(left, counts=shard_sizes(ratios, self.total), ratios=ratios)


def _ratios(speed: FloatArray, min_ratio: float) -> tuple[float, ...]:
    """Return ratios proportional to speed, at least ``min_ratio`` each, that sum to 1.

    Ratios below the floor are raised to it and the others scaled to the remainder, until
    none is below the floor: at most one round per device.
    """
    ratios = speed / speed.sum()
    free = np.ones(len(speed), dtype=np.bool_)
    while (low := free & (ratios < min_ratio)).any():
        free &= ~low
        ratios[low] = min_ratio
        remainder = 1 - min_ratio * (~free).sum()
        ratios[free] = speed[free] * remainder / speed[free].sum()
    # Rounding up keeps the floor; the largest ratio gives up the excess, as it is farthest
    # from the floor.
    grid = np.ceil(ratios * _GRID).astype(np.int64)
    grid[grid.argmax()] += _GRID - grid.sum()
    return tuple((grid / _GRID).tolist())
