"""The scheduler: shifts, windows cut short, plans, and states in a checkpoint."""

import json
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, strategies as st

from elche_jax.cadence import (
    STABLE,
    Balanced,
    Cadence,
    ElChe,
    EveryBatch,
    FixedTotal,
    PostLocal,
    Replay,
    Scheduler,
    SchedulerState,
    Shift,
    State,
    WindowReport,
    nudge_down,
)
from elche_jax.cadence.elche import ElCheState
from elche_jax.cadence.estimate import as_times, update_ms
from elche_jax.cadence.reports import rescale_sync
from elche_jax.cadence.scheduler import AVERAGED, REPLAN_AFTER


def run(scheduler, state, ms, windows=1, sync_ms=0.0, absent=()):
    for _ in range(windows):
        plan = scheduler.plan(state)
        counts = tuple(0 if rank in absent else count for rank, count in enumerate(plan))
        wall = [count * time for count, time in zip(counts, ms, strict=True)]
        state = scheduler.update(state, WindowReport(wall, counts, sync_ms))
    return state


@pytest.mark.parametrize("cadence", [ElChe(), FixedTotal(24)], ids=["ElChe", "FixedTotal"])
@pytest.mark.parametrize("factor", [5.0, 10.0, 100.0])
def test_a_pause_of_one_window_changes_no_counts(cadence, factor):
    """Taken as a speed it gave the other devices windows of 40 times the length."""
    scheduler, ms = Scheduler(cadence), (1.0, 1.0, 2.0, 4.0)
    state = run(scheduler, scheduler.init(4), ms, windows=6, sync_ms=1.0)
    before = state.counts
    for rank in range(4):
        paused = [time * (factor if at == rank else 1.0) for at, time in enumerate(ms)]
        state = run(scheduler, state, paused, sync_ms=1.0)
        assert state.counts == before and state.shifts == 0
        state = run(scheduler, state, ms, windows=3, sync_ms=1.0)
        assert state.counts == before and state.shifts == 0
    # a second window confirms it
    state = run(scheduler, state, (factor, 1.0, 2.0, 4.0), windows=2, sync_ms=1.0)
    assert state.shifts == 1 and state.cadence.ms_per_batch == (factor, 1.0, 2.0, 4.0)


@pytest.mark.parametrize("shift", [Shift(threshold=5.0), Shift(confirm=5), Shift(confirm=1)])
def test_a_slower_device_is_noticed_whatever_counts_as_a_shift(shift):
    scheduler = Scheduler(ElChe(), shift)
    state = run(scheduler, scheduler.init(2), (1.0, 1.0), windows=6, sync_ms=1.0)
    state = run(scheduler, state, (5.5, 1.0), windows=3, sync_ms=1.0)
    assert state.cadence.ms_per_batch[0] > 4.0


def test_a_device_that_pauses_in_every_second_window_is_no_fast_one():
    scheduler = Scheduler(ElChe())
    state = run(scheduler, scheduler.init(2), (1.0, 1.0), windows=6, sync_ms=1.0)
    for _ in range(20):
        state = run(scheduler, state, (20.0, 1.0), sync_ms=1.0)
        state = run(scheduler, state, (1.0, 1.0), sync_ms=1.0)
    state = run(scheduler, state, (20.0, 1.0), sync_ms=1.0)
    assert state.cadence.ms_per_batch[0] > 10.0


def test_a_state_that_cannot_be_stored_is_an_error_at_once():
    @dataclass(frozen=True)
    class Kept(State):
        counts: tuple[int, ...]
        speed: object

    class Keeps(EveryBatch):
        def init(self, world_size):
            return Kept([1] * world_size, [1.0])

    with pytest.raises(TypeError, match=r"^Kept\.to_dict: speed must be a number, .* \(list\)"):
        Scheduler(Keeps()).init(2)


def test_a_confirmed_shift_takes_the_times_as_they_are():
    # 10 -> 30 ms. Smoothing alone: 10 + 0.8 * 20 = 26, then the error is 4 / 26 and
    # alpha 0.154: 26 + 0.615 = 26.615
    with_shift, without = Scheduler(ElChe()), Scheduler(ElChe(), shift=None)
    states = {}
    for scheduler in (with_shift, without):
        state = run(scheduler, scheduler.init(2), (10.0, 10.0), 3)
        states[scheduler] = run(scheduler, state, (30.0, 10.0), 2)
    assert states[with_shift].cadence.ms_per_batch == (30.0, 10.0)
    assert states[with_shift].counts == (10, 30)
    assert states[with_shift].shifts == 1
    assert states[without].cadence.ms_per_batch[0] == pytest.approx(26.615, abs=1e-3)
    assert states[without].counts == (10, 26)
    assert states[without].shifts == 0


