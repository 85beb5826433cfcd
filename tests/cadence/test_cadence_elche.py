"""ElChe: the rule with the sums done by hand, and its laws."""

import itertools
import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from hints import hints_and_ms
from hypothesis import given, settings, strategies as st
from references import densest_counts

from elche_jax.cadence import (
    HOLD_GROWTH,
    STABLE,
    Divergence,
    ElChe,
    ElCheState,
    Scheduler,
    TrendGuard,
    WindowReport,
    nudge_down,
)

laws = settings(deadline=None, database=None, derandomize=True)
ms_lists = st.lists(st.floats(0.01, 1e3), min_size=2, max_size=8)
verdicts = st.sampled_from([STABLE, HOLD_GROWTH, nudge_down(), nudge_down(0.9)])


def report(state, ms, sync_ms=0.0):
    """A report of the planned counts on devices of constant speed."""
    wall = [count * time for count, time in zip(state.counts, ms, strict=True)]
    return WindowReport(wall, state.counts, sync_ms)


def calibrated(anchor, counts, ms):
    return ElCheState(anchor, counts, ms, True)


# the start


def test_init():
    assert ElChe().init(3) == ElCheState(10, (10, 10, 10), (None,) * 3, False)


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        # a tuple of two, int first: (slow_rank, ratio); 10 * 2.3 for the others
        ((1, 2.3), (23, 10, 23)),
        ((0, 1), (10, 10, 10)),
        ((np.int64(2), np.float32(2.0)), (20, 20, 10)),
        # 10 * 1.25 = 12.5 rounds away from zero
        ((0, 1.25), (10, 13, 13)),
        # per-device speeds, the slowest gets the anchor: 1, 3 and 1.5 times as fast
        ((2, 6, 3), (10, 30, 15)),
        ([0.5, 0.5, 1.0], (10, 10, 20)),
        (np.array([4.0, 1.0, 2.0]), (40, 10, 20)),
    ],
)
def test_speed_hint(hint, expected):
    assert ElChe(anchor=10, speed_hint=hint).init(3).counts == expected


def test_speeds_of_two_devices_are_a_list_or_start_with_a_float():
    assert ElChe(speed_hint=(1, 2.3)).init(2).counts == (23, 10)
    assert ElChe(speed_hint=[1, 2.3]).init(2).counts == (10, 23)
    assert ElChe(speed_hint=(1.0, 2.3)).init(2).counts == (10, 23)
    assert ElChe(speed_hint=np.array([1, 2])).init(2).counts == (10, 20)


@pytest.mark.parametrize("hint", [(1, 2.3), [1, 2.3], (1.0, 2.0), (3, 2, 1)])
def test_a_copy_of_the_config_means_the_same(hint):
    cadence = ElChe(speed_hint=hint)
    assert replace(cadence) == cadence
    assert hash(replace(cadence)) == hash(cadence)


def test_a_wrong_hint_is_corrected_by_the_first_report():
    cadence = ElChe(anchor=10, speed_hint=(1, 5.0))
    state = cadence.init(3)
    assert state.counts == (50, 10, 50)
    # it is device 0 that is slow, and the others are five times as fast
    after = cadence.update(state, report(state, (5.0, 1.0, 1.0)))
    assert after == calibrated(10, (10, 50, 50), (5.0, 1.0, 1.0))


