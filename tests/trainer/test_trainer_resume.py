"""A run that stops and goes on is the run that did not stop."""

import dataclasses
import math
import shutil
from functools import cache

import jax
import numpy as np
import optax
import pytest
from fitting import (
    COUNTS,
    DATA,
    HELD_OUT,
    MODEL_STATE,
    PARAMS,
    errors,
    evaluating,
    loop,
    loss_fn,
    metric_fn,
    same_bits,
    shared,
    stateful_loss_fn,
    steps,
    trainer,
)
from marks import slow

import elche_jax as elche
from elche_jax import _progress

EVALUATION = elche.Evaluation(metric_fn, HELD_OUT, 16)
TIMES = ("seconds", "examples_per_s", "throughput", "busy")


class Halt(Exception):
    pass


class StopAfter(elche.Callback):
    """Breaks the run after so many windows, with an error or by asking."""

    def __init__(self, window, error):
        self.window, self.error = window, error

    def on_window(self, context):
        if context.window.index + 1 == self.window:
            if self.error:
                raise Halt
            context.stop()


def told(history):
    """What the epochs say apart from times."""
    rows = [dataclasses.asdict(metrics) for metrics in history]
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


@pytest.mark.parametrize("devices", [slow(1), 4])
@pytest.mark.parametrize("error", [True, slow(False)])
@pytest.mark.parametrize("every", [slow(1), 3])
def test_the_run_and_what_it_says(devices, error, every, tmp_path):
    evaluation = elche.Evaluation(metric_fn, HELD_OUT, 16, every_epochs=2)
    options = {"evaluation": evaluation, "progress": False}
    whole = shared(devices).fit(PARAMS, DATA, 8, 4, **options)
    saving = elche.Checkpoints(tmp_path, every_windows=every, every_epochs=None)
    stops = [4, 9, whole.history[0].windows + whole.history[1].windows]
    for stop in stops:  # in an epoch, in another, and just at the end of one
        part = shared(devices)
        again = {"checkpoints": saving, "resume": "auto", "callbacks": [StopAfter(stop, error)]}
        if error:
            with pytest.raises(Halt):
                part.fit(PARAMS, DATA, 8, 4, **again | options)
        else:
            assert part.fit(PARAMS, DATA, 8, 4, **again | options).windows == stop
    last = trainer(devices).fit(PARAMS, DATA, 8, 4, checkpoints=saving, resume="must", **options)
    assert same_bits(last.state, whole.state) and last.windows == whole.windows
    assert told(last.history) == told(whole.history)
    assert [sorted(m.evaluation) for m in last.history] == [[], ["error"], [], ["error"]]


def test_the_end_of_the_last_epoch_is_made_up_for(tmp_path):
    """Killed between the last window and the evaluation that was due."""
    options = {"evaluation": EVALUATION, "progress": False}
    whole = shared().fit(PARAMS, DATA, 8, 2, **options)
    saving = elche.Checkpoints(tmp_path, every_windows=1, every_epochs=None)
    with pytest.raises(Halt):
        shared().fit(PARAMS, DATA, 8, 2, checkpoints=saving, callbacks=[Refuse()], **options)
    last = shared().fit(PARAMS, DATA, 8, 2, checkpoints=saving, resume="must", **options)
    assert told(last.history) == told(whole.history) and same_bits(last.state, whole.state)
    assert last.windows == whole.windows
    once_more = shared().fit(PARAMS, DATA, 8, 2, checkpoints=saving, resume="must", **options)
    assert told(once_more.history) == told(whole.history)
    assert same_bits(once_more.state, whole.state) and once_more.stopped == "epochs"


class Refuse(elche.Callback):
    """Raises in the evaluation of the second epoch."""

    def on_evaluation(self, context, results):
        if context.history:
            raise Halt


@pytest.mark.parametrize("background", [False, slow(True)])
def test_a_run_that_is_asked_to_start_again(background, tmp_path, monkeypatch):
    """In the middle of an epoch: it ends without a report, and goes on as if nothing had been."""
    whole = shared().fit(PARAMS, DATA, 8, 3, progress=False)
    monkeypatch.setattr(_progress, "_asked", False)
    asks = steps_that(8, elche.distributed.request_restart)
    run = {"run_dir": tmp_path / "run", "resume": "auto", "progress": False}
    with pytest.raises(elche.RestartRequested) as ended:
        if background:
            shared().start(PARAMS, DATA, 8, 3, callbacks=[asks], **run).join()
        else:
            shared().fit(PARAMS, DATA, 8, 3, callbacks=[asks], **run)
    assert ended.value.windows == 9
    assert not (tmp_path / "run" / "report.html").exists(), "the run is not over"
    monkeypatch.setattr(_progress, "_asked", False)
    last = shared().fit(PARAMS, DATA, 8, 3, **run)
    assert same_bits(last.state, whole.state) and told(last.history) == told(whole.history)
    assert (tmp_path / "run" / "report.html").exists()


