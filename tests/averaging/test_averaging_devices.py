"""Devices that are left out, states that differ on purpose, and one set of parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from averaged import (
    BAD,
    FIRST_OF_BAD,
    NESTEROV,
    PARTS,
    THREE,
    TX,
    assert_history,
    poisoned,
    train_on,
)
from marks import slow
from reference import BATCH, LEAVES, Outer, data, loss_fn, params, run

import elche_jax as elche
from elche_jax.observe.timeline import SkipEvent, Timeline


@pytest.mark.parametrize(
    ("diloco", "how"),
    [(True, "average")]
    + [slow(False, how) for how in ("keep", "average", "reset")]
    + [slow(True, how) for how in ("keep", "reset")],
)
def test_a_device_that_is_not_finite_is_left_out_and_comes_back(diloco, how, caplog):
    if diloco:
        rule = elche.DiLoCo(outer=optax.sgd(**NESTEROV), optimizer_state=how)
    else:
        rule = elche.ParameterAveraging(optimizer_state=how)
    timeline = Timeline()
    history, metrics, state, train = train_on(
        rule, THREE, nonfinite="skip", config=elche.DDPConfig(timeline=timeline), **poisoned()
    )
    outer = Outer(0.7, 0.9, True) if diloco else None
    assert_history(history, run(THREE, outer=outer, optimizer_state=how, lost=[BAD]))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(history))
    shares = metrics[4]["share"]
    np.testing.assert_allclose(shares, [5 / 7, 0, 2 / 7], rtol=1e-6)
    assert [bool(said["finite"]) for said in metrics] == [window != 4 for window in range(10)]
    assert all(np.isfinite(said["loss"]) for said in metrics)
    assert (train.skipped, train.left_out) == (1, (0, 1, 0))
    (said,) = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    first = FIRST_OF_BAD
    assert said == (
        "elche: left out of the average of window 4 (epoch 0, counts (5, 2, 2)), as not finite: "
        f"device 1 ({jax.devices()[1]}), microbatches {first} to {first + 1} of the epoch."
    )
    (event,) = [event for event in timeline.events if isinstance(event, SkipEvent)]
    assert (event.window, event.reason) == (4, "left out: not finite")
    elche.check_replicas(state.params)


@pytest.mark.parametrize("fragments", [2, slow(3)])
def test_a_device_that_is_left_out_begins_anew_in_all_fragments(fragments):
    rule = elche.DiLoCo(outer=optax.sgd(**NESTEROV), fragments=fragments)
    history, _, _, _ = train_on(rule, THREE, nonfinite="skip", **poisoned())
    want = run(
        THREE, outer=Outer(0.7, 0.9, True), optimizer_state="keep", parts=PARTS[fragments],
        lost=[BAD],
    )  # fmt: skip
    assert_history(history, want)


def test_it_is_an_error_unless_told_otherwise():
    with pytest.raises(
        elche.NonFiniteError,
        match=rf"^train: loss, weight, parameters and model state of every device must be finite "
        rf"after its steps, but those of window 4 \(epoch 0, counts \(5, 2, 2\)\) were not: device "
        rf"1 \(.*\), microbatches {FIRST_OF_BAD} to .*\. Only the others were averaged; look at",
    ) as caught:
        train_on(elche.ParameterAveraging(), THREE, **poisoned())
    assert caught.value.microbatches == {1: range(FIRST_OF_BAD, FIRST_OF_BAD + 2)}


def test_windows_in_a_row_raise():
    rule = elche.ParameterAveraging()
    with pytest.raises(
        elche.NonFiniteError, match=r"^train: in 2 windows in a row a device was left out of .*"
    ):
        train_on(rule, [(2, 2)] * 9, nonfinite="skip", max_skips=2, **poisoned(range(4, 99, 4)))


@pytest.mark.parametrize("world", [1, 3])
def test_a_window_in_which_no_device_is_finite_changes_nothing(world):
    counts = [(2,) * world] * 4
    bad = range(2 * world, 4 * world)
    rule = elche.DiLoCo(outer=optax.sgd(**NESTEROV), optimizer_state="average")
    history, metrics, state, _ = train_on(rule, counts, nonfinite="skip", **poisoned(bad))
    for name in LEAVES:
        assert history[1][name].tobytes() == history[0][name].tobytes()
        assert history[2][name].tobytes() != history[1][name].tobytes()
    assert metrics[1]["share"].tolist() == [0.0] * world
    assert int(elche.unreplicate(state.step)) == 4
    assert int(elche.unreplicate(state.microbatches)) == 8 * world


@pytest.mark.slow  # test_the_report_says_what_is_sent has such a rule, and compares
def test_what_is_kept_apart_is_not_compared():
    """verify_every looks at what must be alike, and only at that."""
    config = elche.DDPConfig(verify_every=1)
    rule = elche.DiLoCo(outer=optax.sgd(0.5), fragments=2, compression="int8")
    train_on(rule, THREE[:4], config=config)


@pytest.mark.slow  # test_one_set_of_parameters_in_between_is_by_the_steps
def test_average_gives_one_set_of_parameters():
    rule = elche.DiLoCo(outer=optax.sgd(**NESTEROV), fragments=3)
    history, _, state, train = train_on(rule, THREE)
    got = jax.device_get(train.average(state))
    last = history[-1]
    # window 9 exchanged w; v was exchanged in 7 (counts since then: 8, 9), b in 8 (9)
    base = jax.device_get(elche.unreplicate(state.averaging.base))
    since = {"b": np.array(THREE[9]), "v": np.array(THREE[8]) + THREE[9]}
    np.testing.assert_allclose(got["w"], last["w"][0], rtol=1e-6)
    for at, name in enumerate(("b", "v")):
        share = since[name] / since[name].sum()
        differences = base[at] - last[name].astype(np.float64)
        want = base[at] - np.tensordot(share, differences, axes=1)
        np.testing.assert_allclose(got[name], want, rtol=1e-5)


@pytest.mark.slow  # test_ten_windows has such an average
@pytest.mark.parametrize("rule", [None, elche.ParameterAveraging()])
def test_average_of_replicas_is_one_of_them(rule):
    _, _, state, train = train_on(rule, THREE)
    for a, b in zip(
        jax.tree.leaves(train.average(state)), jax.tree.leaves(elche.unreplicate(state.params)),
        strict=True,
    ):  # fmt: skip
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# model state and optimizer state


def with_state(p, model_state, batch, rng):
    mean, var = batch["x"].mean(), batch["x"].var()
    key = jax.random.split(jax.random.wrap_key_data(model_state["key"]))[0]
    new = {
        "mean": 0.5 * model_state["mean"] + 0.5 * mean,
        "var": 0.5 * model_state["var"] + 0.5 * var,
        "steps": model_state["steps"] + 1,
        "key": jax.random.key_data(key),
    }
    return loss_fn(p, batch, rng), new


def test_every_leaf_of_model_state_has_its_rule():
    train = elche.build_train_step(
        with_state, TX, devices=jax.devices()[:2], averaging=elche.ParameterAveraging(),
        cadence=elche.Replay([(3, 1)]),
        merge={"mean": "pooled", "var": "pooled", "steps": "max", "key": "keep"},
    )  # fmt: skip
    keys = np.asarray(jax.random.key_data(jax.random.key(7)))
    state = train.init(params(), model_state={
        "mean": np.float32(0), "var": np.float32(1), "steps": np.int32(0), "key": keys,
    })  # fmt: skip
    for window in train.windows(data(), BATCH, shuffle=False):
        state, _ = train(state, window)
        break
    got = jax.device_get(state.model_state)
    mean, var, x = np.zeros(2), np.ones(2), data()["x"].astype(np.float64)
    for at, device in enumerate((0, 0, 0, 1)):
        rows = x[at * BATCH : (at + 1) * BATCH]
        mean[device] = 0.5 * mean[device] + 0.5 * rows.mean()
        var[device] = 0.5 * var[device] + 0.5 * rows.var()
    share = np.array([0.75, 0.25])
    pooled = share @ mean
    np.testing.assert_allclose(got["mean"], pooled, rtol=1e-5)
    np.testing.assert_allclose(got["var"], share @ (var + (mean - pooled) ** 2), rtol=1e-5)
    assert got["steps"].tolist() == [3, 3]
    key = jax.random.key(7)
    walked = [key]
    for _ in range(3):
        walked.append(jax.random.split(walked[-1])[0])
    for device, steps in enumerate((3, 1)):
        np.testing.assert_array_equal(got["key"][device], jax.random.key_data(walked[steps]))


def test_keep_is_no_rule_of_gradients():
    train = elche.build_train_step(with_state, TX, devices=jax.devices()[:2], merge="keep")
    with pytest.raises(ValueError, match=r"merge must be one of .*'first' for every .* got 'keep'"):
        train.init(params(), model_state={"mean": np.float32(0)})


def test_optimizer_states_are_averaged_leaf_by_leaf():
    """Adam's moments by weight, its counter the maximum, an infinity as it is."""
    tx = optax.chain(optax.scale_by_adam(), optax.contrib.reduce_on_plateau(), optax.scale(-0.01))
    _, _, state, _ = train_on(elche.ParameterAveraging(), [(3, 1)], tx=tx)
    adam, plateau, _ = jax.device_get(state.opt_state)

    @jax.jit
    def step(p, opt_state, batch):
        value, grads = jax.value_and_grad(loss_fn)(p, batch, None)
        updates, opt_state = tx.update(grads, opt_state, p, value=value)
        return optax.apply_updates(p, updates), opt_state

    moments = []
    for microbatches in (range(3), range(3, 4)):
        p, alone = params(), tx.init(params())
        for at in microbatches:
            piece = slice(at * BATCH, (at + 1) * BATCH)
            p, alone = step(p, alone, {n: leaf[piece] for n, leaf in data().items()})
        moments.append(jax.device_get(alone))
    assert adam.count.tolist() == [3, 3]
    for name in LEAVES:
        want = 0.75 * moments[0][0].mu[name] + 0.25 * moments[1][0].mu[name]
        np.testing.assert_allclose(adam.mu[name][0], want, rtol=1e-5)
    want = 0.75 * moments[0][1].best_value + 0.25 * moments[1][1].best_value
    np.testing.assert_allclose(plateau.best_value, want, rtol=1e-5)


