"""WindowTime: windows that last alike on every device, and at least so long."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from elche_jax.cadence import Scheduler, WindowReport, WindowTime, WindowTimeState
from elche_jax.cadence.apportion import densest
from elche_jax.cadence.window_time import MAX_COUNT

laws = settings(deadline=None, database=None, derandomize=True)
cadences = st.builds(WindowTime, window_ms=st.floats(0.01, 1e4), least=st.integers(1, 40))
ms_lists = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)


def report(ms, counts):
    """A report of windows on devices of constant speed."""
    wall = [count * time for count, time in zip(counts, ms, strict=True)]
    return WindowReport(wall, counts, 0.0)


def measured(cadence, ms):
    """The state after the first window, one microbatch each."""
    state = cadence.init(len(ms))
    return cadence.update(state, report(ms, state.counts))


def test_the_first_window_is_one_microbatch_each():
    assert WindowTime().init(3) == WindowTimeState((1, 1, 1), (None, None, None))


@pytest.mark.parametrize(
    ("cadence", "ms", "counts"),
    [
        # 100 / 20 = 5 of the slowest, and 4 and 2 times as many
        (WindowTime(100), (20.0, 5.0, 10.0), (5, 20, 10)),
        # 10 / 20 is less than one: the four that it gets at least
        (WindowTime(10), (20.0, 5.0), (4, 16)),
        (WindowTime(10, least=1), (20.0, 5.0), (1, 4)),
        # 3 * 20 / 7 = 8.57
        (WindowTime(60, least=3), (20.0, 7.0), (3, 9)),
        # 100 / 0.02 = 5000 of the slowest would be too many; 4096 / 4 are not
        (WindowTime(100), (0.02, 0.005), (1024, 4096)),
        # more than 4096 times as fast: only there the counts are out of proportion
        (WindowTime(100, least=2), (1e4, 1.0, 10.0), (2, 4096, 2000)),
        (WindowTime(100), (50.0,), (4,)),
        # clocks and windows as odd as they may be
        (WindowTime(1e308), (1e-9, 1e-9), (4096, 4096)),
        (WindowTime(1e-300), (1e308, 1e-9), (4, 4096)),
    ],
)
def test_counts(cadence, ms, counts):
    after = measured(cadence, ms)
    assert after == WindowTimeState(counts, ms)


@laws
@given(cadence=cadences, ms=ms_lists)
def test_the_slowest_has_the_anchor_and_the_others_are_in_proportion(cadence, ms):
    counts = measured(cadence, ms).counts
    slowest = max(map(Fraction, ms))
    ratio = slowest / min(map(Fraction, ms))
    wanted = min(Fraction(cadence.window_ms) / slowest, MAX_COUNT / ratio)
    anchor = counts[ms.index(max(ms))]
    assert anchor == cadence.least or abs(anchor - wanted) <= Fraction(1, 2) + wanted / 10**12
    assert anchor >= max(cadence.least, math.floor(wanted))
    assert counts == tuple(np.minimum(densest(anchor, np.array(ms)), MAX_COUNT))


@laws
@given(cadence=cadences, ms=ms_lists)
def test_constant_speeds_keep_their_counts(cadence, ms):
    state = measured(cadence, ms)
    again = cadence.update(state, report(ms, state.counts))
    # the measured times may be an ulp off: at a half the count may go the other way
    assert again.ms_per_batch == pytest.approx(tuple(ms), rel=1e-12)
    assert all(
        abs(a - b) <= 1 + b * 2**-10 for a, b in zip(again.counts, state.counts, strict=True)
    )


@laws
@given(
    cadence=cadences,
    ms=st.lists(st.one_of(st.none(), st.floats(1e-3, 1e3)), min_size=1, max_size=6),
)
def test_devices_never_measured_get_one_microbatch_and_change_nothing(cadence, ms):
    state = cadence.init(len(ms))
    after = cadence.update(state, report([time or 0.0 for time in ms], state.counts))
    known = [time for time in ms if time is not None]
    alone = iter(measured(cadence, known).counts if known else ())
    assert after.counts == tuple(1 if time is None else next(alone) for time in ms)
    assert after.ms_per_batch == tuple(ms)


def test_a_device_without_work_keeps_its_estimate():
    cadence = WindowTime(100)
    state = measured(cadence, (20.0, 5.0))
    assert cadence.update(state, WindowReport((40.0, 0.0), (2, 0), 0.0)) == state
    # and one that was never measured is as soon as it has worked
    state = cadence.update(cadence.init(2), WindowReport((20.0, 0.0), (1, 0), 0.0))
    assert state.counts == (5, 1)
    assert cadence.update(state, WindowReport((100.0, 5.0), (5, 1), 0.0)).counts == (5, 20)


def test_a_change_of_speed_is_followed():
    cadence = WindowTime(100)
    state = measured(cadence, (10.0, 10.0))
    assert state.counts == (10, 10)
    # an error of 1 is taken in by 0.8: 10 + 0.8 * 10 = 18 ms, 100 / 18 = 5.6; 6 * 18 / 10 = 10.8
    state = cadence.update(state, report((20.0, 10.0), state.counts))
    assert state.counts == (6, 11)
    for _ in range(10):
        state = cadence.update(state, report((20.0, 10.0), state.counts))
    assert state.counts == (5, 10)


def test_the_scheduler_works_with_it():
    """First windows, whole ones and those that the end of the data has cut short."""
    scheduler = Scheduler(WindowTime(100))
    state = scheduler.init(2)
    assert scheduler.plan(state, window=0) == (1, 1)
    for _ in range(3):
        state = scheduler.update(state, report((2.0, 6.0), scheduler.plan(state)))
        assert scheduler.plan(state) == (51, 17)
        state = scheduler.update(state, report((2.0, 6.0), (3, 1)))
        assert scheduler.plan(state) == (51, 17)
    stored = json.loads(json.dumps(state.to_dict()))
    assert scheduler.from_dict(stored) == state
    other = Scheduler(WindowTime(7))
    assert other.plan(other.from_dict(stored)) == (51, 17)


@laws
@given(cadence=cadences, ms=st.lists(st.one_of(st.none(), st.floats(1e-3, 1e3)), min_size=1))
def test_states_are_plain_numbers(cadence, ms):
    state = cadence.init(len(ms))
    state = cadence.update(state, report([time or 0.0 for time in ms], state.counts))
    assert {type(count) for count in state.counts} == {int}
    assert {type(time) for time in state.ms_per_batch} <= {float, type(None)}
    assert WindowTimeState.from_dict(json.loads(json.dumps(state.to_dict()))) == state


@pytest.mark.parametrize(
    ("knobs", "error", "message"),
    [
        ({"window_ms": 0}, ValueError, r"window_ms must be above 0, got 0\."),
        ({"window_ms": float("inf")}, ValueError, r"window_ms must be finite, got inf\."),
        ({"window_ms": "1"}, TypeError, r"window_ms must be a number, got '1' \(str\)\."),
        ({"least": 0}, ValueError, r"least must be at least 1, got 0\."),
        ({"least": 4097}, ValueError, r"least must be at most 4096, got 4097\."),
        ({"least": 2.0}, TypeError, r"least must be an integer, got 2\.0 \(float\)\."),
    ],
)
def test_errors(knobs, error, message):
    with pytest.raises(error, match=f"^WindowTime: {message}$"):
        WindowTime(**knobs)


def test_a_world_without_devices():
    with pytest.raises(
        ValueError, match=r"^WindowTime\.init: world_size must be at least 1, got 0\.$"
    ):
        WindowTime().init(0)