@laws
@given(
    hints_and_ms(),
    st.integers(1, 20),
    st.one_of(st.none(), st.integers(1, 3)),
    st.floats(0.0, 1e3),
    st.booleans(),
)
def test_any_hint_is_corrected_by_the_first_report(case, anchor, most, sync_ms, scheduled):
    """The counts are those without a hint, up to the anchor: this depends on the overhead,
    and thus on how long the window took that the hint has planned."""
    hint, ms = case
    plain = ElChe(anchor=anchor, max_batch_diff=most)
    hinted = replace(plain, speed_hint=hint)
    rules = [Scheduler(plain), Scheduler(hinted)] if scheduled else [plain, hinted]
    unhinted, after = (
        rule.update(start, report(start, ms, sync_ms))
        for rule, start in ((rule, rule.init(len(ms))) for rule in rules)
    )
    if scheduled:
        unhinted, after = unhinted.cadence, after.cadence
    assert after.ms_per_batch == unhinted.ms_per_batch == tuple(map(float, ms))
    assert after.counts == densest_counts(after.anchor, ms)
    if sync_ms == 0 or after.anchor == unhinted.anchor:
        assert after == unhinted


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"anchor": 10**400}, ValueError, r"anchor must be at most 9007199254740992, got 1(0+)\.$"),
        ({"max_anchor": 2**53 + 1}, ValueError, "max_anchor must be at most 9007199254740992, got"),
        ({"max_batch_diff": 10**400}, ValueError, "max_batch_diff must be at most 900719925474099"),
        ({"anchor": 0}, ValueError, r"anchor must be at least 1, got 0\.$"),
        ({"anchor": 2.0}, TypeError, r"anchor must be an integer, got 2\.0 \(float\)"),
        ({"anchor": True}, TypeError, r"anchor must be an integer, got True \(bool\)"),
        ({"overhead_target": 0.0}, ValueError, "overhead_target must be at least 0.01"),
        ({"overhead_target": 0.6}, ValueError, "overhead_target must be at most 0.5"),
        ({"overhead_target": math.nan}, ValueError, "overhead_target must be finite"),
        ({"max_anchor": 0}, ValueError, "max_anchor must be at least 1, got 0"),
        ({"max_batch_diff": 0}, ValueError, "max_batch_diff must be at least 1, got 0"),
        ({"speed_hint": 2.3}, TypeError, "speed_hint must be a sequence of numbers"),
        ({"speed_hint": (-1, 2.0)}, ValueError, "speed_hint slow_rank must be at least 0, got -1"),
        ({"speed_hint": (True, 2.0)}, TypeError, "speed_hint slow_rank must be an integer"),
        (
            {"speed_hint": (1, 0.5)},
            ValueError,
            (
                r"speed_hint ratio must be at least 1, got 0\.5\. A tuple of two that starts "
                r"with an int means \(slow_rank, ratio\); write the speeds of two "
                r"devices as a list\.$"
            ),
        ),
        ({"speed_hint": [1.0, 0.0]}, ValueError, r"speed_hint\[1\] must be above 0"),
        ({"speed_hint": (1.0, "2")}, TypeError, r"speed_hint\[1\] must be a number"),
    ],
)
def test_config_errors(arguments, kind, text):
    with pytest.raises(kind, match=f"^ElChe: {text}"):
        ElChe(**arguments)


def test_config_bounds_are_inclusive():
    ElChe(anchor=1, overhead_target=0.01, max_anchor=1, max_batch_diff=1)
    assert ElChe(overhead_target=0.5).overhead_target == 0.5


def test_init_errors():
    with pytest.raises(ValueError, match=r"^ElChe\.init: world_size must be at least 1, got 0\.$"):
        ElChe().init(0)
    with pytest.raises(TypeError, match=r"^ElChe\.init: world_size must be an integer"):
        ElChe().init(2.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError,
        match=r"^ElChe\.init: speed_hint slow_rank must be below world_size \(2\), got 2\. ",
    ):
        ElChe(speed_hint=(2, 2.0)).init(2)
    with pytest.raises(
        ValueError,
        match=r"^ElChe\.init: speed_hint must have one entry per device \(2\), got 3\.",
    ):
        ElChe(speed_hint=(1.0, 2.0, 3.0)).init(2)


# the counts


def test_first_update_calibrates():
    cadence = ElChe(anchor=10)
    state = cadence.init(3)
    after = cadence.update(state, WindowReport((300.0, 100.0, 240.0), (10,) * 3, 0.0))
    # 30, 10, 24 ms: 10, 10 * 3, 10 * 30 / 24 = 12.5; with 13, 54 in 312 ms in place of 52 in 300
    assert after == ElCheState(10, (10, 30, 12), (30.0, 10.0, 24.0), True)
    assert after.total == 52
    assert after.anchor_wall_ms == 300.0


