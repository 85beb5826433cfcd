"""Evaluations, scores and patience: of which window they are, and over stops and resumes."""

import gc
import json
import threading
import weakref
from contextlib import suppress

import jax
import numpy as np
import pytest
from fitting import (
    DATA,
    HELD_OUT,
    PARAMS,
    evaluating,
    metric_fn,
    own_loop,
    same_bits,
    shared,
    steps,
    trainer,
)
from marks import slow

import elche_jax as elche


def run(values, epochs=6, every=None, **options):
    """A run whose evaluations give these values; every epoch has five or six windows."""
    evaluation = elche.Evaluation(metric_fn, HELD_OUT, 16, every_windows=every)
    with evaluating(values) as one:
        return one.fit(PARAMS, DATA, 8, epochs, evaluation=evaluation, progress=False, **options)


@pytest.fixture(scope="module")
def ends():
    """Windows at the ends of the epochs."""
    _, _, seen = own_loop(epochs=6)
    return np.cumsum(np.bincount([window.epoch for window, _ in seen])).tolist()


def scores(folder):
    """The score in every checkpoint there is."""
    found = {}
    for step in steps(folder):
        manifest = json.loads((folder / str(step) / "manifest" / "metadata").read_text())
        found[step] = json.loads(manifest["text"])["score"]
    return found


@pytest.mark.parametrize("every", [slow(1), 4, None])
def test_a_score_belongs_to_the_state_that_was_evaluated(every, ends, tmp_path):
    values = [19.5, 14.6, 10.9, 12.0, 11.0, 13.0]
    saving = elche.Checkpoints(
        tmp_path, every_windows=every, keep_last=100, keep_best=1, monitor="error"
    )
    run(values, checkpoints=saving)
    found = scores(tmp_path)
    assert {step: s for step, s in found.items() if s is not None} == dict(
        zip(ends, values, strict=True)
    )
    if every == 1:
        assert list(found) == list(range(1, ends[-1] + 1))


def test_the_best_state_can_be_had(ends, tmp_path):
    saving = elche.Checkpoints(tmp_path, keep_last=1, keep_best=1, monitor="error")
    run([3.0, 1.0, 2.0, 2.0, 2.0, 2.0], checkpoints=saving)
    _, want, _ = own_loop(epochs=2)
    train = shared().train
    with elche.Checkpointer(train, saving) as saver:
        assert same_bits(saver.best(train.init(PARAMS)), want)
    other = elche.Checkpoints(tmp_path, keep_best=1, monitor="accuracy")
    with (
        elche.Checkpointer(train, other) as saver,
        pytest.raises(ValueError, match=r"must hold a checkpoint with a score of 'accuracy', got"),
    ):
        saver.best(train.init(PARAMS))


def test_one_state_is_evaluated_once(ends):
    values = [19.5, 14.6, 10.9, 9.0, 8.0, 7.0]
    first = ends[0]  # the first epoch's end is such a window, too
    stopping = elche.EarlyStopping("error", patience=1)
    result = run(values + [6.0] * 9, every=first, early_stopping=stopping)
    assert result.history[0].evaluation == {"error": 19.5}
    assert len(result.history) > 1


def test_a_run_that_early_stopping_ended_stays_ended(tmp_path):
    options = {
        "early_stopping": elche.EarlyStopping("error", patience=2),
        "checkpoints": elche.Checkpoints(tmp_path), "resume": "auto",
    }  # fmt: skip
    first = run([1.0, 2.0, 3.0], **options)
    assert (first.stopped, len(first.history)) == ("early_stopping", 3)
    for _ in range(2):
        again = run([], **options)
        assert (again.stopped, again.windows) == ("early_stopping", first.windows)
        assert same_bits(again.state, first.state) and len(again.history) == 3


def test_most_windows_are_of_the_whole_run(tmp_path):
    options = {"checkpoints": elche.Checkpoints(tmp_path), "resume": "auto", "progress": False}
    for _ in range(3):
        result = shared().fit(PARAMS, DATA, 8, None, max_windows=7, **options)
        assert (result.stopped, result.windows) == ("max_windows", 7)