def steps_that(window, do):
    """A callback that does something in a window."""

    class Does(elche.Callback):
        def on_window(self, context):
            if context.window.index == window:
                do()

    return Does()


def test_more_epochs_than_before(tmp_path):
    whole = shared().fit(PARAMS, DATA, 8, 4, progress=False)
    saving = elche.Checkpoints(tmp_path)
    shared().fit(PARAMS, DATA, 8, 2, checkpoints=saving, progress=False)
    more = shared().fit(PARAMS, DATA, 8, 4, checkpoints=saving, resume="auto", progress=False)
    assert same_bits(more.state, whole.state) and told(more.history) == told(whole.history)


def test_patience_goes_on(tmp_path):
    values = [3.0, 2.0, 2.5, 2.5, 2.5]

    def run(values, epochs, **options):
        with evaluating(values) as one:
            return one.fit(
                PARAMS, DATA, 8, epochs, evaluation=EVALUATION, progress=False,
                early_stopping=elche.EarlyStopping("error", patience=3),
                checkpoints=elche.Checkpoints(tmp_path), **options,
            )  # fmt: skip

    assert run(values[:3], 3).stopped == "epochs"
    result = run([*values[3:], 0.0], 9, resume="auto")
    assert (result.stopped, len(result.history)) == ("early_stopping", 5)


def test_an_evaluation_with_another_metric_goes_on(tmp_path):
    def absolute(params, batch):
        return {"absolute": abs(errors(params, batch)) ** 0.5}

    options = {"progress": False, "resume": "auto"}
    saving = elche.Checkpoints(tmp_path)
    shared().fit(PARAMS, DATA, 8, 1, evaluation=EVALUATION, checkpoints=saving, **options)
    result = shared().fit(
        PARAMS, DATA, 8, 4, evaluation=elche.Evaluation(absolute, HELD_OUT, 16),
        early_stopping=elche.EarlyStopping("absolute", patience=1, min_delta=1e6),
        checkpoints=elche.Checkpoints(tmp_path, keep_best=1, monitor="absolute"), **options,
    )  # fmt: skip
    assert (result.stopped, len(result.history)) == ("early_stopping", 3)


@pytest.mark.parametrize("mode", ["min", slow("max")])
def test_the_best_are_kept(mode, tmp_path):
    saving = elche.Checkpoints(tmp_path, keep_last=1, keep_best=1, monitor="error", mode=mode)
    options = {"evaluation": EVALUATION, "checkpoints": saving, "progress": False}
    with evaluating([3.0, 5.0, 1.0, math.nan, 4.0, 2.0]) as one:
        result = one.fit(PARAMS, DATA, 8, 6, **options)
    ends = np.cumsum([m.windows for m in result.history])
    best = {"min": 2, "max": 1}[mode]
    assert steps(tmp_path) == [ends[best], ends[-1]]


def test_other_devices_go_on(tmp_path, caplog):
    saving = elche.Checkpoints(tmp_path)
    options = {"checkpoints": saving, "model_state": MODEL_STATE, "progress": False}
    shared(4, stateful_loss_fn).fit(PARAMS, DATA, 8, 2, **options)
    kept = dict.fromkeys(["resume"], "must")
    fewer = trainer(2, stateful_loss_fn, cadence=elche.Replay([(2, 2), (3, 3), (1, 3)] * 9))
    result = fewer.fit(PARAMS, DATA, 8, 4, **options | kept)
    whole = shared(4, stateful_loss_fn).fit(
        PARAMS, DATA, 8, 4, model_state=MODEL_STATE, progress=False
    )
    assert "the number of devices is 2, the checkpoint's was 4" in caplog.text
    assert [m.epoch for m in result.history] == [0, 1, 2, 3]
    assert [len(m.share) for m in result.history] == [4, 4, 2, 2]
    assert told(result.history[:2]) == told(whole.history[:2])
    assert result.history[3].loss == pytest.approx(whole.history[3].loss, rel=0.1)