FOLLOWING = pytest.mark.parametrize(
    ("cadence", "counts"),
    # 40 microbatches end after 22, 24 and 24 ms, where the third device takes 4 ms
    [(ElChe(), (40, 13, 10)), (PostLocal(switch=0), (40, 13, 10)), (FixedTotal(40), (26, 8, 6))],
)


@FOLLOWING
def test_counts_follow_the_others_while_a_device_is_away(cadence, counts):
    """It rests, or is late, for thousands of windows: these must not have the old counts."""
    scheduler = Scheduler(cadence)
    state = run(scheduler, scheduler.init(3), (1.0, 1.0, 4.0), 6)
    state = run(scheduler, state, (1.0, 1.0, 4.0), 5, absent=(2,))
    state = run(scheduler, state, (1.0, 3.0, 4.0), 2, absent=(2,))
    assert state.shifts == 1 and state.cadence.ms_per_batch == (1.0, 3.0, 4.0)
    assert state.counts == counts
    restored = scheduler.from_dict(json.loads(json.dumps(state.to_dict())))
    assert restored == state
    # it comes back as it was
    state = run(scheduler, state, (1.0, 3.0, 4.0), 3)
    assert state.shifts == 1 and state.counts == counts


@FOLLOWING
@pytest.mark.parametrize("ms", [1.0, 2.0, 6.0, 40.0])
def test_a_device_that_comes_back_is_measured_anew(cadence, counts, ms):
    scheduler = Scheduler(cadence)
    state = run(scheduler, scheduler.init(3), (1.0, 1.0, 4.0), 6)
    state = run(scheduler, state, (1.0, 3.0, 4.0), 9, absent=(2,))
    assert state.counts == counts
    # as after any shift, two windows
    state = run(scheduler, state, (1.0, 3.0, ms), 2)
    assert state.shifts == 2 and state.cadence.ms_per_batch == (1.0, 3.0, ms)
    # its times, and what follows from them, are those of a run in which it was never away
    fresh = run(scheduler, scheduler.init(3), (1.0, 3.0, ms), 3)
    assert run(scheduler, state, (1.0, 3.0, ms), 3).counts == fresh.counts


def test_a_device_left_out_by_the_end_of_the_data_does_not_hold_the_counts():
    scheduler = Scheduler(ElChe())
    state = run(scheduler, scheduler.init(3), (1.0, 1.0, 1.0), 6)
    state = run(scheduler, state, (3.0, 1.0, 1.0))
    state = scheduler.update(state, WindowReport((3.0, 1.0, 0.0), (1, 1, 0), 0.0, share=0.1))
    assert state.shifts == 1 and state.cadence.ms_per_batch == (3.0, 1.0, 1.0)
    assert state.counts == (10, 30, 30)


def test_a_device_that_the_cadence_gives_no_work_is_forgotten_and_tried():
    scheduler = Scheduler(FixedTotal(4))
    state = run(scheduler, scheduler.init(3), (1.0, 1.0, 9.0), 6)
    assert state.counts == (2, 2, 0)
    state = run(scheduler, state, (1.0, 3.0, 9.0), 2, absent=(0,))
    assert state.cadence.ms_per_batch == (1.0, 3.0, None) and state.counts == (3, 0, 1)


@pytest.mark.parametrize("kind", [list, np.array])
def test_a_users_counts_may_be_a_list_or_an_array(kind):
    """They were never equal to a report's: no plan settled, and none was fitted."""

    class Kinds(ElChe):
        def init(self, world_size):
            return as_kind(super().init(world_size))

        def update(self, state, report, verdict=STABLE):
            return as_kind(super().update(state, report, verdict))

        def replan(self, state):
            return as_kind(super().replan(state))

    def as_kind(state):
        return replace(state, counts=kind(state.counts))

    states = []
    for cadence in (Kinds(), ElChe()):
        scheduler = Scheduler(cadence)
        state = run(scheduler, scheduler.init(3), (3.0, 1.07, 2.0), 2, sync_ms=1.0)
        state = run(scheduler, state, (3.0, 1.0, 2.0), REPLAN_AFTER - 1, sync_ms=1.0)
        assert type(state.counts) is type(cadence.init(3).counts)
        left = scheduler.without(state, [2])
        states.append((state.to_dict(), left.to_dict()))
    assert states[0] == states[1]
    assert states[0][0]["settled"] and states[0][0]["cadence"]["counts"] == [10, 30, 15]


