"""What a trainer's run is recorded by: nothing is lost, and everything has its time."""

import threading

import jax
import numpy as np
import pytest
from fitting import DATA, PARAMS, shared, trainer
from marks import slow

import elche_jax as elche
from elche_jax.cadence.window import WindowRecord
from elche_jax.engine.job import Job
from elche_jax.observe import events
from elche_jax.observe.timeline import Timeline
from elche_jax.trainer import session
from elche_jax.trainer.epochs import DeviceSums, EpochSums
from elche_jax.trainer.plan import FitPlan
from elche_jax.trainer.recorder import RunRecorder


def record(window, epoch=0):
    return WindowRecord(window, epoch, (1, 1), 16, (1.0, 1.0), 2.0, 0.0, 0.0, True)


@pytest.mark.parametrize("windows", [1, 63, 64, 193])
def test_sums_know_all_windows(windows):
    sums = DeviceSums(2)
    for window in range(windows):
        sums.add(record(window, epoch=window % 2))
    assert sums.rates(0) == ((1000.0, 1000.0), (0.5, 0.5))
    sums.drop(0)
    assert set(sums._epochs) == ({1} if windows > 1 else set())


def test_threads_that_report_while_the_loop_reads_lose_nothing():
    sums, start = DeviceSums(2), threading.Barrier(4)

    def report():
        start.wait()
        for window in range(2000):
            sums.add(record(window))

    threads = [threading.Thread(target=report) for _ in range(3)]
    for thread in threads:
        thread.start()
    start.wait()
    while any(thread.is_alive() for thread in threads):
        sums.rates(0)
    for thread in threads:
        thread.join()
    sums.rates(0)
    assert sums._epochs[0][0].tolist() == [6000.0, 6000.0]


class Waits(elche.Callback):
    """Waits for what is compiled in the background."""

    def on_window(self, context):
        if context.window.index > 20:
            context.train._cache.wait()


def times_of(epochs=15, **options):
    """A run with a late mean and 3 windows in an epoch: which windows have times, the history."""
    counts = elche.Replay([(4, 4)] * 3 * epochs)
    one = trainer(2, averaging=elche.MeanGradient(delay=1), cadence=counts, **options)
    result = one.fit(PARAMS, DATA, 8, epochs, progress=False, callbacks=[Waits()])
    return [record.steady for record in one.train.records], result.history


def test_windows_overlap_unless_a_timeline_shows_them():
    steady, history = times_of()
    assert not all(steady[30:])
    assert all(steady[epoch * 3] for epoch in range(10, 15)), "the first of every epoch"
    assert all(np.isfinite(epoch.throughput).all() and min(epoch.busy) > 0 for epoch in history)
    steady, _ = times_of(epochs=8, timeline=Timeline())
    assert all(steady[1:])


def test_a_run_is_recorded_by_both_timelines_and_a_users_loop_by_its_own(tmp_path):
    own, sums = Timeline(), EpochSums(0)
    recorder = RunRecorder(own)

    def metrics(loss):
        return {"loss": np.float32(loss), "weight": np.float32(1), "finite": np.bool_(True)}

    with recorder.run(FitPlan(PARAMS, DATA, 8, run_dir=tmp_path), Job(tuple(jax.devices()[:2]))):
        recorder.window(record(0))
        recorder.window_metrics(0, 0, metrics(1.0))
        recorder.window_metrics(1, 0, metrics(np.nan))  # a skip tells of it
        assert recorder.waiting == 2
        recorder.sums = sums
        recorder.fold()
        recorder.window_metrics(2, 0, metrics(1.0))
    assert recorder.waiting == 0 and sums.means() == {"loss": 1.0}
    recorder.window(record(1))
    recorder.window_metrics(1, 0, metrics(2.0))

    def kinds(events):
        return [type(event).__name__ for event in events]

    assert kinds(Timeline.read(tmp_path / "timeline.jsonl")) == ["WindowEvent", "LossEvent"]
    assert kinds(own.events) == ["WindowEvent", "LossEvent"] * 2


