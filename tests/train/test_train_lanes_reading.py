"""Two threads read the metrics of a window: the loop, and one that watches windows."""

import jax
import numpy as np
import optax
import pytest

import elche_jax as elche
from elche_jax.engine.devices import one_reader
from elche_jax.train.live_scheduler import LiveScheduler

DATA = {"x": np.random.default_rng(0).normal(size=(48, 3)).astype("float32")}


def loss_fn(params, batch, rng):
    return ((batch["x"] @ params["w"] - 1) ** 2).mean()


def test_arrays_of_a_plugin_on_the_cpu_have_one_reader(twins):
    assert [one_reader(device) for device in (jax.devices("cpu")[1], twins[1])] == [False, True]


@pytest.mark.parametrize("averaging", [None, elche.ParameterAveraging()], ids=["mean", "local"])
@pytest.mark.parametrize("kinds", ["cpu", "twin+cpu"])
def test_the_loop_reads_arrays_of_its_own_if_it_must(kinds, averaging, request, monkeypatch):
    watched = {}

    def on_metrics(scheduler, plan, metrics):
        watched[plan.window] = metrics

    monkeypatch.setattr(LiveScheduler, "on_metrics", on_metrics)
    devices = jax.devices("cpu")[:2]
    if kinds != "cpu":
        devices = [request.getfixturevalue("twins")[0], devices[0]]
    train = elche.build_train_step(
        loss_fn, optax.sgd(0.1), devices=devices, cadence=elche.Replay([(1, 2)] * 4),
        averaging=averaging,
    )  # fmt: skip
    state, read = train.init({"w": np.zeros(3, "float32")}), {}
    with train.windows(DATA, batch_size=4, epochs=1) as windows:
        for number, window in enumerate(windows):
            state, read[number] = train(state, window)
    assert read.keys() == watched.keys() == {0, 1, 2, 3}
    for number, metrics in read.items():
        assert metrics.keys() == watched[number].keys() and metrics["finite"]
        for name, array in metrics.items():
            other = watched[number][name]
            np.testing.assert_array_equal(array, other)
            mine, its = (one.addressable_data(0).unsafe_buffer_pointer() for one in (array, other))
            assert (mine == its) == (kinds == "cpu"), name
