"""What a run writes and shows: its folder, scalars, events, progress; and disks that fail."""

import csv
import io
import json
import logging
import re
import sys
from pathlib import Path

import children
import numpy as np
import pytest
from fitting import DATA, HELD_OUT, PARAMS, metric_fn, own_loop, shared, steps, trainer
from marks import slow

import elche_jax as elche
from elche_jax.observe import events
from elche_jax.observe.timeline import Timeline
from elche_jax.observe.writers import CSVWriter
from elche_jax.trainer import recorder, session

EVALUATION = elche.Evaluation(metric_fn, HELD_OUT, 16)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    result = trainer().fit(PARAMS, DATA, 8, 3, evaluation=EVALUATION, run_dir=folder)
    return folder, result


def test_the_folder_of_a_run(run):
    folder, result = run
    names = {path.name for path in folder.iterdir()}
    assert names == {"timeline.jsonl", "metrics.csv", "checkpoints", "report.html", ".run.lock"}
    ends = np.cumsum([m.windows for m in result.history])
    assert steps(folder / "checkpoints") == ends.tolist()
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and folder.name in page


def test_the_folder_of_a_run_stays_where_it_is(tmp_path, monkeypatch):
    class Elsewhere(elche.Callback):
        def on_epoch(self, context, metrics):
            (tmp_path / "elsewhere").mkdir(exist_ok=True)
            monkeypatch.chdir(tmp_path / "elsewhere")

    monkeypatch.chdir(tmp_path)
    shared().fit(PARAMS, DATA, 8, 2, run_dir="run", callbacks=[Elsewhere()], progress=False)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"timeline.jsonl", "metrics.csv", "checkpoints", "report.html", ".run.lock"}
    assert not list((tmp_path / "elsewhere").iterdir())


def test_the_table_is_the_history(run):
    folder, result = run
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    ends = np.cumsum([m.windows for m in result.history]).tolist()
    assert [int(row["step"]) for row in rows] == ends
    for row, metrics in zip(rows, result.history, strict=True):
        assert float(row["loss"]) == metrics.loss and float(row["mae"]) == metrics.metrics["mae"]
        assert float(row["eval_error"]) == metrics.evaluation["error"]


def test_the_timeline_has_it_all(run):
    folder, result = run
    found = Timeline.read(folder / "timeline.jsonl")
    first = found[0]
    assert isinstance(first, events.RunEvent) and len(first.devices) == 4
    assert first.cadence.startswith("Replay(") and first.windows == 0
    _, _, seen = own_loop()
    windows = [event for event in found if isinstance(event, events.WindowEvent)]
    assert [event.counts for event in windows] == [window.counts for window, _ in seen]
    losses = {event.window: event.loss for event in found if isinstance(event, events.LossEvent)}
    assert losses == {w.index: pytest.approx(float(m["loss"]), rel=1e-6) for w, m in seen}
    epochs = [event for event in found if isinstance(event, events.EpochEvent)]
    assert [(e.epoch, e.windows, e.examples) for e in epochs] == [
        (m.epoch, m.windows, m.examples) for m in result.history
    ]
    assert [e.metrics["loss"] for e in epochs] == [m.loss for m in result.history]
    evaluations = [event for event in found if isinstance(event, events.EvaluationEvent)]
    assert [e.metrics for e in evaluations] == [m.evaluation for m in result.history]
    saved = [event for event in found if isinstance(event, events.CheckpointEvent)]
    assert [e.window + 1 for e in saved] == np.cumsum([m.windows for m in result.history]).tolist()
    assert all(e.size > 0 for e in saved)
    compiled = [event for event in found if isinstance(event, events.CompileEvent)]
    assert {"accumulate", "combine"} <= {event.program for event in compiled}


def test_the_timeline_of_the_configuration_hears_it_too():
    timeline = Timeline()
    one = trainer(
        cadence=None, config=elche.DDPConfig(policy="cadence", anchor=1, timeline=timeline)
    )
    result = one.fit(PARAMS, DATA, 8, 2, progress=False)
    kinds = {type(event) for event in timeline.events}
    assert {events.RunEvent, events.WindowEvent, events.LossEvent, events.EpochEvent} <= kinds
    run = next(event for event in timeline.events if isinstance(event, events.RunEvent))
    assert run.exchange_bytes == result.report.exchange_bytes > 0
    assert run.overhead_target == 0.10 and run.cadence.startswith("ElChe(")
    anchors = [event for event in timeline.events if isinstance(event, events.AnchorEvent)]
    now = 1
    for event in anchors:
        assert event.before == now != event.anchor
        now = event.anchor
    assert now == one.train.cadence_state.cadence.anchor