@dataclass(frozen=True)
class Listed:
    counts: list
    ms_per_batch: list


@dataclass(frozen=True)
class Derived:
    counts: tuple
    times: tuple

    @property
    def ms_per_batch(self):
        return self.times


class Measuring(Cadence):
    """A user's cadence, whose state has its estimates in a field of another name or type."""

    estimates = True

    def __init__(self, kind):
        self.kind, self.entries = kind, list if kind is Listed else tuple

    def init(self, world_size):
        return self.kind(self.entries([2] * world_size), self.entries([None] * world_size))

    def update(self, state, report, verdict=STABLE):
        return self._with(state, as_times(update_ms(state.ms_per_batch, report)))

    def recalibrate(self, state):
        return self._with(state, [None] * len(state.counts))

    def replan(self, state):
        return state

    def _with(self, state, times):
        return self.kind(state.counts, self.entries(times))


@pytest.mark.parametrize("kind", [Listed, Derived])
def test_a_users_estimates_may_be_a_list_or_a_property(kind):
    scheduler = Scheduler(Measuring(kind))
    state = run(scheduler, scheduler.init(3), (1.0, 1.0, 1.0), 4)
    for _ in range(2):  # device 2 rests while device 0 becomes slower
        state = scheduler.update(state, WindowReport((6.0, 2.0, 0.0), (2, 2, 0), sync_ms=0.0))
    assert state.shifts == 1
    assert [*state.cadence.ms_per_batch] == [3.0, 1.0, 1.0 if kind is Listed else None]
    late = WindowReport((6.0, 2.0, 4.0), (2, 2, 2), sync_ms=0.0)
    assert scheduler.learn(state, late).cadence.ms_per_batch[0] == 3.0
    left = scheduler.without(state, [1])
    if kind is Listed:
        assert [*left.cadence.counts] == [2, 2] and [*left.cadence.ms_per_batch] == [3.0, 1.0]
        after = scheduler.update(left, WindowReport((6.0, 2.0), (2, 2), sync_ms=0.0))
        assert after.cadence.ms_per_batch == [3.0, 1.0]


def test_a_users_state_that_is_no_dataclass_may_miss_devices():
    scheduler = Scheduler(Tuples())
    state = run(scheduler, scheduler.init(2), (1.0, 1.0), 3)
    state = run(scheduler, state, (3.0, 1.0), 2, absent=(1,))
    assert state.shifts == 1 and state.counts == (2, 2)


class Times(NamedTuple):
    counts: tuple[int, ...]
    ms_per_batch: tuple[float | None, ...]


class Tuples(Cadence):
    """A cadence of a user: an estimate is the last time."""

    estimates = True

    def init(self, world_size):
        return Times((2,) * world_size, (None,) * world_size)

    def update(self, state, report, verdict=None):
        return state._replace(ms_per_batch=as_times(update_ms(state.ms_per_batch, report)))

    def recalibrate(self, state):
        return state._replace(ms_per_batch=(None,) * len(state.counts))


def noisy(scheduler, state, ms, noise):
    """Run a window per row of `noise`, relative; also return the times it reported."""
    found = np.array(ms) * (1 + np.array(noise))
    for times in found:
        state = run(scheduler, state, times, sync_ms=1.0)
    return state, found


NOISE = np.random.default_rng(0).uniform(-0.04, 0.04, (AVERAGED + 1, 4))
FLEETS = pytest.mark.parametrize(
    "cadence", [ElChe(), FixedTotal(64), PostLocal(switch=0)], ids=repr
)


@FLEETS
def test_the_first_reports_of_a_plan_are_averaged(cadence):
    """Their mean are the estimates, and counts fit them; then a report has a weight of 0.1."""
    scheduler, ms = Scheduler(cadence), (5.0, 5.0, 10.0, 20.0)
    state = run(scheduler, scheduler.init(4), (6.0, 5.5, 11.0, 18.0), sync_ms=1.0)
    state, found = noisy(scheduler, state, ms, NOISE[:-1])
    mean = found.mean(axis=0)
    assert state.averaged == AVERAGED and state.shifts == 0
    assert state.cadence.ms_per_batch == pytest.approx(tuple(mean))
    assert state.counts == scheduler.cadence.replan(state.cadence).counts
    state, found = noisy(scheduler, state, ms, NOISE[-1:])
    assert state.cadence.ms_per_batch == pytest.approx(tuple(0.9 * mean + 0.1 * found[0]))


