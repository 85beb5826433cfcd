"""Whole numbers of microbatches for devices.

`clamp_counts` shrinks a plan to the microbatches that are left, `shard_sizes` follows given
ratios, `apportion` makes the last device finish as early as an integer split can, and `densest`
finds a window in which devices wait little.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from elche_jax import _check as check
from elche_jax.cadence.base import MAX_TOTAL
from elche_jax.cadence.estimate import SHORTEST_MS, FloatArray

ROUNDING = 1e-12
"""Relative error of times and quotients that are equal but for rounding."""


def _lower_largest(counts: list[int], tie: Sequence[int], excess: int) -> None:
    """Lower the largest counts one by one, in place, ``excess`` times in total.

    Of equal counts, the one with the smaller ``tie`` is lowered first; if these are equal,
    too, the one with the higher rank.
    """
    for _ in range(excess):
        rank = max(range(len(counts)), key=lambda rank: (counts[rank], -tie[rank], rank))
        counts[rank] -= 1


def clamp_counts(counts: Sequence[int], max_total: int) -> tuple[int, ...]:
    """Shrink counts in proportion so that they sum to at most ``max_total``.

    Counts that fit are returned unchanged. Otherwise the result sums to exactly
    ``max_total``, by the largest remainder method with ties going to the lower rank. No
    entry is ever raised. A device with work gets 0 only if there are fewer microbatches than
    devices with work; otherwise it keeps at least 1, which the largest counts give up.

    Args:
        counts: Microbatches per device, integers, not negative.
        max_total: Microbatches left, not negative.

    Returns:
        The counts to run, one entry per device.

    Raises:
        TypeError: If a count or ``max_total`` is not an integer.
        ValueError: If one of them is negative.

    Examples:
        >>> clamp_counts((10, 20), 100)
        (10, 20)
        >>> clamp_counts((10, 20), 15)
        (5, 10)
        >>> clamp_counts((10, 20, 30), 2)
        (0, 1, 1)
    """
    counts = check.integers("clamp_counts", "counts", counts, low=0)
    max_total = check.integer("clamp_counts", "max_total", max_total, low=0)
    total = sum(counts)
    if total <= max_total:
        return counts
    # In Python integers: the products may exceed 2**53, up to which float64 is exact.
    clamped = [count * max_total // total for count in counts]
    rest = max_total - sum(clamped)
    # Python's sort is stable, so equal remainders stay in rank order.
    by_remainder = sorted(range(len(counts)), key=lambda rank: -(counts[rank] * max_total % total))
    for rank in by_remainder[:rest]:
        clamped[rank] += 1
    if max_total >= sum(count > 0 for count in counts):
        # there is enough work for every device with some, but rounding left these without
        empty = [r for r, count in enumerate(counts) if count and not clamped[r]]
        _lower_largest(clamped, counts, len(empty))
        for rank in empty:
            clamped[rank] = 1
    return tuple(clamped)


def shard_sizes(ratios: Sequence[float], total: int) -> tuple[int, ...]:
    """Split ``total`` in the given ratios.

    Every device except the last gets its share rounded half away from zero, and at least 1
    if ``total`` allows it; the last device gets the rest. If nothing is left for it, the
    largest shares give up one each, the higher rank first.

    Args:
        ratios: Share of each device, not negative and not all zero. They need not
            sum to 1.
        total: Microbatches to split, not negative.

    Returns:
        Sizes that sum to exactly ``total``, one per device.

    Raises:
        TypeError: If a ratio is not a number, or the total not an integer.
        ValueError: If a number is negative, or all ratios are zero.

    Examples:
        >>> shard_sizes((0.5, 0.25, 0.25), 10)
        (5, 3, 2)
        >>> shard_sizes((0.9, 0.05, 0.05), 4)
        (2, 1, 1)
    """
    where = "shard_sizes"
    ratios = check.reals(where, "ratios", ratios, low=0)
    total = check.integer(where, "total", total, low=0, high=MAX_TOTAL)
    largest = max(ratios, default=0.0)
    if largest <= 0:
        rule = "have an entry above 0"
        raise ValueError(check.message(where, "ratios", rule, ratios))
    # scaled by a power of two, which is exact: the sum might overflow
    scale = -max(0, math.frexp(largest)[1])
    ratios = [math.ldexp(ratio, scale) for ratio in ratios]
    # Rounded once, so that the order of the devices does not matter.
    whole = math.fsum(ratios)
    least = 1 if total >= len(ratios) else 0
    sizes = [max(least, math.floor(ratio / whole * total + 0.5)) for ratio in ratios[:-1]]
    last = total - sum(sizes)
    if last < least:
        _lower_largest(sizes, [0] * len(sizes), least - last)
        last = least
    return (*sizes, last)


def apportion(total: int, ms_per_batch: Sequence[float]) -> tuple[int, ...]:
    """Split ``total`` so that the last device finishes as early as possible.

    Minimises ``max(counts * ms_per_batch)`` over all integer splits exactly, not by
    rounding: the result is the same as handing out one microbatch at a time to the device
    that would finish it first, with ties going to the lower rank.

    Args:
        total: Microbatches to split, not negative.
        ms_per_batch: Milliseconds per microbatch of each device, at least 1e-9.

    Returns:
        Counts that sum to exactly ``total``. A faster device never gets fewer than a
        slower one; a very slow device may get 0.

    Raises:
        TypeError: If the total is not an integer, or a time not a number.
        ValueError: If the total is negative, or a time is below 1e-9.

    Examples:
        The shares are 2.33 and 0.67. Rounded to (2, 1) they would take 3.5 ms
        instead of 3.

        >>> apportion(3, (1.0, 3.5))
        (3, 0)
    """
    where = "apportion"
    total = check.integer(where, "total", total, low=0, high=MAX_TOTAL)
    times = check.reals(where, "ms_per_batch", ms_per_batch, low=SHORTEST_MS)
    if not times:
        raise ValueError(check.message(where, "ms_per_batch", "have one entry per device", "none"))
    return tuple(split(total, np.array(times)).tolist())


@np.errstate(over="ignore")  # reached only by times above 1e290 ms or below 1e-290
def split(total: int, ms: FloatArray) -> NDArray[np.int64]:
    """Compute `apportion` for checked arrays.

    Microbatch ``k`` of device ``d`` ends at ``k * ms[d]``. The split consists of the
    ``total`` earliest ends, ordered by (end, rank). The continuous problem gives a lower
    bound on the last of them, and thereby nearly all microbatches at once. The remaining
    ones, about as many as there are devices, are handed out one by one.

    Args:
        total: Microbatches to split, ``0 <= total <= 2**53``.
        ms: Shape ``(devices,)``, milliseconds per microbatch, above 0.

    Returns:
        Counts, shape ``(devices,)``.

    Examples:
        >>> split(10, np.array([1.0, 2.5])).tolist()
        [7, 3]
    """
    # scaled by a power of two, which is exact: total * ms might overflow
    ms = np.ldexp(ms, -max(0, int(np.frexp(ms.min())[1])))
    fastest = float(ms.min())  # divided out, as 1 / ms may overflow
    # Lowered by far more than the rounding error of the sum: the microbatches that end by
    # this time must never exceed the total.
    level = total / float((fastest / ms).sum()) * fastest * (1.0 - 1e-12)
    counts = np.floor(level / ms).astype(np.int64)
    # One by one is fast enough: 0.5 ms for 512 devices. For the largest total, 2**53, the slack in
    # the level leaves 9,000 microbatches.
    for _ in range(total - int(counts.sum())):
        counts[((counts + 1) * ms).argmin()] += 1  # the first of equal ends: the lower rank
    return counts


@np.errstate(over="ignore", divide="ignore", invalid="ignore")  # only by ratios above 1e300
def densest(anchor: int, ms: FloatArray) -> FloatArray:
    """Return the counts of the window that has the most microbatches per time.

    In a window of length ``T``, device ``d`` runs ``floor(T / ms[d])`` microbatches. ``T`` is
    ``anchor * max(ms)``, or the end of the next microbatch of some device if the slowest device
    has no time for another one by then. Of equally good windows, the shortest is chosen.

    With counts rounded to the nearest, all devices would wait for the one whose count is rounded
    up furthest. The cost grows with the square of the number of devices: 4 ms for 512.

    Args:
        anchor: Count of the slowest device, at least 1.
        ms: Shape ``(devices,)``, milliseconds per microbatch, above 0.

    Returns:
        Counts, shape ``(devices,)``, whole numbers from ``anchor`` to `MAX_TOTAL`.

    Examples:
        In 200 ms the first device runs 13.3 microbatches. The window in which it runs 14 takes
        210 ms.

        >>> densest(10, np.array([15.0, 5.0, 10.0, 20.0])).tolist()
        [13.0, 40.0, 20.0, 10.0]
    """
    # scaled by a power of two, which is exact: anchor * ms might overflow
    ms = np.ldexp(ms, -int(np.frexp(ms.max())[1]))
    shortest, longest = anchor * ms.max(), (anchor + 1) * ms.max()
    ends = (_whole(shortest, ms) + 1) * ms
    # not those of devices that only rounding makes faster than the slowest
    ends = np.array([shortest, *np.sort(ends[ends < longest * (1.0 - 2 * ROUNDING)])])
    counts = np.minimum(_whole(ends[:, None], ms), MAX_TOTAL)
    rates = counts.sum(axis=1) / ends
    return counts[(rates >= rates.max() * (1.0 - ROUNDING)).argmax()]


def _whole(window_ms: FloatArray, ms: FloatArray) -> FloatArray:
    """Return how many microbatches fit, despite rounding errors of the quotient."""
    quotient = window_ms / ms
    return np.floor(quotient + np.minimum(quotient * ROUNDING, 1e-3))