class Kept:
    """A writer that keeps what it gets."""

    def __init__(self):
        self.rows, self.closed = [], False

    def scalars(self, step, values):
        self.rows.append((step, dict(values)))

    def close(self):
        self.closed = True


def test_scalars_of_windows_are_means_by_weight():
    kept = Kept()
    result = shared().fit(PARAMS, DATA, 8, 2, writers=[kept], log_every=3, progress=False)
    _, _, seen = own_loop(epochs=2)
    logged = [step for step, values in kept.rows if "seconds" not in values]
    assert logged == list(range(3, len(seen) + 1, 3))
    for step, values in kept.rows:
        if "seconds" not in values:
            part = [m for _, m in seen[step - 3 : step]]
            losses, weights = (
                np.array([m[k] for m in part], "float64") for k in ("loss", "weight")
            )
            want = np.average(losses, weights=weights)
            assert values["window_loss"] == pytest.approx(want, rel=1e-12)
    assert [values["loss"] for _, values in kept.rows if "seconds" in values] == [
        m.loss for m in result.history
    ]
    assert not kept.closed  # whoever made it closes it


def test_a_resumed_run_goes_on_with_its_table(tmp_path):
    class Halt(elche.Callback):
        def on_window(self, context):
            if context.window.index == 12:
                raise KeyboardInterrupt

    options = {"run_dir": tmp_path, "progress": False, "resume": "auto"}
    with pytest.raises(KeyboardInterrupt):
        shared().fit(PARAMS, DATA, 8, 4, callbacks=[Halt()], **options)
    result = shared().fit(PARAMS, DATA, 8, 4, **options)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == [m.loss for m in result.history]
    kinds = [type(event) for event in Timeline.read(tmp_path / "timeline.jsonl")]
    assert kinds.count(events.RunEvent) == 2 and kinds.count(events.EpochEvent) == 4


def test_progress_on_something_that_is_no_terminal(capsys):
    result = shared().fit(PARAMS, DATA, 8, 2)
    out, err = capsys.readouterr()
    device, *lines = err.splitlines()
    assert out == "" and device == "elche: 4 devices | cpu x4"
    assert [line.split(",")[0] for line in lines] == [
        f"epoch {m.epoch + 1} of 2: loss {m.loss:.4g}" for m in result.history
    ]
    shared().fit(PARAMS, DATA, 8, 1, progress=False)
    assert capsys.readouterr() == ("", "")