@pytest.mark.parametrize("midway", [False, True])
def test_a_loop_of_ones_own_goes_on(midway, tmp_path):
    """It saves no sums: those of an epoch of which it has trained a part are of the rest."""
    train, saving = shared().train, elche.Checkpoints(tmp_path)
    state = train.init(PARAMS)
    with elche.Checkpointer(train, saving) as saver:
        for window in train.windows(DATA, 8):
            state, _ = train(state, window)
            if midway and window.index == 1:
                break
        # they are not the trainer's, which has notes of its own
        notes = (lambda: {"best": 3.5}) if midway else None
        saver.save(state, window, force=True, notes=notes)
    options = {"checkpoints": saving, "progress": False, "resume": "must"}
    none = shared().fit(PARAMS, DATA, 8, 3, **options, max_windows=1)
    assert none.history == () and none.windows == window.index + 1
    seen, never_better = PerWindow(), elche.EarlyStopping(patience=1, min_delta=1e9)
    result = shared().fit(
        PARAMS, DATA, 8, 3, **options, callbacks=[seen], early_stopping=never_better
    )
    first = 0 if midway else 1
    assert [m.epoch for m in result.history] == [first, first + 1]  # the second is not better
    assert [m.whole for m in result.history] == [not midway, True]
    for metrics in result.history:
        assert metrics.windows == sum(epoch == metrics.epoch for epoch, _ in seen.seen)
        assert metrics.loss == pytest.approx(seen.means(metrics.epoch)["loss"], rel=1e-5)
    rest = 192 - 8 * sum(map(sum, COUNTS[:2])) if midway else 192
    assert [m.examples for m in result.history] == [rest, 192]


def test_another_model_is_refused(tmp_path):
    saving = elche.Checkpoints(tmp_path)
    shared().fit(PARAMS, DATA, 8, 1, checkpoints=saving, progress=False)
    other = PARAMS | {"b": np.zeros(9, "float32")}
    with pytest.raises(ValueError, match=r"but leaf params/b is float32\[8\] there and float32\[9"):
        shared().fit(other, DATA, 8, 1, checkpoints=saving, resume="auto", progress=False)
    one = elche.Trainer(stateful_loss_fn, optax.sgd(0.1), has_aux=True)
    with pytest.raises(ValueError, match=r"must be of this model and optimizer, but "):
        one.fit(
            PARAMS, DATA, 8, 1, model_state=MODEL_STATE, checkpoints=saving, resume="auto",
            progress=False,
        )  # fmt: skip