def test_a_device_that_is_left_out_goes_on_from_the_model_state_it_had():
    """Also where each device keeps its own: a NaN in it would leave the device out for good."""
    poison = poisoned()

    def loss(p, model_state, batch, rng):
        value = poison["loss"](p, batch, rng)
        return value, {"mine": model_state["mean"] * 0 + value, "mean": model_state["mean"] + 1}

    train = elche.build_train_step(
        loss, TX, devices=jax.devices()[:3], averaging=elche.ParameterAveraging(),
        cadence=elche.Replay(THREE), nonfinite="skip",
        merge=lambda path, leaf: "keep" if "mine" in path else "mean",
    )  # fmt: skip
    start = {"mine": np.float32(0), "mean": np.float32(0)}
    state = train.init(params(), model_state=start)
    with train.windows(poison["rows"], BATCH, shuffle=False) as windows:
        for window in windows:
            before = np.asarray(state.model_state["mine"])
            state, _ = train(state, window)
            if window.index == BAD[0]:
                assert np.asarray(state.model_state["mine"])[BAD[1]] == before[BAD[1]]
            if window.index == 9:
                break
    assert train.left_out == (0, 1, 0)
    assert np.isfinite(np.asarray(state.model_state["mine"])).all()


@pytest.mark.parametrize("delay", [slow(0), 1])
def test_an_outer_optimizer_that_makes_no_number_is_noticed_and_changes_nothing(delay):
    def update(grads, state, params=None):
        return jax.tree.map(lambda g: jnp.full_like(g, jnp.nan), grads), state

    outer = optax.GradientTransformation(lambda p: optax.EmptyState(), update)
    train = elche.build_train_step(
        loss_fn, TX, devices=jax.devices()[:2], averaging=elche.DiLoCo(outer, delay=delay),
        cadence=elche.Replay([(2, 1)] * 9),
    )  # fmt: skip
    state = train.init(params())
    with (
        pytest.raises(elche.NonFiniteError, match=r"were not: (no device, but their|dev)"),
        train.windows(data(), BATCH) as windows,
    ):
        for window in windows:
            state, _ = train(state, window)
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(state.params))


