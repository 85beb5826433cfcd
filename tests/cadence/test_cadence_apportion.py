"""The three splits: hand computed, against brute force, and their laws."""

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from references import densest_counts

from elche_jax.cadence import apportion, clamp_counts, shard_sizes
from elche_jax.cadence.apportion import densest, split

laws = settings(deadline=None, database=None, derandomize=True)
counts_lists = st.lists(st.integers(0, 200), min_size=1, max_size=12)
# Few distinct values, so that ties are common.
tied_times = st.sampled_from([0.1, 0.2, 0.3, 1 / 3, 0.5, 0.7, 1.0, 2.0, 3.0])
any_times = st.floats(min_value=1e-3, max_value=1e3)
times_lists = st.lists(tied_times, min_size=1, max_size=9) | st.lists(
    any_times, min_size=1, max_size=9
)


def splits(total, size):
    """All ways to write ``total`` as a sum of ``size`` counts."""
    if size == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in splits(total - first, size - 1):
            yield (first, *rest)


def one_by_one(total, ms):
    """The split by its definition, one microbatch at a time."""
    counts = [0] * len(ms)
    for _ in range(total):
        rank = min(range(len(ms)), key=lambda r: ((counts[r] + 1) * ms[r], r))
        counts[rank] += 1
    return tuple(counts)


# clamp_counts


@pytest.mark.parametrize(
    ("counts", "max_total", "expected"),
    [
        ((10, 30), 40, (10, 30)),
        ((10, 30), 100, (10, 30)),
        ((10, 30), 20, (5, 15)),
        # shares 2.5 and 7.5: equal remainders, the lower rank gets the last one
        ((10, 30), 10, (3, 7)),
        # shares 3.33 each: one left, to rank 0
        ((5, 5, 5), 10, (4, 3, 3)),
        # shares 0.33, 0.67, 1: fewer microbatches than devices, one gets 0
        ((10, 20, 30), 2, (0, 1, 1)),
        # shares 9.9 and 0.1: enough for all, so the largest gives up one
        ((100, 1), 10, (9, 1)),
        # exactly one for each
        ((100, 1, 1), 3, (1, 1, 1)),
        # shares 1.82, 2, 0.18 -> 2, 2, 0: of two equal ones the one that had less
        ((10, 11, 1), 4, (1, 2, 1)),
        # a device without work stays without
        ((0, 8, 8), 6, (0, 3, 3)),
        ((3, 4), 0, (0, 0)),
        ((0, 0), 0, (0, 0)),
        ((), 5, ()),
    ],
)
def test_clamp_counts_by_hand(counts, max_total, expected):
    assert clamp_counts(counts, max_total) == expected


@laws
@given(counts_lists, st.integers(0, 1000))
def test_clamp_counts_laws(counts, max_total):
    clamped = clamp_counts(counts, max_total)
    assert sum(clamped) == min(sum(counts), max_total)
    assert all(0 <= new <= old for new, old in zip(clamped, counts, strict=True))
    if max_total >= len(counts):
        assert all(new > 0 for new, old in zip(clamped, counts, strict=True) if old)
    for (old_a, a), (old_b, b) in itertools.combinations(zip(counts, clamped, strict=True), 2):
        # a larger count never ends up with less than a smaller one
        assert old_a <= old_b or a >= b
        assert old_b <= old_a or b >= a


@laws
@given(st.lists(st.integers(20, 200), min_size=1, max_size=6), st.integers(60, 300))
def test_clamp_counts_is_within_one_of_proportional(counts, max_total):
    total = sum(counts)
    for new, old in zip(clamp_counts(counts, max_total), counts, strict=True):
        assert abs(new - old * min(1, max_total / total)) < 1


def test_clamp_counts_with_huge_numbers_is_exact():
    assert clamp_counts((10**30, 3 * 10**30), 10**29) == (
        10**29 // 4,
        3 * 10**29 // 4,
    )


def test_clamp_counts_errors():
    with pytest.raises(ValueError, match=r"^clamp_counts: max_total must be at least 0, got -1\.$"):
        clamp_counts((1, 2), -1)
    with pytest.raises(
        ValueError, match=r"^clamp_counts: counts\[1\] must be at least 0, got -2\.$"
    ):
        clamp_counts((1, -2), 3)
    with pytest.raises(TypeError, match=r"^clamp_counts: max_total must be an integer, got 1\.0 "):
        clamp_counts((1, 2), 1.0)  # pyright: ignore[reportArgumentType]


# shard_sizes