def test_silent_but_for_the_devices(caplog, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with caplog.at_level(logging.DEBUG):
        shared().fit(PARAMS, DATA, 8, 1)
    assert stream.getvalue().startswith("elche: 4 devices | cpu x4\nepoch 1 of 1: loss ")
    assert [r for r in caplog.records if r.name == "elche_jax" and r.levelno > logging.INFO] == []


FULL = """
import resource, sys
sys.path.insert(0, {here!r})
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
import numpy as np
from fitting import DATA, trainer
import elche_jax as elche

more = np.random.default_rng(0).normal(size=(8, 100_000))
params = {{"a": np.ones((5, 8), "float32"), "b": np.ones(8, "float32"), "more": [*more]}}
saving = elche.Checkpoints(every_epochs=1, on_error={on_error!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, -1))
try:
    trainer().fit(params, DATA, 8, 3, checkpoints=saving, run_dir={folder!r}, progress=False)
except elche.CheckpointError as error:
    result = error.result
    print("epochs", None if result is None else len(result.history))
"""


@pytest.mark.slow  # test_a_disk_that_is_full fills one, and test_trainer_watched fits then
@pytest.mark.parametrize(("on_error", "epochs"), [("now", None), ("end", 3)])
def test_a_full_disk(on_error, epochs, tmp_path):
    """A disk that takes no large file: checkpoints fail, small files are written."""
    here = Path(__file__).parent
    text = FULL.format(here=str(here), folder=str(tmp_path), on_error=on_error)
    child = children.run(sys.executable, "-c", text)
    assert (child.returncode, child.stdout) == (0, f"epochs {epochs}\n"), child.stderr
    assert re.fullmatch(
        r"WARNING:elche_jax:elche: the checkpoint of window \d+ was not written: OSError: "
        r"\[Errno 27\] File too large: '.*'\. Later failures are not logged\.\n",
        child.stderr,
    ), child.stderr
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert left == {".lock"}  # nothing half
    lines = (tmp_path / "timeline.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["event"] == "run"


def test_what_cannot_be_written_in_the_end_costs_no_result(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("elche_jax.trainer.recorder.write_page", fail)
    with pytest.raises(OSError, match="No space left") as caught:
        shared().fit(PARAMS, DATA, 8, 2, run_dir=tmp_path, progress=False)
    assert len(caught.value.result.history) == 2
    assert "Training had finished" in caught.value.__notes__[0]


def test_a_table_on_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("elche_jax.observe.writers._append", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics\.csv'") as caught:
        shared().fit(PARAMS, DATA, 8, 2, run_dir=tmp_path, progress=False)
    assert len(caught.value.result.history) == 2


def test_a_result_that_is_lost_too_does_not_hide_the_first_error(tmp_path, monkeypatch):
    def gone(*arguments, **options):
        raise RuntimeError("the device is gone")

    def full(*arguments, **options):
        monkeypatch.setattr("elche_jax.trainer.session.FitResult", gone)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("elche_jax.trainer.recorder.write_page", full)
    with pytest.raises(OSError, match="No space left") as caught:
        shared().fit(PARAMS, DATA, 8, 1, run_dir=tmp_path, progress=False)
    assert caught.value.__notes__ == [
        "Training had finished, but its result is not available: the device is gone"
    ]


def test_the_writers_of_the_library_are_writers(tmp_path):
    table = CSVWriter(tmp_path / "a.csv")
    shared().fit(PARAMS, DATA, 8, 1, writers=[table], progress=False)
    table.close()
    assert (tmp_path / "a.csv").read_text().startswith("step,loss,mae,")


def test_the_last_line_of_an_epoch_has_its_busy_shares(monkeypatch):
    shown = []

    class Shown(elche.observe.progress.Progress):
        def update(self, epoch, done, loss, rate, busy):
            shown.append((epoch, done, tuple(busy)))

    monkeypatch.setattr(recorder, "Progress", Shown)
    result = shared().fit(PARAMS, DATA, 8, 2, progress=True)
    for epoch in result.history:
        end = (epoch.epoch, 24 * (epoch.epoch + 1))
        *_, busy = [busy for *where, busy in shown if tuple(where) == end]
        assert busy == epoch.busy and max(busy) > 0


@pytest.mark.parametrize("first", [slow({"epochs": 1}), {"epochs": 3, "max_windows": 4}])
@pytest.mark.parametrize("known", [True, slow(False)])
def test_how_far_a_run_is_after_a_resume(first, known, tmp_path, monkeypatch):
    """The bar goes on where the run was, at the end of an epoch and in the middle."""
    monkeypatch.setattr(session, "REFRESH_S", 0.0)  # every window is shown
    shown, totals = [], []

    class Shown:
        def __init__(self, total, epochs, names):
            totals.append(total)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def line(self, text):
            pass

        def update(self, epoch, done, *rest):
            shown[-1].append((epoch, done))

    monkeypatch.setattr(recorder, "Progress", Shown)
    batches = [{k: v[at : at + 8] for k, v in DATA.items()} for at in range(0, 192, 8)]

    class Batches:
        def __iter__(self):
            return iter(batches)

    data, size = (DATA, 8) if known else (Batches(), None)
    for options in (first, {"epochs": 3, "max_windows": None}):
        shown.append([])
        shared().fit(
            PARAMS, data, size, **options, progress=True, resume="auto",
            checkpoints=elche.Checkpoints(tmp_path, every_windows=4),
        )  # fmt: skip
    assert totals == ([24 * first["epochs"], 72] if known else [None, None])
    for part in shown:
        done = [done for _, done in part]
        assert done == sorted(done) and done[0] > 0
    if known:
        assert all(epoch * 24 < done <= epoch * 24 + 24 for part in shown for epoch, done in part)
        assert shown[-1][-1] == (2, 72) and shown[-1][0][1] > shown[0][-1][1]
