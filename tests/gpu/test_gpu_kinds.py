"""A GPU and its host's CPU train together: against one device, and bitwise alike."""

import jax
import numpy as np
import optax
import pytest
from by_hand import BATCH, DATA, HELD_OUT, PARAMS, errors, gpu, loss_fn, metric_fn
from models import assert_close, host

import elche_jax as elche

pytestmark = pytest.mark.gpu
COUNTS = [(3, 1, 2), (4, 0, 1), (0, 2, 2), (5, 1, 1), (1, 1, 1)] * 2


@pytest.fixture(autouse=True)
def full_precision():
    """Products of float32 matrices in float32: TensorFloat-32, the default, has 10 bits."""
    with jax.default_matmul_precision("float32"):
        yield


def trained(devices, counts=COUNTS, **options):
    train = elche.build_train_step(
        loss_fn, optax.sgd(1e-2, momentum=0.9), devices=devices, cadence=elche.Replay(counts),
        **options,
    )  # fmt: skip
    state = train.init(PARAMS)
    with train.windows(DATA, BATCH, epochs=None, shuffle=False) as windows:
        for window in windows:
            state, _ = train(state, window)
            if window.index + 1 == len(counts):
                break
    return train, state


def mixed():
    return [gpu(), *jax.devices("cpu")[:2]]


@pytest.mark.parametrize("devices", [mixed, lambda: mixed()[::-1]], ids=["gpu first", "gpu last"])
def test_a_gpu_and_cpus_give_what_one_device_gives(devices):
    train, state = trained(devices())
    _, alone = trained(jax.devices("cpu")[:1], [(sum(counts),) for counts in COUNTS])
    elche.check_replicas(state)
    assert_close(host(state.params), host(alone.params), 1e-4)
    names = str(train.report())
    assert f"({gpu().device_kind})" in names and "(cpu)" in names


@pytest.mark.parametrize(
    "rule",
    [
        elche.MeanGradient(delay=1),
        elche.MeanGradient("int8"),
        elche.ParameterAveraging(),
        elche.DiLoCo(optax.sgd(0.7, momentum=0.9, nesterov=True), fragments=2),
    ],
)
def test_rules_over_both_are_those_of_alike_devices(rule):
    _, state = trained(mixed(), averaging=rule)
    _, alike = trained(jax.devices("cpu")[:3], averaging=rule)
    assert_close(host(state.params), host(alike.params), 1e-2)


def test_the_optimizers_state_lies_on_the_gpu_alone():
    _, state = trained(mixed()[::-1])
    held = {device for leaf in jax.tree.leaves(state.opt_state) for device in leaf.devices()}
    assert held == {gpu()}


def test_evaluation_and_predictions_over_both():
    _, state = trained(mixed())
    evaluate = elche.build_eval_step(metric_fn, devices=mixed())
    alone = elche.build_eval_step(metric_fn, devices=jax.devices("cpu")[:1])
    params = host(state.params)
    got, want = evaluate(state, HELD_OUT, BATCH), alone(params, HELD_OUT, BATCH)
    assert got == pytest.approx(want, rel=1e-5)
    outputs = elche.predict(errors, state, DATA, BATCH, devices=mixed())
    want = elche.predict(errors, params, DATA, BATCH, devices=[gpu()])
    np.testing.assert_allclose(outputs, want, rtol=1e-4, atol=1e-5)
