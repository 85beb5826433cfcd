"""`Trainer.fit`: the user's loop, bit for bit, and what it says of the epochs."""

import itertools
import math

import jax
import numpy as np
import optax
import pytest
from fitting import (
    DATA,
    HELD_OUT,
    MODEL_STATE,
    PARAMS,
    evaluating,
    held_out_error,
    loop,
    loss_fn,
    metric_fn,
    own_loop,
    same_bits,
    shared,
    stateful_loss_fn,
    trainer,
)
from marks import slow

import elche_jax as elche

EVALUATION = elche.Evaluation(metric_fn, HELD_OUT, 16)


@pytest.mark.parametrize("devices", [slow(1), 4])
def test_fit_is_the_users_loop_and_tells_of_it(devices):
    """Bit for bit, and its history is the mean by weight."""
    _, state, seen = own_loop(devices)
    result = shared(devices).fit(PARAMS, DATA, 8, 3, progress=False)
    assert same_bits(result.state, state)
    assert same_bits(result.params, elche.unreplicate(state.params))
    assert result.model_state is None
    assert (result.stopped, result.windows) == ("epochs", len(seen))
    assert result.report.windows == len(seen)
    assert [metrics.epoch for metrics in result.history] == [0, 1, 2]
    for metrics in result.history:
        mine = [(w, m) for w, m in seen if w.epoch == metrics.epoch]
        weights = [float(m["weight"]) for _, m in mine]
        for name, value in (("loss", metrics.loss), ("mae", metrics.metrics["mae"])):
            values = [float(m[name]) for _, m in mine]
            assert value == pytest.approx(np.average(values, weights=weights), rel=1e-12)
        assert metrics.windows == len(mine)
        assert metrics.examples == 192 == sum(w.examples for w, _ in mine)
        work = np.sum([w.counts for w, _ in mine], axis=0)
        np.testing.assert_allclose(metrics.share, work / work.sum())
        assert metrics.examples_per_s == pytest.approx(192 / metrics.seconds)
        assert metrics.whole and metrics.skipped == 0 and metrics.evaluation == {}
        assert len(metrics.throughput) == len(metrics.busy) == devices
        assert all(0 <= busy <= 1 for busy in metrics.busy)
    assert result.loss == result.history[-1].loss


@pytest.mark.parametrize("devices", [slow(1), 4])
def test_model_state(devices):
    one = shared(devices, stateful_loss_fn)
    _, state, _ = loop(one.train, model_state=MODEL_STATE)
    result = one.fit(PARAMS, DATA, 8, 3, model_state=MODEL_STATE, progress=False)
    assert same_bits(result.state, state)
    assert same_bits(result.model_state, elche.unreplicate(state.model_state))


@pytest.mark.parametrize("devices", [slow(1), 4])
def test_evaluation_at_the_ends_of_epochs_is_exact_and_changes_nothing(devices):
    evaluation = elche.Evaluation(metric_fn, HELD_OUT, 16, every_epochs=2)
    plain = shared(devices).fit(PARAMS, DATA, 8, 5, progress=False)
    kept = Kept()
    result = shared(devices).fit(
        PARAMS, DATA, 8, 5, evaluation=evaluation, callbacks=[kept], progress=False
    )
    assert same_bits(result.state, plain.state)
    assert [sorted(m.evaluation) for m in result.history] == [[], ["error"], [], ["error"], []]
    for epoch in (1, 3):
        found = result.history[epoch].evaluation["error"]
        assert found == pytest.approx(held_out_error(kept.params[epoch]), rel=1e-5)
    assert result.history[1].values["eval_error"] == result.history[1].evaluation["error"]


class Kept(elche.Callback):
    """Copies the parameters at the ends of epochs and the numbers of what is called when."""

    def __init__(self):
        self.params, self.windows, self.evaluated = {}, [], []

    def on_window(self, context):
        self.windows.append(context.window.index)

    def on_evaluation(self, context, results):
        self.evaluated.append((context.window.index, results["error"], host(context)))

    def on_epoch(self, context, metrics):
        self.params[metrics.epoch] = host(context)