@pytest.mark.parametrize(
    ("ratios", "total", "expected"),
    [
        ((0.25, 0.75), 8, (2, 6)),
        # 2.5 rounds away from zero
        ((0.25, 0.75), 10, (3, 7)),
        # 3.33, 3.33: rounded, the last takes the rest
        ((1, 1, 1), 10, (3, 3, 4)),
        # 0.2 is raised to 1
        ((0.05, 0.95), 4, (1, 3)),
        # 1.5, 1.5, 1.5 -> 2, 2, 2: nothing left for the last, ranks 2 and 1 give
        ((0.3, 0.3, 0.3, 0.1), 5, (2, 1, 1, 1)),
        # one for each
        ((0.9, 0.05, 0.05), 3, (1, 1, 1)),
        # fewer than devices: no least size
        ((0.5, 0.3, 0.2), 2, (1, 1, 0)),
        ((0.4, 0.4, 0.2), 1, (0, 0, 1)),
        ((0.45, 0.45, 0.05, 0.05), 3, (1, 1, 0, 1)),
        # 1.35, 1.35 -> 1, 1; 1.5 -> 2 would leave -1
        ((0.6, 0.6, 0.6, 0.01, 0.01), 3, (1, 1, 1, 0, 0)),
        ((1.0,), 7, (7,)),
        ((0.5, 0.5), 0, (0, 0)),
    ],
)
def test_shard_sizes_by_hand(ratios, total, expected):
    assert shard_sizes(ratios, total) == expected


@laws
@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=12).filter(lambda r: sum(r) > 1e-6),
    st.integers(0, 500),
)
def test_shard_sizes_laws(ratios, total):
    sizes = shard_sizes(ratios, total)
    assert sum(sizes) == total
    assert min(sizes) >= (1 if total >= len(ratios) else 0)


def test_shard_sizes_of_ratios_whose_sum_is_no_number():
    assert shard_sizes([1e308, 1e308, 0.5e308], 10) == (4, 4, 2)


def test_shard_sizes_errors():
    with pytest.raises(
        ValueError,
        match=r"^shard_sizes: ratios must have an entry above 0, got \(0\.0, 0\.0\)\.$",
    ):
        shard_sizes((0.0, 0.0), 4)
    with pytest.raises(
        ValueError, match=r"^shard_sizes: ratios\[0\] must be at least 0, got -1\.0\.$"
    ):
        shard_sizes((-1.0, 2.0), 4)
    with pytest.raises(ValueError, match=r"^shard_sizes: total must be at least 0, got -4\.$"):
        shard_sizes((1.0, 2.0), -4)


# apportion


@pytest.mark.parametrize(
    ("total", "ms", "expected"),
    [
        (8, (1.0, 1.0), (4, 4)),
        # the odd one goes to the lower rank
        (9, (1.0, 1.0), (5, 4)),
        (8, (30.0, 10.0), (2, 6)),
        # shares 2.33 and 0.67: (2, 1) ends at 3.5, (3, 0) at 3
        (3, (1.0, 3.5), (3, 0)),
        # ends 1, 2 | 2 | : both 2s are needed
        (3, (1.0, 2.0), (2, 1)),
        # ends 1, 2 | 2: only one 2, rank 0 has it
        (2, (1.0, 2.0), (2, 0)),
        # the same with the ranks exchanged
        (2, (2.0, 1.0), (1, 1)),
        (0, (1.0, 2.0), (0, 0)),
        (5, (7.0,), (5,)),
    ],
)
def test_apportion_by_hand(total, ms, expected):
    assert apportion(total, ms) == expected


@laws
@given(
    st.integers(0, 9),
    st.lists(tied_times | any_times, min_size=1, max_size=4),
)
def test_apportion_is_as_good_as_the_best_of_all_splits(total, ms):
    def ends(counts):
        return max(count * time for count, time in zip(counts, ms, strict=True))

    assert ends(apportion(total, ms)) == min(map(ends, splits(total, len(ms))))


@laws
@given(st.integers(0, 120), times_lists)
def test_apportion_breaks_ties_by_rank(total, ms):
    assert apportion(total, ms) == one_by_one(total, ms)


@laws
@given(st.integers(0, 10**6), times_lists)
def test_apportion_laws(total, ms):
    counts = apportion(total, ms)
    assert sum(counts) == total
    assert min(counts) >= 0
    for (a, ms_a), (b, ms_b) in itertools.combinations(zip(counts, ms, strict=True), 2):
        assert ms_a <= ms_b or a <= b
        assert ms_b <= ms_a or b <= a
        assert ms_a != ms_b or 0 <= a - b <= 1


@pytest.mark.parametrize("total", [7, 700, 9_001])
@pytest.mark.parametrize("slow", [0, 1, 300])
def test_apportion_of_very_unequal_devices(total, slow):
    # One very fast device among equal slow ones: the continuous solution is far
    # from the integer one, most microbatches come in the later rounds.
    rng = random.Random(0)
    ms = [1.0] * slow + [1e-4] + [10 ** rng.uniform(-4, 0) for _ in range(slow)]
    assert apportion(total, ms) == one_by_one(total, ms)


@laws
@given(st.integers(1, 2**50), times_lists)
def test_apportion_of_any_total_takes_the_earliest_ends(total, ms):
    counts = apportion(total, ms)
    assert sum(counts) == total
    ranked = [*enumerate(zip(counts, ms, strict=True))]
    taken = [(count * time, rank) for rank, (count, time) in ranked if count]
    assert max(taken) < min(((count + 1) * time, rank) for rank, (count, time) in ranked)


