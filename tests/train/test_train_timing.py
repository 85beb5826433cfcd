"""Which windows are timed: the first, some, and those after a surprise."""

import jax
import numpy as np
import optax
import pytest
from small import PARAMS, data, loss_fn

import elche_jax as elche
from elche_jax.cadence import WindowRecord
from elche_jax.engine.compile_cache import CompileCache
from elche_jax.lab import EmulatedSpeeds, constant, throttle
from elche_jax.train.timing import AFTER_A_SURPRISE, EVERY, FIRST, Timing, timing_for
from elche_jax.trainer.recorder import RunRecorder


def record(window, wall_ms, counts=(2, 1), steady=True, cold=False):
    return WindowRecord(window, 0, counts, 12, (wall_ms,) * 2, wall_ms, 0.1, 0.0, steady, cold=cold)


def calm(timing, windows, wall_ms=10.0, counts=(2, 1)):
    """Which of so many windows, that all take as long, are timed."""
    said = []
    for window in windows:
        said.append(timing.timed(window, counts))
        timing.observe(record(window, wall_ms, counts, steady=said[-1]), said[-1])
    return said


def test_the_first_and_then_one_in_a_few():
    said = calm(Timing(), range(50))
    assert said == [window < FIRST or window % EVERY == 0 for window in range(50)]


def test_all_where_they_are_recorded():
    assert all(calm(timing_for(elche.Timeline()), range(50)))


def test_one_in_every_epoch_where_epochs_are_summed_up():
    """Each has three windows; those of the timeline are all timed while it is there."""
    recorder = RunRecorder(None)
    for timing, each in ((timing_for(recorder), [True, False, False]), (timing_for(None), None)):
        calm(timing, range(24))
        said = [timing.timed(25 + at, (2, 1), epoch=1 + at // 3) for at in range(9)]
        others = [(25 + at) % EVERY == 0 for at in range(9)]
        assert said == [a or b for a, b in zip((each or [False] * 3) * 3, others, strict=True)]
    timing = timing_for(RunRecorder(elche.Timeline()))
    assert all(calm(timing, range(50)))


@pytest.mark.parametrize("wall_ms", [30.0, 4.0])
def test_after_a_window_that_took_another_time(wall_ms):
    timing = Timing()
    calm(timing, range(31))
    assert not timing.timed(31, (2, 1)) and not timing.surprised
    timing.observe(record(31, wall_ms, steady=False), timed=False)
    assert timing.surprised
    assert calm(timing, range(32, 32 + AFTER_A_SURPRISE), wall_ms) == [True] * AFTER_A_SURPRISE
    assert not timing.surprised
    assert calm(timing, (37, 38), wall_ms) == [False, False]  # that is what is expected now


def surprises(walls):
    """How many of such windows are a surprise."""
    timing, found = Timing(), 0
    for window, wall_ms in enumerate(walls):
        timed, before = timing.timed(window, (2, 1)), timing.surprised
        timing.observe(record(window, wall_ms, steady=timed), timed)
        found += timing.surprised and not before
    return timing, found


def test_windows_that_vary_by_themselves_are_no_surprise():
    """As short ones do on a busy machine; one that takes three times as long still is one."""
    rng = np.random.default_rng(0)
    timing, found = surprises(3.0 * rng.lognormal(0, 0.35, size=2000))
    assert found < 100
    median = np.median(timing._walls)
    while timing.timed(2001, (2, 1)):  # 2001 is not one that is timed anyway
        timing.observe(record(2001, median), timed=True)
    timing.observe(record(2001, 3 * median, steady=False), timed=False)
    assert timing.surprised


def test_a_duration_of_nothing_is_no_measure():
    timing = Timing()
    calm(timing, range(31))
    timing.observe(record(31, 0.0), timed=True)
    timing.observe(record(32, 0.0, steady=False), timed=False)
    assert not timing.surprised
    assert calm(timing, (33, 34)) == [False, False]


def test_windows_of_other_counts():
    timing = Timing()
    calm(timing, range(32))
    assert calm(timing, (32, 33, 34), counts=(4, 2)) == [True, False, False]


def test_a_window_whose_programs_were_new_is_no_measure():
    timing = Timing()
    for window in range(32):
        timing.observe(record(window, 500.0, cold=True), timed=True)
        timing.observe(record(window, 500.0, steady=False), timed=True)
    assert timing.timed(32, (2, 1))


@pytest.mark.slow  # test_a_threefold_slow_down_is_tracked_within_three_windows, and those above
@pytest.mark.further  # on busy processors the speeds, and so the counts, are others
def test_a_throttled_device_gets_less_though_few_windows_are_timed():
    """From window 30 on device 1 is three times slower."""
    train = elche.build_train_step(
        loss_fn, optax.sgd(0.05), devices=jax.devices()[:2],
        cadence=elche.ElChe(8, max_anchor=8, overhead_target=0.5),
        emulate=EmulatedSpeeds(throttle(constant([5, 5]), rank=1, factor=3, at=30)),
    )  # fmt: skip
    state, counts = train.init(PARAMS), []
    with train.windows(data(4096), 4, epochs=None) as windows:
        for window in windows:
            state, _ = train(state, window)
            counts.append(window.counts)
            if window.index == 42:
                break
    before, after = np.mean(counts[22:30], axis=0), counts[-1]
    assert before[0] / before[1] == pytest.approx(1, rel=0.3)
    assert after[0] / after[1] == pytest.approx(3, rel=0.35)


@pytest.mark.parametrize("lanes", [False, True])
def test_windows_while_the_program_of_untimed_ones_is_compiled(lanes, monkeypatch):
    """Their times are disturbed, and not used; lanes have no such program."""
    observed, observe = {}, Timing.observe

    def noted(self, record, timed):
        observed[record.window] = timed
        observe(self, record, timed)

    monkeypatch.setattr(Timing, "observe", noted)
    monkeypatch.setattr(Timing, "timed", lambda self, window, counts, epoch=0: window in (0, 1, 4))
    prepare = CompileCache.prepare
    monkeypatch.setattr(CompileCache, "prepare", lambda *_: None)  # it takes until window 6
    train = elche.build_train_step(
        loss_fn, optax.sgd(1e-3), devices=jax.devices()[:2], cadence=elche.Replay([(1, 1)] * 8),
        lanes=((0,), (1,)) if lanes else None,
    )  # fmt: skip
    state = train.init(PARAMS)
    for window in train.windows(data(), 4):
        if window.index == 6:
            monkeypatch.setattr(CompileCache, "prepare", prepare)
        state, _ = train(state, window)
        train._cache.wait()
    steady = [record.steady for record in train.records]
    assert steady == [lanes or at in (0, 1, 4) for at in range(8)]
    if lanes:
        assert observed == dict.fromkeys(range(8), True)
    else:
        assert observed == {0: True, 1: True, 4: True, 7: False}
