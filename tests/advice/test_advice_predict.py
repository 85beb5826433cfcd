"""What cadences would give, against windows played through one microbatch at a time."""

import math
from itertools import combinations
from unittest import mock

import pytest
from hypothesis import given, strategies as st

from elche_jax.advice import Speeds
from elche_jax.advice.predict import Forecast, one_device, settled
from elche_jax.cadence import (
    Cadence,
    ElChe,
    EveryBatch,
    FixedTotal,
    WindowReport,
    clamp_counts,
)

MS = st.floats(0.5, 40)
SYNC = st.floats(0, 30)
few_windows = mock.patch("elche_jax.advice.predict.SETTLE", 20)
"""For what holds however many windows a cadence is given to settle."""


def played(ms, counts, sync_ms, batch_size, windows=7):
    """Examples per second of devices that run microbatch after microbatch, then meet."""
    now, examples = 0.0, 0
    for _ in range(windows):
        ends = []
        for each, count in zip(ms, counts, strict=True):
            at = now
            for _ in range(count):
                at += each
                examples += batch_size
            ends.append(at)
        now = max(ends) + sync_ms
    return 1e3 * examples / now


def alike(ms, sync_ms):
    """Speeds of devices that share nothing."""
    return Speeds(tuple(ms), tuple(ms), sync_ms)


@given(ms=st.lists(MS, min_size=2, max_size=5), sync_ms=SYNC, batch_size=st.integers(1, 64))
@few_windows
def test_plans_are_what_windows_come_to(ms, sync_ms, batch_size):
    for cadence in (ElChe(anchor=4), FixedTotal(16), EveryBatch()):
        made = Forecast(alike(ms, sync_ms), batch_size).plan("it", cadence)
        rate = played(ms, made.counts, sync_ms, batch_size)
        assert made.examples_per_s == pytest.approx(rate)
        limit = sum(1e3 * batch_size / each for each in ms)
        assert made.limit_share == pytest.approx(rate / limit)
        assert made.window_ms == pytest.approx(1e3 * batch_size * sum(made.counts) / rate)
        assert (made.name, made.ranks, made.anchor) == (
            "it",
            tuple(range(len(ms))),
            min(made.counts),
        )


@given(ms=st.tuples(MS, MS, MS), total=st.integers(1, 12))
@few_windows
def test_a_fixed_total_has_the_best_split_of_all(ms, total):
    splits = [(a, b, total - a - b) for a in range(total + 1) for b in range(total - a + 1)]
    best = min(max(c * each for c, each in zip(s, ms, strict=True)) for s in splits)
    made = Forecast(alike(ms, 0.0), 1).plan("fixed", FixedTotal(total))
    assert sum(made.counts) == total
    # the cadence keeps a split that another one betters by no more than 2 %
    assert best <= made.window_ms <= best / 0.98 * (1 + 1e-9)


@given(ms=st.lists(MS, min_size=2, max_size=5), sync_ms=SYNC)
def test_elche_has_settled_on_counts_in_proportion_and_a_bearable_overhead(ms, sync_ms):
    cadence = ElChe(anchor=4, overhead_target=0.2)
    counts = settled(cadence, ms, sync_ms)
    anchor = counts[ms.index(max(ms))]
    longest = max(count * each for count, each in zip(counts, ms, strict=True))
    for count, each in zip(counts, ms, strict=True):  # whole microbatches alone, see Scheduler
        assert count == math.floor(longest / each * (1 + 1e-9))
    assert longest < (anchor + 1) * max(ms)
    assert sync_ms / longest <= 0.2 * 1.12 or anchor >= 180  # the dead zone; max_anchor


def test_the_cadence_is_told_of_its_own_counts():
    told = []

    class Spy(Cadence):
        def init(self, world_size):
            return EveryBatch().init(world_size)

        def update(self, state, report, verdict=None):
            told.append(report)
            return state

    assert settled(Spy(), (3.0, 5.0), 2.0) == (1, 1)
    assert set(told) == {WindowReport((3.0, 5.0), (1, 1), 2.0)}