def one_epoch(one, folder):
    """Checkpoints of a run of one epoch, to be copied."""
    one.fit(PARAMS, DATA, 8, 1, checkpoints=elche.Checkpoints(folder), progress=False)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return one_epoch(shared(), tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 4}, r"^windows: batch_size must be that of the cursor's run \(8\), got 4"),
        ({"seed": 1}, r"^windows: seed must be that of the cursor's run \(0\), got 1"),
        (
            {"data": {k: v[:96] for k, v in DATA.items()}},
            r"^windows: the number of examples must be",
        ),
    ],
)
def test_data_read_otherwise_are_refused(change, message, saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    arguments = {"params": PARAMS, "data": DATA, "batch_size": 8, "epochs": 2} | change
    options = {"checkpoints": elche.Checkpoints(tmp_path), "progress": False}
    with pytest.raises(ValueError, match=message):
        shared().fit(**arguments, **options, resume="auto")


def test_fewer_epochs_than_were_trained(tmp_path):
    saving = {"checkpoints": elche.Checkpoints(tmp_path), "progress": False}
    shared().fit(PARAMS, DATA, 8, 3, **saving)
    message = (
        r"^Trainer\.fit: epochs must be at least 3, the epochs that the saved run has begun, "
        r"got 2\. Epochs are counted from the start of the run\.$"
    )
    with pytest.raises(ValueError, match=message):
        shared().fit(PARAMS, DATA, 8, 2, resume="auto", **saving)


@pytest.mark.parametrize("name", ["run_dir", "checkpoints"])
def test_a_run_that_must_be_there_leaves_no_folder(name, tmp_path):
    folder = tmp_path / "runs" / "mine"
    place = {name: folder if name == "run_dir" else elche.Checkpoints(folder)}
    text = r"^checkpoints: .*mine.* must hold a whole checkpoint with resume='must', got none\. "
    with pytest.raises(ValueError, match=text):
        shared().fit(PARAMS, DATA, 8, 1, resume="must", progress=False, **place)
    assert not list(tmp_path.iterdir())


def test_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shared().fit(PARAMS, DATA, 8, 1, run_dir="~/run", progress=False)
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_a_folder_that_is_not_empty_is_not_mixed_with_another_run(tmp_path):
    options = {"run_dir": tmp_path, "progress": False}
    shared().fit(PARAMS, DATA, 8, 1, **options)
    kept = (tmp_path / "timeline.jsonl").read_bytes()
    text = (
        r"^Trainer\.fit: run_dir must hold no run with resume='never', got .*{}\. Pass "
        r"resume='auto' to resume it, or use another folder\. If the file is not of a run, you may "
        r"also move it\.$"
    )
    with pytest.raises(ValueError, match=text.format("timeline.jsonl")):
        shared().fit(PARAMS, DATA, 8, 1, **options)
    assert (tmp_path / "timeline.jsonl").read_bytes() == kept
    (tmp_path / "timeline.jsonl").unlink()
    (tmp_path / "metrics.csv").write_text("another program's")
    with pytest.raises(ValueError, match=text.format("metrics.csv")):
        shared().fit(PARAMS, DATA, 8, 1, **options)


# -- what the epochs say, wherever the run stopped

KEEP = {"optimizer_state": "keep"}
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
RULES = {
    "gradients": {},
    "keep": {"averaging": elche.ParameterAveraging(**KEEP)},
    "average": {"averaging": elche.ParameterAveraging()},
    "reset": {"averaging": elche.ParameterAveraging(optimizer_state="reset")},
    "delay": {"averaging": elche.ParameterAveraging(**KEEP, delay=1)},
    "three pending": {"averaging": elche.ParameterAveraging(**KEEP, delay=3)},
    "gradients, three pending": {"averaging": elche.MeanGradient("int8", delay=3)},
    "diloco": {"averaging": elche.DiLoCo(OUTER)},
    "delayed diloco": {"averaging": elche.DiLoCo(OUTER, delay=1)},
    "fragments": {"averaging": elche.DiLoCo(OUTER, fragments=2)},
    "int8": {"averaging": elche.DiLoCo(OUTER, compression="int8")},
    "host": {
        "averaging": elche.ParameterAveraging(**KEEP),
        "config": elche.DDPConfig(exchange="host"),
    },
    "host, three pending": {
        "averaging": elche.ParameterAveraging(**KEEP, delay=3),
        "exchange": elche.HostExchange(),
    },
    "host diloco": {
        "averaging": elche.DiLoCo(OUTER),
        "config": elche.DDPConfig(exchange="host"),
    },
}


class PerWindow(elche.Callback):
    """Notes the metrics of every window, with its epoch."""

    def __init__(self):
        self.seen = []

    def on_window(self, context):
        self.seen.append((context.window.epoch, context.metrics))

    def means(self, epoch):
        """The means of an epoch, by weight."""
        rows = [jax.device_get(metrics) for at, metrics in self.seen if at == epoch]
        rows = [row for row in rows if np.isfinite(row["loss"])]  # of no window: the first one
        weight = np.array([row["weight"] for row in rows], "float64")
        return {name: weight @ [row[name] for row in rows] / weight.sum() for name in NAMES}


NAMES = ("loss", "mae")
EPOCHS = 2


def whole_and_resumed(rule, stops, folder):
    """What a run says of its epochs by itself, what it should, and what runs say that go on
    from checkpoints of it."""
    one, seen = trainer(**RULES[rule]), PerWindow()
    options = {"data": DATA, "batch_size": 8, "epochs": EPOCHS, "progress": False}
    saving = elche.Checkpoints(folder / "whole", every_windows=1, keep_last=100)
    whole = one.fit(PARAMS, **options, callbacks=[seen], checkpoints=saving)
    want = [seen.means(epoch) for epoch in range(EPOCHS)]
    resumed = {}
    for stop in stops:
        shutil.copytree(folder / "whole" / str(stop), folder / str(stop) / str(stop))
        again = elche.Checkpoints(folder / str(stop), every_epochs=None)
        resumed[stop] = one.fit(PARAMS, **options, checkpoints=again, resume="must")
    return whole, want, resumed


@pytest.mark.parametrize(
    ("rule", "stops"),
    [
        slow("delay", (4, 5, 6, 8)),
        slow("delayed diloco", (7,)),
        ("three pending", (4, 7)),
        slow("gradients, three pending", (2, 6)),
    ],
)
def test_the_losses_of_the_epochs_wherever_it_stopped(rule, stops, tmp_path):
    """In an epoch, at its end, at the beginning of the next, and where exchanges overlap."""
    whole, want, resumed = whole_and_resumed(rule, stops, tmp_path)
    assert [metrics.windows for metrics in whole.history] == [5, 6]
    for metrics, means in zip(whole.history, want, strict=True):
        assert {name: metrics.values[name] for name in NAMES} == pytest.approx(means, rel=1e-12)
    for stop, result in resumed.items():
        assert told(result.history) == told(whole.history), f"stopped after {stop}"
        assert same_bits(result.state, whole.state)


@pytest.mark.slow  # test_the_same_bits of checkpoints has means pending on the host
def test_the_losses_of_the_epochs_with_means_pending_on_the_host(tmp_path):
    """Each window counts in its own epoch."""
    whole, _, resumed = whole_and_resumed("host, three pending", (2, 7), tmp_path)
    assert [metrics.windows for metrics in whole.history] == [5, 6]
    for result in resumed.values():
        assert told(result.history) == told(whole.history)
        assert same_bits(result.state, whole.state)


@pytest.mark.slow  # test_the_run_and_what_it_says stops and goes on
def test_a_run_that_was_told_to_stop_says_the_same(tmp_path):
    """With the guard's history, of which the last window is read late as well."""
    options = {"data": DATA, "batch_size": 8, "epochs": EPOCHS, "progress": False}
    one, another = trainer(**RULES["delay"]), trainer(**RULES["delay"])
    whole = one.fit(PARAMS, **options)
    divergence = one.train.divergence
    for stop in (6, 9):
        options["checkpoints"] = elche.Checkpoints(tmp_path)
        result = another.fit(PARAMS, **options, max_windows=stop, resume="auto")
        assert result.windows == stop
    result = another.fit(PARAMS, **options, resume="must")
    assert told(result.history) == told(whole.history)
    assert repr(another.train.divergence) == repr(divergence)


@cache
def delayed():
    """A trainer whose last window the next run tells of."""
    return trainer(**RULES["delay"])


@pytest.fixture(scope="module")
def pending(tmp_path_factory):
    return one_epoch(delayed(), tmp_path_factory.mktemp("run"))


@pytest.mark.slow  # test_the_losses_of_the_epochs_wherever_it_stopped, on as many devices
def test_the_last_window_is_told_of_on_fewer_devices(pending, tmp_path):
    options = {"data": DATA, "batch_size": 8, "progress": False}
    whole, part = PerWindow(), PerWindow()
    delayed().fit(PARAMS, **options, epochs=2, callbacks=[whole])
    shutil.copytree(pending, tmp_path, dirs_exist_ok=True)
    options["checkpoints"] = elche.Checkpoints(tmp_path)
    two = trainer(2, **RULES["delay"], cadence=elche.Replay([(2, 2)] * 100))
    two.fit(PARAMS, **options, epochs=2, resume="must", callbacks=[part])
    want = next(metrics for epoch, metrics in whole.seen if epoch == 1)
    _, got = part.seen[0]
    assert float(got["weight"]) == float(want["weight"]) == 6 * 8
    assert [float(got[name]) for name in NAMES] == pytest.approx([float(want[n]) for n in NAMES])


def test_delayed_metrics_are_those_that_are_known():
    one = delayed()
    _, _, seen = loop(one.train, epochs=1)
    result = one.fit(PARAMS, DATA, 8, 1, progress=False)
    known = [m for _, m in seen if m["weight"] > 0]
    assert len(known) == len(seen) - 1
    want = np.average([m["loss"] for m in known], weights=[m["weight"] for m in known])
    assert result.loss == pytest.approx(want) and result.history[0].skipped == 0


def renamed(params, batch, rng):
    error, metrics = loss_fn(params, batch, rng)
    return error, {"absolute": metrics["mae"]}


@pytest.mark.parametrize(
    ("devices", "changed", "lost"),
    [
        slow(4, {}, 0),
        (4, {"loss": renamed}, 1),
        slow(4, {"config": elche.DDPConfig(exchange="host")}, 1),  # keeps none pending, as one
        slow(1, {}, 1),  # test_gradients_that_one_device_cannot_have_pending_are_dropped
    ],
    ids=["same", "renamed", "host", "one"],
)
def test_what_no_window_can_tell_any_more_is_said(
    devices, changed, lost, pending, tmp_path, caplog
):
    shutil.copytree(pending, tmp_path, dirs_exist_ok=True)
    options = {"data": DATA, "batch_size": 8, "progress": False}
    options["checkpoints"] = elche.Checkpoints(tmp_path)
    again = trainer(devices, **RULES["delay"] | changed)
    again.fit(PARAMS, **options, epochs=2, resume="must")
    said = "train: loss and metrics of the windows that were pending at the stop are not reported"
    assert caplog.text.count(said) == lost