def test_apportion_of_a_total_beyond_the_slack_of_the_bound():
    # 1e-12 of this total is more than there are devices.
    counts = apportion(3 * 10**12 + 1, (1.0, 2.0))
    assert counts == (2 * 10**12 + 1, 10**12)


@pytest.mark.parametrize(
    "ms",
    [
        (1e-9, 1e-9),
        (1e-9, 1.0, 1.0),
        (1e300, 1e-9),
        (2e-9, 3e300, 1e-9),
    ],
)
@pytest.mark.parametrize("total", [1, 3, 50])
def test_apportion_of_absurd_times_is_exact_as_well(total, ms):
    assert apportion(total, ms) == one_by_one(total, ms)


def test_apportion_of_ends_that_are_no_numbers():
    assert apportion(233_060_125, [7.7e299]) == (233_060_125,)
    assert apportion(10**9, [7.7e299, 7.7e299]) == (5 * 10**8, 5 * 10**8)


def test_split_leaves_its_arguments_alone():
    ms = np.array([1.0, 2.0, 5.0])
    split(11, ms)
    assert ms.tolist() == [1.0, 2.0, 5.0]


def test_apportion_errors():
    with pytest.raises(
        ValueError, match=r"^apportion: ms_per_batch\[1\] must be at least 1e-09, got 0\.0\.$"
    ):
        apportion(4, (1.0, 0.0))
    with pytest.raises(
        ValueError, match=r"^apportion: ms_per_batch\[0\] must be finite, got nan\.$"
    ):
        apportion(4, (float("nan"), 1.0))
    with pytest.raises(
        ValueError,
        match=r"^apportion: ms_per_batch must have one entry per device, got none\.$",
    ):
        apportion(4, ())
    with pytest.raises(ValueError, match=r"^apportion: total must be at least 0, got -1\.$"):
        apportion(-1, (1.0, 1.0))
    with pytest.raises(
        ValueError, match=r"^apportion: total must be at most 9007199254740992, got "
    ):
        apportion(2**53 + 1, (1.0, 1.0))
    with pytest.raises(
        TypeError, match=r"^apportion: total must be an integer, got 4\.5 \(float\)\.$"
    ):
        apportion(4.5, (1.0, 1.0))  # pyright: ignore[reportArgumentType]


# densest


@pytest.mark.parametrize(
    ("anchor", "ms", "expected"),
    [
        (10, (5, 5, 10, 20), (40, 40, 20, 10)),
        # 83 in 200 ms; 84 in 210 would be fewer per time
        (10, (15, 5, 10, 20), (13, 40, 20, 10)),
        # 33 in 300 ms are fewer per time than 34 in 307.2
        (10, (30, 12.8), (10, 24)),
        # a device that seems a little faster does not make seven others wait
        (20, (10, 10, 10, 10, 10, 10, 10, 9.75), (20,) * 8),
        # equally good: the shorter one
        (1, (2, 1.5), (1, 1)),
        (3, (7.0,), (3,)),
        # equal but for rounding: the slowest still gets its anchor
        (1, (1, 1 - 1e-13, 0.66), (1, 1, 2)),
        (1, (2.1 / 3, 0.7, 0.42), (1, 1, 2)),
        (10**13, (1.0, 1.0), (10**13, 10**13)),
        # quotients with rounding errors
        (9, (1 / 3, 0.1), (9, 30)),
        (7, (0.7, 0.1), (7, 49)),
        # broken clocks
        (200, (1e-9, 1e9), (2**53, 200)),
        (2**53, (1e308, 1e-308), (2**53, 2**53)),
    ],
)
def test_densest_by_hand(anchor, ms, expected):
    assert tuple(densest(anchor, np.array(ms, dtype=float))) == expected


@laws
@given(st.integers(1, 60), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8))
def test_densest_is_the_best_of_all_windows_it_may_choose(anchor, ms):
    counts = densest(anchor, np.array(ms))
    times, best = list(map(Fraction, ms)), densest_counts(anchor, ms)

    def rate(counts):
        ends = [int(count) * time for count, time in zip(counts, times, strict=True)]
        assert max(ends) < (anchor + 1) * max(times)
        return sum(map(int, counts)) / max(ends)

    # not the counts: rounding decides between windows that are equally good
    assert rate(counts) >= rate(best) * (1 - Fraction(1, 10**11))
    assert counts[np.argmax(ms)] == anchor


@laws
@given(st.integers(1, 10**6), st.integers(1, 40), st.lists(st.integers(1, 9), max_size=8))
def test_speeds_in_whole_numbers_are_met_exactly(unit, anchor, ratios):
    ms = [unit / ratio for ratio in (1, *ratios)]
    assert tuple(densest(anchor, np.array(ms))) == tuple(anchor * r for r in (1, *ratios))