def test_anchor_wall_before_any_measurement():
    assert ElChe().init(2).anchor_wall_ms is None
    assert ElCheState(4, (4, 4), (3.0, None), False).anchor_wall_ms == 12.0


def test_the_counts_really_run_are_what_counts():
    cadence = ElChe(anchor=10)
    # cut short: 2 in 60 ms, 4 in 40 ms -> 30 and 10 ms
    after = cadence.update(cadence.init(2), WindowReport((60.0, 40.0), (2, 4), 0.0))
    assert after.ms_per_batch == (30.0, 10.0)
    assert after.counts == (10, 30)


def test_dead_zone_is_ten_percent_of_the_present_count():
    cadence = ElChe(anchor=10)
    state = calibrated(10, (10, 30), (30.0, 10.0))
    # error 0.09 -> alpha 0.1: 10 * 0.991 = 9.91; 300 / 9.91 = 30.27 -> 30
    assert cadence.update(state, WindowReport((300, 273), (10, 30), 0)).counts[1] == 30
    # error 0.3 -> alpha 0.3: 10 - 0.9 = 9.1; 300 / 9.1 = 32.97 -> 33, 10 % of 30
    after = cadence.update(state, WindowReport((300.0, 210.0), (10, 30), 0.0))
    assert after.counts == (10, 30)
    assert after.ms_per_batch[1] == pytest.approx(9.1)
    # error 0.34: 10 - 0.34 * 3.4 = 8.844; 300 / 8.844 = 33.92 -> 34, above 10 %
    after = cadence.update(state, WindowReport((300.0, 198.0), (10, 30), 0.0))
    assert after.counts == (10, 34)


def test_no_dead_zone_in_the_calibrating_update():
    cadence = ElChe(anchor=20)
    # 20 * 10.5 / 10 = 21: a change of 5 %
    after = cadence.update(cadence.init(2), WindowReport((210, 200), (20, 20), 0.0))
    assert after.counts == (20, 21)


def test_max_batch_diff_bounds_a_change_once_calibrated():
    cadence = ElChe(anchor=10, max_batch_diff=5)
    state = cadence.update(cadence.init(2), WindowReport((300, 100), (10, 10), 0.0))
    assert state.counts == (10, 30)  # the first is free
    # device 1 to 20 ms: error 1 -> alpha 0.8: 18 ms; 300 / 18 = 16.7 -> 17, but
    # 30 - 5 = 25
    state = cadence.update(state, WindowReport((300.0, 600.0), (10, 30), 0.0))
    assert state.counts == (10, 25)
    # back to 5 ms: error 13/18 -> alpha 13/18: 18 - 9.39 = 8.61; 34.8 -> 35; 25 + 5
    state = cadence.update(state, WindowReport((300.0, 125.0), (10, 25), 0.0))
    assert state.counts == (10, 30)


def test_every_device_keeps_at_least_one():
    # the anchor device is the slowest, so nobody rounds below the anchor; with a
    # cut of the anchor to 1 all others are still at least 1
    cadence = ElChe(anchor=1)
    state = cadence.update(cadence.init(2), WindowReport((2.0, 2.0), (1, 1), 0.0))
    assert cadence.update(state, report(state, (2, 2)), nudge_down(0.1)).counts == (
        1,
        1,
    )


def test_until_all_are_measured_the_counts_stay():
    cadence = ElChe(anchor=10, speed_hint=(0, 2.0))
    state = cadence.init(3)
    after = cadence.update(state, WindowReport((50.0, 0.0, 60.0), (1, 0, 1), 0.0))
    assert after == ElCheState(10, (10, 20, 20), (50.0, None, 60.0), False)
    # the anchor moves them in proportion: half of 20 is 10
    assert cadence.nudge_anchor_down(after, 0.5).counts == (5, 10, 10)
    after = cadence.update(after, WindowReport((500, 500, 1200), (10, 20, 20), 0.0))
    # 50, 25, 60 ms: 10 * 60 / 50 = 12, 10 * 60 / 25 = 24
    assert after.calibrated
    assert after.counts == (12, 24, 10)