def host(context):
    return jax.tree.map(np.array, elche.unreplicate(context.state.params))


def test_evaluation_after_windows():
    kept = Kept()
    evaluation = elche.Evaluation(metric_fn, HELD_OUT, 16, every_epochs=None, every_windows=4)
    result = shared().fit(PARAMS, DATA, 8, 2, evaluation=evaluation, callbacks=[kept])
    assert kept.windows == list(range(result.windows))
    assert [index for index, _, _ in kept.evaluated] == list(range(3, result.windows, 4))
    for _, error, params in kept.evaluated:
        assert error == pytest.approx(held_out_error(params), rel=1e-5)


def test_averaging_gives_one_copy_of_what_the_devices_have():
    averaging = elche.DiLoCo(optax.sgd(0.7), fragments=2)
    one = trainer(averaging=averaging)
    train, state, _ = loop(one.train)
    want = train.average(state)
    evaluation = elche.Evaluation(metric_fn, HELD_OUT, 16)
    result = one.fit(PARAMS, DATA, 8, 3, evaluation=evaluation, progress=False)
    assert same_bits(result.params, want)
    got = result.history[-1].evaluation["error"]
    assert got == pytest.approx(held_out_error(want), rel=1e-5)


@pytest.mark.parametrize("rule", [slow("mean"), "keep"])
def test_model_states_of_their_own_are_averaged(rule):
    one = trainer(loss=stateful_loss_fn, averaging=elche.ParameterAveraging(), merge=rule)
    _, state, _ = loop(one.train, model_state=MODEL_STATE)
    result = one.fit(PARAMS, DATA, 8, 3, model_state=MODEL_STATE, progress=False)
    rows = np.asarray(state.model_state["mean"])
    assert (len(np.unique(rows, axis=0)) > 1) == (rule == "keep")
    np.testing.assert_allclose(result.model_state["mean"], rows.mean(axis=0), rtol=1e-6)


def test_microbatches_as_they_come_and_datasets():
    batches = [{k: v[at : at + 8] for k, v in DATA.items()} for at in range(0, 192, 8)]
    stream = shared().fit(PARAMS, Again(batches), epochs=2, progress=False)
    arrays = shared().fit(PARAMS, DATA, 8, 2, shuffle=False, progress=False)
    rows = [{k: v[i] for k, v in DATA.items()} for i in range(192)]
    dataset = shared().fit(PARAMS, Rows(rows), 8, 2, shuffle=False, progress=False)
    assert same_bits(stream.state, arrays.state) and same_bits(dataset.state, arrays.state)


def test_an_evaluation_of_microbatches_as_they_come():
    def errors(data, batch_size=None):
        evaluation = elche.Evaluation(metric_fn, data, batch_size)
        result = shared().fit(PARAMS, DATA, 8, 2, evaluation=evaluation, progress=False)
        return [m.evaluation["error"] for m in result.history]

    batches = Again([{k: v[at : at + 10] for k, v in HELD_OUT.items()} for at in range(0, 50, 10)])
    assert errors(batches) == pytest.approx(errors(HELD_OUT, 10), rel=1e-6)


class Again:
    """An iterable that starts anew, and has no length."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


class Rows:
    """A map-style dataset."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def test_a_second_fit_begins_anew():
    one = shared()
    first = one.fit(PARAMS, DATA, 8, 2, progress=False)
    bits = jax.tree.map(np.array, first.params)
    second = one.fit(PARAMS, DATA, 8, 2, progress=False)
    assert same_bits(bits, second.params) and same_bits(bits, first.params)
    assert [m.loss for m in first.history] == [m.loss for m in second.history]


