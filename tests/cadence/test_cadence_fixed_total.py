"""FixedTotal: the best split of a constant total, without flapping."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from elche_jax.cadence import FixedTotal, FixedTotalState, Scheduler, WindowReport, apportion

laws = settings(deadline=None, database=None, derandomize=True)


def report(state, ms):
    wall = [count * time for count, time in zip(state.counts, ms, strict=True)]
    return WindowReport(wall, state.counts, 1.0)


@pytest.mark.parametrize(
    ("total", "world_size", "expected"),
    [(8, 2, (4, 4)), (8, 3, (3, 3, 2)), (2, 4, (1, 1, 0, 0)), (5, 1, (5,))],
)
def test_init_is_as_equal_as_possible(total, world_size, expected):
    state = FixedTotal(total).init(world_size)
    assert state == FixedTotalState(expected, (None,) * world_size)


def test_the_first_measurement_is_followed_at_once():
    cadence = FixedTotal(8)
    after = cadence.update(cadence.init(2), WindowReport((120, 40), (4, 4), 0.0))
    # 30 and 10 ms: (2, 6) ends at 60
    assert after == FixedTotalState((2, 6), (30.0, 10.0))


def test_the_first_measurement_is_followed_even_for_a_small_gain():
    cadence = FixedTotal(100)
    # (51, 49) ends at 51 instead of 51.5
    after = cadence.update(cadence.init(2), WindowReport((50, 51.5), (50, 50), 0.0))
    assert after.counts == (51, 49)


def test_a_gain_up_to_two_percent_moves_nothing():
    cadence = FixedTotal(100)
    state = FixedTotalState((50, 50), (1.0, 1.0))
    # error 0.3 -> alpha 0.3: 1.09. Best: 52 | 48 -> 52.32 instead of 54.5: 4 % less
    after = cadence.update(state, WindowReport((50.0, 65.0), (50, 50), 0.0))
    assert after.ms_per_batch == pytest.approx((1.0, 1.09))
    assert after.counts == (52, 48)
    # error 0.1 -> alpha 0.1: 1.01. Best: 50 | 50 -> 50.5
    after = cadence.update(state, WindowReport((50.0, 55.0), (50, 50), 0.0))
    assert after.counts == (50, 50)
    # error 0.2 -> alpha 0.2: 1.04. Best: 51 | 49 -> 51 instead of 52: 1.92 % less
    after = cadence.update(state, WindowReport((50.0, 60.0), (50, 50), 0.0))
    assert after.ms_per_batch == pytest.approx((1.0, 1.04))
    assert apportion(100, (1.0, 1.04)) == (51, 49)
    assert after.counts == (50, 50)


def test_a_device_without_work_keeps_its_estimate():
    cadence = FixedTotal(3)
    state = FixedTotalState((3, 0), (1.0, 9.0))
    after = cadence.update(state, WindowReport((3.0, 0.0), (3, 0), 0.0))
    assert after == replace(state, idle=(0, 1))


def test_a_device_without_work_is_tried_again_ever_more_seldom():
    cadence, state, tried = FixedTotal(3), FixedTotalState((3, 0), (1.0, 9.0)), []
    for window in range(600):
        wall = tuple(n * ms for n, ms in zip(state.counts, (1.0, 9.0), strict=True))
        tried += [window] * (state.counts[1] > 0)
        state = cadence.update(state, WindowReport(wall, state.counts, 0.0))
    # from where 9 ms are less than 5 % of so many windows of 3 ms
    assert tried == [64, 128, 256, 512]


def test_more_devices_without_work_than_microbatches_are_tried_in_turn():
    cadence, ms, tried = FixedTotal(2), (1.0, 6.0, 6.0, 6.0, 6.0), {}
    state = FixedTotalState((2, 0, 0, 0, 0), ms)
    for window in range(100):
        for rank in np.flatnonzero(state.counts[1:]) + 1:
            tried.setdefault(int(rank), window)
        wall = tuple(n * t for n, t in zip(state.counts, ms, strict=True))
        state = cadence.update(state, WindowReport(wall, state.counts, 0.0))
        assert sum(state.counts) == 2
    assert tried == {1: 64, 2: 64, 3: 65, 4: 65}


@pytest.mark.parametrize(("total", "factor"), [(2, 10.0), (8, 100.0), (64, 100.0)])
def test_a_device_that_was_slow_for_a_while_comes_back(factor, total):
    """As the loop does, with each window planned before the last one is reported."""
    scheduler = Scheduler(FixedTotal(total))
    state, counts = scheduler.init(2), [(0, 0)]
    for window in range(800):
        counts.append(scheduler.plan(state))
        if window > 1:
            slow = factor if 30 <= window - 1 < 40 else 1.0
            wall = (5.0 * counts[-2][0], 5.0 * slow * counts[-2][1])
            state = scheduler.update(state, WindowReport(wall, counts[-2], 0.1))
    assert counts[45] == (total, 0)
    assert np.median((np.array(counts[600:]) * 5.0).max(axis=1)) == 5.0 * total / 2


def test_fewer_microbatches_than_devices_are_tried_in_turn():
    cadence = FixedTotal(2)
    ms = (4.0, 3.0, 2.0, 1.0, 5.0)
    state = cadence.init(5)
    assert state.counts == (1, 1, 0, 0, 0)
    state = cadence.update(state, report(state, ms))
    assert state.counts == (0, 0, 1, 1, 0)
    state = cadence.update(state, report(state, ms))
    # one left to try; the other microbatch goes to the fastest known
    assert state.counts == (0, 0, 0, 1, 1)
    state = cadence.update(state, report(state, ms))
    # ends 1, 2 | 2: ranks 2 and 3 tie at 2 for the second, the lower one has it
    assert state == FixedTotalState((0, 0, 1, 1, 0), ms, idle=(1, 1, 0, 0, 1))


def test_while_all_unmeasured_devices_have_work_the_split_stays():
    cadence = FixedTotal(8)
    state = cadence.init(2)
    # a window cut short left device 1 without work
    after = cadence.update(state, WindowReport((9.0, 0.0), (1, 0), 0.0))
    assert after == FixedTotalState((4, 4), (9.0, None))
    # nothing measured at all
    assert cadence.update(state, WindowReport((0.0, 0.0), (4, 4), 0.0)) == state


def test_recalibrate_tries_idle_devices_again():
    cadence = FixedTotal(4)
    state = cadence.recalibrate(FixedTotalState((4, 0), (1.0, 9.0)))
    assert state == FixedTotalState((4, 0), (None, None))
    state = cadence.update(state, report(state, (1.0, 1.0)))
    assert state.counts == (3, 1)
    state = cadence.update(state, report(state, (1.0, 1.0)))
    assert state == FixedTotalState((2, 2), (1.0, 1.0))


@pytest.mark.parametrize(("total", "equal"), [(3, (1, 1, 1)), (16, (6, 5, 5))])
def test_a_single_pause_leaves_no_device_without_work(total, equal):
    cadence = FixedTotal(total)
    state = FixedTotalState(equal, (5.0, 5.0, 5.0))
    # a second in which device 1 did nothing; the next window was planned before
    wall = [5.0 * count for count in equal]
    paused = WindowReport([wall[0], wall[1] + 1000, wall[2]], equal, 1.0)
    state = cadence.update(state, paused)
    assert state.counts[1] == 1 and sum(state.counts) == total
    state = cadence.update(state, WindowReport(wall, equal, 1.0))
    for _ in range(10):
        state = cadence.update(state, report(state, (5.0, 5.0, 5.0)))
    # what is left of the pause in the estimate is below the gain that moves counts
    assert state.counts[1] >= equal[1] - 1
    assert state.ms_per_batch[1] < 6


def test_a_device_that_stays_slow_loses_its_work_in_the_second_window():
    cadence = FixedTotal(8)
    state = FixedTotalState((3, 3, 2), (5.0, 5.0, 5.0))
    state = cadence.update(state, report(state, (5.0, 500.0, 5.0)))
    assert state.counts == (4, 1, 3)
    # 401 ms are the estimate by now
    state = cadence.update(state, report(state, (5.0, 500.0, 5.0)))
    assert state.counts == (4, 0, 4)


def test_the_only_microbatch_stays_where_it_took_long():
    cadence = FixedTotal(1)
    state = FixedTotalState((1, 0), (5.0, 6.0))
    state = cadence.update(state, WindowReport((100.0, 0.0), (1, 0), 1.0))
    assert state.counts == (1, 0)
    state = cadence.update(state, WindowReport((100.0, 0.0), (1, 0), 1.0))
    assert state.counts == (0, 1)


@laws
@given(
    st.integers(1, 60),
    st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6),
)
def test_constant_speeds_reach_the_best_split_and_keep_it(total, ms):
    cadence = FixedTotal(total)
    state = cadence.init(len(ms))
    for _ in range(len(ms) + 1):
        state = cadence.update(state, report(state, ms))
        assert sum(state.counts) == total
    assert None not in state.ms_per_batch
    after = cadence.update(state, report(state, ms))
    assert after.counts == state.counts

    def ends(counts):
        return max(count * time for count, time in zip(counts, ms, strict=True))

    # the measured times may be an ulp off the true ones
    assert ends(state.counts) <= ends(apportion(total, ms)) * (1 / 0.98 + 1e-9)


def test_errors():
    with pytest.raises(ValueError, match=r"^FixedTotal: total must be at least 1, got 0\.$"):
        FixedTotal(0)
    with pytest.raises(TypeError, match=r"^FixedTotal: total must be an integer, got "):
        FixedTotal(64.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match=r"^FixedTotal\.init: world_size must be at least 1, got 0\.$"
    ):
        FixedTotal(64).init(0)


@pytest.mark.parametrize("spread", [0.1, 0.2, 0.3])
def test_noise_does_not_try_a_device_that_is_too_slow_again_and_again(spread):
    """Windows of 50 times the length: an estimate that is forgotten costs one of them."""
    rng, ms = np.random.default_rng(0), (2.0, 2.0, 2.0, 100.0)
    scheduler, tried = Scheduler(FixedTotal(8)), 0
    state = scheduler.init(4)
    for _ in range(500):
        counts = state.counts
        tried += counts[3] > 0
        wall = [n * t * (1 + spread * rng.uniform(-1, 1)) for n, t in zip(counts, ms, strict=True)]
        state = scheduler.update(state, WindowReport(tuple(wall), counts, 0.1))
    assert tried < 11, "two of them after 128 and 256 windows"