def test_an_optimizer_state_that_is_not_finite_leaves_a_device_out():
    def update(grads, state, params=None):
        bad = jnp.where(grads["b"] > 1e3, jnp.inf, 0.0)
        return jax.tree.map(lambda g: -0.01 * jnp.tanh(g), grads), state + bad

    tx = optax.GradientTransformation(lambda p: jnp.float32(0), update)
    rows = data()
    rows["y"][BATCH * 9 : BATCH * 10] -= 1e4  # of device 0 in window 2
    history, _, state, train = train_on(
        elche.ParameterAveraging(), [(2, 2)] * 5, tx=tx, rows=rows, nonfinite="skip"
    )
    assert train.left_out == (1, 0)
    assert np.asarray(state.opt_state).tolist() == [0.0, 0.0]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(history))


@pytest.mark.parametrize(
    ("dtype", "counts"),
    [("bfloat16", [(2, 1)] * 4), slow("bfloat16", [(1,)] * 6), slow("float16", [(2, 1)] * 4),
     slow("float16", [(1,)] * 6)],
)  # fmt: skip
def test_parameters_of_16_bits_are_joined_in_float32(dtype, counts):
    """Bit for bit as ParameterAveraging, and on one device as plain training."""
    small, seen = jax.tree.map(lambda x: jnp.asarray(x, dtype), params()), []
    for rule in (
        elche.ParameterAveraging(optimizer_state="keep"), elche.DiLoCo(optax.sgd(1.0)),
    ):  # fmt: skip
        train = elche.build_train_step(
            loss_fn, optax.sgd(0.01), devices=jax.devices()[: len(counts[0])], averaging=rule,
            cadence=elche.Replay(counts),
        )  # fmt: skip
        state = train.init(small)
        for window in train.windows(data(), BATCH, shuffle=False):
            state, _ = train(state, window)
            if window.index == len(counts) - 1:
                break
        seen.append(jax.device_get(state.params))
    for a, b in zip(*map(jax.tree.leaves, seen), strict=True):
        assert a.dtype == dtype and a.tobytes() == b.tobytes()