def test_the_end_of_an_epoch_is_saved_once_it_is_told(ends, tmp_path):
    saving = elche.Checkpoints(tmp_path, every_windows=ends[0], every_epochs=None)
    for _ in range(3):
        told = []

        class Told(elche.Callback):
            def on_epoch(self, context, metrics, told=told):
                told.append(metrics.epoch)

        result = shared().fit(
            PARAMS, DATA, 8, 1, checkpoints=saving, resume="auto", callbacks=[Told()],
            progress=False,
        )  # fmt: skip
        assert [m.epoch for m in result.history] == [0]
    assert told == []


def test_patience_with_something_else_begins_anew(tmp_path, caplog):
    saving = {"checkpoints": elche.Checkpoints(tmp_path), "resume": "auto"}
    run([9.0, 9.5], 2, early_stopping=elche.EarlyStopping("error", patience=3), **saving)
    result = run(
        [8.0, 9.0, 10.0, 10.0], early_stopping=elche.EarlyStopping("error", "max", 2), **saving
    )
    assert (result.stopped, len(result.history)) == ("epochs", 6)
    assert "monitored error (min) before and monitors error (max) now" in caplog.text


def test_an_evaluation_metric_takes_precedence_even_before_the_first_evaluation(ends, tmp_path):
    saving = elche.Checkpoints(tmp_path, keep_last=100, keep_best=1, monitor="loss")
    evaluation = elche.Evaluation(metric_fn, HELD_OUT, 16, every_epochs=3)
    # no value is that much better than the one before
    stopping = elche.EarlyStopping("loss", patience=1, min_delta=1e6)
    with evaluating([5.0, 4.0], "loss") as one:
        result = one.fit(
            PARAMS, DATA, 8, 6, evaluation=evaluation, early_stopping=stopping, checkpoints=saving,
            progress=False,
        )  # fmt: skip
    assert (result.stopped, len(result.history)) == ("epochs", 6)
    assert scores(tmp_path) == dict.fromkeys(ends) | {ends[2]: 5.0, ends[5]: 4.0}


def test_what_no_evaluation_gives_is_watched_from_the_first_epoch_on():
    """But it stops a run only once an evaluation has shown that it does not give it."""
    stopping = elche.EarlyStopping("mae", patience=2, min_delta=1e6)
    result = shared().fit(
        PARAMS, DATA, 8, 9, early_stopping=stopping, progress=False,
        evaluation=elche.Evaluation(metric_fn, HELD_OUT, 16, every_epochs=5),
    )  # fmt: skip
    assert (result.stopped, len(result.history)) == ("early_stopping", 5)


def test_metrics_of_devices_that_run_ahead_are_each_told_once():
    options = {
        "averaging": elche.ParameterAveraging(optimizer_state="keep"),
        "config": elche.DDPConfig(policy="async", exchange="host"),
        "cadence": elche.Replay([(3, 1), (1, 3), (2, 2)] * 9),
    }  # fmt: skip
    told = []

    class Rows:
        def scalars(self, step, values):
            if "window_loss" in values:
                told.append(step)

        def close(self):
            pass

    result = trainer(2, **options).fit(
        PARAMS, DATA, 8, 3, writers=[Rows()], log_every=1, progress=False
    )
    assert told == list(range(1, result.windows + 1))
    assert all(np.isfinite(m.loss) for m in result.history)


def test_rows_of_windows_go_on_over_a_resume(tmp_path):
    def rows(**options):
        kept = []

        class Keep:
            def scalars(self, step, values):
                if "window_loss" in values:
                    kept.append((step, values["window_loss"]))

            def close(self):
                pass

        shared().fit(PARAMS, DATA, 8, 2, writers=[Keep()], log_every=3, progress=False, **options)
        return kept

    whole = rows()
    saving = {"checkpoints": elche.Checkpoints(tmp_path), "resume": "auto"}
    parts = [*rows(max_windows=5, **saving), *rows(**saving)]
    assert parts == whole