def test_a_report_without_any_time_changes_nothing():
    cadence = ElChe(anchor=10)
    state = calibrated(12, (12, 36), (30.0, 10.0))
    assert cadence.update(state, WindowReport((0.0, 0.0), (12, 36), 5.0)) == state


def test_recalibrate_takes_the_next_report_as_it_is():
    cadence = ElChe(anchor=10, max_batch_diff=1)
    state = calibrated(12, (12, 36), (30.0, 10.0))
    forgotten = cadence.recalibrate(state)
    assert forgotten == ElCheState(12, (12, 36), (None, None), False)
    # sync at the target: the anchor stays; 30 and 20 ms: 12 * 1.5 = 18
    after = cadence.update(forgotten, WindowReport((360.0, 720.0), (12, 36), 72.0))
    assert after == calibrated(12, (12, 18), (30.0, 20.0))


def test_a_broken_clock_gives_no_overflow():
    cadence = ElChe()
    wall = (1e300, 1e-3)
    after = cadence.update(cadence.init(2), WindowReport(wall, (10, 10), 0.0))
    assert after.counts == (10, 2**53)


# the anchor


@pytest.mark.parametrize(
    ("anchor", "sync_ms", "expected"),
    [
        # 0.3 of the window where 0.1 is the target: three times the anchor
        (10, 30.0, 30),
        # 10 * 0.11 / 0.1 = 11
        (10, 11.0, 11),
        # 10 * 0.102 / 0.1 = 10.2 -> 11
        (10, 10.2, 11),
        # exactly the target: stays
        (12, 10.0, 12),
        # exactly half the target: stays
        (12, 5.0, 12),
        # below half: a tenth less, at least one
        (12, 4.9, 11),
        (200, 0.0, 180),
        (39, 4.9, 36),
        # not below the initial anchor
        (10, 0.0, 10),
        (11, 0.0, 10),
        # 12 * 3 / 0.1 = 360 -> max_anchor
        (12, 300.0, 200),
    ],
)
def test_overhead_rule(anchor, sync_ms, expected):
    cadence = ElChe(anchor=10, overhead_target=0.1)
    state = calibrated(anchor, (anchor, anchor), (1.0, 1.0))
    wall = WindowReport((100.0, 80.0), (100, 80), sync_ms)
    assert cadence.update(state, wall).anchor == expected


def test_products_that_are_whole_do_not_round_up():
    # 100 * 0.07 is 7.000000000000001 in floating point
    cadence = ElChe(anchor=100)
    assert cadence.nudge_anchor_down(cadence.init(2), 0.07).anchor == 7


def test_hold_growth_forbids_the_raise_only():
    cadence = ElChe(anchor=10, overhead_target=0.1)
    state = calibrated(20, (20, 20), (5.0, 5.0))
    raised = WindowReport((100.0, 100.0), (20, 20), 30.0)
    assert cadence.update(state, raised).anchor == 60
    assert cadence.update(state, raised, HOLD_GROWTH) == state
    cheap = WindowReport((100.0, 100.0), (20, 20), 1.0)
    assert cadence.update(state, cheap, HOLD_GROWTH).anchor == 18


@pytest.mark.parametrize(("factor", "expected"), [(0.5, 10), (0.51, 11), (0.01, 1), (1.0, 20)])
def test_nudge_down_multiplies_and_rounds_up(factor, expected):
    cadence = ElChe(anchor=15)
    state = calibrated(20, (20, 20), (5.0, 5.0))
    costly = WindowReport((100.0, 100.0), (20, 20), 80.0)
    # the verdict takes the place of the overhead rule, which would raise
    assert cadence.update(state, costly, nudge_down(factor)).anchor == expected
    assert cadence.nudge_anchor_down(state, factor).anchor == expected


def test_nudge_down_moves_the_counts():
    cadence = ElChe(anchor=10)
    state = calibrated(10, (10, 30), (30.0, 10.0))
    after = cadence.update(state, report(state, (30, 10)), nudge_down())
    assert after == replace(calibrated(5, (5, 15), (30.0, 10.0)), ceiling=5)
    assert cadence.nudge_anchor_down(state, 0.5) == after