def test_most_windows():
    _, _, seen = own_loop(epochs=2)
    short = shared().fit(PARAMS, DATA, 8, None, max_windows=7, progress=False)
    assert (short.stopped, short.windows) == ("max_windows", 7)
    last = short.history[-1]
    mine = [m for w, m in seen[:7] if w.epoch == last.epoch]
    assert last.loss == pytest.approx(
        np.average([m["loss"] for m in mine], weights=[m["weight"] for m in mine])
    )
    assert [m.whole for m in short.history] == [True] * last.epoch + [False]


def test_an_epoch_that_is_just_done_is_whole():
    _, _, seen = own_loop(epochs=1)
    result = shared().fit(
        PARAMS, DATA, 8, None, max_windows=len(seen), evaluation=EVALUATION, progress=False
    )
    assert [m.whole for m in result.history] == [True]
    assert list(result.history[0].evaluation) == ["error"]


def test_most_seconds():
    result = shared().fit(PARAMS, DATA, 8, None, max_seconds=1e-9, progress=False)
    assert (result.stopped, result.windows) == ("max_seconds", 1)


def test_early_stopping_by_the_evaluation():
    values = [5.0, 4.0, 4.5, 3.9, 3.9, math.nan, 4.0, 1.0]
    stopping = elche.EarlyStopping("error", patience=3)
    with evaluating(values) as one:
        result = one.fit(
            PARAMS, DATA, 8, 20, evaluation=EVALUATION, early_stopping=stopping, progress=False
        )
    assert result.stopped == "early_stopping"
    assert [m.evaluation["error"] for m in result.history][:5] == [5.0, 4.0, 4.5, 3.9, 3.9]
    assert len(result.history) == 7  # 3.9 was the best; 3.9, NaN and 4.0 are not better
    assert all(m.whole for m in result.history)


def test_early_stopping_by_the_training_loss():
    # no loss is that much better than the first one
    result = shared().fit(
        PARAMS, DATA, 8, 50, early_stopping=elche.EarlyStopping("loss", patience=2, min_delta=1e6),
        progress=False,
    )  # fmt: skip
    assert (result.stopped, len(result.history)) == ("early_stopping", 3)


@pytest.fixture(scope="module")
def skipping():
    """A trainer that skips as many windows as there are."""
    return trainer(nonfinite="skip", max_skips=None)


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_windows_that_are_not_finite(nonfinite, skipping):
    data = {"x": DATA["x"].copy(), "y": DATA["y"]}
    data["x"][100] = np.nan
    if nonfinite == "raise":
        with pytest.raises(elche.NonFiniteError):
            shared().fit(PARAMS, data, 8, 2, progress=False)
        return
    result = skipping.fit(PARAMS, data, 8, 2, progress=False)
    assert [m.skipped for m in result.history] == [1, 1]
    assert all(math.isfinite(m.loss) for m in result.history)
    assert skipping.train.skipped == 2


@pytest.mark.parametrize("monitor", ["loss", "mae"])
def test_epochs_without_a_finite_window_try_the_patience(monitor, skipping):
    data = {"x": np.full_like(DATA["x"], np.nan), "y": DATA["y"]}
    stopping = elche.EarlyStopping(monitor, patience=2)
    result = skipping.fit(PARAMS, data, 8, 5, early_stopping=stopping, progress=False)
    assert (result.stopped, len(result.history)) == ("early_stopping", 2)
    assert all(math.isnan(m.loss) and math.isnan(m.metrics["mae"]) for m in result.history)


def test_the_trainers_cadence_is_the_users():
    one = elche.Trainer(
        loss_fn, optax.adam(1e-2), has_aux=True, devices=jax.devices()[:2],
        config=elche.DDPConfig(policy="cadence", anchor=2),
    )  # fmt: skip
    one.fit(PARAMS, DATA, 8, 1, progress=False)
    history = one.train.counts_history
    assert history[0] == (2, 2)
    assert sum(itertools.chain(*history)) == 24
