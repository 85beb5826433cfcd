"""What is called when, what it sees, and what becomes of its exceptions."""

import time

import jax
import numpy as np
import pytest
from fitting import DATA, HELD_OUT, PARAMS, metric_fn, shared
from marks import slow

import elche_jax as elche

EVALUATION = elche.Evaluation(metric_fn, HELD_OUT, 16)


class Diary(elche.Callback):
    """Notes every call."""

    def __init__(self):
        self.calls = []

    def on_window(self, context):
        assert len(self.epochs) == len(context.history)
        self.calls.append(("window", context.window.index))

    def on_epoch(self, context, metrics):
        assert context.history[-1] is metrics
        self.calls.append(("epoch", metrics.epoch))

    def on_evaluation(self, context, results):
        self.calls.append(("evaluation", sorted(results)))

    def on_checkpoint(self, context, step):
        self.calls.append(("checkpoint", step))

    @property
    def epochs(self):
        return [number for kind, number in self.calls if kind == "epoch"]


def test_the_order(tmp_path):
    diary = Diary()
    result = shared().fit(
        PARAMS, DATA, 8, 2, evaluation=EVALUATION, callbacks=[diary], progress=False,
        checkpoints=elche.Checkpoints(tmp_path),
    )  # fmt: skip
    calls = [call for call in diary.calls if call[0] != "checkpoint"]
    windows = [m.windows for m in result.history]
    want = []
    for epoch, (first, count) in enumerate(zip((0, windows[0]), windows, strict=True)):
        want += [("window", index) for index in range(first, first + count)]
        want += [("evaluation", ["error"]), ("epoch", epoch)]
    assert calls == want
    # said when they are on the disk, which the first may be only after a window or two
    said = [step for kind, step in diary.calls if kind == "checkpoint"]
    assert said == [windows[0], sum(windows)]


def test_a_callback_reads_and_stops():
    class Stop(elche.Callback):
        def on_window(self, context):
            if context.window.index == 3:
                self.loss = float(context.metrics["loss"])
                self.step = np.asarray(context.state.step).tolist()
                self.report = context.train.report()
                context.stop()

    stop = Stop()
    result = shared().fit(PARAMS, DATA, 8, None, callbacks=[stop], progress=False)
    assert (result.stopped, result.windows) == ("callback", 4)
    assert stop.step == [4] * 4 and stop.loss > 0 and len(stop.report.devices) == 4


class Boom(Exception):
    pass


@pytest.mark.parametrize("background", [False, slow(True)])
@pytest.mark.parametrize("where", ["on_window", "on_epoch", "on_evaluation", "on_checkpoint"])
def test_an_exception_ends_the_run_and_is_raised(where, background, tmp_path):
    class Bad(elche.Callback):
        pass

    def fail(self, context, *arguments):
        raise Boom(where)

    setattr(Bad, where, fail)
    one = shared()
    options = {
        "evaluation": EVALUATION, "callbacks": [Diary(), Bad()], "progress": False,
        "run_dir": tmp_path, "epochs": 3,
    }  # fmt: skip
    with pytest.raises(Boom, match=where):
        if background:
            one.start(PARAMS, DATA, 8, **options).join()
        else:
            one.fit(PARAMS, DATA, 8, **options)
    # the trainer is free again, and its files are closed and whole
    result = one.fit(PARAMS, DATA, 8, **options | {"callbacks": [], "resume": "auto"})
    assert [m.epoch for m in result.history] == [0, 1, 2]


def test_what_is_done_between_two_epochs_is_no_time_of_a_window(monkeypatch):
    clock, later, records = time.perf_counter, [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + later[0])

    class Slow(elche.Callback):
        def on_epoch(self, context, metrics):
            later[0] += 1e6
            records[:] = context.train.records

    result = shared().fit(PARAMS, DATA, 8, 3, callbacks=[Slow()], progress=False)
    assert later[0] == 3e6 and len(records) == result.windows
    assert max(record.wall_ms for record in records) < 1e9 / 2


def test_several_callbacks_in_their_order():
    heard = []

    class Named(elche.Callback):
        def __init__(self, name):
            self.name = name

        def on_epoch(self, context, metrics):
            heard.append(self.name)

    shared().fit(
        PARAMS, DATA, 8, 1, callbacks=[Named("a"), Named("b")], progress=False,
    )  # fmt: skip
    assert heard == ["a", "b"]


def test_a_state_that_is_copied_can_be_kept():
    class Best(elche.Callback):
        def on_epoch(self, context, metrics):
            self.params = jax.tree.map(np.array, elche.unreplicate(context.state.params))

    best = Best()
    result = shared().fit(PARAMS, DATA, 8, 2, callbacks=[best], progress=False)
    for a, b in zip(jax.tree.leaves(best.params), jax.tree.leaves(result.params), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["on_epoch_ends", "on_windows", "on_start"])
def test_a_hook_that_nobody_calls(name):
    message = (
        rf"^Mine: {name} must be one of on_window, on_epoch, on_evaluation, on_checkpoint, got a "
        r"method\. It would never be called; rename it\.$"
    )
    for base in (elche.Callback, Diary):
        with pytest.raises(TypeError, match=message):
            type("Mine", (base,), {name: lambda self, context: None})
