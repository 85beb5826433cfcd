"""A script that says `ElChe` runs unchanged on one device."""

import jax
import numpy as np
import optax
import pytest
from marks import table

import elche_jax as elche

DATA = {"x": np.random.default_rng(0).normal(size=(96, 3)).astype("float32")}
ONE = jax.devices()[:1]


def loss_fn(params, batch, rng):
    return (batch["x"] @ params["w"]) ** 2


def trained(**options):
    train = elche.build_train_step(loss_fn, optax.adam(0.1), devices=ONE, **options)
    state = train.init({"w": np.ones(3, "float32")})
    for window in train.windows(DATA, 4, epochs=2):
        state, _ = train(state, window)
    return np.asarray(elche.unreplicate(state.params)["w"]), train.counts_history


@pytest.mark.parametrize("rule", [None, elche.ParameterAveraging()])
def test_it_is_a_step_for_every_microbatch(rule):
    wanted, history = trained(averaging=rule, cadence=elche.EveryBatch())
    cadence = elche.ElChe(anchor=10, speed_hint=(0, 3.0))
    got, counts = trained(averaging=rule, cadence=cadence)
    assert counts == history == [(1,)] * 48
    assert got.tobytes() == wanted.tobytes()


def test_an_outer_optimizer_steps_after_the_anchor():
    rule = elche.DiLoCo(outer=optax.sgd(0.7, momentum=0.9, nesterov=True))
    wanted, history = trained(averaging=rule, cadence=elche.FixedTotal(6))
    got, counts = trained(averaging=rule, cadence=elche.ElChe(anchor=6))
    assert counts == history == [(6,)] * 8
    assert got.tobytes() == wanted.tobytes()
    assert trained(averaging=rule, config=elche.DDPConfig(anchor=6))[1] == counts


def test_an_evaluation_takes_it_too():
    def metric_fn(params, batch):
        return {"error": (batch["x"] @ params["w"]) ** 2}

    params = {"w": np.ones(3, "float32")}
    evaluate = elche.build_eval_step(metric_fn, devices=ONE, cadence=elche.ElChe())
    wanted = np.mean((DATA["x"].astype(np.float64) @ params["w"]) ** 2)
    assert evaluate(params, DATA, 4)["error"] == pytest.approx(wanted, rel=1e-6)


def test_its_windows_do_not_wait_for_each_other():
    """There is nothing to measure: the next window is planned while one is under way."""
    train = elche.build_train_step(loss_fn, optax.sgd(0.1), devices=ONE, cadence=elche.ElChe())
    state = train.init({"w": np.ones(3, "float32")})
    with train.windows(DATA, 4) as windows:
        for _ in range(2):
            window = next(windows)
            state, _ = train(state, window)
        next(windows)
        assert len(train.records) == 1, "of two that were trained"


@table(world=[1, 2], placement=["stream", "resident"])
def test_a_guard_against_implicit_transfers(world, placement):
    """One device gets its data with the call of a program, which is meant like any placing."""
    devices = jax.devices()[:world]
    train = elche.build_train_step(loss_fn, optax.sgd(0.1), devices=devices)
    evaluate = elche.build_eval_step(lambda params, batch: {"x": batch["x"][:, 0]}, devices=devices)
    params = jax.device_put({"w": np.ones(3, "float32")}, devices[0])
    state = train.init(params)
    with train.windows(DATA, 4, placement=placement) as windows:
        for window in windows:
            with jax.transfer_guard_host_to_device("disallow"):
                state, metrics = train(state, window)
    assert np.isfinite(float(metrics["loss"]))
    want = evaluate(params, DATA, 4)["x"]
    for _ in range(2):  # the second one is not measured
        with jax.transfer_guard_host_to_device("disallow"):
            assert evaluate(params, DATA, 4)["x"] == pytest.approx(want, rel=1e-6)
    jax.config.update("jax_transfer_guard_host_to_device", "disallow")  # in all threads
    try:
        with train.windows(DATA, 4, placement=placement) as windows:
            for window in windows:
                state, metrics = train(state, window)
    finally:
        jax.config.update("jax_transfer_guard_host_to_device", None)
    assert np.isfinite(float(metrics["loss"]))
    with (
        jax.transfer_guard_host_to_device("disallow"),
        pytest.raises(jax.errors.JaxRuntimeError, match="Disall"),
    ):
        jax.jit(sum)(np.ones(3))  # what is the user's own stays guarded
