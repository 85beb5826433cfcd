"""Reports of windows, corrected for what they would otherwise say about a plan. Pure."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from elche_jax.cadence.base import WindowReport
from elche_jax.cadence.estimate import FloatArray, as_array, measured_ms

PAUSE = 4.0
"""Ratio of a time to its estimate above which one window alone says nothing about the speed."""


def missed(report: WindowReport, planned: Sequence[int]) -> tuple[bool, ...]:
    """Return which devices ran nothing although the cadence gave them work.

    They rest or are late, or the window was cut short to fewer microbatches than devices.

    Args:
        report: The measurements.
        planned: The cadence's counts, one entry per device.

    Examples:
        >>> missed(WindowReport((20.0, 0.0, 0.0), (20, 0, 0), sync_ms=1.0), planned=(20, 10, 0))
        (False, True, False)
    """
    return tuple(plan > 0 and not ran for plan, ran in zip(planned, report.counts, strict=True))


def without_pauses(report: WindowReport, ms_per_batch: Sequence[float | None]) -> WindowReport:
    """Return the report with the expected time for devices that took much longer.

    Args:
        report: The measurements.
        ms_per_batch: The estimates without this report, in milliseconds per microbatch; None
            for a device whose time is kept.

    Examples:
        >>> report = WindowReport((500.0, 30.0), (10, 10), sync_ms=1.0)
        >>> without_pauses(report, (2.0, 1.0)).wall_ms
        (20.0, 30.0)
        >>> without_pauses(report, (None, 1.0)).wall_ms
        (500.0, 30.0)
    """
    wall = tuple(
        took if ms is None or took <= PAUSE * (ms * count) else ms * count
        for took, ms, count in zip(report.wall_ms, ms_per_batch, report.counts, strict=True)
    )
    return report if wall == report.wall_ms else replace(report, wall_ms=wall)


def rescale_sync(report: WindowReport, planned: tuple[int, ...]) -> WindowReport:
    """Return the report with ``sync_ms`` rescaled to another plan.

    The cost of a synchronisation does not depend on the counts, but the busy time does.
    ``wall_ms * planned / counts`` is the busy time that each device would have had. With
    ``sync_ms`` replaced by::

        sync_ms * max(wall_ms) / max(wall_ms * planned / counts)

    ``sync_ms / max(wall_ms)`` is the overhead of the plan. Everything else is unchanged, and
    so is the whole report if its counts are the planned ones.

    Args:
        report: The measurements.
        planned: The counts of the plan, one entry per device.

    Returns:
        The report by which to judge the overhead.

    Examples:
        5 ms are 5 % of a full window of 100 ms, not 25 % as in a last window of 20 ms.

        >>> report = WindowReport((20.0, 20.0), (2, 4), sync_ms=5.0)
        >>> rescale_sync(report, planned=(10, 20)).sync_ms
        1.0
    """
    if report.counts == planned:
        return report
    as_planned = (
        wall * plan / ran
        for wall, plan, ran in zip(report.wall_ms, planned, report.counts, strict=True)
        if ran > 0
    )
    longest = max(as_planned, default=0.0)
    if longest <= 0:
        return report
    return replace(report, sync_ms=report.sync_ms * max(report.wall_ms) / longest)


def averaged_ms(
    report: WindowReport, ms_per_batch: Sequence[float | None], number: int
) -> FloatArray:
    """Return the mean times per microbatch after one more report, all with equal weights.

    Args:
        report: The measurements.
        ms_per_batch: The mean of the reports before, in milliseconds per microbatch.
        number: Number of reports, this one included.

    Returns:
        The mean, NaN for a device that is not measured or was not before.

    Examples:
        >>> averaged_ms(WindowReport((60.0, 30.0), (10, 10), sync_ms=1.0), (3.0, 3.0), number=3)
        array([4., 3.])
    """
    before = as_array(ms_per_batch)
    return before + (measured_ms(report) - before) / number


def with_ms(report: WindowReport, ms_per_batch: FloatArray) -> WindowReport:
    """Return the report with other times per microbatch, one for each device.

    Examples:
        >>> with_ms(WindowReport((60.0, 30.0), (10, 10), sync_ms=1.0), np.array([4.0, 3.0])).wall_ms
        (40.0, 30.0)
    """
    wall = ms_per_batch * np.array(report.counts)
    return replace(report, wall_ms=tuple(wall.tolist()))
