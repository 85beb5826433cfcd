"""Shift: lasting changes of speed are told from noise."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from elche_jax.cadence import Shift, ShiftState

laws = settings(deadline=None, database=None, derandomize=True)


def follow(detector, pairs):
    """Feed (expected, measured) of one device; return runs and verdicts."""
    state = detector.init(1)
    seen = []
    for expected, measured in pairs:
        state, shifted = detector.update(state, (expected,), (measured,))
        seen.append((state.runs[0], shifted))
    return seen


def test_two_windows_in_the_same_direction():
    assert follow(Shift(), [(10.0, 12.0), (10.0, 12.0)]) == [(1, False), (0, True)]
    assert follow(Shift(), [(10.0, 8.0), (10.0, 8.0)]) == [(-1, False), (0, True)]


def test_the_other_direction_starts_anew():
    assert follow(Shift(), [(10.0, 12.0), (10.0, 8.0), (10.0, 12.0)]) == [
        (1, False),
        (-1, False),
        (1, False),
    ]


def test_a_window_as_expected_ends_the_run():
    # exactly 10 % is not more than 10 %
    assert follow(Shift(), [(10.0, 12.0), (10.0, 11.0), (10.0, 12.0)]) == [
        (1, False),
        (0, False),
        (1, False),
    ]


def test_unknown_times_leave_the_run():
    pairs = [(10.0, 12.0), (10.0, None), (None, 12.0), (None, None), (10.0, 12.0)]
    assert [shifted for _, shifted in follow(Shift(), pairs)] == [False] * 4 + [True]


def test_one_device_is_enough_and_all_runs_reset():
    detector = Shift(threshold=0.5, confirm=2)
    state = ShiftState((1, 1, -1))
    state, shifted = detector.update(state, (1.0, 1.0, 1.0), (1.4, 1.6, 1.0))
    assert shifted
    assert state.runs == (0, 0, 0)


def test_arrays_with_nan_mean_the_same_as_tuples_with_none():
    detector = Shift()
    state = ShiftState((1, 0))
    by_tuple = detector.update(state, (10.0, None), (None, 5))
    by_array = detector.update(state, np.array([10.0, math.nan]), np.array([math.nan, 5.0]))
    assert by_tuple == by_array == (ShiftState((1, 0), (0.0, 0.0)), False)


@laws
@given(st.integers(1, 5), st.lists(st.floats(0.5, 2.0), max_size=30))
def test_a_shift_is_confirm_deviations_in_a_row(confirm, measured):
    detector = Shift(threshold=0.1, confirm=confirm, noise=0)
    seen = follow(detector, [(1.0, ms) for ms in measured])
    # by the definition: count back from each window to the last shift
    start = 0
    for index, (_, shifted) in enumerate(seen):
        recent = [ms - 1.0 for ms in measured[start : index + 1]][-confirm:]
        slower = all(off > 0.1 for off in recent)
        faster = all(off < -0.1 for off in recent)
        assert shifted == (len(recent) == confirm and (slower or faster))
        if shifted:
            start = index + 1


@pytest.mark.parametrize("spread", [0.1, 0.2, 0.4])
def test_times_that_always_vary_are_no_shift(spread):
    """And a change of speed is one all the same, after as many windows."""
    rng, detector, shifts = np.random.default_rng(0), Shift(), 0
    state = detector.init(1)
    for _ in range(1000):
        measured = 10 * (1 + spread * rng.uniform(-1, 1))
        state, shifted = detector.update(state, (10.0,), (measured,))
        shifts += shifted
    assert shifts <= 5 and state.deviations[0] == pytest.approx(spread / 2, rel=0.4)
    for ms in (30.0, 3.0):
        once, shifted = detector.update(replace(state, runs=(0,)), (10.0,), (ms,))
        assert not shifted and detector.update(once, (10.0,), (ms,))[1]


@laws
@given(st.lists(st.floats(0.01, 100), max_size=40))
def test_the_limit_is_that_of_the_smoothed_deviation(measured):
    state, usual, run = Shift().init(1), 0.0, 0
    for ms in measured:
        state, shifted = Shift().update(state, (1.0,), (ms,))
        limit = max(0.1, min(3 * usual, 0.5))
        side = 0 if abs(ms - 1.0) <= limit else 1 if ms > 1 else -1
        run = run + side if run * side > 0 else side
        assert shifted == (abs(run) >= 2)
        run = 0 if shifted else run
        usual += 0.1 * (min(abs(ms - 1), limit) - usual)
        assert state.deviations[0] == pytest.approx(usual)


def test_a_state_that_was_saved_without_deviations_goes_on():
    state = ShiftState.from_dict({"runs": [1, 0]})
    assert Shift().first_deviations(state) == (True, False)
    assert Shift().update(state, (10.0, 10.0), (12.0, 10.0))[1]
    with pytest.raises(ValueError, match=r"^ShiftState\.from_dict: deviations must have one entry"):
        ShiftState.from_dict({"runs": [1, 0], "deviations": [0.1]})
    with pytest.raises(ValueError, match=r"^ShiftState\.from_dict: deviations\[1\] must be at lea"):
        ShiftState.from_dict({"runs": [1, 0], "deviations": [0.1, -1.0]})
    again = ShiftState.from_dict(Shift().init(2).to_dict())
    assert again == Shift().init(2)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"noise": -1}, ValueError, "noise must be at least 0, got -1"),
        ({"threshold": 0}, ValueError, "threshold must be above 0, got 0"),
        ({"threshold": None}, TypeError, "threshold must be a number, got None"),
        ({"confirm": 0}, ValueError, "confirm must be at least 1, got 0"),
        ({"confirm": 1.0}, TypeError, "confirm must be an integer, got 1.0"),
    ],
)
def test_config_errors(arguments, kind, text):
    with pytest.raises(kind, match=f"^Shift: {text}"):
        Shift(**arguments)


@pytest.mark.parametrize(
    ("expected", "measured", "kind", "text"),
    [
        ((1.0,), (1.0, 1.0), ValueError, r"expected_ms must have one entry per device"),
        ((1.0, 1.0), (1.0,), ValueError, r"measured_ms must have one entry per device"),
        ((0.0, 1.0), (1.0, 1.0), ValueError, r"expected_ms\[0\] must be above 0 and"),
        (
            (1.0, 1.0),
            np.array([1.0, math.inf]),
            ValueError,
            r"measured_ms\[1\] must be above 0 and finite, got inf",
        ),
        ((1.0, "2"), (1.0, 1.0), TypeError, r"expected_ms\[1\] must be a number"),
        (
            3.0,
            (1.0, 1.0),
            TypeError,
            "expected_ms must be a sequence of numbers or Non",
        ),
    ],
)
def test_update_errors(expected, measured, kind, text):
    detector = Shift()
    with pytest.raises(kind, match=rf"^Shift\.update: {text}"):
        detector.update(detector.init(2), expected, measured)


def test_init_errors():
    with pytest.raises(ValueError, match=r"^Shift\.init: world_size must be at least 1, got 0\.$"):
        Shift().init(0)
