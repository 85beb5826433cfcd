"""Fitting, evaluation, inference and advice on devices of two kinds."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import DATA, HELD_OUT, PARAMS, errors, held_out_error, loss_fn, metric_fn, same_bits
from marks import slow

import elche_jax as elche
from elche_jax.advice import advise
from elche_jax.engine.devices import names_of

COUNTS = [(2, 1, 1), (1, 2, 2), (0, 3, 1), (1, 1, 1)]


def replay(world=3):
    rows = COUNTS if world == 3 else [(sum(row),) for row in COUNTS]
    return elche.Replay(rows * 20)


# -- the trainer


def fitted(devices, epochs=2, **options):
    cadence = options.pop("cadence", replay(len(devices)))
    job = elche.Trainer(loss_fn, optax.adam(1e-2), has_aux=True, devices=devices, cadence=cadence)
    return job.fit(
        PARAMS, DATA, 8, epochs, evaluation=elche.Evaluation(metric_fn, HELD_OUT, 16), rng=1,
        **options,
    )  # fmt: skip


@pytest.mark.slow  # test_train_lanes trains two kinds as one device, and others fit
def test_a_fit_is_that_of_one_device(mixed):
    got, want = fitted(mixed), fitted(mixed[:1])
    for name in PARAMS:
        np.testing.assert_allclose(got.params[name], want.params[name], rtol=1e-5, atol=1e-6)
    for a, b in zip(got.history, want.history, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
        assert a.metrics == pytest.approx(b.metrics, rel=1e-5)
        assert a.evaluation == pytest.approx(b.evaluation, rel=1e-5)
    last = got.history[-1].evaluation["error"]
    assert last == pytest.approx(held_out_error(got.params), rel=1e-5)
    elche.check_replicas(got.state)


@pytest.mark.slow  # test_the_same_kinds_go_on_with_the_same_bits; test_the_run_and_what_it_says
def test_a_fit_that_was_stopped_goes_on(mixed, tmp_path):
    def fit(epochs, folder):
        asked = elche.Checkpoints(folder, every_windows=4)
        return fitted(mixed, epochs, checkpoints=asked, resume="auto")

    first = fit(1, tmp_path / "a")
    again = fit(3, tmp_path / "a")
    whole = fit(3, tmp_path / "b")
    assert 0 < first.windows < whole.windows == again.windows
    assert same_bits(again.params, whole.params)
    assert same_bits(jax.device_get(again.state), jax.device_get(whole.state))


@cache
def told(*devices):
    """A trainer, what came of its first run, and the events of that; later runs begin anew."""
    timeline = elche.Timeline()
    job = elche.Trainer(
        loss_fn, optax.adam(1e-2), has_aux=True, devices=devices, cadence=replay(),
        config=elche.DDPConfig(timeline=timeline),
    )  # fmt: skip
    return job, job.fit(PARAMS, DATA, 8), tuple(timeline.events)


def test_timeline_and_report_name_the_kinds(mixed):
    _, result, events = told(*mixed)
    names = names_of(mixed)
    assert [name.split(" (")[1] for name in names] == ["cpu)", "twin)", "cpu)"]
    started = [event for event in events if type(event).__name__ == "RunEvent"]
    assert [list(event.devices) for event in started] == [names]
    assert [device.name for device in result.report.devices] == names
    assert all(name in str(result.report) for name in names)
    ran = [device.microbatches for device in result.report.devices]
    rows = [event.counts for event in events if type(event).__name__ == "WindowEvent"]
    assert ran == np.sum(rows, axis=0).tolist() and sum(ran) == len(DATA["y"]) // 8


# -- evaluation and inference


def metrics_by_numpy(params, data):
    hidden = np.tanh(data["x"].astype(np.float64) @ np.asarray(params["a"], "float64"))
    error = (hidden @ np.asarray(params["b"], "float64") - data["y"]) ** 2
    weight = np.arange(len(error)) % 3
    return {"error": error.mean(), "weighted": np.average(error, weights=weight)}


def two_metrics(params, batch):
    error = errors(params, batch)
    return {"error": error, "weighted": elche.Weighted(error, batch["n"] % 3)}


ROWS = HELD_OUT | {"n": np.arange(len(HELD_OUT["y"]), dtype="int32")}
REPLAYED = elche.Replay([(2, 1, 0), (0, 3, 1), (1, 1, 1)] * 5)
CADENCES = [(cadence, placement) for cadence in (REPLAYED, None, elche.EveryBatch())
            for placement in ("stream", "resident")]  # fmt: skip


def cases(quick):
    """Of cadences and placements `make test` has one; a training state is evaluated with none."""
    return [row if row == quick else slow(*row) for row in CADENCES]


@pytest.mark.parametrize(("cadence", "placement"), cases(quick=(REPLAYED, "stream")))
def test_metrics_are_exact(cadence, placement, mixed):
    evaluate = elche.build_eval_step(two_metrics, devices=mixed, cadence=cadence)
    for data in (ROWS, jax.tree.map(lambda leaf: leaf[:7], ROWS)):
        got = evaluate(PARAMS, data, 4, placement=placement)
        want = metrics_by_numpy(PARAMS, data)
        assert got.keys() == want.keys()
        for name, value in want.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-5)


@pytest.mark.parametrize(("cadence", "placement"), cases(quick=(REPLAYED, "resident")))
def test_outputs_come_in_the_order_of_the_data(cadence, placement, mixed):
    def apply_fn(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["a"])
        return {"out": hidden @ params["b"], "n": batch["n"], "big": batch["x"] > 1}

    got = elche.predict(
        apply_fn, PARAMS, ROWS, 4, devices=mixed, cadence=cadence, placement=placement
    )
    want = np.tanh(ROWS["x"].astype(np.float64) @ PARAMS["a"]) @ PARAMS["b"].astype(np.float64)
    np.testing.assert_allclose(got["out"], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got["n"], ROWS["n"])
    np.testing.assert_array_equal(got["big"], ROWS["x"] > 1)


@pytest.mark.parametrize("averaging", [None, slow(elche.DiLoCo(optax.sgd(0.7)))])
def test_a_training_state_is_evaluated_where_it_is(averaging, mixed):
    train = told(*mixed)[0].train
    if averaging is not None:
        train = elche.build_train_step(
            loss_fn, optax.adam(1e-2), has_aux=True, devices=mixed, cadence=replay(),
            averaging=averaging,
        )  # fmt: skip
    state = train.init(PARAMS)
    for window in train.windows(DATA, 8):
        state, _ = train(state, window)
    params = jax.device_get(train.average(state))
    assert np.abs(params["a"] - PARAMS["a"]).max() > 1e-3
    want = metrics_by_numpy(params, ROWS)
    evaluate = elche.build_eval_step(two_metrics, devices=mixed)
    out = np.tanh(ROWS["x"].astype(np.float64) @ params["a"]) @ params["b"].astype(np.float64)
    for given in (state, elche.unreplicate(state.params), params):
        got = evaluate(given, ROWS, 4)
        for name, value in want.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-5)
        outputs = elche.predict(
            lambda p, batch: jnp.tanh(batch["x"] @ p["a"]) @ p["b"], given, ROWS, 4, devices=mixed
        )
        np.testing.assert_allclose(outputs, out, rtol=1e-5, atol=1e-6)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state)), "it can be trained on"


def test_a_state_of_two_kinds_is_evaluated_on_others(mixed):
    train = elche.build_train_step(loss_fn, optax.adam(1e-2), has_aux=True, devices=mixed)
    state = train.init(PARAMS)
    want = metrics_by_numpy(PARAMS, ROWS)["error"]
    for devices in (mixed[:1], mixed[1:2], mixed[::-1]):
        evaluate = elche.build_eval_step(two_metrics, devices=devices)
        with pytest.raises(
            ValueError,
            match=r"^build_eval_step: a TrainState must be on the devices of the evaluation "
            rf"\({', '.join(map(str, devices))}\), got one on {', '.join(map(str, mixed))}\. Pass "
            r"devices=train\.devices, or unreplicate\(state\.params\)\.$",
        ):
            evaluate(state, ROWS, 4)
        got = evaluate(elche.unreplicate(state.params), ROWS, 4)
        np.testing.assert_allclose(got["error"], want, rtol=1e-5)


# -- advice


@pytest.mark.slow  # tests/advice measures and advises, other tests train two kinds
def test_advice_for_two_kinds(mixed):
    devices = mixed[:2]
    advice = advise(
        lambda p, batch, rng: errors(p, batch), optax.sgd(0.01), PARAMS, DATA, 2,
        devices=devices, seconds=0.05,
    )  # fmt: skip
    assert [device.name for device in advice.devices] == names_of(devices)
    assert all(device.solo_ms > 0 and device.together_ms > 0 for device in advice.devices)
    text = str(advice)
    assert all(name in text for name in names_of(devices))