@FLEETS
def test_the_first_reports_after_a_shift_are_averaged(cadence):
    """All of the plan that was made from the confirming report, which ran another one."""
    scheduler, ms = Scheduler(cadence), (15.0, 5.0, 10.0, 20.0)
    state = run(scheduler, scheduler.init(4), (5.0, 5.0, 10.0, 20.0), 8, sync_ms=1.0)
    state = run(scheduler, state, (16.0, 5.2, 10.0, 20.0), 2, sync_ms=1.0)
    assert state.shifts == 1 and state.averaged == 0
    # a report of a window that was planned before says nothing of the new plan
    other = WindowReport((150.0, 50.0, 100.0, 200.0), (10,) * 4, 1.0)
    assert scheduler.update(state, other).averaged == 0
    state, found = noisy(scheduler, state, ms, NOISE[:-1])
    assert state.averaged == AVERAGED and state.shifts == 1
    assert state.cadence.ms_per_batch == pytest.approx(tuple(found.mean(axis=0)))


@pytest.mark.parametrize(
    ("report", "after", "averaged"),
    [
        # twice the time may be the first report of a shift: the relative error is the weight
        (WindowReport((80.0, 10.0), (10, 10), 0.0), (4.0 + 0.8 * 4.0, 1.0), 2),
        # cut short
        (WindowReport((12.0, 3.15), (3, 3), 0.0, share=0.1), (4.0, 1.0 + 0.1 * 0.1 * 0.05), 2),
        # a device rests, perhaps for long
        (WindowReport((0.0, 10.5), (0, 10), 0.0), (4.0, 1.0 + 0.1 * 0.05), AVERAGED),
    ],
)
def test_other_reports_are_not_averaged(report, after, averaged):
    scheduler = Scheduler(ElChe())
    state = run(scheduler, scheduler.init(2), (4.0, 1.0), 3)
    assert state.averaged == 2
    state = scheduler.update(state, report)
    assert state.averaged == averaged
    assert state.cadence.ms_per_batch == pytest.approx(after)


def test_without_a_shift_detector_only_the_first_report_replaces_estimates():
    scheduler = Scheduler(ElChe(), shift=None)
    state = run(scheduler, scheduler.init(2), (4.0, 1.0), 3)
    state = run(scheduler, state, (4.2, 1.0))
    assert state.cadence.ms_per_batch == pytest.approx((4.0 + 0.1 * 0.2, 1.0))


def test_a_device_without_work_ends_the_average():
    """Tried again after hundreds of windows, it would replace the estimates of all devices."""
    scheduler = Scheduler(FixedTotal(10))
    state = run(scheduler, scheduler.init(3), (5.0, 5.0, 100.0), 12)
    assert state.counts == (5, 5, 0) and state.averaged == AVERAGED
    state = run(scheduler, state, (15.0, 5.0, 100.0), 12)
    assert state.shifts == 1 and state.counts[2] == 0 and state.averaged == AVERAGED


def test_the_first_reports_of_the_devices_that_are_left_are_averaged():
    scheduler = Scheduler(ElChe())
    state = run(scheduler, scheduler.init(3), (5.0, 5.0, 10.0), 8)
    state = scheduler.without(state, [0])
    for ms in (5.0, 5.3, 5.3):
        state = run(scheduler, state, (ms, 10.0))
    assert state.averaged == 3 and state.cadence.ms_per_batch == pytest.approx((5.2, 10.0))


@pytest.mark.parametrize("kind", [list, np.array])
def test_estimates_in_a_list_or_an_array_are_not_averaged(kind):
    """The cadence finds what it has put there."""

    @dataclass(frozen=True)
    class Own:
        counts: tuple[int, ...]
        ms_per_batch: list | np.ndarray

    class Mine(Cadence):
        estimates = True

        def init(self, world_size):
            return Own((10,) * world_size, kind([1.0] * world_size))

        def update(self, state, report, verdict=None):
            assert type(state.ms_per_batch) is type(kind([1.0]))
            times = np.array(report.wall_ms) / np.array(report.counts)
            return Own(state.counts, kind(0.5 * np.array(state.ms_per_batch) + 0.5 * times))

        def recalibrate(self, state):
            return state

    scheduler = Scheduler(Mine())
    state = run(scheduler, scheduler.init(2), (1.0, 1.04), 6)
    assert state.cadence.ms_per_batch[1] == pytest.approx(1.04, abs=0.01)


