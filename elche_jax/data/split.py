"""Cutting a window: devices get ranges, ranges get chunks, chunks get pieces.

A window is a run of consecutive microbatches. Device `d` takes `counts[d]` of them,
device 0 first. A compiled program of capacity `C = 2**k - 1` takes at most `C` from each
device in one call, so a range is cut into *chunks* of at most `C`. A chunk of `n`
microbatches crosses to its device as *pieces* whose lengths are the binary digits of `n`
(13 = 8 + 4 + 1): every piece has one of `k` shapes, and no padding is transferred.
"""

from collections.abc import Sequence
from dataclasses import dataclass


def capacity_for(count: int) -> int:
    """Smallest capacity `2**k - 1` that holds `count` microbatches.

    Examples:
        >>> from elche_jax.data.split import capacity_for
        >>> [capacity_for(n) for n in (1, 2, 3, 4, 40)]
        [1, 3, 3, 7, 63]
    """
    return (1 << max(count, 1).bit_length()) - 1


def piece_lengths(capacity: int) -> tuple[int, ...]:
    """Lengths of the pieces a program of this capacity takes, longest first.

    Examples:
        >>> from elche_jax.data.split import piece_lengths
        >>> piece_lengths(15)
        (8, 4, 2, 1)
    """
    return tuple(1 << k for k in reversed(range(capacity.bit_length())))


@dataclass(frozen=True)
class Range:
    """Consecutive microbatches: `start` (within the window) and `count`."""

    start: int
    count: int

    def pieces(self) -> dict[int, int]:
        """Start of each piece by its length: the binary digits of `count`.

        Examples:
            >>> from elche_jax.data.split import Range
            >>> Range(start=100, count=13).pieces()
            {8: 100, 4: 108, 1: 112}
        """
        starts, at = {}, self.start
        for length in piece_lengths(self.count):
            if self.count & length:
                starts[length] = at
                at += length
        return starts


def split_window(counts: Sequence[int], capacity: int) -> list[tuple[Range, ...]]:
    """Chunks of a window, each a range per device.

    Args:
        counts: Microbatches per device.
        capacity: Most microbatches a device takes in one call, at least 1.

    Returns:
        One tuple of ranges (one per device) for each call. The ranges of a device are
        consecutive, and every device gets an even share of its work in each call:
        counts go with speeds, so the devices end a call together, also where the
        runtime starts a call on all of them at once.

    Examples:
        >>> from elche_jax.data.split import split_window
        >>> [[(r.start, r.count) for r in chunk] for chunk in split_window((5, 2), 3)]
        [[(0, 2), (5, 1)], [(2, 3), (6, 1)]]
    """
    calls = -(-max(counts) // capacity)
    chunks = []
    for call in range(calls):
        first, ranges = 0, []
        for count in counts:
            begin, end = count * call // calls, count * (call + 1) // calls
            ranges.append(Range(first + begin, end - begin))
            first += count
        chunks.append(tuple(ranges))
    return chunks