def test_a_checkpoint_of_ones_own_loop_is_not_a_whole_epoch(tmp_path):
    one = shared()
    saving = elche.Checkpoints(tmp_path, every_windows=3)
    with elche.Checkpointer(one.train, saving) as saver:
        state = one.train.init(PARAMS)
        for window in one.train.windows(DATA, 8, 1):
            state, _ = one.train(state, window)
            if saver.save(state, window):
                break
    result = shared().fit(PARAMS, DATA, 8, 2, checkpoints=saving, resume="must", progress=False)
    assert [m.whole for m in result.history] == [False, True]
    _, want, _ = own_loop(epochs=2)
    assert same_bits(result.state, want)


@pytest.mark.parametrize("batch_size", [8, np.int64(8)])
def test_the_end_of_an_epoch_is_known_whatever_the_data(batch_size, ends):
    batches = [{k: v[at : at + 8] for k, v in DATA.items()} for at in range(0, 192, 8)]

    class Again:
        def __iter__(self):
            return iter(batches)

    for data, size in ((DATA, batch_size), (Again(), None)):
        result = shared().fit(PARAMS, data, size, None, max_windows=ends[0], progress=False)
        assert [m.whole for m in result.history] == [True]


def test_nothing_of_a_run_is_kept_alive():
    data = {k: v.copy() for k, v in DATA.items()}
    one = shared()
    one.fit(PARAMS, data, 8, 1, progress=False)
    watched = weakref.ref(data["x"])
    del data
    gc.collect()
    assert watched() is None
    assert one._recorder._devices._epochs == {}


@pytest.mark.parametrize("at_the_end", [False, True])
def test_nothing_of_a_broken_run_waits_for_the_garbage_collector(at_the_end):
    watched = []

    class Halt(elche.Callback):
        def on_window(self, context):
            if not at_the_end:
                watched.append(weakref.ref(context.state.params["a"]))
                raise KeyError("halt")

        def on_epoch(self, context, metrics):
            watched.append(weakref.ref(context.state.params["a"]))
            raise KeyError("halt")

    gc.collect()
    gc.disable()
    try:
        with suppress(KeyError):
            shared().fit(PARAMS, DATA, 8, 1, callbacks=[Halt()], progress=False)
        assert [one() for one in watched] == [None]
    finally:
        gc.enable()


def test_what_a_broken_run_has_left_does_not_reach_the_next():
    data = {k: v.copy() for k, v in DATA.items()}
    data["x"][:] = np.nan

    class Halt(elche.Callback):
        def on_window(self, context):
            jax.block_until_ready(context.state)
            raise KeyError("halt")

    one = shared()
    with pytest.raises((KeyError, elche.NonFiniteError)):
        one.fit(PARAMS, data, 8, 1, callbacks=[Halt()], progress=False)
    assert len(one.fit(PARAMS, DATA, 8, 1, progress=False).history) == 1


def test_the_last_checkpoint_that_fails_costs_no_result(tmp_path, monkeypatch):
    _, want, _ = own_loop(epochs=2)
    saving = elche.Checkpoints(tmp_path, every_epochs=None)

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("elche_jax.checkpoint.store.Store.save", full)
    with pytest.raises(elche.CheckpointError, match="No space left") as caught:
        shared().fit(PARAMS, DATA, 8, 2, checkpoints=saving, progress=False)
    assert same_bits(caught.value.result.state, want)


def test_a_checkpoint_that_fails_during_the_last_window_costs_no_result(
    ends, tmp_path, monkeypatch
):
    _, want, _ = own_loop(epochs=1)
    last = ends[0] - 1

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    class Wait(elche.Callback):
        def on_window(self, context):
            if context.window.index == last:
                for thread in threading.enumerate():
                    if thread.name == "elche-checkpoint":
                        thread.join()

    monkeypatch.setattr("elche_jax.checkpoint.store.Store.save", full)
    saving = elche.Checkpoints(tmp_path, every_windows=last, every_epochs=None)
    with pytest.raises(elche.CheckpointError, match="No space left") as caught:
        shared().fit(
            PARAMS, DATA, 8, 1, checkpoints=saving, callbacks=[Wait()], progress=False
        )  # fmt: skip
    assert same_bits(caught.value.result.state, want)
    assert [m.whole for m in caught.value.result.history] == [True]