def test_no_report_of_a_shift_to_be_confirmed_is_averaged():
    scheduler = Scheduler(ElChe(), Shift(confirm=3))
    state = run(scheduler, scheduler.init(2), (4.0, 1.0), 3)
    state = run(scheduler, state, (8.0, 1.0), 2)
    assert state.averaged == 2 and state.shifts == 0
    # relative errors of 1 and 0.8 / 7.2
    first = 4.0 + 0.8 * 4.0
    assert state.cadence.ms_per_batch[0] == pytest.approx(first + (0.8 / first) * 0.8)


def test_an_average_holds_max_batch_diff():
    scheduler = Scheduler(ElChe(anchor=40, max_batch_diff=1))
    state, counts = run(scheduler, scheduler.init(2), (3.0, 1.0), 2), [(40, 120)]
    for ms in (1.05, 0.95, 0.96):
        state = run(scheduler, state, (3.0, ms))
        counts.append(state.counts)
    assert counts == [(40, 120), (40, 119), (40, 120), (40, 121)]


def test_what_is_learnt_fits_the_counts_and_starts_their_reports_over():
    scheduler = Scheduler(ElChe(anchor=10))
    state = run(scheduler, scheduler.init(2), (3.0, 1.0), AVERAGED + 4)
    learnt = scheduler.learn(state, WindowReport((30.0, 31.5), (10, 30), 0.0))
    # a weight of 0.1: 1.005 ms
    assert state.agreed > 0 and learnt.agreed == 0 and learnt.counts == (10, 30)
    assert learnt.cadence.ms_per_batch[1] == pytest.approx(1.005)


def test_an_imbalance_inside_the_dead_zone_is_fitted_after_a_while():
    # the first windows of the plan say 3.0 : 1.07, all later ones 3.0 : 1.0
    scheduler = Scheduler(ElChe(anchor=10))
    state = run(scheduler, scheduler.init(2), (3.0, 1.07), 1 + AVERAGED)
    assert state.counts == (10, 28) and state.agreed == 0
    state = run(scheduler, state, (3.0, 1.0), REPLAN_AFTER - 1)
    assert state.counts == (10, 28) and state.agreed == REPLAN_AFTER - 1
    # a window cut short says nothing about the plan
    cut = scheduler.update(state, WindowReport((3.0, 1.0), (1, 1), 0.0))
    assert cut.counts == (10, 28) and cut.agreed == state.agreed
    state = run(scheduler, state, (3.0, 1.0))
    # 0.9 of the error is left after each of 8 windows: 1 + 0.07 * 0.9**8 = 1.030
    assert state.counts == (10, 29) and state.agreed == 0
    assert run(scheduler, state, (3.0, 1.0), 3 * REPLAN_AFTER).counts == (10, 30)


def test_replan_holds_max_batch_diff():
    state = ElCheState(10, (10, 27), (3.0, 1.0), True)
    assert ElChe().replan(state).counts == (10, 30)
    assert ElChe(max_batch_diff=1).replan(state).counts == (10, 28)


def test_replan_needs_every_device_measured():
    cadence = ElChe(anchor=4)
    assert cadence.replan(cadence.init(2)) == cadence.init(2)


def test_one_odd_window_is_no_shift():
    scheduler = Scheduler(ElChe(), shift=Shift(threshold=0.5))
    state = run(scheduler, scheduler.init(2), (10.0, 10.0), 3)
    state = run(scheduler, state, (16.0, 10.0))
    # error 0.6 -> alpha 0.6: 13.6; back to 10 the error is 0.26, below threshold
    state = run(scheduler, state, (10.0, 10.0), 5)
    assert state.shifts == 0


@pytest.mark.parametrize("cadence", [ElChe(), FixedTotal(40)])
def test_a_threefold_slow_down_is_tracked_within_three_windows(cadence):
    scheduler = Scheduler(cadence)
    state = run(scheduler, scheduler.init(2), (10.0, 10.0), 5)
    assert state.counts[0] == state.counts[1]
    state = run(scheduler, state, (30.0, 10.0), 3)
    assert state.counts[1] == 3 * state.counts[0]