def test_moments_of_16_bits_are_averaged_in_float32():
    """Gradients are the same on both devices, so that so are the moments, and fall by 300."""
    rows = {"g": np.where(np.arange(2 * 26) < 2, 1.0, 0.003).astype("float32")}
    moments = {}
    for how in ("keep", "average"):
        train = elche.build_train_step(
            lambda p, batch, rng: batch["g"].mean() * p["w"].astype("float32").sum(),
            optax.adam(1e-3, b1=0.5, b2=0.9), devices=jax.devices()[:2],
            averaging=elche.ParameterAveraging(optimizer_state=how),
            cadence=elche.Replay([(1, 1), (25, 25)]), guard=elche.NoGuard(),
        )  # fmt: skip
        state = train.init({"w": jnp.ones(2, "bfloat16")})
        with train.windows(rows, 1, shuffle=False) as windows:
            for window in windows:
                state, _ = train(state, window)
        moments[how] = np.asarray(state.opt_state[0].mu["w"].astype("float32"))
    np.testing.assert_allclose(moments["keep"], 0.003, rtol=0.02)
    np.testing.assert_array_equal(moments["average"], moments["keep"])


def test_microbatches_without_weight_are_no_steps():
    """A device that had none but such has no say in the average."""

    def loss(p, batch, rng):
        return elche.Weighted(loss_fn(p, batch, rng), batch["weight"].sum())

    rows = data()
    rows["weight"] = np.ones(len(rows["x"]), "float32")
    rows["weight"][2 * BATCH : 4 * BATCH] = 0  # all of device 1 in window 0
    rule, counts = elche.ParameterAveraging(), [(2, 2), (2, 2)]
    with jax.numpy_dtype_promotion("strict"):
        _, metrics, _, _ = train_on(rule, counts, loss=loss, rows=rows)
    assert [m["share"].tolist() for m in metrics] == [[1.0, 0.0], [0.5, 0.5]]


@pytest.mark.parametrize("compression", ["bfloat16", slow("int8")])
def test_compressed_parameters_of_two_dtypes(compression):
    train = elche.build_train_step(
        lambda p, batch, rng: (p["a"] - 1).astype("float64").sum() + p["b"].sum(), optax.sgd(0.125),
        devices=jax.devices()[:2], averaging=elche.ParameterAveraging(compression=compression),
        cadence=elche.Replay([(1, 1)]),
    )  # fmt: skip
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        state = train.init({"a": np.ones(3, "float32"), "b": np.ones(2, "float64")})
        for window in train.windows(np.zeros(4, "float32"), 2):
            state, metrics = train(state, window)
    assert metrics["finite"]
    assert {name: leaf.dtype.name for name, leaf in state.params.items()} == {
        "a": "float32",
        "b": "float64",
    }
    np.testing.assert_allclose(state.params["a"], np.full((2, 3), 0.875), rtol=1e-6)
    np.testing.assert_allclose(state.params["b"], np.full((2, 2), 0.875), rtol=1e-6)


