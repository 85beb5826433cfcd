"""Counts computed independently of the library, in exact arithmetic."""

from fractions import Fraction


def densest_counts(anchor, ms):
    """The counts of the shortest window that has the most microbatches per time."""
    times = list(map(Fraction, ms))
    shortest, longest = anchor * max(times), (anchor + 1) * max(times)
    ends = {shortest, *((shortest // time + 1) * time for time in times)}
    windows = [(end, tuple(int(end // time) for time in times)) for end in ends if end < longest]
    return max(windows, key=lambda window: (sum(window[1]) / window[0], -window[0]))[1]
