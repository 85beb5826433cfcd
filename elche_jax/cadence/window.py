"""A window as planned, and the same window as measured, in plain numbers.

No other type describes a window in plain numbers: a cadence's reports, a timeline's records and
the results of `advise` are derived from these.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """A window as planned.

    Attributes:
        window: Number of the window in the run.
        epoch: Epoch of the window.
        counts: Microbatches per device.
        examples: Valid examples of all devices.
        first: Number of the window's first microbatch in the epoch.
        share: Share of the microbatches that the cadence asked for, in `(0, 1]`; below 1 if the
            end of an epoch cut the window short.

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
    share: float = 1.0

    def measured(
        self, busy_ms: tuple[float, ...], wall_ms: float, sync_ms: float, skew_ms: float,
        steady: bool, **known: Any,
    ) -> "WindowRecord":  # fmt: skip
        """Return the record of this window; the arguments are the record's other fields."""
        return WindowRecord(
            self.window, self.epoch, self.counts, self.examples, busy_ms, wall_ms, sync_ms,
            skew_ms, steady, first=self.first, share=self.share, **known,
        )  # fmt: skip


@dataclass(frozen=True)
class Divergence:
    """How far apart the devices were at the end of a window; one entry per device.

    `x` are the parameters before the window, `y` the device's parameters after its local
    steps, `a` the average before any outer optimizer, and `delta` the averaged difference.
    Parameters that the window did not exchange are ignored. The distance of a device that was
    left out is NaN.

    Attributes:
        window: Number of the window.
        counts: Microbatches.
        distance: `|y - a| / |a|`.
        update_norm: `|x - y|`.
        cosine: Cosine of the angle between `x - y` and `delta`.
        share: Shares in the average; they sum to 1, or are all 0 if no device took part.
    """

    window: int
    counts: tuple[int, ...]
    distance: tuple[float, ...]
    update_norm: tuple[float, ...]
    cosine: tuple[float, ...]
    share: tuple[float, ...]

    @property
    def largest(self) -> float:
        """The largest distance of the devices that had work and were not left out, or NaN."""
        distances = zip(self.distance, self.counts, strict=True)
        # a device without work is as far from the average as the others have moved: a guard would
        # shorten windows because that device rests
        return max((d for d, n in distances if n and not math.isnan(d)), default=math.nan)


@dataclass(frozen=True, slots=True)
class WindowMeasurement:
    """When the devices worked in a window: the part of a record that a run's file stores.

    Attributes:
        window: Number of the window in the run.
        epoch: Epoch of the window.
        counts: Microbatches per device.
        examples: Valid examples of all devices.
        busy_ms: Busy time per device, including data delivery; empty with one device, whose
            time is `wall_ms`.
        wall_ms: Time from the end of the previous window to the end of this one. It excludes
            the time that the loop spends on other work before it requests the window, but
            includes the time spent waiting for the window's data.
        sync_ms: Cost of the synchronisation, the smallest wait over the devices.
        skew_ms: Time between the first and the last device's arrival at the synchronisation.
        steady: Whether the cadence may use these times: not if the window waited for a
            compilation, if an exchange overlapped it, or if a device was late.
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
        """Share of the window during which each device worked, 0 to 1; 0 if not timed."""
        if not self.busy_ms:
            return (1.0,)  # one device, which is not timed apart from its windows
        if self.wall_ms <= 0:
            return (0.0,) * len(self.busy_ms)
        return tuple(min(1.0, busy / self.wall_ms) for busy in self.busy_ms)


@dataclass(frozen=True, slots=True)
class WindowRecord(WindowMeasurement):
    """A window as measured: its plan and its results.

    Attributes:
        first: Number of the window's first microbatch in the epoch.
        share: Share of the microbatches that the cadence asked for, see `WindowPlan`.
        cold: Whether the programs of this window, or of the window that `sync_ms` is from, ran
            for the first time. `sync_ms` then says nothing about later windows.
        left_out: Ranks of the devices that were late and are not in the window's average.
        divergence: How far apart the devices were; with `delay=k`, `k` windows before this one.
            None in gradient mode.
        loss: Mean loss of the window; None if neither the cadence nor a timeline uses it.
    """

    _: KW_ONLY
    first: int = 0
    share: float = 1.0
    cold: bool = False
    left_out: tuple[int, ...] = ()
    divergence: Divergence | None = None
    loss: float | None = None

    def of(self, ranks: Sequence[int]) -> "WindowRecord":
        """Return the record as a cadence for some of the devices sees it.

        Args:
            ranks: Ranks of these devices.
        """
        counts, busy = (
            tuple(values[rank] for rank in ranks if values)
            for values in (self.counts, self.busy_ms)
        )
        return replace(self, counts=counts, busy_ms=busy)
