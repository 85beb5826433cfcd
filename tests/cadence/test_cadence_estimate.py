"""The smoothed time per microbatch, against sums done by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from elche_jax.cadence import ElChe, WindowReport
from elche_jax.cadence.estimate import as_array, as_times, measured_ms, update_ms

laws = settings(deadline=None, database=None, derandomize=True)
times = st.floats(min_value=1e-3, max_value=1e6)


def estimate(old, wall, count=1):
    return as_times(update_ms(old, WindowReport((wall,), (count,), 0.0)))[0]


def test_first_time_is_taken_as_it_is():
    assert estimate((None,), 30.0, 4) == 7.5


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        # error 0.05 -> alpha 0.1:  0.1 * 10.5 + 0.9 * 10
        (10.0, 10.5, 10.05),
        # error 0.5 -> alpha 0.5:  0.5 * 15 + 0.5 * 10
        (10.0, 15.0, 12.5),
        # error 0.4 downwards -> alpha 0.4:  0.4 * 6 + 0.6 * 10
        (10.0, 6.0, 8.4),
        # error 2 -> alpha 0.8:  0.8 * 30 + 0.2 * 10
        (10.0, 30.0, 26.0),
        # error 0.9 downwards -> alpha 0.8:  0.8 * 1 + 0.2 * 10
        (10.0, 1.0, 2.8),
    ],
)
def test_smoothing(old, new, expected):
    assert estimate((old,), new) == pytest.approx(expected, rel=1e-12)


@laws
@given(times, times, st.floats(min_value=1e-3, max_value=1))
def test_a_window_cut_short_counts_by_its_share(old, new, share):
    whole = estimate((old,), new)
    (cut,) = update_ms((old,), WindowReport((new,), (1,), 0.0, share=share))
    assert cut - old == pytest.approx(share * (whole - old), rel=1e-6, abs=1e-12 * (old + new))


def test_a_pause_in_a_window_cut_short_changes_no_counts():
    """7 of 200 microbatches, and 10 ms in which the device did not run."""
    cadence = ElChe(anchor=200, max_anchor=200)
    state = cadence.update(cadence.init(2), WindowReport((200.0, 200.0), (200, 200), 2.0))
    cut = WindowReport((7.0, 17.0), (7, 7), 0.02, share=14 / 400)
    assert cadence.update(state, cut).counts == (200, 200)
    assert cadence.update(state, replace(cut, share=1.0)).counts[0] > 400


def test_unmeasured_devices_keep_their_estimate():
    report = WindowReport((5.0, 0.0, 0.0, 7.0), (0, 3, 3, 7), 0.0)
    result = as_times(update_ms((2.0, 4.0, None, None), report))
    assert result == (2.0, 4.0, None, 1.0)


def test_measured_uses_the_counts_really_run():
    report = WindowReport((30.0, 12.0), (10, 4), 0.0)
    assert measured_ms(report).tolist() == [3.0, 3.0]


@pytest.mark.parametrize("wall", [5e-324, 3.9e-9])
def test_less_than_a_picosecond_is_no_measurement(wall):
    report = WindowReport((wall, 6.0), (4, 2), 0.0)
    assert as_times(update_ms((None, None), report)) == (None, 3.0)


def test_array_and_tuple_forms():
    assert as_times(as_array((1.5, None))) == (1.5, None)
    assert as_times(np.array([1.5, 2.0])) == (1.5, 2.0)
    assert np.isnan(as_array((None,)))[0]


@laws
@given(times, times, st.integers(1, 1000))
def test_estimate_moves_towards_the_new_time_and_not_past_it(old, new, count):
    result = estimate((old,), new * count, count)
    assert result is not None
    got = new * count / count
    slack = 1e-12 * max(old, got)
    assert min(old, got) - slack <= result <= max(old, got) + slack
    assert abs(got - result) <= 0.9 * abs(got - old) + slack


@laws
@given(times)
def test_constant_time_is_a_fixed_point_to_the_last_bit(ms):
    assert estimate((ms,), ms) == ms


def test_extreme_times_stay_finite_and_silent():
    with np.errstate(all="raise"):
        result = estimate((1e-300,), 1e300)
    assert result is not None
    assert math.isfinite(result)
