"""The contracts of one device, on a GPU: against loops by hand, NumPy and the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import (
    BATCH,
    DATA,
    HELD_OUT,
    PARAMS,
    X,
    each_error,
    errors,
    gpu,
    loss_fn,
    metric_fn,
    windows_by_hand,
)
from flax.training.dynamic_scale import DynamicScale
from models import Cnn, assert_bitwise, assert_close, digits, host, norm_loss, run, variables

import elche_jax as elche
from elche_jax.engine.devices import free_bytes

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def full_precision():
    """Products of float32 matrices in float32: TensorFloat-32, the default, has 10 bits."""
    with jax.default_matmul_precision("float32"):
        yield


def build(loss=loss_fn, tx=None, device=None, **options):
    return elche.build_train_step(
        loss, tx or optax.adam(1e-2), devices=[device or gpu()], **options
    )


def trained(loss=loss_fn, params=PARAMS, data=DATA, windows=None, init=None, **options):
    """Trains in the order of the data; gives the step, the state and the metrics."""
    train = build(loss, **options)
    state, seen = train.init(params, **init or {}), []
    for window in train.windows(data, BATCH, shuffle=False, **windows or {}):
        state, metrics = train(state, window)
        seen.append(jax.device_get(metrics))
    return train, state, seen


def where(tree):
    """The devices that the arrays of a pytree are on."""
    return {device for leaf in jax.tree.leaves(tree) for device in leaf.devices()}


# -- the mean gradient

CALLS = {
    "resident": {"placement": "resident"},
    "resident, several calls": {"placement": "resident", "window_bytes": 2 * 4 * BATCH},
    "stream": {"placement": "stream"},
    "stream, several calls": {"placement": "stream", "window_bytes": 2 * BATCH * 7 * 4},
}


@pytest.mark.parametrize("count", [1, 5, 8])
@pytest.mark.parametrize("calls", CALLS)
def test_a_window_is_the_jit_step_written_by_hand(count, calls):
    """Also the epoch's last window, which is smaller, and windows of several program calls."""
    train, state, _ = trained(cadence=elche.FixedTotal(count), windows=CALLS[calls])
    counts = [row for (row,) in train.counts_history]
    assert sum(counts) == 48 and set(counts[:-1]) == {count}
    assert where(state) == {gpu()}
    want = windows_by_hand(counts, optax.adam(1e-2))
    assert_close(host(state.params), want[-1], rtol=1e-5, atol=1e-6)


