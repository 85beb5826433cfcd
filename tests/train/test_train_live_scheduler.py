"""What `LiveScheduler` knows of the devices, and what it tells a timeline."""

import logging
import math
import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import elche_jax as elche
from elche_jax.averaging.rules import MOST
from elche_jax.cadence import (
    BalancedState,
    Controller,
    ElCheState,
    EveryBatch,
    State,
    WindowPlan,
    WindowRecord,
)
from elche_jax.engine.host.limits import Limits
from elche_jax.observe.timeline import SkipEvent, Timeline, WindowEvent
from elche_jax.train.live_scheduler import HINT_AFTER, LiveScheduler
from elche_jax.train.speeds import RECENT, ratios, throughput

laws = settings(deadline=None, database=None, derandomize=True)


def record(counts, busy_ms, *, window=0, steady=True, wall_ms=None):
    wall_ms = max(busy_ms, default=1.0) if wall_ms is None else wall_ms
    return WindowRecord(
        window, 0, tuple(counts), 8 * sum(counts), tuple(busy_ms), wall_ms, 0.5, 0.0, steady
    )


def scheduler_of(cadence, world_size, **options):
    return LiveScheduler(Controller(cadence), world_size, hint=False, **options)


def feed(scheduler, ms, windows=1):
    """Runs the plan on devices of these speeds."""
    for _ in range(windows):
        counts = scheduler.counts
        scheduler.observe(
            record(counts, [count * one for count, one in zip(counts, ms, strict=True)])
        )


@dataclass(frozen=True)
class OnesState(State):
    counts: tuple[int, ...]


class Ones(elche.Cadence):
    """A user's own cadence, which estimates nothing."""

    def init(self, world_size):
        return OnesState((1,) * world_size)

    def update(self, state, report, verdict=None):
        return state


def test_log_handlers_and_what_tells_of_lanes_may_read_it_and_set_it():
    """Also in a thread that they wait for: nothing is said under a lock."""
    free = []

    def elsewhere():
        def use():
            assert scheduler.records
            scheduler.restore(scheduler.state)

        thread = threading.Thread(target=use, daemon=True)
        thread.start()
        thread.join(10)
        free.append(not thread.is_alive())

    class Tells(logging.Handler):
        def emit(self, record):
            elsewhere()

    class Worth:
        def observe(self, record):
            if len(scheduler.records) == 1:
                elsewhere()

    scheduler = LiveScheduler(Controller(EveryBatch()), 2, hint=True, worth=Worth())
    handler = Tells()
    logging.getLogger("elche_jax").addHandler(handler)
    try:
        feed(scheduler, (20.0, 2.0), HINT_AFTER)
    finally:
        logging.getLogger("elche_jax").removeHandler(handler)
    assert free == [True, True]


# throughput


@pytest.mark.parametrize(
    "cadence",
    [
        elche.ElChe(anchor=4), elche.FixedTotal(8), elche.Balanced(8), elche.EveryBatch(),
        elche.Replay([(4, 4)] * 9), Ones(),
    ],
    ids=lambda cadence: type(cadence).__name__,
)  # fmt: skip
def test_throughput_is_per_second(cadence):
    scheduler = scheduler_of(cadence, 2)
    assert scheduler.throughput == (None, None)
    feed(scheduler, (8.0, 2.0))
    assert scheduler.throughput == pytest.approx((125.0, 500.0))


def test_the_cadences_own_estimate_comes_first():
    records = [record((1, 1), (100.0, 100.0))]
    state = ElCheState(10, (10, 10), (8.0, None), False)
    assert throughput(state, records, 2) == (125.0, None)
    state = BalancedState((4, 4), (0.5, 0.5), (None, 0.25), 1, 10)
    assert throughput(state, records, 2) == (None, 250.0)
    # smoothed: twice 8 ms, then 4: error 0.5, hence 6 ms and 1000 / 6
    scheduler = scheduler_of(elche.ElChe(anchor=4), 2)
    for busy in ((32.0, 32.0), (32.0, 32.0), (16.0, 32.0)):
        scheduler.observe(record((4, 4), busy))
    assert scheduler.throughput == pytest.approx((1000 / 6, 125.0))


