"""What a training step measures, records and plans from it."""

import json
import threading
import time
from statistics import median

import jax
import numpy as np
import pytest
from small import PARAMS, build, data

import elche_jax as elche
from elche_jax.cadence import Controller
from elche_jax.cadence.window import WindowRecord
from elche_jax.lab import EmulatedSpeeds
from elche_jax.train.live_scheduler import HINT_AFTER, LiveScheduler


def test_a_run_of_several_calls_of_windows_replays():
    """Windows are numbered on, and nothing compiles in the second call."""
    live = build(2, cadence=elche.Replay([(1, 2), (3, 1), (2, 2), (1, 1), (4, 1)]))
    state = live.init(PARAMS)
    for epoch, size in enumerate((28, 32)):
        for window in live.windows(data(size), 4, seed=epoch, placement="stream"):
            state, _ = live(state, window)
    assert live.counts_history == [(1, 2), (3, 1), (2, 2), (1, 1), (1, 1)]
    assert live.report().compile_misses == 2
    again = build(2, cadence=elche.Replay(live.counts_history))
    replayed = again.init(PARAMS)
    for epoch, size in enumerate((28, 32)):
        for window in again.windows(data(size), 4, seed=epoch, placement="stream"):
            replayed, _ = again(replayed, window)
    a, b = (np.asarray(elche.unreplicate(s.params)["w"]) for s in (state, replayed))
    assert a.tobytes() == b.tobytes()
    live.init(PARAMS)
    assert live.counts_history == []


def test_hint_for_unequal_devices_of_one_kind(caplog):
    # on a busy machine every window takes some milliseconds more, on both devices
    train = build(2, emulate=EmulatedSpeeds([1.0, 20.0]))
    state = train.init(PARAMS)
    with caplog.at_level("WARNING", logger="elche_jax"):
        for window in train.windows(data(), 2, epochs=2):
            state, _ = train(state, window)
    assert train.counts == (1, 1)
    hints = [r.getMessage() for r in caplog.records if "differ in speed" in r.getMessage()]
    assert len(hints) == 1 and "ElChe" in hints[0]


@pytest.mark.parametrize(("ms", "hints"), [((0.1, 0.6), 0), ((1.0, 6.0), 1)])
def test_no_hint_on_times_that_are_mostly_noise(caplog, ms, hints):
    scheduler = LiveScheduler(Controller(elche.EveryBatch()), 2, hint=True)
    for number in range(HINT_AFTER):
        assert not caplog.records, "not before it is certain"
        scheduler.observe(WindowRecord(number, 0, (1, 1), 2, ms, max(ms), 0.0, 0.0, True))
    assert len(caplog.records) == hints


def test_no_hint_where_the_user_chose(caplog):
    train = build(2, cadence=elche.EveryBatch(), emulate=EmulatedSpeeds([1.0, 6.0]))
    state = train.init(PARAMS)
    for window in train.windows(data(), 2):
        state, _ = train(state, window)
    assert not [r for r in caplog.records if "differ in speed" in r.getMessage()]


def test_policy_auto():
    config = elche.DDPConfig()
    assert config.cadence_for(4, kinds=1) == elche.EveryBatch()
    assert config.cadence_for(4, kinds=2) == elche.ElChe()
    assert config.cadence_for(1, kinds=1) == elche.EveryBatch()
    assert elche.DDPConfig(policy="sync").cadence_for(4, kinds=2) == elche.EveryBatch()
    assert elche.DDPConfig(policy="cadence", anchor=3).cadence_for(2, 1) == elche.ElChe(anchor=3)
    assert build(2).counts == (1, 1)


def test_elche_finds_the_speeds_and_report_shows_them():
    train = build(4, cadence=elche.ElChe(anchor=4), emulate=EmulatedSpeeds([5.0, 5.0, 10.0, 20.0]))
    state = train.init(PARAMS)
    for window in train.windows(data(448), 2):
        state, _ = train(state, window)
    fast, also_fast, middle, slow = train.counts
    assert min(fast, also_fast) > middle > slow
    times = train.cadence_state.cadence.ms_per_batch
    assert max(times[:2]) < times[2] < times[3]
    report = train.report()
    assert [d.microbatches for d in report.devices] == [
        sum(counts[rank] for counts in train.counts_history) for rank in range(4)
    ]
    assert report.limit_share is not None and 0 < report.limit_share <= 1.01
    text = str(report)
    assert "of the limit" in text and len(text.splitlines()) == 8