def test_the_default_is_a_step_for_every_microbatch():
    train, state, seen = trained()
    assert train.counts_history == [(1,)] * 48
    want = windows_by_hand([1] * 48, optax.adam(1e-2))
    assert_close(host(state.params), want[-1], rtol=1e-5, atol=1e-6)
    losses = [  # of the parameters before each window
        float(loss_fn(p, {k: v[i : i + BATCH] for k, v in DATA.items()},
                      jax.random.fold_in(jax.random.key(0), i // BATCH)).mean())
        for p, i in zip([PARAMS, *want[:-1]], range(0, 192, BATCH), strict=True)
    ]  # fmt: skip
    np.testing.assert_allclose([m["loss"] for m in seen], losses, rtol=1e-4)


@pytest.mark.parametrize("count", [1, 6])
def test_the_gpu_trains_as_the_cpu_does(count):
    """The same keys, the same order, the same sums, up to rounding."""
    states = []
    for device in (gpu(), jax.devices("cpu")[0]):
        train = build(tx=optax.sgd(0.02), device=device, cadence=elche.FixedTotal(count))
        state, used = run(train, train.init(PARAMS, rng=5), DATA, BATCH, epochs=2, seed=3)
        assert where(state) == {device}
        assert used[-1].epoch == 1
        states.append(host(state))
    got, want = states
    assert_close(got.params, want.params, rtol=1e-4, atol=1e-6)
    assert_bitwise(got.key, want.key)
    assert got.microbatches == want.microbatches == 96


def test_convolutions_batchnorm_and_dropout_train_as_on_the_cpu():
    model = Cnn(dropout=0.3, norm=True)
    first, found = variables(model), []
    for device in (gpu(), jax.devices("cpu")[0]):
        train = build(
            norm_loss(model), optax.sgd(0.05), device, cadence=elche.FixedTotal(3), has_aux=True
        )
        state = train.init(first["params"], model_state={"batch_stats": first["batch_stats"]})
        state, _ = run(train, state, digits(), 16, windows=10)
        found.append(host((state.params, state.model_state)))
    assert_close(*found, rtol=1e-3, atol=1e-5)


# -- the ragged end

WEIGHTS = np.random.default_rng(3).normal(size=6)


def linear_data(size):
    return {"x": X[:size], "y": (X[:size] @ WEIGHTS).astype("float32")}


def linear_losses(params, batch, rng):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


def linear_mean(params, batch, rng):
    """Knows of the examples that are missing by the mask alone."""
    return (linear_losses(params, batch, rng) * batch["mask"]).sum() / batch["mask"].sum()


@pytest.mark.parametrize("placement", ["resident", "stream"])
@pytest.mark.parametrize("form", ["vector", "mask"])
def test_every_example_counts_once_at_the_ragged_end(form, placement):
    """45 examples in windows of 20; by NumPy in float64."""
    loss, mask_key, unit = {
        "vector": (linear_losses, None, 1), "mask": (linear_mean, "mask", BATCH)
    }[form]  # fmt: skip
    data = linear_data(45)
    _, state, seen = trained(
        loss, {"w": np.zeros(6, "f")}, data, tx=optax.sgd(0.05), cadence=elche.FixedTotal(5),
        windows={"drop_last": False, "mask_key": mask_key, "placement": placement},
    )  # fmt: skip
    w, losses, x, y = np.zeros(6), [], data["x"].astype("float64"), data["y"]
    for rows in (slice(0, 20), slice(20, 40), slice(40, 45)):
        error = x[rows] @ w - y[rows]
        losses.append((error**2).mean())
        w -= 0.05 * 2 * x[rows].T @ error / len(error)
    np.testing.assert_allclose(host(state.params)["w"], w, rtol=1e-5)
    np.testing.assert_allclose([m["loss"] for m in seen], losses, rtol=1e-5)
    assert [m["weight"] * unit for m in seen] == [20, 20, 5]


# -- evaluation and inference


@pytest.mark.parametrize("placement", ["resident", "stream"])
def test_an_evaluation_is_the_mean_over_all_examples(placement):
    evaluate = elche.build_eval_step(metric_fn, devices=[gpu()])
    _, state, _ = trained()
    for given, params in ((PARAMS, PARAMS), (state, host(state.params))):
        got = evaluate(given, HELD_OUT, 16, placement=placement)["error"]
        assert got == pytest.approx(each_error(params).mean(), rel=1e-5)


@pytest.mark.parametrize("placement", ["resident", "stream"])
def test_predictions_come_in_the_order_of_the_data(placement):
    _, state, _ = trained()
    for given, params in ((PARAMS, PARAMS), (state, host(state.params))):
        got = elche.predict(errors, given, HELD_OUT, 16, devices=[gpu()], placement=placement)
        assert type(got) is np.ndarray and got.shape == (50,)
        np.testing.assert_allclose(got, each_error(params), rtol=1e-4, atol=1e-5)


# -- the same bits again


def trainer(device=None, **options):
    return elche.Trainer(
        loss_fn, optax.adam(1e-2), devices=[device or gpu()], cadence=elche.FixedTotal(5), **options
    )


FIT = {
    "params": PARAMS, "data": DATA, "batch_size": BATCH, "epochs": 3, "progress": False,
    "evaluation": elche.Evaluation(metric_fn, HELD_OUT, 16),
}  # fmt: skip


def test_a_recorded_run_replayed_gives_the_same_bits():
    live, state, _ = trained(cadence=elche.FixedTotal(7), windows={"epochs": 2})
    again = elche.Replay(live.counts_history)
    _, replayed, _ = trained(cadence=again, windows={"epochs": 2})
    assert_bitwise(host(replayed), host(state))


@pytest.mark.parametrize("stop", [4, 10])
def test_a_fit_that_stops_and_goes_on_is_the_one_that_did_not(stop, tmp_path):
    """In an epoch, and at the end of one, of ten windows each."""
    whole = trainer().fit(**FIT)
    saving = elche.Checkpoints(tmp_path, every_windows=1, every_epochs=None)
    part = trainer().fit(**FIT, checkpoints=saving, max_windows=stop)
    assert part.windows == stop
    last = trainer().fit(**FIT, checkpoints=saving, resume="must")
    assert where(last.state) == {gpu()}
    assert_bitwise(host(last.state), host(whole.state))
    losses = [[metrics.loss for metrics in result.history] for result in (last, whole)]
    evaluations = [[metrics.evaluation for metrics in r.history] for r in (last, whole)]
    assert losses[0] == losses[1] and evaluations[0] == evaluations[1]
    assert evaluations[0][-1]["error"] == pytest.approx(each_error(last.params).mean(), rel=1e-5)


@pytest.mark.parametrize("first", ["cuda", "cpu"])
def test_a_checkpoint_goes_on_on_the_other_kind(first, tmp_path):
    devices = {name: jax.devices(name)[0] for name in ("cuda", "cpu")}
    then = {"cuda": "cpu", "cpu": "cuda"}[first]
    saving = elche.Checkpoints(tmp_path)
    trainer(devices[first]).fit(**FIT, checkpoints=saving, max_windows=14)
    result = trainer(devices[then]).fit(**FIT, checkpoints=saving, resume="must")
    assert where(result.state) == {devices[then]}
    whole = trainer(devices[then]).fit(**FIT)
    assert_close(result.params, whole.params, rtol=1e-3, atol=1e-5)
    assert [m.windows for m in result.history] == [m.windows for m in whole.history]


# -- narrow numbers


def test_a_window_in_bfloat16_is_the_float32_sum_of_its_microbatches():
    """Against one gradient per microbatch in bfloat16, cast and summed by NumPy."""
    seen = {}

    def loss(params, batch, rng):
        seen.update(a=params["a"].dtype.name, x=batch["x"].dtype.name)
        return errors(params, batch).astype("float32")

    config = elche.DDPConfig(compute_dtype="bfloat16")
    data = {name: leaf[: 8 * BATCH] for name, leaf in DATA.items()}
    _, state, _ = trained(
        loss, data=data, tx=optax.sgd(1.0), config=config, cadence=elche.FixedTotal(8)
    )
    assert seen == {"a": "bfloat16", "x": "bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}

    @jax.jit
    def gradient(params, batch):
        def low(params):
            narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, batch))
            return errors(*narrow).astype("float32").mean()

        return jax.grad(low)(params)

    parts = [
        gradient(jax.device_put(PARAMS, gpu()), {k: v[i : i + BATCH] for k, v in data.items()})
        for i in range(0, 8 * BATCH, BATCH)
    ]
    for name, leaf in PARAMS.items():
        mean = np.mean([np.asarray(part[name], "float64") for part in parts], axis=0)
        got = leaf - host(state.params)[name]
        # single products may be rounded to 8 bits in another order
        np.testing.assert_allclose(got, mean, rtol=2e-2, atol=2e-2 * np.abs(mean).max())


def tiny_loss(params, batch, rng):
    """In float16 its gradient, 1e-9 and less, is zero: the numbers end at 6e-8."""
    return (batch["x"] * params["w"] * batch["small"] * batch["small"]).mean()


@pytest.mark.parametrize("scale", [None, 2.0**14, DynamicScale(scale=2.0**14)])
def test_a_scale_keeps_small_gradients(scale):
    data = {"x": np.linspace(0.1, 0.5, 64).astype("f"), "small": np.full(64, 2e-4, "f")}
    _, state, _ = trained(
        tiny_loss, {"w": np.zeros((), "f")}, data, tx=optax.sgd(1e8), loss_scale=scale,
        config=elche.DDPConfig(compute_dtype="float16"), cadence=elche.FixedTotal(16),
    )  # fmt: skip
    want = 0.0 if scale is None else -1e8 * 4e-8 * data["x"].mean()
    assert float(host(state.params)["w"]) == pytest.approx(want, rel=1e-2)


def test_a_dynamic_scale_is_halved_until_the_gradient_is_finite():
    """The gradient is 1, float16 ends at 65504: 2**15 is the largest scale that will do."""
    data = {"x": np.ones(12 * BATCH, "f")}
    train, state, seen = trained(
        lambda p, batch, rng: (p["w"] * batch["x"]).mean(), {"w": np.ones((), "f")}, data,
        tx=optax.sgd(0.125), config=elche.DDPConfig(compute_dtype="float16"),
        loss_scale=DynamicScale(scale=2.0**18, growth_interval=1000),
    )  # fmt: skip
    assert [m["loss_scale"] for m in seen] == [2.0**18, 2.0**17, 2.0**16, *[2.0**15] * 9]
    assert [bool(m["finite"]) for m in seen] == [False] * 3 + [True] * 9
    assert train.skipped == 3
    assert float(host(state.params)["w"]) == 1 - 9 * 0.125


# -- gradients that are not finite


def poisoned(window):
    """Data in which the window of four microbatches of this number has one NaN."""
    x = X.copy()
    x[(4 * window + 2) * BATCH + 1, 3] = np.nan
    return {**DATA, "x": x}


def test_an_update_that_is_not_finite_reaches_nobody():
    """With `"skip"` the run is that of the windows before it and after it."""
    options = {"cadence": elche.FixedTotal(4), "tx": optax.sgd(0.02, momentum=0.9)}
    train, state, seen = trained(
        lambda p, b, rng: errors(p, b), data=poisoned(5), nonfinite="skip", **options
    )
    assert [bool(m["finite"]) for m in seen] == [n != 5 for n in range(12)]
    assert train.skipped == 1
    rest = {name: np.delete(leaf, slice(80, 96), axis=0) for name, leaf in DATA.items()}
    want = windows_by_hand([4] * 11, options["tx"], loss=lambda p, b, key: errors(p, b), data=rest)
    assert_close(host(state.params), want[-1], rtol=1e-5, atol=1e-6)


def test_the_error_names_the_window_and_its_microbatches():
    with pytest.raises(elche.NonFiniteError, match="window 5") as raised:
        trained(data=poisoned(5), cadence=elche.FixedTotal(4))
    assert raised.value.window == 5
    assert raised.value.microbatches == {0: range(20, 24)}


# -- local steps


def test_averaging_on_one_device_is_a_step_for_every_microbatch():
    rule = elche.ParameterAveraging()
    train, state, _ = trained(
        averaging=rule, cadence=elche.FixedTotal(6), windows={"placement": "stream"}
    )
    want = windows_by_hand([1] * 48, optax.adam(1e-2))
    assert_close(host(state.params), want[-1], rtol=1e-5, atol=1e-6)
    assert_bitwise(jax.device_get(train.average(state)), host(state.params))


def test_an_outer_step_follows_the_inner_ones():
    """Eight windows of six inner steps; Nesterov's outer step by NumPy in float64."""
    outer, tx = optax.sgd(0.7, momentum=0.9, nesterov=True), optax.sgd(0.02)
    train, state, _ = trained(averaging=elche.DiLoCo(outer), tx=tx, cadence=elche.FixedTotal(6))
    assert train.counts_history == [(6,)] * 8
    base = {name: leaf.astype("float64") for name, leaf in PARAMS.items()}
    trace = dict.fromkeys(base, 0.0)
    for window in range(8):
        begun = {name: leaf.astype("float32") for name, leaf in base.items()}
        gone = windows_by_hand([1] * 6, tx, params=begun, first=6 * window)[-1]
        for name, leaf in base.items():
            moved = leaf - gone[name]
            trace[name] = moved + 0.9 * trace[name]
            base[name] = leaf - 0.7 * (moved + 0.9 * trace[name])
    assert_close(host(state.params), base, rtol=1e-4, atol=1e-5)


# -- memory


def test_the_old_state_is_given_up():
    train = build(tx=optax.adam(1e-2))
    state = train.init(PARAMS)
    for window in train.windows(DATA, BATCH):
        before = state
        state, _ = train(state, window)
        given_up = jax.tree.leaves((before.params, before.opt_state))
        assert all(leaf.is_deleted() for leaf in given_up)
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("placement", ["resident", "stream"])
def test_windows_leave_nothing_in_the_memory(placement):
    """After 40 windows no more is in use than after ten; each brings 256 KiB."""
    data = {"x": np.zeros((40 * 64, 1024), "f")}
    train = build(lambda p, b, rng: (b["x"] @ p["w"]).mean(), optax.sgd(0.1))
    state, used = train.init({"w": np.zeros((1024, 8), "f")}), []
    for window in train.windows(data, 64, placement=placement):
        state, _ = train(state, window)
        jax.block_until_ready(state)
        used.append(gpu().memory_stats()["bytes_in_use"])
    assert len(used) == 40
    assert used[-1] - used[9] < 2**18


def test_resident_data_lie_on_the_gpu_and_streamed_ones_do_not():
    data = {"x": np.zeros((2**14, 1024), "f")}  # 64 MiB
    grown = {}
    for placement in ("stream", "resident", "auto"):
        train = build(lambda p, b, rng: (b["x"] @ p["w"]).mean(), optax.sgd(0.1))
        state = train.init({"w": np.zeros(1024, "f")})
        before = gpu().memory_stats()["bytes_in_use"]
        with train.windows(data, 64, placement=placement) as windows:
            state, _ = train(state, next(windows))
            jax.block_until_ready(state)
            grown[placement] = gpu().memory_stats()["bytes_in_use"] - before
        del train, state, windows
    assert grown["stream"] < 2**22 and grown["resident"] >= 2**26
    assert grown["auto"] == grown["resident"], "a quarter of the free memory holds them"


# -- what is said of the device


def test_the_memory_of_the_device_is_told():
    stats = gpu().memory_stats()
    free = stats["bytes_limit"] - stats["bytes_in_use"]
    assert free_bytes([gpu()]) == pytest.approx(free, abs=2**24)
    name = gpu().device_kind.removeprefix("NVIDIA ").removeprefix("GeForce ")
    limit = stats["bytes_limit"] / 2**30
    assert elche.device_summary([gpu()]) == f"elche: 1 GPU | {name} ({limit:.1f} GiB)"


def test_a_run_is_measured_and_its_devices_named():
    train, _, _ = trained(cadence=elche.FixedTotal(4))
    assert [record.counts for record in train.records] == [(4,)] * 12
    assert all(record.wall_ms > 0 for record in train.records)
    (speed,) = train.throughput
    assert speed > 0
    assert str(gpu()) in str(train.report())
