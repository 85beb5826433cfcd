"""C1: the applied gradient is the weighted mean over all data of the window."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import slow
from models import Cnn, Script, assert_close, digits, host, run, scalar_loss, variables, vector_loss

import elche_jax as elche

COUNTS = [(4, 1, 2, 0), slow((1, 1, 1, 1)), slow((0, 0, 3, 1)), slow((40, 1, 1, 1))]


def in_order(start: int, count: int) -> dict[str, np.ndarray]:
    return {name: leaf[start : start + count] for name, leaf in digits().items()}


@pytest.mark.parametrize("counts", COUNTS)
def test_window_gradient_is_one_grad_over_the_data(counts, devices4):
    model = Cnn()
    params = variables(model)["params"]
    train = elche.build_train_step(
        scalar_loss(model), optax.sgd(1.0), devices=devices4, cadence=Script([counts])
    )
    state, _ = run(train, train.init(params), digits(), 8, windows=1, shuffle=False)
    applied = jax.tree.map(lambda a, b: a - b, params, host(state.params))
    whole = in_order(0, 8 * sum(counts))
    want = jax.jit(jax.grad(scalar_loss(model)))(params, whole, jax.random.key(0))
    assert_close(applied, want, rtol=2e-5, atol=2e-7)


def test_same_as_multisteps_on_one_device(devices4):
    """optax.MultiSteps averages microbatches alike: its weights are ours."""
    model, counts, windows = Cnn(), (3, 0, 4, 1), 5
    params = variables(model)["params"]
    train = elche.build_train_step(
        scalar_loss(model), optax.adam(1e-2), devices=devices4, cadence=Script([counts])
    )
    state, _ = run(train, train.init(params), digits(), 8, windows, shuffle=False)

    multi = optax.MultiSteps(optax.adam(1e-2), every_k_schedule=sum(counts))
    opt_state = multi.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        grads = jax.grad(scalar_loss(model))(params, batch, jax.random.key(0))
        updates, opt_state = multi.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    expected = params
    for i in range(windows * sum(counts)):
        expected, opt_state = step(expected, opt_state, in_order(8 * i, 8))
    assert_close(host(state.params), expected)


def test_linear_model_in_float64(devices4):
    """NumPy in float64, by the formula, for a vector loss with a ragged end."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(45, 3)), rng.normal(size=45)

    def loss_fn(params, batch, _):
        return (batch["x"] @ params["w"] - batch["y"]) ** 2

    train = elche.build_train_step(
        loss_fn, optax.sgd(0.05), devices=devices4, cadence=Script([(2, 1, 0, 1)])
    )
    data = {"x": x.astype("float32"), "y": y.astype("float32")}
    state = train.init({"w": np.zeros(3, "float32")})
    state, used = run(train, state, data, 4, shuffle=False, drop_last=False)
    w, at = np.zeros(3), 0
    for examples in (16, 16, 13):
        part, target = x[at : at + examples], y[at : at + examples]
        w -= 0.05 * 2 * part.T @ (part @ w - target) / examples
        at += examples
    assert [window.examples for window in used] == [16, 16, 13]
    np.testing.assert_allclose(host(state.params)["w"], w, rtol=1e-5)


def token_data() -> dict[str, np.ndarray]:
    """Sequences of 1 to 30 valid tokens, microbatches of very different weight."""
    rng = np.random.default_rng(3)
    lengths = np.sort(rng.integers(1, 31, size=64))
    mask = (np.arange(30) < lengths[:, None]).astype("float32")
    return {"x": rng.normal(size=(64, 30)).astype("float32"), "mask": mask}


def token_loss(params, batch):
    each = (batch["x"] * params["w"] - 1.0 + params["b"]) ** 2
    return (each * batch["mask"]).sum(), batch["mask"].sum()


def test_weight_is_the_number_of_tokens(devices4):
    def loss_fn(params, batch, _):
        total, tokens = token_loss(params, batch)
        return elche.Weighted(total / tokens, tokens)

    params = {"w": np.float32(0.3) * np.ones(30, "float32"), "b": np.zeros((), "float32")}
    train = elche.build_train_step(
        loss_fn, optax.sgd(1.0), devices=devices4, cadence=Script([(5, 2, 1, 0)])
    )
    state, _ = run(train, train.init(params), token_data(), 8, shuffle=False)
    applied = jax.tree.map(lambda a, b: a - b, params, host(state.params))

    def one_big_batch(params):
        total, tokens = token_loss(params, token_data())
        return total / tokens

    assert_close(applied, jax.jit(jax.grad(one_big_batch))(params), rtol=1e-5, atol=1e-6)
    # the average of the microbatches' averages is another number: the test can tell
    data = token_data()
    blocks = [{k: v[i : i + 8] for k, v in data.items()} for i in range(0, 64, 8)]
    mean_of = jax.jit(jax.grad(lambda p, b: jnp.divide(*token_loss(p, b))))
    means = [mean_of(params, block) for block in blocks]
    wrong = sum(mean["b"] for mean in means) / len(means)
    assert abs(wrong - applied["b"]) > 1e-3