def test_two_training_steps_in_turns_do_not_count_each_others_time():
    """What two players' devices were busy for cannot exceed the time there was."""
    players = [build(2, cadence=elche.Replay([(2, 1)] * 16), emulate=EmulatedSpeeds([4.0, 8.0]))
               for _ in range(2)]  # fmt: skip
    states = [player.init(PARAMS) for player in players]
    with players[0].windows(data(96), 2) as a, players[1].windows(data(96), 2) as b:
        for number, windows in enumerate(zip(a, b, strict=False)):
            if number == 1:
                begun = time.perf_counter()
            for which in (0, 1):
                states[which], metrics = players[which](states[which], windows[which])
                if number == 0:
                    jax.block_until_ready(metrics)
    elapsed = 1e3 * (time.perf_counter() - begun)
    records = [record for player in players for record in player.records if record.window > 0]
    assert len(records) == 30
    for rank in (0, 1):
        assert sum(record.busy_ms[rank] for record in records) <= elapsed


def test_speeds_go_over_into_another_run():
    train = build(2, cadence=elche.ElChe(anchor=4), emulate=EmulatedSpeeds([2.0, 8.0]))
    state = train.init(PARAMS)
    for window in train.windows(data(256), 2):
        state, _ = train(state, window)
    assert train.counts[0] > train.counts[1]
    saved = json.dumps(train.cadence_state.to_dict())
    again = build(2, cadence=elche.ElChe(anchor=4), emulate=EmulatedSpeeds([2.0, 8.0]))
    again.cadence_state = json.loads(saved)
    assert again.cadence_state == train.cadence_state
    again.init(PARAMS)
    with again.windows(data(256), 2) as windows:
        assert next(windows).counts == train.counts


def test_the_loops_own_time_is_not_the_windows():
    """Waiting for the data counts, what the loop does between two windows does not."""
    gate = threading.Event()

    class Slow:
        def __len__(self):
            return 64

        def __getitem__(self, i):
            if i == 48:
                threading.Timer(0.3, gate.set).start()
                gate.wait()
            return {"x": np.ones(3, "float32")}

    train = build(2)
    state, own = train.init(PARAMS), 0.0
    for window in train.windows(Slow(), 4, shuffle=False):
        state, metrics = train(state, window)
        jax.block_until_ready(metrics)
        if window.index == 1:
            begun = time.perf_counter()
            threading.Event().wait(0.3)
            own = 1e3 * (time.perf_counter() - begun)
    walls = [record.wall_ms for record in train.records]
    assert walls[2] < own, "the loop's own time is left out"
    assert sum(walls[2:]) > 150, "waiting for the data is not"


def test_counts_history_is_every_window():
    train = build(2, cadence=elche.Replay([(3, 1), (0, 2), (2, 2)]))
    state = train.init(PARAMS)
    for window in train.windows(data(20), 2):
        state, _ = train(state, window)
    assert train.counts_history == [(3, 1), (0, 2), (2, 2)]


def test_waiting_is_measured_as_the_definitions_say():
    """The slow device waits least; the sync's cost is that least wait."""
    train = build(2, cadence=elche.Replay([(1, 1)] * 12), emulate=EmulatedSpeeds([1.0, 30.0]))
    state = train.init(PARAMS)
    begun = time.perf_counter()
    for window in train.windows(data(48), 2):
        state, _ = train(state, window)
    wall = 1e3 * (time.perf_counter() - begun)
    steady = [r for r in train.records if r.steady]
    assert len(steady) >= 10
    assert all(record.skew_ms >= 0 and record.sync_ms >= 0 for record in steady)
    # not of every window: an end that is noticed late makes the next one short
    skew, one = (median(getattr(r, name) for r in steady) for name in ("skew_ms", "wall_ms"))
    assert 15 <= skew <= one and median(record.busy_ms[1] for record in steady) >= 20
    assert sum(r.wall_ms for r in train.records) <= wall * 1.001
