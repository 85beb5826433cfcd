"""A window as it is planned, and the same window as it was measured. Plain numbers.

These are all there is of a window besides its data: what a cadence is told, what a timeline
records and what `advise` computes are views of them.
"""

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """A window as it was decided.

    Attributes:
        window: Number of the window in the run.
        epoch: Its epoch.
        counts: Microbatches per device.
        examples: Valid examples of all devices.
        first: Number of its first microbatch in the epoch.

    Examples:
        >>> plan = WindowPlan(window=3, epoch=0, counts=(4, 2), examples=48, first=18)
        >>> plan.measured((8.0, 7.0), wall_ms=9.0, sync_ms=1.0, skew_ms=1.0, steady=True).first
        18
    """

    window: int
    epoch: int
    counts: tuple[int, ...]
    examples: int
    first: int = 0

    def measured(
        self, busy_ms: tuple[float, ...], wall_ms: float, sync_ms: float, skew_ms: float,
        steady: bool, **known: Any,
    ) -> "WindowRecord":  # fmt: skip
        """Return the record of this window; the arguments are its further fields."""
        return WindowRecord(
            self.window, self.epoch, self.counts, self.examples, busy_ms, wall_ms, sync_ms,
            skew_ms, steady, first=self.first, **known,
        )  # fmt: skip


@dataclass(frozen=True)
class Divergence:
    """How far apart the devices were at the end of a window; one entry per device.

    With `x` the parameters before the window, `y` the device's own after its steps, `a`
    the ones after the synchronisation and `delta` the averaged difference; what a window
    did not exchange is not looked at. The distance of a device that was left out is NaN.

    Attributes:
        window: Number of the window.
        counts: Microbatches.
        distance: `|y - a| / |a|`.
        update_norm: `|x - y|`.
        cosine: Between `x - y` and `delta`.
        share: Shares in the average; they sum to 1, or are all 0 if no device had one.
    """

    window: int
    counts: tuple[int, ...]
    distance: tuple[float, ...]
    update_norm: tuple[float, ...]
    cosine: tuple[float, ...]
    share: tuple[float, ...]

    @property
    def largest(self) -> float:
        """The largest distance of a device that was not left out; NaN where all were."""
        return max((d for d in self.distance if not math.isnan(d)), default=math.nan)


@dataclass(frozen=True, slots=True)
class WindowMeasurement:
    """When the devices worked in a window: what a file of a run keeps of it.

    Attributes:
        window: Number of the window in the run.
        epoch: Its epoch.
        counts: Microbatches per device.
        examples: Valid examples of all devices.
        busy_ms: Busy time per device, data delivery included; empty with one device,
            whose time is `wall_ms`.
        wall_ms: From the end of the window before to the end of this one. Time that the
            loop spends on its own things before it asks for the window is left out; time
            it waits for the window's data is not.
        sync_ms: Cost of the synchronisation, the least wait over the devices.
        skew_ms: How far the devices' arrivals at the synchronisation lay apart.
        steady: Whether its times are to be told to the cadence: not if it waited for a
            compile, if an exchange overlapped it, or if a device was late.
    """

    window: int
    epoch: int
    counts: tuple[int, ...]
    examples: int
    busy_ms: tuple[float, ...]
    wall_ms: float
    sync_ms: float
    skew_ms: float
    steady: bool

    @property
    def busy_share(self) -> tuple[float, ...]:
        """Share of the window in which each device worked, 0 to 1; 0 without a time."""
        if not self.busy_ms:
            return (1.0,)
        if self.wall_ms <= 0:
            return (0.0,) * len(self.busy_ms)
        return tuple(min(1.0, busy / self.wall_ms) for busy in self.busy_ms)


@dataclass(frozen=True, slots=True)
class WindowRecord(WindowMeasurement):
    """A window as it was measured: its plan, and all that came of it.

    Attributes:
        first: Number of its first microbatch in the epoch.
        cold: Whether its programs ran for the first time. What its synchronisation cost
            says nothing about later ones.
        left_out: Ranks of the devices that were late, and are not in its average.
        divergence: How far apart the devices were. With `delay=1` it is of the window
            before. None in gradient mode.
        loss: Its mean loss; None if neither the cadence nor a timeline asked for it.
    """

    first: int = field(default=0, kw_only=True)
    cold: bool = field(default=False, kw_only=True)
    left_out: tuple[int, ...] = field(default=(), kw_only=True)
    divergence: Divergence | None = field(default=None, kw_only=True)
    loss: float | None = field(default=None, kw_only=True)