def test_weight_zero_contributes_nothing(devices4):
    """A microbatch without a valid token has a loss of 0 / 0."""

    def loss_fn(params, batch, _):
        total, tokens = token_loss(params, batch)
        return elche.Weighted(total / tokens, tokens)

    data = token_data()
    data["mask"][8:24] = 0.0
    params = {"w": np.ones(30, "float32"), "b": np.zeros((), "float32")}
    train = elche.build_train_step(
        loss_fn, optax.sgd(1.0), devices=devices4, cadence=Script([(1, 2, 3, 2)])
    )
    state, _ = run(train, train.init(params), data, 8, shuffle=False)
    applied = jax.tree.map(lambda a, b: a - b, params, host(state.params))

    def one_big_batch(params):
        total, tokens = token_loss(params, data)
        return total / tokens

    assert_close(applied, jax.jit(jax.grad(one_big_batch))(params), rtol=1e-5, atol=1e-6)


def test_weight_zero_leaves_the_model_state(devices4):
    """0 / 0 statistics of an empty microbatch reach neither state nor parameters."""

    def loss_fn(params, model_state, batch, _):
        total, tokens = token_loss(params, batch)
        return elche.Weighted(total / tokens, tokens), {"mean": total / tokens}

    data = token_data()
    data["mask"][8:16] = 0.0
    params = {"w": np.ones(30, "float32"), "b": np.zeros((), "float32")}
    train = elche.build_train_step(
        loss_fn, optax.sgd(0.0), devices=devices4[:2], cadence=Script([(2, 1)])
    )
    state = train.init(params, model_state={"mean": np.float32(0)})
    small = {name: leaf[:24] for name, leaf in data.items()}
    state, _ = run(train, state, small, 8, shuffle=False)
    parts = [token_loss(params, {k: v[i : i + 8] for k, v in data.items()}) for i in (0, 16)]
    want = sum(float(total) for total, _ in parts) / sum(float(tokens) for _, tokens in parts)
    np.testing.assert_allclose(host(state.model_state)["mean"], want, rtol=1e-5)


def test_a_negative_weight_is_not_finite(devices4):
    def loss_fn(params, batch, _):
        return elche.Weighted((params["w"] * batch["x"]).sum(), batch["x"].sum())

    train = elche.build_train_step(
        loss_fn, optax.sgd(1.0), devices=devices4[:2], cadence=Script([(1, 1)])
    )
    state = train.init({"w": np.ones(1, "float32")})
    with pytest.raises(elche.NonFiniteError, match="window 0"):
        run(train, state, {"x": np.array([[3.0], [-1.0]], "float32")}, 1, shuffle=False)


def test_metrics_are_weighted_like_the_gradient(devices4):
    model = Cnn()

    def loss_fn(params, batch, rng):
        losses = vector_loss(model)(params, batch, rng)
        return losses, {"hardest": losses.max(), "squared": losses**2}

    params = variables(model)["params"]
    train = elche.build_train_step(
        loss_fn, optax.sgd(0.0), devices=devices4, cadence=Script([(3, 1, 1, 2)]), has_aux=True
    )
    state = train.init(params)
    data = in_order(0, 52)
    for window in train.windows(data, 8, shuffle=False, drop_last=False):
        state, metrics = train(state, window)
    losses = jax.jit(vector_loss(model))(params, data, jax.random.key(0))
    losses = np.asarray(losses, np.float64)
    ends = [*range(0, 52, 8), 52]
    blocks = [losses[a:b] for a, b in pairwise(ends)]
    hardest = sum(block.max() * len(block) for block in blocks) / 52
    np.testing.assert_allclose(metrics["loss"], losses.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["squared"], (losses**2).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["weight"], 52)
    np.testing.assert_allclose(metrics["hardest"], hardest, rtol=1e-5)


def test_scalar_loss_with_a_mask_is_exact_at_the_ragged_end(devices4):
    model = Cnn()

    def loss_fn(params, batch, rng):
        losses = vector_loss(model)(params, batch, rng)
        return (losses * batch["mask"]).sum() / batch["mask"].sum()

    params, data = variables(model)["params"], in_order(0, 52)
    train = elche.build_train_step(
        loss_fn, optax.sgd(1.0), devices=devices4, cadence=Script([(3, 1, 1, 2)])
    )
    state, _ = run(
        train, train.init(params), data, 8, shuffle=False, drop_last=False, mask_key="mask"
    )
    applied = jax.tree.map(lambda a, b: a - b, params, host(state.params))
    want = jax.jit(jax.grad(scalar_loss(model)))(params, data, jax.random.key(0))
    assert_close(applied, want, rtol=2e-5, atol=2e-7)