@pytest.mark.parametrize(
    "rule",
    [slow(elche.ParameterAveraging(), id="plain"),
     pytest.param(elche.DiLoCo(optax.sgd(1.0), fragments=2), id="fragments"),
     slow(elche.DiLoCo(optax.sgd(1.0), delay=1), id="delay")],
)  # fmt: skip
def test_frozen_parameters_are_compared_whatever_the_rule(rule):
    train = elche.build_train_step(
        loss_fn, TX, devices=jax.devices()[:2], averaging=rule, cadence=elche.Replay([(1, 1)] * 4),
        config=elche.DDPConfig(verify_every=1), trainable={"b": True, "v": True, "w": False},
    )  # fmt: skip
    state = train.init(params())
    shards = [jax.device_put(np.full((1, 3), rank, "f"), d) for rank, d in enumerate(train.devices)]
    w = jax.make_array_from_single_device_arrays((2, 3), state.params["w"].sharding, shards)
    state = state.replace(params=state.params | {"w": w})
    with (
        pytest.raises(elche.ReplicaMismatch, match=r"\.params\['w'\] on .* differs"),
        train.windows(data(), BATCH) as windows,
    ):
        for window in windows:
            state, _ = train(state, window)


def test_another_model_after_average():
    train = elche.build_train_step(
        loss_fn, TX, devices=jax.devices()[:2], averaging=elche.DiLoCo(optax.sgd(1.0), fragments=2),
        trainable=lambda path, leaf: leaf.size > 1,
    )  # fmt: skip
    train.average(train.init(params()))
    other = {"b": np.ones(2, "f"), "v": np.float32(1), "w": np.ones(3, "f")}
    got = train.average(train.init(other))
    for name, leaf in other.items():
        np.testing.assert_array_equal(got[name], leaf)


@pytest.mark.parametrize(
    ("options", "want"),
    [({"fragments": 2, "compression": "int8"}, (6 + 4 * 3) / 2), slow({"fragments": 3}, 8),
     slow({"compression": "int8"}, 6 + 4 * 3)],
)  # fmt: skip
def test_the_report_says_what_is_sent(options, want):
    """Comparing replicas is none of it, and finds nothing in what is kept apart.

    Of averages `test_an_exponent_that_follows_a_schedule` looks at the report."""
    rule = elche.DiLoCo(optax.sgd(1.0), **options)
    config = elche.DDPConfig(verify_every=1)
    _, metrics, state, train = train_on(rule, [(1, 1)] * rule.fragments, config=config)
    if rule.fragments > 1:
        with pytest.raises(elche.ReplicaMismatch):
            elche.check_replicas(state.params)
    assert train.report().exchange_bytes == want
    assert np.mean([m["exchange_bytes"] for m in metrics]) == want


@pytest.mark.slow  # test_shares_of_weights_whose_sum_is_too_large
@pytest.mark.parametrize("exchange", ["device", "host"])
def test_weights_of_devices_whose_sum_is_too_large(exchange):
    class Large(elche.ParameterAveraging):
        def weigh(self, work):
            return work.steps * 0 + 3e38

    _, metrics, _, _ = train_on(
        Large(), [(2, 2)] * 2, config=elche.DDPConfig(exchange=exchange), nonfinite="raise"
    )
    assert [said["share"].tolist() for said in metrics] == [[0.5, 0.5]] * 2


@pytest.mark.parametrize("exchange", ["device", "host"])
def test_distances_of_parameters_that_become_much_smaller(exchange):
    """By a factor of 10,000 in a window; from those before it they could not be computed."""
    target = np.float32(1e-4) * (1 + np.array([-1, 1, -2, 2], "f") / 4)

    def loss(params, batch, rng):
        return (params["w"] * jax.lax.stop_gradient(params["w"] - batch["t"])).sum()

    train = elche.build_train_step(
        loss, optax.sgd(1.0), devices=jax.devices()[:4], averaging=elche.ParameterAveraging(),
        cadence=elche.Replay([(1,) * 4]), config=elche.DDPConfig(exchange=exchange),
    )  # fmt: skip
    state = train.init({"w": np.ones(3, "f")})
    with train.windows({"t": target}, 1, shuffle=False) as windows:
        state, metrics = train(state, next(windows))
    # the parameters keep 1e-7 of 1
    np.testing.assert_allclose(metrics["distance"], [0.25, 0.25, 0.5, 0.5], rtol=5e-3)