class Mine(Timeline):
    """A timeline of somebody's own, which wants to see the windows."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def window(self, record):
        self.seen.append(record.window)
        super().window(record)


@pytest.mark.parametrize("make", [Timeline, Mine])
@pytest.mark.parametrize("devices", [slow(1), 4])
def test_losses_come_after_their_windows(make, devices):
    """In a loop of the user's own over a trainer's step, and in `fit`."""
    timeline = make()
    one = trainer(devices, config=elche.DDPConfig(timeline=timeline))
    state = one.train.init(PARAMS)
    for window in one.train.windows(DATA, 8):
        state, _ = one.train(state, window)
    one.fit(PARAMS, DATA, 8, 1, progress=False)
    found = timeline.events
    for kind in (events.WindowEvent, events.LossEvent):
        numbers = [event.window for event in found if isinstance(event, kind)]
        assert numbers == [*range(len(numbers) // 2)] * 2
    begins = [at for at, event in enumerate(found) if isinstance(event, events.RunEvent)]
    for part in (found[: begins[-1]], found[begins[-1] :]):
        over = set()
        for event in part:
            if isinstance(event, events.WindowEvent):
                over.add(event.window)
            elif isinstance(event, events.LossEvent):
                assert event.window in over
    if make is Mine:
        assert timeline.seen == [e.window for e in found if isinstance(e, events.WindowEvent)]


@pytest.mark.parametrize("stop", ["callback", "max_windows"])
def test_what_has_led_to_an_error_at_the_end_is_recorded(stop, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "REFRESH_S", 1e9)  # metrics wait
    data = {name: values.copy() for name, values in DATA.items()}
    data["x"][100] = np.nan  # in window 2

    class Stop(elche.Callback):
        def on_window(self, run):
            if run.window.index == 2 and stop == "callback":
                run.stop()

    with pytest.raises(elche.NonFiniteError):
        shared().fit(
            PARAMS, data, 8, 1, shuffle=False, run_dir=tmp_path, progress=False,
            callbacks=[Stop()], max_windows=3,
        )  # fmt: skip
    found = Timeline.read(tmp_path / "timeline.jsonl")
    assert [e.window for e in found if isinstance(e, events.LossEvent)] == [0, 1]


def test_what_has_led_to_an_error_is_recorded(tmp_path):
    data = {name: values.copy() for name, values in DATA.items()}
    data["x"][100] = np.nan

    steps = []

    class Kept:
        def scalars(self, step, values):
            steps.append(step)

        def close(self):
            pass

    with pytest.raises(elche.NonFiniteError) as raised:
        shared().fit(  # raises where a window is not finite
            PARAMS, data, 8, 1, shuffle=False, run_dir=tmp_path, writers=[Kept()], log_every=1,
            progress=False,
        )  # fmt: skip
    found = Timeline.read(tmp_path / "timeline.jsonl")
    windows = [event.window for event in found if isinstance(event, events.WindowEvent)]
    losses = [event.window for event in found if isinstance(event, events.LossEvent)]
    bad = next(event.window for event in found if isinstance(event, events.SkipEvent))
    assert bad >= 1 and f"window {bad}" in str(raised.value)
    assert losses[:bad] == windows[:bad] == [*range(bad)] and bad not in losses
    assert steps[:bad] == [*range(1, bad + 1)]


def test_a_second_error_is_told_with_the_first(monkeypatch):
    monkeypatch.setattr(session, "REFRESH_S", 1e9)  # metrics wait

    class Full:
        full = False

        def scalars(self, step, values):
            if self.full:
                raise OSError("no room")

        def close(self):
            pass

    class Halt(elche.Callback):
        def on_window(self, run):
            if run.window.index == 3:
                Full.full = True
                raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match=r"^enough") as raised:
        shared().fit(
            PARAMS, DATA, 8, 1, writers=[Full()], log_every=1, callbacks=[Halt()], progress=False
        )
    assert raised.value.__notes__ == ["Besides, no room"]