def test_after_a_nudge_the_anchor_rises_step_by_step():
    cadence = ElChe(anchor=10)
    state = cadence.update(calibrated(10, (10, 30), (30.0, 10.0)), costly(10), nudge_down())
    anchors = []
    for verdict in (STABLE, STABLE, HOLD_GROWTH, STABLE):
        state = cadence.update(state, costly(state.anchor), verdict)
        anchors.append(state.anchor)
    assert anchors == [6, 7, 7, 8]
    # on target, as for one odd window: the bound stays
    state = cadence.update(state, WindowReport((240.0, 240.0), (8, 24), 20.0))
    assert (state.anchor, state.ceiling) == (8, 9)
    assert cadence.update(state, costly(8)).anchor == 10
    # little more is asked for: from then on the overhead decides alone
    state = cadence.update(state, WindowReport((240.0, 240.0), (8, 24), 26.0))
    assert (state.anchor, state.ceiling) == (10, 0), "min_anchor"
    assert cadence.update(state, costly(10)).anchor == 100


def costly(anchor):
    """An exchange as long as the window, of an anchor and one three times as fast."""
    return WindowReport((30.0 * anchor, 30.0 * anchor), (anchor, 3 * anchor), 30.0 * anchor)


def test_with_a_guard_windows_do_not_swing():
    """A costly exchange, and devices that drift apart by 0.005 per microbatch of the anchor."""
    scheduler, guard, ms = Scheduler(ElChe()), TrendGuard(), (5.0, 5.0, 10.0, 20.0)
    state, seen, anchors = scheduler.init(4), [], []
    for window in range(300):
        anchor = state.cadence.anchor
        wall = tuple(n * t for n, t in zip(state.counts, ms, strict=True))
        drift = (0.005 * anchor,) * 4
        seen.append(Divergence(window, state.counts, drift, (1.0,) * 4, (1.0,) * 4, (0.25,) * 4))
        verdict = guard.verdict(seen)
        state = scheduler.update(state, WindowReport(wall, state.counts, 200.0), verdict)
        anchors.append(anchor)
    # 20 is twice the guard's threshold; without the ceiling it jumped back to 100 each time
    assert max(anchors[100:]) <= 25 and min(anchors[100:]) >= 5


def test_a_nudged_anchor_stays_until_the_overhead_raises_it():
    cadence = ElChe(anchor=10, overhead_target=0.1)
    state = calibrated(4, (4, 4), (10.0, 10.0))
    for sync_ms in (0.0, 1.0, 3.0, 4.0):  # 0, 2.5, 7.5 and 10 %
        assert cadence.update(state, report(state, (10, 10), sync_ms)).anchor == 4
    # 12.5 %: 4 * 1.25 = 5, kept within [min_anchor, max_anchor] = [10, 200]
    assert cadence.update(state, report(state, (10, 10), 5.0)).anchor == 10
    # 50 %: 4 * 5 = 20
    assert cadence.update(state, report(state, (10, 10), 20.0)).anchor == 20
    assert cadence.update(state, report(state, (10, 10), 20.0), HOLD_GROWTH) == state


def test_max_anchor_below_the_initial_anchor():
    cadence = ElChe(anchor=30, max_anchor=20)
    assert cadence.min_anchor == 20
    state = cadence.init(2)
    assert state.counts == (30, 30)
    state = cadence.update(state, report(state, (1, 1)))
    assert (state.anchor, state.counts) == (20, (20, 20))
    for allowed in (cadence.init(2), ElChe(anchor=20).init(2)):
        cadence.check_state(allowed)
    with pytest.raises(ValueError, match=r"at most max_anchor \(20\), got 31\. Start without"):
        cadence.check_state(ElChe(anchor=31).init(2))
    assert cadence.update(state, report(state, (1, 1))).anchor == 20


def test_nudge_anchor_down_errors():
    cadence = ElChe()
    state = cadence.init(2)
    where = r"^ElChe\.nudge_anchor_down: factor must be "
    with pytest.raises(ValueError, match=where + "above 0, got 0"):
        cadence.nudge_anchor_down(state, 0)
    with pytest.raises(ValueError, match=where + "at most 1, got 1.5"):
        cadence.nudge_anchor_down(state, 1.5)
    with pytest.raises(TypeError, match=where + "a number, got None"):
        cadence.nudge_anchor_down(state, None)  # pyright: ignore[reportArgumentType]