def test_a_window_cut_short_does_not_raise_the_anchor():
    cadence = ElChe(anchor=10, overhead_target=0.1)
    scheduler = Scheduler(cadence)
    state = run(scheduler, scheduler.init(2), (10.0, 10.0), 3, sync_ms=8.0)
    assert state.cadence.anchor == 10  # 8 % of 100 ms
    tail = WindowReport((10.0, 10.0), (1, 1), 8.0)
    # 80 % of 10 ms would be an anchor of 80
    assert cadence.update(state.cadence, tail).anchor == 80
    assert scheduler.update(state, tail).cadence.anchor == 10


@pytest.mark.parametrize(
    ("costs", "anchor"),
    [
        ((80.0,), 10),  # 80 % of 100 ms would be an anchor of 80
        ((80.0, 5.0, 5.0), 10),
        ((5.0, 5.0, 80.0), 10),
        ((5.0, 80.0, 5.0, 5.0, 80.0, 5.0), 10),
        ((20.0, 20.0), 20),  # two in a row are a lasting cost, of 20 %
        ((5.0, 20.0, 20.0), 20),
        ((5.0, 80.0, 20.0), 20),
    ],
)
def test_one_odd_synchronisation_does_not_raise_the_anchor(costs, anchor):
    scheduler = Scheduler(ElChe(anchor=10, overhead_target=0.1))
    state = scheduler.init(2)
    for cost in costs:
        # before the anchor rises, a window takes 100 ms
        state = scheduler.update(state, WindowReport((100.0, 100.0), (10, 10), cost))
    assert state.cadence.anchor == anchor
    assert state.sync_ms == costs[-3:]


def test_a_short_trouble_with_the_exchange_is_soon_over():
    scheduler, anchors = Scheduler(ElChe()), []
    state = scheduler.init(2)
    for window in range(60):
        counts = scheduler.plan(state)
        wall = tuple(5.0 * count for count in counts)
        sync_ms = 250.0 if 20 <= window < 23 else 0.5
        state = scheduler.update(state, WindowReport(wall, counts, sync_ms))
        anchors.append(max(scheduler.plan(state)))
    assert max(anchors) == 200 and anchors[18] == 10
    assert anchors[-1] <= 11  # with one less per window it would take 190, not 34


@given(
    st.lists(
        st.tuples(
            st.floats(1.0, 1000.0), st.floats(0.0, 1e4), st.integers(1, 30), st.integers(0, 60)
        ),
        max_size=20,
    ),
    st.integers(4, 20),
)
def test_an_unknown_cost_changes_no_anchor(windows, anchor):
    scheduler = Scheduler(ElChe(anchor=4, overhead_target=0.1))
    state = scheduler.init(2)
    state = replace(state, cadence=replace(state.cadence, anchor=anchor))
    for ms, cost, first, second in windows:
        report = WindowReport((ms * first, ms * second), (first, second), cost)
        state = scheduler.update(state, report, cost_known=False)
    assert state.cadence.anchor == anchor
    assert state.sync_ms == ()


def held(anchor, counts, cost):
    """A run of devices of 1 and 0.5 ms whose counts have not come to the anchor yet."""
    state = ElCheState(anchor, counts, (1.0, 0.5), True)
    return SchedulerState(state, None, settled=True, sync_ms=(cost,))


@pytest.mark.parametrize("most", [2, 5, 1000])
def test_max_batch_diff_lets_counts_come_up_to_the_anchor(most):
    cadence = ElChe(anchor=10, overhead_target=0.1, max_batch_diff=most)
    scheduler, state = Scheduler(cadence, shift=None), held(10, (10, 20), 5.0)
    # 5 ms for each exchange, where 0.5 ms did not matter: the slow device needs 50 ms
    for _ in range(100):
        counts = state.counts
        state = run(scheduler, state, (1.0, 0.5), sync_ms=5.0)
        assert state.cadence.anchor == 50
        assert max(abs(a - b) for a, b in zip(state.counts, counts, strict=True)) <= most
    # within a dead zone of 10 %
    assert 45 <= state.counts[0] <= 50 and 90 <= state.counts[1] <= 100