def test_two_runs_in_one_folder(tmp_path):
    saving = elche.Checkpoints(tmp_path)
    text = r"must be used by one run at a time, but another one \(process \d+, or a fork of it\)"
    with elche.Checkpointer(trainer().train, saving):
        writing = tmp_path / "7.orbax-checkpoint-tmp"
        writing.mkdir()
        with pytest.raises(RuntimeError, match=text):
            shared().fit(PARAMS, DATA, 8, 1, checkpoints=saving, progress=False)
        assert writing.exists(), "what the first run is writing is not touched"
    assert shared().fit(PARAMS, DATA, 8, 1, checkpoints=saving, progress=False).windows > 0


def test_a_damaged_timeline_does_not_decide_over_the_run(tmp_path, caplog):
    options = {"run_dir": tmp_path, "resume": "auto", "progress": False}
    shared().fit(PARAMS, DATA, 8, 1, **options)
    with (tmp_path / "timeline.jsonl").open("ab") as file:
        file.write(b"garbage\nmore\n")
    result = shared().fit(PARAMS, DATA, 8, 2, **options)
    assert len(result.history) == 2 and "It was renamed to " in caplog.text
    assert len(list(tmp_path.glob("timeline-damaged-*.jsonl"))) == 1


def test_a_log_that_is_damaged_in_the_middle_loses_the_report_only(tmp_path, caplog):
    options = {"run_dir": tmp_path, "resume": "auto", "progress": False}
    shared().fit(PARAMS, DATA, 8, 1, **options)
    path = tmp_path / "timeline.jsonl"
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join([first, "garbage\n", *rest]))
    (tmp_path / "report.html").unlink()
    assert len(shared().fit(PARAMS, DATA, 8, 2, **options).history) == 2
    assert "elche: report.html was not written: Timeline.read: line 2 of " in caplog.text
    assert not (tmp_path / "report.html").exists()


def test_another_run_with_checkpoints_of_its_own_is_refused(tmp_path):
    """Both would write the other files of the folder."""

    class Second(elche.Callback):
        def on_epoch(self, context, metrics):
            trainer().fit(
                PARAMS, DATA, 8, 1, run_dir=tmp_path, progress=False, resume="auto",
                checkpoints=elche.Checkpoints(tmp_path / "second"),
            )  # fmt: skip

    text = f"^run_dir: {tmp_path} must be used by one run at a time, but another one "
    with pytest.raises(RuntimeError, match=text):
        shared().fit(PARAMS, DATA, 8, 1, run_dir=tmp_path, callbacks=[Second()], progress=False)
    shared().fit(PARAMS, DATA, 8, 1, run_dir=tmp_path, resume="auto", progress=False)


def test_a_file_of_a_run_that_cannot_be_written(tmp_path):
    (tmp_path / "timeline.jsonl").symlink_to(tmp_path / "none" / "timeline.jsonl")
    text = r"^Trainer\.fit: run_dir must be a folder whose files can be written, got .*FileNotFound"
    with pytest.raises(OSError, match=text):
        shared().fit(PARAMS, DATA, 8, 1, run_dir=tmp_path, progress=False)


def test_the_table_of_another_program_is_refused_at_once(tmp_path):
    (tmp_path / "metrics.csv").write_text("mine\n1\n")
    with pytest.raises(
        ValueError, match=r"metrics\.csv must be a table with a first column 'step'"
    ):
        shared().fit(PARAMS, DATA, 8, 1, run_dir=tmp_path, resume="auto", progress=False)
    assert not (tmp_path / "checkpoints").exists()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^Trainer\.fit: run_dir must be a folder that can be"):
        shared().fit(PARAMS, DATA, 8, 1, run_dir=tmp_path / "file", progress=False)
