"""The controller: what cadence and guard are told of a window, and when."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from elche_jax.cadence import (
    HOLD_GROWTH,
    QSR,
    STABLE,
    AdaComm,
    Balanced,
    Cadence,
    Controller,
    Divergence,
    ElChe,
    EveryBatch,
    FixedTotal,
    NoGuard,
    PostLocal,
    Replay,
    State,
    WindowPlan,
    WindowRecord,
    WindowReport,
    nudge_down,
)
from elche_jax.cadence.guards import HISTORY, judge

laws = settings(deadline=None, database=None, derandomize=True)


class Heard(Cadence):
    """Notes what it is told."""

    def __init__(self, **flags):
        self.told = []
        for name, value in flags.items():
            setattr(self, name, value)

    def init(self, world_size):
        return Counts((1,) * world_size)

    def update(self, state, report, verdict=STABLE):
        self.told.append((report, verdict))
        return state


class Counts(State):
    def __init__(self, counts):
        object.__setattr__(self, "counts", counts)


class Says:
    """A guard with a verdict for every window."""

    def __init__(self, *verdicts):
        self.verdicts, self.histories = list(verdicts), []

    def verdict(self, history):
        self.histories.append(tuple(history))
        return self.verdicts[history[-1].window]


def record(window, *, steady=True, counts=(1, 1), distance=None, loss=None):
    busy = tuple(10.0 * count for count in counts)
    plan = WindowPlan(window, 0, counts, 8 * sum(counts), first=2 * window)
    apart = None
    if distance is not None:
        rows = [(value,) * len(counts) for value in (distance, 1.0, 1.0, 1 / len(counts))]
        apart = Divergence(window, counts, *rows)
    return plan.measured(busy, 12.0, 2.0, 0.0, steady=steady, divergence=apart, loss=loss)


def run(controller, records):
    state = controller.init(2)
    for one in records:
        state = controller.observe(state, one)
    return state


def verdicts(cadence):
    return [verdict.action for _, verdict in cadence.told]


def test_a_record_is_its_plan_and_what_was_measured():
    plan = WindowPlan(3, 1, (4, 2), 48, first=18)
    measured = plan.measured((8.0, 7.0), 9.0, 1.0, 0.5, steady=False, left_out=(1,), loss=0.25)
    assert measured == WindowRecord(
        window=3, epoch=1, counts=(4, 2), examples=48, first=18, busy_ms=(8.0, 7.0), wall_ms=9.0,
        sync_ms=1.0, skew_ms=0.5, steady=False, left_out=(1,), divergence=None, loss=0.25,
    )  # fmt: skip


def test_the_cadence_is_told_of_steady_windows():
    cadence = Heard()
    run(Controller(cadence), [record(0, steady=False), record(1, counts=(2, 3)), record(2)])
    assert [report.counts for report, _ in cadence.told] == [(2, 3), (1, 1)]
    assert cadence.told[0][0].wall_ms == (20.0, 30.0) and cadence.told[0][0].sync_ms == 2.0


def test_one_device_has_no_busy_times_to_tell():
    cadence, plan = Heard(), WindowPlan(0, 0, (4,), 32)
    controller = Controller(cadence)
    controller.observe(controller.init(1), plan.measured((), 9.0, 0.0, 0.0, steady=True))
    assert cadence.told == []


def test_a_cadence_that_counts_windows_hears_of_all():
    cadence = Heard(counts_windows=True, uses_loss=True)
    run(Controller(cadence), [record(0, steady=False, loss=3.0), record(1, loss=2.0)])
    assert [(r.wall_ms, r.loss) for r, _ in cadence.told] == [
        ((0.0, 0.0), 3.0),
        ((10.0, 10.0), 2.0),
    ]


def late(cadence):
    """Runs a window whose times become known later; returns the state."""
    controller = Controller(cadence)
    state = run(controller, [record(0, steady=False, loss=3.0)])
    return controller.learn(state, record(0, loss=3.0))


def test_a_window_whose_times_come_later_is_told_once():
    counts, loses, neither = Heard(counts_windows=True), Heard(uses_loss=True), Heard()
    for cadence in (counts, loses, neither):
        late(cadence)
    assert [(r.wall_ms, r.loss) for r, _ in counts.told] == [((0.0, 0.0), None)]
    assert [(r.wall_ms, r.loss) for r, _ in loses.told] == [((10.0, 10.0), 3.0)]
    assert [(r.wall_ms, r.loss) for r, _ in neither.told] == [((10.0, 10.0), None)]


@pytest.mark.parametrize(
    "rule",
    [AdaComm(anchor=4), PostLocal(switch=2), QSR(alpha=0.1, base=2, learning_rate=0.1)],
    ids=lambda rule: type(rule).__name__,
)
def test_times_that_come_later_change_estimates_alone(rule):
    state = late(rule).schedule.cadence
    before = run(Controller(rule), [record(0, steady=False, loss=3.0)]).schedule.cadence
    assert before.windows == 1 and before.ms_per_batch == (None, None)
    assert state == replace(before, ms_per_batch=(10.0, 10.0))


def test_balanced_counts_the_windows_that_are_not_timed():
    controller = Controller(Balanced(8, calibration_windows=2, rebalance_every=3))
    timed = replace(record(0, counts=(4, 4)), busy_ms=(12.0, 4.0))
    state = controller.observe(controller.init(2), timed)
    untimed = [replace(timed, window=at, steady=False) for at in range(1, 5)]
    plans = []
    for each in untimed[:-1]:
        state = controller.observe(state, each)
        plans.append(controller.plan(state, each.window + 1))
    # after windows 2 and 5, of which the first one alone is timed
    assert plans == [(2, 6)] * 3
    assert (state.schedule.cadence.windows, state.schedule.cadence.next_rebalance) == (4, 5)
    # both are equal now, which becomes known later and changes no counts before window 5
    state = controller.learn(state, replace(timed, busy_ms=(4.0, 4.0)))
    assert controller.plan(state, 4) == (2, 6)
    # 0.3 * 1 + 0.7 / 3 and 1
    assert state.schedule.cadence.throughput == pytest.approx((0.533, 1.0), abs=1e-3)
    state = controller.observe(state, untimed[-1])
    assert controller.plan(state, 5) == (3, 5)


def test_counts_follow_times_that_come_later():
    controller = Controller(PostLocal(switch=1, anchor=4))
    state = run(controller, [record(0), record(1, counts=(4, 4))])
    slow = replace(record(2, counts=(4, 4)), busy_ms=(40.0, 400.0))
    state = controller.learn(state, slow)
    # alpha is at most 0.8: 0.8 * 100 + 0.2 * 10 ms
    assert state.schedule.cadence.ms_per_batch == pytest.approx((10.0, 82.0))
    assert controller.plan(state, 3) == (33, 4)


@pytest.mark.parametrize(("uses", "told"), [(True, [2.0]), (False, [None] * 3)])
def test_a_loss_that_is_none_is_told_to_nobody(uses, told):
    cadence = Heard(uses_loss=uses)
    losses = (float("nan"), 2.0, float("inf"))
    run(Controller(cadence), [record(at, loss=loss) for at, loss in enumerate(losses)])
    assert [report.loss for report, _ in cadence.told] == told


def test_a_recording_is_told_nothing():
    controller = Controller(Replay([(1, 2), (3, 4)]))
    state = run(controller, [record(0), record(1)])
    assert state == controller.init(2)
    assert [controller.plan(state, window) for window in (1, 0)] == [(3, 4), (1, 2)]


@pytest.mark.parametrize(("target", "said"), [(0.1, "hold_growth"), (0.0, "stable")])
def test_a_cold_window_tells_speeds_and_no_overhead(target, said):
    cadence = Heard(overhead_target=target)
    run(Controller(cadence), [replace(record(0), cold=True), record(1)])
    assert verdicts(cadence) == [said, "stable"]
    assert cadence.told[0][0].wall_ms == (10.0, 10.0)


def test_a_cold_synchronisation_does_not_move_the_anchor():
    controller = Controller(ElChe(anchor=10))
    cold = replace(record(0, counts=(10, 10)), sync_ms=80.0, cold=True, busy_ms=(100.0, 50.0))
    state = controller.observe(controller.init(2), cold)
    assert controller.plan(state, 1) == (10, 20)
    assert state.schedule.sync_ms == ()
    warm = replace(cold, cold=False)
    state = controller.observe(controller.observe(state, warm), warm)
    assert min(controller.plan(state, 3)) == 80


def test_a_verdict_waits_until_the_cadence_is_told():
    """The strongest since; then it is owed no more."""
    cadence = Heard()
    guard = Says(HOLD_GROWTH, nudge_down(0.5), HOLD_GROWTH, HOLD_GROWTH)
    states = [
        record(0, steady=False, distance=0.1), record(1, steady=False, distance=0.1),
        record(2, distance=0.1), record(3, distance=0.1),
    ]  # fmt: skip
    state = run(Controller(cadence, guard), states)
    assert verdicts(cadence) == ["nudge_down", "hold_growth"]
    assert (state.verdict, state.owed) == (HOLD_GROWTH, STABLE)


def test_a_window_without_divergence_leaves_the_verdict():
    controller = Controller(Heard(), Says(HOLD_GROWTH))
    state = run(controller, [record(0, distance=0.1), record(1)])
    assert state.verdict == HOLD_GROWTH and len(state.divergence) == 1
    assert verdicts(controller.cadence) == ["hold_growth", "stable"], "it was told once"


def test_a_guard_sees_the_last_windows():
    guard = Says(*[HOLD_GROWTH] * (HISTORY + 9))
    windows = range(HISTORY + 9)
    state = run(Controller(Heard(), guard), [record(at, distance=at) for at in windows])
    assert [one.window for one in state.divergence] == list(windows)[-HISTORY:]
    assert guard.histories[-1] == state.divergence and len(guard.histories[3]) == 4


@laws
@given(
    st.lists(
        st.tuples(st.booleans(), st.one_of(st.none(), st.floats(0, 0.5)), st.floats(1, 100)),
        max_size=20,
    ),
    st.sampled_from([ElChe(anchor=2), FixedTotal(8), EveryBatch()]),
)
def test_it_is_cadence_shift_and_guard(windows, cadence):
    """Against the parts driven by hand; and states stay as they are."""
    guard = Says(*[HOLD_GROWTH, nudge_down(0.5), STABLE] * 7)
    controller = Controller(cadence, guard)
    state, by_hand = controller.init(2), controller.scheduler.init(2)
    history, owed = [], []
    for at, (steady, distance, ms) in enumerate(windows):
        counts = controller.plan(state, at)
        assert counts == by_hand.counts
        one = record(at, steady=steady, counts=counts, distance=distance)
        one = replace(one, busy_ms=(ms * counts[0], 10.0 * counts[1]))
        before, kept = state, repr(state)
        state = controller.observe(state, one)
        assert repr(before) == kept
        if distance is not None:
            history.append(one.divergence)
            owed.append(judge(guard, history))
        if steady:
            strongest = min(
                owed, key=lambda v: (v.action != "nudge_down", v.action == "stable"),
                default=STABLE,
            )  # fmt: skip
            report = WindowReport(one.busy_ms, one.counts, one.sync_ms)
            by_hand, owed = controller.scheduler.update(by_hand, report, strongest), []
        assert state.schedule == by_hand and list(state.divergence) == history
        json.dumps(state.schedule.to_dict())


@pytest.mark.parametrize("counts", [(1,), (1, 1, 1), (0, 0), (2, -1)])
def test_counts_must_be_some(counts):
    class Wrong(Heard):
        def init(self, world_size):
            return Counts(counts)

    controller = Controller(Wrong(), NoGuard())
    with pytest.raises(
        ValueError,
        match=r"^Wrong: counts must have one entry per device \(2\), none below 0 and not all 0, "
        r"got \(.*\) for window 5\.$",
    ):
        controller.plan(controller.init(2), 5)


def test_counts_of_numpy_are_plain_and_go_into_json():
    class Arrays(Heard):
        def init(self, world_size):
            return ElChe(anchor=3).init(world_size)

        def update(self, state, report, verdict=STABLE):
            return replace(state, counts=np.rint([2.0, 5.0]).astype(int))

    controller = Controller(Arrays())
    state = controller.observe(controller.init(2), record(0))
    counts = controller.plan(state, 1)
    assert counts == (2, 5) and {type(count) for count in counts} == {int}
    assert json.loads(json.dumps(state.schedule.to_dict()))["cadence"]["counts"] == [2, 5]


@pytest.mark.parametrize("flags", [{}, {"estimates": True}, {"counts_windows": True}])
def test_an_update_that_returns_no_state(flags):
    class Forgets(Heard):
        def init(self, world_size):
            return ElChe().init(world_size)

        def update(self, state, report, verdict=STABLE):
            pass

        def recalibrate(self, state):
            return state

    controller = Controller(Forgets(**flags))
    window = record(0, steady="counts_windows" not in flags)
    with pytest.raises(
        TypeError, match=r"^Forgets: update must return a state with counts, got None"
    ):
        controller.observe(controller.init(2), window)


def test_what_is_none():
    with pytest.raises(TypeError, match=r"^Heard: init must return a state with ms_per_batch, got"):
        Controller(Heard(estimates=True)).init(2)
    with pytest.raises(TypeError, match=r"^Controller: cadence must be .*Cadence, got 'x'"):
        Controller("x")
    with pytest.raises(TypeError, match=r"^Controller: guard must be .*Guard, got 3"):
        Controller(EveryBatch(), 3)
    controller = Controller(EveryBatch())
    with pytest.raises(TypeError, match=r"^Controller\.observe: record must be .*, got WindowPlan"):
        controller.observe(controller.init(2), WindowPlan(0, 0, (1, 1), 2))
    fractions = Controller(Heard())
    state = replace(
        fractions.init(2), schedule=replace(fractions.init(2).schedule, cadence=Counts((2.5, 1)))
    )
    with pytest.raises(TypeError, match=r"^Heard: counts\[0\] must be an integer, got 2\.5"):
        fractions.plan(state, 0)


# -- devices that are lost


def test_all_devices_cannot_be_lost():
    controller = Controller(ElChe())
    state = controller.without(controller.init(3), [0, 2])
    assert state.left == (1,) and controller.plan(state, 0) == (0, 10, 0)
    with pytest.raises(ValueError, match=r"^Controller.without: ranks must leave a device, got"):
        controller.without(state, [1])


def test_a_recording_needs_its_devices():
    controller = Controller(Replay([(1, 2, 3)] * 2))
    rule = r"^Controller.without: ranks must be empty, as a recording needs all devices, got \[2\]"
    with pytest.raises(ValueError, match=rule):
        controller.without(controller.init(3), [2])


def test_losing_some_at_once_or_one_by_one_is_the_same():
    controller = Controller(FixedTotal(9))
    state = controller.init(4)
    for window in range(3):
        counts = controller.plan(state, window)
        busy = tuple(ms * n for ms, n in zip((1.0, 2.0, 3.0, 4.0), counts, strict=True))
        state = controller.observe(
            state, WindowRecord(window, 0, counts, 72, busy, max(busy), 0.1, 0.0, True)
        )
    once = controller.without(state, [0, 3])
    assert once == controller.without(controller.without(state, [3]), [0, 3])
    assert controller.plan(once, 3) == (0, 6, 3, 0)