def test_without_an_estimate_it_is_the_median_of_steady_windows():
    records = [record((2, 1), busy) for busy in ((20.0, 10.0), (10.0, 10.0), (40.0, 10.0))]
    records += [record((2, 1), (1.0, 1.0), steady=False)] * 9
    assert throughput(EveryBatch().init(2), records, 2) == (100.0, 100.0)


def test_of_the_last_windows_only():
    old, new = record((1, 1), (50.0, 50.0)), record((1, 1), (10.0, 10.0))
    state = EveryBatch().init(2)
    assert throughput(state, [old] * 500 + [new] * RECENT, 2) == (100.0, 100.0)
    assert throughput(state, [new] * RECENT + [old] * (RECENT // 2 + 1), 2) == (20.0, 20.0)


def test_windows_without_work_say_nothing_of_a_device():
    idle = [record((3, 0), (30.0, 0.0))] * (2 * RECENT)
    state = EveryBatch().init(2)
    assert throughput(state, idle, 2) == (100.0, None)
    assert throughput(state, [record((1, 2), (10.0, 8.0)), *idle], 2) == (100.0, 250.0)
    # a clock that stood still
    assert throughput(state, [record((1, 1), (0.0, 10.0))], 2) == (None, 100.0)


def test_one_device_is_timed_by_its_windows():
    scheduler = scheduler_of(elche.FixedTotal(4), 1)
    assert (scheduler.throughput, scheduler.ratios) == ((None,), (1.0,))
    scheduler.observe(record((4,), (), wall_ms=80.0))
    assert (scheduler.throughput, scheduler.ratios) == ((50.0,), (1.0,))


def test_speeds_that_were_restored_are_known():
    scheduler, again = (
        scheduler_of(elche.ElChe(anchor=4), 2),
        scheduler_of(elche.ElChe(anchor=4), 2),
    )
    feed(scheduler, (8.0, 2.0), windows=3)
    again.restore(scheduler.state.to_dict())
    assert again.throughput == scheduler.throughput == (125.0, 500.0)
    assert again.ratios == scheduler.ratios == pytest.approx((0.2, 0.8))


def test_what_the_longest_delay_plans_from_is_kept():
    """Devices that run ahead plan a window from what was known as many windows before it."""
    cadence = elche.ElChe(anchor=4)
    scheduler = scheduler_of(cadence, 2)
    ahead = Limits(1.0, ahead=True, delay=MOST).in_flight
    plans = []
    for window in range(2 * ahead):  # each a tenth slower than the one before
        ms = (8.0 * 1.1 ** (window % 30), 2.0)
        scheduler.observe(record((4, 16), (4 * ms[0], 16 * ms[1]), window=window))
        plans.append(scheduler.counts)
    assert len(set(plans)) > 9
    last = 2 * ahead - 1
    for after in range(last - ahead, last + 1):
        assert scheduler.plan(last + 1, after) == plans[after]


@dataclass(frozen=True)
class LossesState(State):
    plan: tuple[int, ...]
    last: tuple[float, ...] = ()
    runs: int = 3
    words: tuple[str, ...] = ("warm", "up", "now")

    @property
    def counts(self):
        return self.plan


class Losses(elche.Cadence):
    """A user's own cadence, whose state has tuples that are not by device."""

    state_type = LossesState
    uses_loss = True

    def init(self, world_size):
        return LossesState((1,) * world_size)

    def update(self, state, report, verdict=None):
        return replace(state, last=(*state.last, report.loss)[-10:])


def test_fields_of_a_users_state_need_not_be_by_device():
    scheduler, again = scheduler_of(Losses(), 2), scheduler_of(Losses(), 2)
    for loss in (-3.0, 2.0, 1.0):
        scheduler.observe(replace(record((1, 1), (8.0, 2.0)), loss=loss))
    again.restore(scheduler.state.to_dict())
    assert again.state == scheduler.state
    assert again.state.cadence.last == (-3.0, 2.0, 1.0)
    with pytest.raises(ValueError, match=r"counts must have one entry per device \(3\), got 2"):
        scheduler_of(Losses(), 3).restore(scheduler.state)
    four = scheduler_of(elche.Replay([(1, 1, 1, 1)]), 4)
    with pytest.raises(ValueError, match=r"next_counts must have one entry .* \(2\), got 4"):
        scheduler_of(elche.Replay([(1, 1)]), 2).restore(four.state)


@pytest.mark.parametrize("part", ["ms_per_batch", "throughput"])
def test_a_restored_speed_must_be_one(part):
    cadence = elche.ElChe() if part == "ms_per_batch" else elche.Balanced(20)
    scheduler = scheduler_of(cadence, 2)
    saved = scheduler.state.to_dict()
    saved["cadence"][part] = [1.0, 0.0]
    with pytest.raises(
        ValueError, match=rf"^TrainStep\.cadence_state: {part}\[1\] must be above 0, got 0\.0\.$"
    ):
        scheduler.restore(saved)


# ratios


@pytest.mark.parametrize(
    ("cadence", "expected"),
    [
        (elche.ElChe(), (0.5, 0.5)),
        (elche.ElChe(speed_hint=(1, 3.0)), (0.75, 0.25)),
        (elche.Balanced(8, speed_hint=(1, 3.0)), (0.75, 0.25)),
        (elche.FixedTotal(3), (2 / 3, 1 / 3)),
        (elche.EveryBatch(), (0.5, 0.5)),
        (elche.Replay([(1, 4), (4, 1)]), (0.2, 0.8)),
        (Ones(), (0.5, 0.5)),
    ],
)
def test_before_any_measurement_the_plan_is_all_there_is(cadence, expected):
    assert scheduler_of(cadence, 2).ratios == pytest.approx(expected)


@pytest.mark.parametrize(
    "cadence",
    [elche.ElChe(), elche.ElChe(speed_hint=(0, 9.0)), elche.FixedTotal(8), EveryBatch(), Ones()],
)
def test_measured_devices_share_by_speed(cadence):
    scheduler = scheduler_of(cadence, 2)
    feed(scheduler, (6.0, 2.0))
    assert scheduler.ratios == pytest.approx((0.25, 0.75))


def test_balanced_says_itself():
    scheduler = scheduler_of(elche.Balanced(40), 2)
    feed(scheduler, (3.0, 1.0), windows=9)
    assert scheduler.throughput == pytest.approx((1000 / 3, 1000))
    assert scheduler.ratios == (0.5, 0.5), "it rebalances after ten windows"
    feed(scheduler, (3.0, 1.0))
    assert scheduler.ratios == pytest.approx((0.25, 0.75))


def test_an_unmeasured_device_counts_as_the_mean():
    state = ElCheState(10, (10, 10, 10), (2.0, None, 6.0), False)
    # 500, 333.3 and 166.7 per second
    assert ratios(state, [], (10, 10, 10)) == pytest.approx((1 / 2, 1 / 3, 1 / 6))


def test_after_a_recording_its_last_window_counts():
    scheduler = scheduler_of(elche.Replay([(1, 1), (1, 3)]), 2)
    for window, counts in enumerate(((1, 1), (1, 3))):
        scheduler.on_dispatch(WindowPlan(window, 0, counts, 8))
    assert scheduler.ratios == (0.25, 0.75)


@laws
@given(
    st.lists(st.one_of(st.none(), st.floats(1e-9, 1e12)), min_size=1, max_size=9),
    st.data(),
    st.booleans(),
)
def test_ratios_sum_to_one(times, data, of_records):
    n = len(times)
    counts = data.draw(st.lists(st.integers(1, 10**6), min_size=n, max_size=n))
    state = ElCheState(1, (1,) * n, tuple(times), None not in times)
    records = []
    if of_records:
        records = [record((1,) * n, [0.0 if ms is None else ms for ms in times])]
        state = EveryBatch().init(n)
    shares = ratios(state, records, counts)
    assert len(shares) == n
    assert math.fsum(shares) == pytest.approx(1, abs=1e-15 * n)
    assert all(0 <= share <= 1 for share in shares)
    rates = throughput(state, records, n)
    known = [rank for rank in range(n) if rates[rank] is not None]
    # one speed of two devices is one ratio; a faster one never has the smaller share
    if n > 1:
        for a in known:
            assert all(shares[a] <= shares[b] for b in known if rates[a] <= rates[b])


@dataclass(frozen=True)
class OwnState:
    counts: tuple[int, ...]
    ratios: object


def test_ratios_of_a_cadence_of_ones_own():
    assert ratios(OwnState((1, 1), [3, 1]), [], (1, 1)) == (0.75, 0.25)
    where = r"^TrainStep\.ratios: ratios of the cadence's state"
    for own, kind, text in [
        ((1.0,), ValueError, r" must have one entry per device \(2\), got 1\.$"),
        ((0.0, 0.0), ValueError, r" must have an entry above 0, got \(0\.0, 0\.0\)\.$"),
        ((2.0, -1.0), ValueError, r"\[1\] must be at least 0, got -1\.0\.$"),
        (("a", 1.0), TypeError, r"\[0\] must be a number, got 'a' \(str\)\.$"),
        (0.5, TypeError, r" must be a sequence of numbers, got 0\.5 \(float\)\.$"),
    ]:
        with pytest.raises(kind, match=where + text):
            ratios(OwnState((1, 1), own), [], (1, 1))


@dataclass(frozen=True)
class TimesState:
    counts: tuple[int, ...]
    ms_per_batch: object = ()


def test_times_of_a_cadence_of_ones_own():
    assert throughput(TimesState((1, 1)), [], 2) == (None, None)
    assert throughput(TimesState((1, 1), np.array([4, 8])), [], 2) == (250.0, 125.0)
    assert throughput(TimesState((1, 1), [None, np.float32(8)]), [], 2) == (None, 125.0)
    where = r"^TimesState: ms_per_batch"
    for own, kind, text in [
        ((1.0,), ValueError, r" must have one entry per device \(2\), got 1\.$"),
        ((2.0, 0.0), ValueError, r"\[1\] must be above 0, got 0\.0\.$"),
        ((None, math.nan), ValueError, r"\[1\] must be finite, got nan\.$"),
        (np.zeros(2), ValueError, r"\[0\] must be above 0, got 0\.0\.$"),
        (("a", 1.0), TypeError, r"\[0\] must be a number, got 'a' \(str\)\.$"),
        (3.0, TypeError, r" must be a sequence of numbers, got 3\.0 \(float\)\.$"),
        ({0: 1.0}, TypeError, r" must be a sequence of numbers, got {0: 1\.0} \(dict\)\.$"),
    ]:
        with pytest.raises(kind, match=where + text):
            throughput(TimesState((1, 1), own), [], 2)


def test_ratios_of_an_unsound_plan():
    class Nothing(Ones):
        def init(self, world_size):
            return OnesState((0,) * world_size)

    with pytest.raises(ValueError, match=r"^Nothing: counts must have one entry .* for window 0"):
        _ = scheduler_of(Nothing(), 2).ratios


# the timeline


def test_windows_and_skips_are_told(tmp_path):
    with Timeline(tmp_path / "run.jsonl") as timeline:
        scheduler = scheduler_of(elche.ElChe(), 2, timeline=timeline)
        steady = record((10, 10), (60.0, 20.0))
        compiled = replace(steady, window=1, steady=False)
        scheduler.observe(steady)
        scheduler.on_skip(WindowPlan(0, 0, (10, 10), 160), "not finite")
        scheduler.observe(compiled)
    first, dropped, second = Timeline.read(tmp_path / "run.jsonl")
    assert isinstance(first, WindowEvent) and isinstance(second, WindowEvent)
    assert (first.window, first.busy_ms, first.steady) == (0, (60.0, 20.0), True)
    assert (second.window, second.steady) == (1, False)
    assert dropped == SkipEvent(0, 0, "not finite", dropped.at)
    assert scheduler.records == [steady, compiled]


def test_without_a_timeline_nothing_is_told():
    scheduler = scheduler_of(elche.ElChe(), 2)
    scheduler.observe(record((10, 10), (60.0, 20.0)))
    scheduler.on_skip(WindowPlan(0, 0, (10, 10), 160), "not finite")
    assert len(scheduler.records) == 1 and scheduler.timeline is None


def test_a_timeline_may_look_at_the_scheduler_that_tells_it():
    """It is told outside of the lock."""

    class Looking(Timeline):
        def window(self, record):
            self.seen = scheduler.throughput
            super().window(record)

    timeline = Looking()
    scheduler = scheduler_of(elche.ElChe(), 2, timeline=timeline)
    scheduler.observe(record((10, 10), (60.0, 20.0)))
    assert len(timeline.events) == 1 and timeline.seen == (1000 / 6, 500.0)


# the hint in the log


@pytest.mark.parametrize(("cadence", "hints"), [(EveryBatch(), 1), (elche.Balanced(2), 0)])
def test_only_a_cadence_that_does_not_balance_is_worth_a_hint(cadence, hints, caplog):
    scheduler = LiveScheduler(Controller(cadence), 2, hint=True)
    for window in range(HINT_AFTER):
        scheduler.observe(record((1, 1), (5.0, 30.0), window=window))
    assert len(caplog.records) == hints


# -- devices that are lost


@pytest.mark.parametrize("cadence", [elche.ElChe(anchor=4), elche.FixedTotal(12), EveryBatch()])
def test_without_a_device_the_others_keep_their_speeds(cadence):
    scheduler = scheduler_of(cadence, 3)
    feed(scheduler, (4.0, 2.0, 1.0), windows=4)
    total, speeds = sum(scheduler.counts), scheduler.throughput
    scheduler.on_lost([1])
    assert scheduler.lost == (1,)
    assert scheduler.counts[1] == 0 and len(scheduler.counts) == 3
    assert scheduler.throughput == (speeds[0], None, speeds[2])
    assert scheduler.ratios == pytest.approx((0.2, 0.0, 0.8))
    if isinstance(cadence, elche.FixedTotal):
        assert sum(scheduler.counts) == total
    counts = scheduler.counts
    busy = [4.0 * counts[0], 0.0, counts[2]]
    scheduler.observe(record(counts, busy, window=4))  # a record of all, with nothing of the lost
    assert scheduler.counts[1] == 0
    assert len(scheduler.state.counts) == 2
    scheduler.restart()
    assert scheduler.lost == (1,), "a new run has the same devices"
    scheduler.on_lost([0])
    assert scheduler.counts[:2] == (0, 0) and scheduler.counts[2] > 0


def test_what_follows_from_windows_before_the_loss_stays():
    """A process that plans late must plan as those that planned before they knew."""
    scheduler = scheduler_of(elche.ElChe(anchor=4), 3)
    for window in range(3):
        counts = scheduler.counts
        scheduler.observe(record(counts, [4.0 * counts[0], counts[1], counts[2]], window=window))
    before = scheduler.plan(4, after=2)
    scheduler.on_lost([0])
    assert scheduler.plan(4, after=2) == before and before[0] > 0
    counts = scheduler.counts
    scheduler.observe(record(counts, [0.0, counts[1], counts[2]], window=3))
    assert scheduler.plan(5, after=3)[0] == 0
