"""Balanced: when it rebalances, to what, and that the ratios sum to exactly 1."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hints import hints_and_ms
from hypothesis import given, settings, strategies as st

from elche_jax.cadence import Balanced, BalancedState, Scheduler, WindowReport, shard_sizes

laws = settings(deadline=None, database=None, derandomize=True)


def run(cadence, state, ms, windows=1):
    for _ in range(windows):
        wall = [count * time for count, time in zip(state.counts, ms, strict=True)]
        state = cadence.update(state, WindowReport(wall, state.counts, 0.0))
    return state


def test_init():
    assert Balanced(total=10).init(2) == BalancedState(
        counts=(5, 5),
        ratios=(0.5, 0.5),
        throughput=(None, None),
        windows=0,
        next_rebalance=10,
    )
    assert Balanced(total=8).init(1).counts == (8,)


def test_rebalances_after_10_windows_then_every_50():
    cadence = Balanced(total=8)
    state = run(cadence, cadence.init(2), (3.0, 1.0), 9)
    assert (state.counts, state.ratios) == ((4, 4), (0.5, 0.5))
    state = run(cadence, state, (3.0, 1.0))
    assert state.windows == 10
    assert state.next_rebalance == 60
    assert state.ratios == pytest.approx((0.25, 0.75))
    assert state.counts == (2, 6)
    # now both equal, but nothing moves before window 60
    state = run(cadence, state, (1.0, 1.0), 49)
    assert state.counts == (2, 6)
    state = run(cadence, state, (1.0, 1.0))
    assert (state.windows, state.next_rebalance, state.counts) == (60, 110, (4, 4))


def test_throughput_is_an_average_of_rates():
    cadence = Balanced(total=8)
    state = cadence.update(cadence.init(2), WindowReport((8.0, 4.0), (4, 4), 0.0))
    assert state.throughput == (0.5, 1.0)  # taken as it is
    state = cadence.update(state, WindowReport((4.0, 0.0), (4, 4), 0.0))
    # 0.3 * 1 + 0.7 * 0.5 = 0.65; device 1 was not measured
    assert state.throughput == pytest.approx((0.65, 1.0))


def test_floor_is_filled_from_the_others():
    cadence = Balanced(total=40, calibration_windows=1, min_ratio=0.05)
    # 1 : 30 : 69 -> 0.01 is raised to 0.05; the others share 0.95 as 30 : 69
    state = run(cadence, cadence.init(3), (1.0, 1 / 30, 1 / 69))
    assert state.ratios == pytest.approx((0.05, 0.95 * 30 / 99, 0.95 * 69 / 99))
    assert min(state.ratios) >= 0.05
    # 2, 11.5 -> 12, the rest
    assert state.counts == (2, 12, 26)


def test_floor_is_checked_again_after_scaling():
    cadence = Balanced(total=40, calibration_windows=1, min_ratio=0.2)
    # 0.01, 0.205, 0.785: raising the first scales 0.205 by 0.8 / 0.99 to 0.166,
    # which is now below as well; the last keeps 0.6
    state = run(cadence, cadence.init(3), (1 / 0.01, 1 / 0.205, 1 / 0.785))
    assert state.ratios == pytest.approx((0.2, 0.2, 0.6))


def test_an_unmeasured_device_counts_as_the_mean():
    cadence = Balanced(total=12, calibration_windows=1)
    state = cadence.update(cadence.init(3), WindowReport((12.0, 4.0, 0.0), (4, 4, 0), 0.0))
    # 1/3 and 1, mean 2/3: 2 : 6 : 4
    assert state.counts == (2, 6, 4)
    assert state.throughput[2] is None


def test_without_any_measurement_the_change_waits():
    cadence = Balanced(total=8, calibration_windows=1)
    state = cadence.update(cadence.init(2), WindowReport((0.0, 0.0), (4, 4), 0.0))
    assert (state.counts, state.windows, state.next_rebalance) == ((4, 4), 1, 1)
    state = run(cadence, state, (3.0, 1.0))
    assert (state.counts, state.next_rebalance) == ((2, 6), 52)


@pytest.mark.parametrize(
    ("hint", "counts", "ratios"),
    [
        # 2 : 1 : 2, of 20: 8, 4, 8
        ((1, 2.0), (8, 4, 8), (0.4, 0.2, 0.4)),
        ((0, 1), (7, 7, 6), (1 / 3, 1 / 3, 1 / 3)),
        ([5, 2, 3], (10, 4, 6), (0.5, 0.2, 0.3)),
        (np.array([0.5, 0.2, 0.3]), (10, 4, 6), (0.5, 0.2, 0.3)),
        # 1 : 98 : 1, where the floor of 0.05 binds: 0.05, 0.9, 0.05
        ([1, 98, 1], (1, 18, 1), (0.05, 0.9, 0.05)),
        # the largest spread there may be
        ([2**53, 1.0, 1.0], (18, 1, 1), (0.9, 0.05, 0.05)),
    ],
)
def test_speed_hint_seeds_ratios_and_counts(hint, counts, ratios):
    state = Balanced(total=20, speed_hint=hint).init(3)
    assert (state.counts, state.ratios) == (counts, pytest.approx(ratios))
    assert (state.throughput, state.windows) == ((None,) * 3, 0)


def test_speed_hint_of_one_device():
    assert Balanced(8, speed_hint=[3.0]).init(1).counts == (8,)
    assert Balanced(8, speed_hint=(0, 2.0)).init(1).ratios == (1.0,)


def test_a_wrong_hint_is_corrected_by_the_first_report():
    cadence = Balanced(total=12, speed_hint=(1, 5.0))
    state = cadence.init(2)
    assert state.counts == (10, 2)
    # device 1 is five times as fast, not five times as slow
    state = run(cadence, state, (5.0, 1.0))
    assert (state.counts, state.ratios) == ((2, 10), pytest.approx((1 / 6, 5 / 6)))


def test_after_the_hint_changes_come_when_they_would_without():
    cadence = Balanced(total=12, speed_hint=(1, 5.0))
    state = run(cadence, cadence.init(2), (5.0, 1.0))
    assert (state.windows, state.next_rebalance) == (1, 10)
    state = run(cadence, state, (1.0, 1.0), 8)
    assert state.counts == (2, 10)  # equal by now, and nothing moves before window 10
    state = run(cadence, state, (1.0, 1.0))
    assert (state.windows, state.next_rebalance) == (10, 60)
    assert state.counts == (6, 6)


def test_a_hint_waits_for_the_first_report_with_a_time():
    cadence = Balanced(total=12, calibration_windows=3, rebalance_every=7, speed_hint=(1, 5.0))
    state = cadence.update(cadence.init(2), WindowReport((0.0, 0.0), (10, 2), 0.0))
    assert (state.counts, state.next_rebalance) == ((10, 2), 1)
    state = run(cadence, state, (5.0, 1.0))
    assert (state.counts, state.next_rebalance) == ((2, 10), 3)
    # so late that the correction is the calibration
    late = cadence.init(2)
    for _ in range(4):
        late = cadence.update(late, WindowReport((0.0, 0.0), (10, 2), 0.0))
    late = run(cadence, late, (5.0, 1.0))
    assert (late.counts, late.windows, late.next_rebalance) == ((2, 10), 5, 12)


@laws
@given(hints_and_ms(), st.integers(0, 40))
def test_any_hint_is_corrected_in_one_window(case, more):
    hint, ms = case
    total = len(ms) + more
    hinted = Balanced(total, speed_hint=hint)
    plain = Balanced(total, calibration_windows=1)
    # in a training loop, where a scheduler stands between
    scheduler = Scheduler(hinted)
    start = scheduler.init(len(ms))
    wall = [count * time for count, time in zip(start.counts, ms, strict=True)]
    after = scheduler.update(start, WindowReport(wall, start.counts, 1.0))
    expected = run(plain, plain.init(len(ms)), ms)
    assert sum(start.cadence.ratios) == sum(map(Fraction, start.cadence.ratios)) == 1
    assert after.counts == expected.counts
    assert after.cadence.ratios == expected.ratios
    assert after.cadence.throughput == expected.throughput


@laws
@given(
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20),
    st.integers(1, 400),
    st.floats(0.0, 0.05),
)
def test_ratio_laws(ms, total, min_ratio):
    cadence = Balanced(total, calibration_windows=1, min_ratio=min_ratio)
    start = cadence.init(len(ms))
    wall = WindowReport(ms, (1,) * len(ms), 0.0)
    for state in (start, cadence.update(start, wall)):
        # exact, in whatever order and by whatever algorithm they are added
        assert sum(state.ratios) == 1.0
        assert math.fsum(state.ratios) == 1.0
        assert sum(map(Fraction, state.ratios)) == 1
        assert min(state.ratios) >= min_ratio - 1e-14
        assert sum(state.counts) == total
        assert state.counts == shard_sizes(state.ratios, total)
    by_speed = sorted(zip(ms, state.ratios, strict=True))
    for (ms_a, a), (ms_b, b) in itertools.pairwise(by_speed):
        assert ms_a <= ms_b
        assert a >= b - 1e-14


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 13, 20])
def test_the_tightest_floor_still_sums_to_one(world_size):
    cadence = Balanced(total=100, calibration_windows=1, min_ratio=1 / world_size)
    ms = [1.0 + rank for rank in range(world_size)]
    state = run(cadence, cadence.init(world_size), ms)
    assert sum(state.ratios) == 1.0
    assert state.ratios == pytest.approx((1 / world_size,) * world_size)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"total": 0}, ValueError, r"total must be at least 1, got 0\.$"),
        ({"total": 8.0}, TypeError, r"total must be an integer, got 8\.0 \(float\)"),
        ({"alpha": 0}, ValueError, "alpha must be above 0, got 0"),
        ({"alpha": 1.1}, ValueError, "alpha must be at most 1, got 1.1"),
        ({"calibration_windows": 0}, ValueError, "calibration_windows must be at leas"),
        ({"rebalance_every": 0}, ValueError, "rebalance_every must be at least 1"),
        ({"min_ratio": -0.1}, ValueError, "min_ratio must be at least 0, got -0.1"),
        ({"min_ratio": "a"}, TypeError, "min_ratio must be a number, got 'a'"),
        ({"speed_hint": 2.3}, TypeError, "speed_hint must be a sequence of numbers"),
        ({"speed_hint": (1, 0.5)}, ValueError, r"speed_hint ratio must be at least 1, got 0\.5"),
    ],
)
def test_config_errors(arguments, kind, text):
    with pytest.raises(kind, match=f"^Balanced: {text}"):
        Balanced(**{"total": 8} | arguments)


def test_init_errors():
    with pytest.raises(
        ValueError,
        match=r"^Balanced\.init: min_ratio must be at most 1 / world_size "
        r"\(21 devices\), got 0\.05\. Lower min_ratio\.$",
    ):
        Balanced(total=64).init(21)
    with pytest.raises(
        ValueError, match=r"^Balanced\.init: world_size must be at least 1, got 0\.$"
    ):
        Balanced(total=64).init(0)
    with pytest.raises(
        ValueError,
        match=r"^Balanced\.init: speed_hint slow_rank must be below world_size \(2\), got 2\. ",
    ):
        Balanced(total=8, speed_hint=(2, 2.0)).init(2)
    with pytest.raises(
        ValueError,
        match=r"^Balanced\.init: speed_hint must have one entry per device \(2\), got 3\.$",
    ):
        Balanced(total=8, speed_hint=[1, 2, 3]).init(2)