def test_an_anchor_that_was_nudged_stays_while_counts_come_down_to_it():
    cadence = ElChe(anchor=1, overhead_target=0.1, max_batch_diff=5)
    scheduler, state = Scheduler(cadence, shift=None), held(100, (100, 200), 4.0)
    # 4 ms of 50 are on target, and 4 of the 95 that a window has at first are below a half of it
    report = WindowReport((100.0, 100.0), (100, 200), 4.0)
    state = scheduler.update(state, report, nudge_down(0.5))
    for _ in range(100):
        state = run(scheduler, state, (1.0, 0.5), sync_ms=4.0)
        assert state.cadence.anchor == 50
    assert 50 <= state.counts[0] <= 55 and 100 <= state.counts[1] <= 110


@pytest.mark.parametrize(("anchor", "counts"), [(50, (10, 20)), (10, (50, 100))])
def test_an_unknown_cost_changes_no_anchor_whose_counts_are_held_back(anchor, counts):
    cadence = ElChe(anchor=1, max_batch_diff=1)
    scheduler, state = Scheduler(cadence, shift=None), held(anchor, counts, 4.0)
    for _ in range(20):
        wall = [count * ms for count, ms in zip(state.counts, (1.0, 0.5), strict=True)]
        state = scheduler.update(state, WindowReport(wall, state.counts, 9.0), cost_known=False)
        assert state.cadence.anchor == anchor


def test_a_report_of_an_older_plan_does_not_raise_the_anchor_twice():
    scheduler = Scheduler(ElChe(anchor=10, overhead_target=0.1))
    first = WindowReport((100.0, 100.0), (10, 10), 20.0)
    state = scheduler.update(scheduler.update(scheduler.init(2), first), first)
    assert state.counts == (20, 20)
    # planned and dispatched before the first report came: still (10, 10)
    assert scheduler.update(state, first).counts == (20, 20)


def test_rescale_sync():
    report = WindowReport((20.0, 40.0, 0.0), (2, 4, 0), 6.0)
    # device 0 would be busy 100, device 1 for 80: the window 100 instead of 40
    scaled = rescale_sync(report, (10, 8, 5))
    assert scaled == WindowReport((20.0, 40.0, 0.0), (2, 4, 0), 6.0 * 40 / 100)
    assert rescale_sync(report, (2, 4, 0)) is report
    idle = WindowReport((0.0, 0.0), (1, 0), 6.0)
    assert rescale_sync(idle, (10, 10)) is idle


def test_verdicts_reach_the_cadence():
    scheduler = Scheduler(ElChe(anchor=10))
    state = run(scheduler, scheduler.init(2), (1.0, 1.0))
    report = WindowReport((10.0, 10.0), (10, 10), 0.0)
    assert scheduler.update(state, report, nudge_down()).counts == (5, 5)


def test_cadences_without_estimates_are_left_alone():
    scheduler = Scheduler(Balanced(8, calibration_windows=1))
    state = run(scheduler, scheduler.init(2), (3.0, 1.0))
    assert state.counts == (2, 6)
    state = run(scheduler, state, (30.0, 1.0), 3)
    assert state.shifts == 0


def test_a_replay_is_planned_by_window_or_by_report():
    scheduler = Scheduler(Replay([(4, 4), (2, 6)]))
    state = scheduler.init(2)
    assert [scheduler.plan(state, window=index) for index in (0, 1)] == [(4, 4), (2, 6)]
    assert scheduler.plan(state) == (4, 4)
    state = run(scheduler, state, (1.0, 1.0), 2)
    for ask in ({}, {"window": 2}):
        with pytest.raises(ValueError, match=r"^Replay: the recording has 2 windows, .* window 2 "):
            scheduler.plan(state, **ask)


def test_the_window_index_is_of_no_matter_to_other_cadences():
    scheduler = Scheduler(EveryBatch())
    assert scheduler.plan(scheduler.init(3), window=99) == (1, 1, 1)


@pytest.mark.parametrize("shift", [Shift(), None])
@pytest.mark.parametrize(
    "cadence",
    [ElChe(), FixedTotal(9), Balanced(9), EveryBatch(), Replay([(1, 2)] * 3)],
)
def test_state_through_json_goes_on_as_if_nothing_had_been(cadence, shift):
    scheduler = Scheduler(cadence, shift)
    state = run(scheduler, scheduler.init(2), (3.1, 1.0), 2, sync_ms=2.0)
    restored = scheduler.from_dict(json.loads(json.dumps(state.to_dict())))
    assert restored == state
    assert run(scheduler, restored, (2.0, 1.0)) == run(scheduler, state, (2.0, 1.0))