def test_config_is_frozen():
    with pytest.raises(FrozenInstanceError):
        ElChe().anchor = 3  # pyright: ignore[reportAttributeAccessIssue]


# laws


@laws
@given(ms_lists, st.integers(1, 300))
def test_faster_never_gets_less_than_slower_when_calibrating(ms, anchor):
    cadence = ElChe(anchor=anchor, max_anchor=300)
    state = cadence.init(len(ms))
    # the estimates, not ms itself: two times an ulp apart may measure as one
    after = cadence.update(state, report(state, ms))
    pairs = zip(after.counts, after.ms_per_batch, strict=True)
    for (a, ms_a), (b, ms_b) in itertools.combinations(pairs, 2):
        assert ms_a <= ms_b or a <= b
        assert ms_b <= ms_a or b <= a
    assert min(after.counts) == after.anchor == anchor


@laws
@given(
    st.integers(1, 50),
    st.integers(1, 300),
    st.lists(
        st.tuples(st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0, 1e3), verdicts),
        max_size=12,
    ),
)
def test_the_anchor_is_bounded_whatever_is_reported(anchor, max_anchor, windows):
    cadence = ElChe(anchor=anchor, max_anchor=max_anchor)
    state = cadence.init(2)
    for wall_a, wall_b, sync_ms, verdict in windows:
        before = state
        window = WindowReport((wall_a, wall_b), state.counts, sync_ms)
        state = cadence.update(state, window, verdict)
        assert 1 <= state.anchor <= max_anchor
        assert min(state.counts) >= 1
        if verdict is not STABLE:
            assert state.anchor <= before.anchor


@laws
@given(ms_lists, st.floats(0.0, 500.0))
def test_constant_speeds_reach_a_fixed_point(ms, sync_ms):
    cadence = ElChe()
    state = cadence.init(len(ms))
    # the anchor comes down by a tenth per window from at most 200
    for _ in range(60):
        state = cadence.update(state, report(state, ms, sync_ms))
    after = cadence.update(state, report(state, ms, sync_ms))
    assert (after.anchor, after.counts) == (state.anchor, state.counts)


@pytest.mark.parametrize("ms", [(30.0, 10.0), (8.0, 4.0, 2.0), (5.0,) * 4])
def test_constant_speeds_end_within_a_tenth_and_reach_the_target(ms):
    cadence = ElChe(anchor=10, overhead_target=0.1)
    state = cadence.init(len(ms))
    for _ in range(3):
        state = cadence.update(state, report(state, ms, 100.0))
    wall = report(state, ms).wall_ms
    assert min(wall) > 0.9 * max(wall)
    assert 0.05 <= 100.0 / max(wall) <= 0.1 / 0.9


@laws
@given(ms_lists, st.integers(1, 5))
def test_max_batch_diff_holds(ms, most):
    cadence = ElChe(anchor=10, max_batch_diff=most)
    state = cadence.init(len(ms))
    state = cadence.update(state, report(state, ms))
    for scale in (3.0, 0.1, 1.0):
        slower = [ms[0] * scale, *ms[1:]]
        after = cadence.update(state, report(state, slower, 50.0))
        steps = zip(after.counts, state.counts, strict=True)
        assert all(abs(new - old) <= most for new, old in steps)
        state = after


@pytest.mark.parametrize("hint", [None, (1, 3.0), [1.0, 2.0]])
def test_one_device_has_nothing_to_balance(hint):
    cadence = ElChe(anchor=7, speed_hint=hint)
    state = cadence.init(1)
    assert state.counts == (1,)
    report = WindowReport((2.0,), (1,), sync_ms=9.0)
    assert cadence.update(state, report) == state == cadence.nudge_anchor_down(state)
    assert Scheduler(cadence).update(Scheduler(cadence).init(1), report).counts == (1,)