def test_plain_pmap_waits_for_the_slowest_at_every_microbatch():
    made = Forecast(alike((5, 5, 10, 20), 1.0), 8).plan("plain pmap", EveryBatch())
    assert made.counts == (1, 1, 1, 1)
    assert made.examples_per_s == pytest.approx(4 * 8 / 0.021)


def test_speeds_between_alone_and_together_are_on_a_line():
    speeds = Speeds((4.0, 6.0, 8.0), (8.0, 12.0, 9.0), 1.0)
    assert [speeds.of((rank,)) for rank in range(3)] == [(4.0,), (6.0,), (8.0,)]
    assert speeds.of((0, 1, 2)) == (8.0, 12.0, 9.0)
    assert speeds.of((0, 2)) == (6.0, 8.5)
    assert Speeds((4.0,), (4.0,), 0.0).of((0,)) == (4.0,)


def test_one_device_has_nothing_to_exchange():
    forecast = Forecast(Speeds((4.0, 9.0), (5.0, 9.0), 100.0), 10)
    made = forecast.plan("alone", ElChe(), ranks=[0])
    assert (made.counts, made.window_ms, made.examples_per_s) == ((1,), 4.0, 2500.0)
    assert made.limit_share == 1.0


def test_one_device_pays_for_its_optimizer_steps():
    speeds = Speeds((4.0, 9.0), (5.0, 9.0), 100.0, step_ms=(6.0, 0.0))
    forecast = Forecast(speeds, 10)
    plain = forecast.plan("plain", EveryBatch(), ranks=[0])
    assert (plain.counts, plain.window_ms, plain.examples_per_s) == ((1,), 10.0, 1000.0)
    assert plain.limit_share == pytest.approx(0.4)
    total = forecast.plan("total", FixedTotal(16), ranks=[0])
    assert (total.counts, total.window_ms) == ((16,), 70.0)
    # in windows of ElChe's: 15 microbatches of 4 ms, so that the step costs a tenth
    fewer = forecast.plan("fewer", ElChe(), ranks=[0])
    assert (fewer.counts, fewer.window_ms) == ((15,), 66.0)
    assert fewer.examples_per_s == pytest.approx(1e3 * 10 * 15 / 66)


@given(ms=MS, step_ms=st.floats(0, 300), anchor=st.integers(1, 20), target=st.floats(0.02, 0.5))
def test_one_device_steps_as_rarely_as_elche_would(ms, step_ms, anchor, target):
    cadence = ElChe(anchor=anchor, overhead_target=target)
    made = one_device(cadence, ms, step_ms)
    twin = settled(cadence, (ms, ms), step_ms)[0]  # of two alike
    if isinstance(made, FixedTotal):
        assert twin - 1 <= made.total <= twin + 1  # in steps of its own, with rounding
        assert ms + step_ms > 1.02 * (ms + step_ms / made.total)
    else:
        assert ms + step_ms <= 1.021 * (ms + step_ms / twin) + 1e-9


@given(
    ms=st.lists(MS, min_size=1, max_size=4),
    sync_ms=SYNC,
    epoch=st.integers(4, 400),
    anchor=st.integers(1, 50),
)
@few_windows
def test_an_epoch_is_whole_windows_and_the_rest(ms, sync_ms, epoch, anchor):
    """As the loop has it: a window of what is planned, or of what is left."""
    speeds = Speeds(tuple(ms), tuple(ms), sync_ms, (sync_ms,) * len(ms))
    for cadence in (ElChe(anchor=anchor), FixedTotal(1000), EveryBatch()):
        if len(ms) == 1 and isinstance(cadence, ElChe):
            continue
        made = Forecast(speeds, 8, epoch).plan("it", cadence)
        assert 0 < sum(made.counts) <= epoch
        left, taken, wanted = epoch, 0.0, settled(cadence, ms, sync_ms)
        counts = first = clamp_counts(wanted, left)
        while left:
            counts = clamp_counts(first, left)
            taken += max(c * each for c, each in zip(counts, ms, strict=True)) + sync_ms
            left -= sum(counts)
        assert made.counts == first
        assert made.examples_per_s == pytest.approx(1e3 * 8 * epoch / taken)
        limit = sum(1e3 * 8 / each for each in ms)
        assert made.limit_share == pytest.approx(made.examples_per_s / limit)


