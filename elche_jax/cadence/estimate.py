"""Smoothed estimates of the time per microbatch on each device.

States hold estimates as a tuple with ``None`` for a device that was never measured. The
arithmetic uses a float64 array with NaN in its place.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from elche_jax.cadence.base import WindowReport

FloatArray = NDArray[np.float64]
Times = tuple[float | None, ...]

# The bounds are from flodl's cadence. `Scheduler` corrects what they leave: after a threefold
# jump an estimate is 13 % too low, and then creeps, as a small error has a small weight.
ALPHA_MIN = 0.1
ALPHA_MAX = 0.8

# A picosecond. No clock resolves less, so smaller times are not measurements, and 1 / ms
# cannot overflow.
SHORTEST_MS = 1e-9


def as_array(times: Sequence[float | None] | FloatArray) -> FloatArray:
    """Return times as a float64 array, ``None`` as NaN.

    Examples:
        >>> as_array((2.0, None))
        array([ 2., nan])
    """
    return np.array(times, dtype=np.float64)


def as_times(array: FloatArray) -> Times:
    """Return an array as a tuple of floats, NaN as ``None``.

    Examples:
        >>> as_times(np.array([2.0, np.nan]))
        (2.0, None)
    """
    return tuple(None if math.isnan(ms) else ms for ms in array.tolist())


def measured_ms(report: WindowReport) -> FloatArray:
    """Return the time per microbatch of each device in one window.

    This is ``wall_ms / counts``, with the counts actually run, if both are above zero and
    the result is at least a picosecond.

    Args:
        report: The report of the window.

    Returns:
        Milliseconds per microbatch, NaN for a device that was not measured.

    Examples:
        >>> measured_ms(WindowReport([30.0, 0.0, 9.0], [10, 10, 0], 0.0))
        array([ 3., nan, nan])
    """
    wall = np.array(report.wall_ms, dtype=np.float64)
    counts = np.array(report.counts, dtype=np.float64)
    ms = wall / np.maximum(counts, 1.0)  # a count of 0 is masked out below
    return np.where((counts > 0) & (ms >= SHORTEST_MS), ms, np.nan)


def update_ms(
    ms_per_batch: Sequence[float | None] | FloatArray, report: WindowReport
) -> FloatArray:
    """Return the estimates after one more window.

    The first measurement of a device is its estimate. Afterwards, with
    ``new = wall / count``::

        error = |new - old| / old
        alpha = clip(error, 0.1, 0.8) * share
        ms    = alpha * new + (1 - alpha) * old

    so that small noise is smoothed while a jump is followed at once. A window that the end of the
    data cut short is weighted by its share of the planned microbatches: a pause of 10 ms is noise
    in a window of 200 ms, but doubles the time of a window of 10 ms. A device that was not
    measured (a count or time of zero) keeps its estimate.

    Args:
        ms_per_batch: Current estimates, milliseconds per microbatch, ``None`` (or NaN, in
            an array) for a device that was never measured.
        report: The report of the window, for the same number of devices.

    Returns:
        The new estimates, NaN for a device that was never measured.

    Examples:
        Device 0 goes from 10 to 15 ms: the error is 0.5, hence 12.5.

        >>> update_ms((10.0, None), WindowReport([60.0, 8.0], [4, 2], 0.0))
        array([12.5,  4. ])

        The same in a window with a tenth of the planned microbatches.

        >>> update_ms((10.0, 4.0), WindowReport([60.0, 8.0], [4, 2], 0.0, share=0.1))
        array([10.25,  4.  ])
    """
    old = as_array(ms_per_batch)
    new = measured_ms(report)
    with np.errstate(over="ignore"):  # alpha is bounded
        alpha = np.minimum(np.maximum(np.abs(new - old) / old, ALPHA_MIN), ALPHA_MAX)
    # At full weight, a pause in 7 of 200 microbatches doubled a device's work in the next windows,
    # which cost 4 to 8 % of a run.
    return smoothed(old, new, alpha * report.share)


def smoothed(old: FloatArray, new: FloatArray, alpha: FloatArray | float) -> FloatArray:
    """Return ``alpha * new + (1 - alpha) * old``; if one of them is NaN, the other.

    Examples:
        >>> smoothed(np.array([10.0, np.nan, 3.0]), np.array([15.0, 4.0, np.nan]), alpha=0.5)
        array([12.5,  4. ,  3. ])
    """
    # The same value, but exact if nothing has changed.
    mixed = old + alpha * (new - old)
    return np.where(np.isnan(new), old, np.where(np.isnan(old), new, mixed))