@dataclass(frozen=True)
class Plain(Cadence):
    """A cadence of a user: two methods, a bare state."""

    def init(self, world_size):
        return PlainState((2,) * world_size)

    def update(self, state, report, verdict=None):
        return PlainState(tuple(count + 1 for count in report.counts))


@dataclass(frozen=True)
class PlainState:
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Kept(State):
    counts: tuple[int, ...]


def test_a_users_cadence_needs_two_methods_and_counts():
    scheduler = Scheduler(Plain())
    state = run(scheduler, scheduler.init(2), (1.0, 1.0), 2)
    assert state.counts == (4, 4)
    with pytest.raises(
        TypeError,
        match=r"^SchedulerState\.to_dict: cadence must be an elche_jax\.cadence\.State,"
        r" got PlainState\(counts=\(4, 4\)\) \(PlainState\)\. Derive the cadence's "
        r"state class from State to store it\.$",
    ):
        state.to_dict()
    values = SchedulerState(Kept((1, 1)), Shift().init(2)).to_dict()
    with pytest.raises(
        TypeError,
        match=r"^Scheduler\.from_dict: state_type of the cadence must be a subclass of "
        r"elche_jax\.cadence\.State, got None\. Name the state's class as `state_type` "
        r"on the cadence's class\.$",
    ):
        scheduler.from_dict(values)


def test_a_users_state_without_counts():
    class Zero(Plain):
        def init(self, world_size):
            return 0

    with pytest.raises(TypeError, match=r"^Zero: init must return a state with counts, got 0 "):
        Scheduler(Zero()).init(2)


@pytest.mark.parametrize(
    ("flag", "hook", "ask"),
    [
        ("scripted", "counts_at", lambda cadence: Scheduler(cadence).plan(None, window=0)),
        ("estimates", "recalibrate", lambda cadence: cadence.recalibrate(None)),
    ],
)
def test_a_hook_that_a_flag_asks_for(flag, hook, ask):
    flagged = type("Flagged", (Plain,), {flag: True})()
    message = rf"^Flagged: {hook} must be defined if {flag} is True, got none\.$"
    with pytest.raises(NotImplementedError, match=message):
        ask(flagged)


def test_a_state_type_that_is_no_state():
    flagged = type("Flagged", (Plain,), {"state_type": int})()
    values = SchedulerState(Kept((1, 1)), Shift().init(2)).to_dict()
    with pytest.raises(TypeError, match=r"state_type of the cadence must .* got <class 'int'>\."):
        Scheduler(flagged).from_dict(values)


def test_from_dict_errors():
    scheduler = Scheduler(ElChe())
    values = scheduler.init(2).to_dict()
    with pytest.raises(
        ValueError,
        match=r"^Scheduler\.from_dict: values must have the keys \['agreed', 'averaged', "
        r"'cadence', 'settled', 'shift', 'shifts', 'sync_ms'\], got \['cadence'\]\.$",
    ):
        scheduler.from_dict({"cadence": values["cadence"]})
    with pytest.raises(
        ValueError,
        match=r"^Scheduler\.from_dict: shift must fit the scheduler's, got one\. "
        r"Resume with the scheduler that wrote the state\.$",
    ):
        Scheduler(ElChe(), shift=None).from_dict(values)
    with pytest.raises(ValueError, match=r"^Scheduler\.from_dict: shift must fit .*, got none\. "):
        scheduler.from_dict(values | {"shift": None})
    with pytest.raises(
        ValueError, match=r"^Scheduler\.from_dict: sync_ms must have at most 3 entries, got 4\.$"
    ):
        scheduler.from_dict(values | {"sync_ms": [1.0] * 4})
    del values["sync_ms"], values["averaged"]  # saved before there were any
    assert scheduler.from_dict(values) == replace(scheduler.init(2), averaged=AVERAGED)
    with pytest.raises(
        ValueError, match=r"^Scheduler\.from_dict: sync_ms\[1\] must be at least 0, got -1\."
    ):
        scheduler.from_dict(values | {"sync_ms": [1.0, -1]})
    with pytest.raises(
        ValueError, match=r"^FixedTotalState\.from_dict: values must have the keys "
    ):
        Scheduler(FixedTotal(8)).from_dict(values)