def test_bfloat16_parameters_accumulate_in_float32(devices4):
    """256 gradients of 1/256 on top of 1: a bfloat16 sum would stay at 1."""

    def loss_fn(params, batch, _):
        return (params["w"] * batch["x"]).sum().astype(jnp.float32)

    x = np.full((512, 1), 2.0**-8, "float32")
    x[0] = 1.0
    train = elche.build_train_step(
        loss_fn, optax.sgd(1.0), devices=devices4[:2], cadence=Script([(256, 256)])
    )
    state = train.init({"w": np.zeros(1, jnp.bfloat16)})
    state, _ = run(train, state, {"x": x.astype(jnp.bfloat16)}, 1, shuffle=False)
    want = x.astype(np.float64).mean()
    got = float(host(state.params)["w"][0])
    assert abs(-got - want) < 2**-8 * want
    in_bfloat16 = jnp.bfloat16(0)
    for value in x[:, 0]:
        in_bfloat16 = in_bfloat16 + jnp.bfloat16(value)
    assert abs(float(in_bfloat16) / 512 - want) > 0.3 * want


def test_clip_per_device_before_the_exchange(devices4):
    """Each device's mean gradient is clipped, then weighted; by hand in NumPy."""
    x = np.array([[3.0], [5.0], [0.5], [0.1]], "float32")

    def loss_fn(params, batch, _):
        return (params["w"] * batch["x"]).sum()

    train = elche.build_train_step(
        loss_fn, optax.sgd(1.0), devices=devices4[:2], cadence=Script([(2, 2)]),
        config=elche.DDPConfig(max_grad_norm=1.0),
    )  # fmt: skip
    state = train.init({"w": np.zeros(1, "float32")})
    state, _ = run(train, state, {"x": x}, 1, shuffle=False)
    clipped = (2 * 1.0 + 2 * 0.3) / 4
    np.testing.assert_allclose(host(state.params)["w"], [-clipped], rtol=1e-6)


@pytest.mark.parametrize("form", ["vector", "weighted"])
def test_half_precision_with_large_weights(form):
    """The weight multiplies in float32: 4096 tokens times a gradient of 100 is no float16."""

    def loss_fn(params, batch, rng):
        losses = batch["x"].astype(jnp.float16) * params["w"]
        return losses if form == "vector" else elche.Weighted(losses.mean(), 4096)

    x = np.random.default_rng(0).uniform(50, 150, (8, 1024)).astype("float32")
    train = elche.build_train_step(
        loss_fn, optax.sgd(1.0), devices=jax.devices()[:2], cadence=elche.Replay([(5, 3)])
    )
    state = train.init({"w": np.float16(0)})
    for window in train.windows({"x": x.reshape(-1)}, 1024):
        state, _ = train(state, window)
    got = float(elche.unreplicate(state.params)["w"])
    assert got == pytest.approx(-x.astype("float64").mean(), rel=2e-3)


def test_an_optimizer_that_asks_for_the_loss():
    """Polyak's step size, computed by hand from the window's mean loss and gradient."""

    def loss_fn(params, batch, rng):
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(24, 3)).astype("float32"), "y": rng.normal(size=24)}
    train = elche.build_train_step(
        loss_fn, optax.polyak_sgd(max_learning_rate=10.0), devices=jax.devices()[:2],
        cadence=elche.Replay([(4, 2)]),
    )  # fmt: skip
    state = train.init({"w": np.ones(3, "float32")})
    for window in train.windows(data, 4):
        state, _ = train(state, window)
    x, w = data["x"].astype("float64"), np.ones(3)
    error = x @ w - data["y"]
    grad = 2 * x.T @ error / len(x)
    want = w - np.mean(error**2) / np.sum(grad**2) * grad
    np.testing.assert_allclose(elche.unreplicate(state.params)["w"], want, rtol=1e-4)


def test_an_optimizer_with_a_typed_key_in_its_state():
    def loss_fn(params, batch, rng):
        return jnp.mean(batch["x"] @ params["w"])

    tx = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(5)), optax.sgd(0.1))
    train = elche.build_train_step(loss_fn, tx, devices=jax.devices()[:2])
    params = {"w": np.ones(3, "float32")}
    state = train.init(params)
    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
    for window in train.windows({"x": x}, 4, shuffle=False):
        state, _ = train(state, window)
    elche.check_replicas(state)
    want, opt, update = params, tx.init(params), jax.jit(tx.update)
    for start in (0, 8):
        grads = {"w": jnp.asarray(x[start : start + 8].mean(axis=0))}
        updates, opt = update(grads, opt, want)
        want = optax.apply_updates(want, updates)
    np.testing.assert_allclose(elche.unreplicate(state.params)["w"], want["w"], rtol=1e-5)