@given(
    solo=st.tuples(MS, MS, MS),
    slower=st.tuples(*3 * [st.floats(1, 4)]),
    sync_ms=st.floats(0, 300),
)
@few_windows
def test_the_best_of_three_devices_is_the_best_of_all_sets(solo, slower, sync_ms):
    """With three devices the sets that are looked at leave out slower single ones alone."""
    together = tuple(ms * factor for ms, factor in zip(solo, slower, strict=True))
    speeds, cadence = Speeds(solo, together, sync_ms), ElChe()
    rates = {}
    for size in (1, 2, 3):
        for ranks in combinations(range(3), size):
            ms = [solo[r] + (together[r] - solo[r]) * (size - 1) / 2 for r in ranks]
            counts = settled(cadence, ms, sync_ms) if size > 1 else (1,)
            rates[ranks] = played(ms, counts, sync_ms if size > 1 else 0.0, 8)
    forecast = Forecast(speeds, 8)
    best = forecast.best_plan("best", cadence, forecast.plan("all", cadence))
    assert best.examples_per_s == pytest.approx(max(rates.values()))
    assert best.examples_per_s == pytest.approx(rates[best.ranks])


def test_the_best_may_be_all_but_one_that_is_not_the_slowest():
    """Device 1 is fast alone and held up by the others."""
    forecast = Forecast(Speeds((4.0, 5.0, 6.0), (6.0, 40.0, 7.0), 1.0), 8)
    everyone = forecast.plan("all", ElChe())
    assert forecast.best_plan("best", ElChe(), everyone).ranks == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (((), (), 1.0), ValueError, r"Speeds: solo_ms must have one entry per device, got none\."),
        (((0.0,), (1.0,), 1.0), ValueError, r"Speeds: solo_ms\[0\] must be above 0, got 0\.0\."),
        (
            ((1.0,), (1.0, 2.0), 1.0),
            ValueError,
            r"Speeds: together_ms must have one entry per device \(1\), got 2\.",
        ),
        (((1.0,), (-1.0,), 1.0), ValueError, r"together_ms\[0\] must be above 0, got -1\.0\."),
        (((1.0,), (1.0,), -1), ValueError, r"Speeds: sync_ms must be at least 0, got -1\."),
        (
            ((1.0,), (1.0,), 1.0, (0.0, 0.0)),
            ValueError,
            r"Speeds: step_ms must have one entry per device \(1\), got 2\.",
        ),
        (
            ((1.0,), (1.0,), 1.0, (-1.0,)),
            ValueError,
            r"Speeds: step_ms\[0\] must be at least 0, got -1\.0\.",
        ),
        (((1.0,), (1.0,), "x"), TypeError, r"Speeds: sync_ms must be a number, got 'x' \(str\)\."),
    ],
)
def test_errors(arguments, kind, message):
    with pytest.raises(kind, match=message):
        Speeds(*arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None, (1.0,), 0.0), TypeError, "Speeds: solo_ms must be a sequence of numbers, got None"),
        (((1.0,), None, 0.0), TypeError, "Speeds: together_ms must be a sequence of numbers, got"),
        (((), (1.0,), 0.0), ValueError, "Speeds: solo_ms must have one entry per device, got none"),
        (((1.0,), (1.0, 2.0), 0.0), ValueError, "Speeds: together_ms must have one entry per dev"),
    ],
)
def test_speeds_that_are_none(arguments, error, message):
    with pytest.raises(error, match="^" + message):
        Speeds(*arguments)
