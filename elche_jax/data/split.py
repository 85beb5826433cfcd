"""Splitting a window into ranges per device, chunks per call, and pieces per transfer.

A window is a run of consecutive microbatches. Device `d` takes `counts[d]` of them,
device 0 first. A compiled program of capacity `C = 2**k - 1` takes at most `C` from each
device in one call, so a range is cut into *chunks* of at most `C`. A chunk of `n`
microbatches crosses to its device as *pieces* whose lengths are the binary digits of `n`
(13 = 8 + 4 + 1). Every piece thus has one of `k` shapes, and no padding is transferred.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


def capacity_for(count: int) -> int:
    """Return the smallest capacity `2**k - 1` that holds `count` microbatches.

    Examples:
        >>> from elche_jax.data.split import capacity_for
        >>> [capacity_for(n) for n in (1, 2, 3, 4, 40)]
        [1, 3, 3, 7, 63]
    """
    return (1 << max(count, 1).bit_length()) - 1


def piece_lengths(capacity: int) -> tuple[int, ...]:
    """Return the lengths of the pieces that a program of this capacity takes, longest first.

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
        """Return the start of each piece by its length, a binary digit of `count`.

        Examples:
            >>> from elche_jax.data.split import Range
            >>> Range(start=100, count=13).pieces()
            {8: 100, 4: 108, 1: 112}
        """
        starts, at = {}, self.start
        # longest first: `Pieces.fetch` recomputes the starts on the device, in this order
        for length in piece_lengths(self.count):
            if self.count & length:
                starts[length] = at
                at += length
        return starts


def split_window(
    counts: Sequence[int], capacity: int, ranks: Sequence[int] | None = None
) -> list[tuple[Range, ...]]:
    """Return the chunks of a window, each with a range per device.

    Args:
        counts: Microbatches per device.
        capacity: Largest number of microbatches of a device in one call, at least 1.
        ranks: Ranks of the devices whose ranges to return; None for all.

    Returns:
        For each call, a tuple with one range per such device. The ranges of a device are
        consecutive, and its work is split evenly over the calls: as counts are proportional
        to speeds, the devices then finish each call together, even if the runtime starts a
        call on all of them at once.

    Examples:
        >>> from elche_jax.data.split import split_window
        >>> [[(r.start, r.count) for r in chunk] for chunk in split_window((5, 2), 3)]
        [[(0, 2), (5, 1)], [(2, 3), (6, 1)]]
    """
    firsts = [0, *accumulate(counts)]
    wanted = [(firsts[rank], counts[rank]) for rank in ranks or range(len(counts))]
    calls = -(-max(count for _, count in wanted) // capacity)  # rounded up
    # devices without work still take part in the exchange with those of other processes
    calls = max(calls, int(any(counts)))

    def part(first: int, count: int, call: int) -> Range:
        # filling one call after the other made such a window 1.4 times as long
        begin, end = count * call // calls, count * (call + 1) // calls
        return Range(first + begin, end - begin)

    return [tuple(part(*own, call) for own in wanted) for call in range(calls)]
