"""What a trainer's run is recorded by: nothing is lost, and everything has its time."""

import threading
import time

import numpy as np
import pytest
from fitting import DATA, PARAMS, trainer

import elche_jax as elche
from elche_jax.observe import events
from elche_jax.observe.records import WindowRecord
from elche_jax.observe.timeline import Timeline
from elche_jax.trainer import relay as module, session
from elche_jax.trainer.relay import Relay


def record(window):
    return WindowRecord(window, 0, (1, 1), 16, (1.0, 1.0), 2.0, 0.0, 0.0, True)


@pytest.fixture
def slow(monkeypatch):
    """A relay that has just handed on, and does not so again by itself."""
    monkeypatch.setattr(module, "GATHER_S", 1e9)
    timeline, relay = Timeline(), Relay(None)
    relay.begin(2, timeline)
    relay.flush()
    return relay, timeline


def numbers(timeline):
    return [event.window for event in timeline.events]


def test_windows_are_handed_on_together_with_their_own_times(slow):
    relay, timeline = slow
    before = time.perf_counter()
    for window in range(3):
        relay.window(record(window))
        assert timeline.events == []
    after = time.perf_counter()
    relay.flush()
    ats = [event.at for event in timeline.events]
    assert numbers(timeline) == [0, 1, 2] and ats == sorted(ats)
    relay.add(events.SkipEvent, window=3, epoch=0, reason="r")
    assert ats[-1] - ats[0] <= after - before <= timeline.events[-1].at


def test_what_comes_after_a_window_is_told_after_it(slow):
    relay, timeline = slow
    relay.window(record(0))
    relay.add(events.SkipEvent, window=0, epoch=0, reason="r")
    relay.window(record(1))
    relay.loss(0, 0, 1.5)
    kinds = [type(event).__name__ for event in timeline.events]
    assert kinds == ["WindowEvent", "SkipEvent", "WindowEvent", "LossEvent"]


def test_windows_do_not_wait_long(slow):
    relay, timeline = slow
    for window in range(module.AT_ONCE - 1):
        relay.window(record(window))
    assert timeline.events == []
    relay.window(record(module.AT_ONCE - 1))
    assert numbers(timeline) == [*range(module.AT_ONCE)]


def test_windows_do_not_wait_at_all_where_they_are_long(monkeypatch):
    monkeypatch.setattr(module, "GATHER_S", 0.0)
    timeline, relay = Timeline(), Relay(None)
    relay.begin(2, timeline)
    for window in range(3):
        relay.window(record(window))
        assert numbers(timeline) == [*range(window + 1)]


def test_the_end_hands_on_the_rest_and_keeps_nothing(slow):
    relay, timeline = slow
    relay.window(record(0))
    relay.window_metrics(0, 0, {"loss": np.float32(1.0)})
    relay.end()
    assert numbers(timeline) == [0] and relay.waiting == 0
    relay.window(record(1))  # of a loop of the user's own
    relay.begin(2, again := Timeline())
    relay.flush()
    assert again.events == [] and numbers(timeline) == [0]


def test_the_sums_know_what_has_not_been_handed_on(slow):
    relay, _ = slow
    relay.window(record(0))
    assert relay.devices.of(0) == ((1000.0, 1000.0), (0.5, 0.5))


def test_a_timeline_of_the_configuration_has_all_at_once(monkeypatch):
    monkeypatch.setattr(module, "GATHER_S", 1e9)
    own, timeline = Timeline(), Timeline()
    relay = Relay(own)
    relay.begin(2, timeline)
    relay.flush()
    relay.window(record(0))
    assert numbers(own) == [0] and timeline.events == []
    relay.end()
    relay.window(record(1))
    relay.window_metrics(1, 0, {"loss": np.float32(1.0)})
    kinds = [type(event).__name__ for event in own.events]
    assert kinds == ["WindowEvent", "WindowEvent", "LossEvent"]


def test_a_loss_that_is_no_number_is_not_told(slow):
    relay, timeline = slow
    relay.loss(0, 0, float("nan"))
    assert timeline.events == []


def test_threads_that_report_and_hand_on_at_once_lose_nothing(monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE", 3)
    timeline, relay = Timeline(), Relay(None)
    relay.begin(2, timeline)
    start = threading.Barrier(4)

    def report(first):
        start.wait()
        for window in range(first, 2000, 4):
            relay.window(record(window))
            if window % 10 < 4:
                relay.loss(window, 0, 1.0)

    threads = [threading.Thread(target=report, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    relay.end()
    found = timeline.events
    windows = [event.window for event in found if isinstance(event, events.WindowEvent)]
    assert sorted(windows) == [*range(2000)]
    for first in range(4):  # each thread's own in its order
        mine = [event.window for event in found if event.window % 4 == first]
        assert mine == sorted(mine)
    ats = [event.at for event in found]
    assert ats == sorted(ats)


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
        trainer().fit(  # raises where a window is not finite
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
    monkeypatch.setattr(session, "LOOK_S", 1e9)  # metrics wait

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
        trainer().fit(
            PARAMS, DATA, 8, 1, writers=[Full()], log_every=1, callbacks=[Halt()], progress=False
        )
    assert raised.value.__notes__ == ["Besides, no room"]
