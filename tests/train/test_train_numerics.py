"""Numerics that are easily got wrong: weights, clipping, precision, merged state."""

from functools import cache
from itertools import pairwise

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from marks import slow, table
from models import Script, digits

import elche_jax as elche

# -- tokens ---------------------------------------------------------------------------

VOCABULARY, LENGTH = 17, 24


class CharModel(nn.Module):
    """A character model: embedding, gated mixing of the past, logits of the next one."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, 16)(tokens)
        past = jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1)[:, None]
        x = nn.Dense(32)(jnp.concatenate([x, past], axis=-1))
        return nn.Dense(VOCABULARY)(nn.gelu(x))


MODEL = CharModel()


def texts(count, seed=0):
    """Sentences of 2 to 24 characters; those at the end are much the longer."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, VOCABULARY, size=(count, LENGTH + 1)).astype("int32")
    lengths = np.where(np.arange(count) < count * 3 // 4, rng.integers(2, 5, count), LENGTH)
    mask = np.arange(LENGTH) < lengths[:, None]
    return {"tokens": tokens, "mask": mask.astype("float32")}


def token_losses(params, batch):
    logits = MODEL.apply(params, batch["tokens"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])


def mean_over_tokens(params, batch):
    return (token_losses(params, batch) * batch["mask"]).sum() / batch["mask"].sum()


def by_tokens(params, batch, rng):
    return elche.Weighted(mean_over_tokens(params, batch), batch["mask"].sum())


def by_microbatch(params, batch, rng):
    """The known error: an average of averages."""
    return mean_over_tokens(params, batch)


def trained(loss, counts, steps=3):
    data = texts(4 * sum(counts) * steps)
    order = np.random.default_rng(1).permutation(len(data["mask"]))
    data = {name: leaf[order] for name, leaf in data.items()}
    params = jax.device_get(jax.jit(MODEL.init)(jax.random.key(0), data["tokens"][:1, :-1]))
    train = elche.build_train_step(
        loss, optax.sgd(1.0), devices=jax.devices()[: len(counts)], cadence=Script([counts])
    )
    state, losses = train.init(params), []
    for window in train.windows(data, 4, shuffle=False):
        state, metrics = train(state, window)
        losses.append((float(metrics["loss"]), float(metrics["weight"])))
    return data, params, jax.device_get(elche.unreplicate(state.params)), losses


def big_batches(data, params, steps, size):
    """One device, one batch per step, the mean over all its tokens."""
    losses, gradient = [], jax.jit(jax.value_and_grad(mean_over_tokens))
    for at in range(0, steps * size, size):
        batch = {name: leaf[at : at + size] for name, leaf in data.items()}
        loss, grads = gradient(params, batch)
        params = jax.tree.map(lambda p, g: p - g, params, grads)
        losses.append((float(loss), float(batch["mask"].sum())))
    return params, losses


@pytest.mark.parametrize("counts", [slow((3, 1, 2)), slow((1, 1, 1)), (0, 5, 1)])
@pytest.mark.slow  # test_weight_is_the_number_of_tokens
def test_token_weights_are_one_big_batch(counts):
    data, first, got, losses = trained(by_tokens, counts)
    want, expected = big_batches(data, first, 3, 4 * sum(counts))
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow  # what the comparison of test_token_weights_are_one_big_batch is worth
def test_the_average_of_averages_is_not():
    """The same comparison tells the known error from the right result."""
    data, first, got, _ = trained(by_microbatch, (3, 1, 2))
    want, _ = big_batches(data, first, 3, 24)
    apart = [
        np.linalg.norm(a - b) / np.linalg.norm(b - c)
        for a, b, c in zip(*map(jax.tree.leaves, (got, want, first)), strict=True)
    ]
    assert min(apart) > 0.1  # of the way gone, in every leaf


# -- clipping -------------------------------------------------------------------------

RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(64, 3)), RNG.normal(size=64)
X[:24] *= 30  # the first device's share has by far the larger gradient


def linear_loss(params, batch, rng):
    return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()


def gradient(first, last):
    x, y = X[first:last], Y[first:last]
    return 2 * x.T @ (x @ np.zeros(3) - y) / (last - first)


def one_window(config=None, tx=None):
    train = elche.build_train_step(
        linear_loss, tx or optax.sgd(1.0), devices=jax.devices()[:2], config=config,
        cadence=Script([(3, 5)]),
    )  # fmt: skip
    state = train.init({"w": np.zeros(3, "f")})
    data = {"x": X.astype("f"), "y": Y.astype("f")}
    for window in train.windows(data, 8, shuffle=False):
        state, _ = train(state, window)
    return -np.asarray(elche.unreplicate(state.params)["w"])


def clipped(grad, norm):
    return grad * min(1.0, norm / np.linalg.norm(grad))


def test_clipping_per_device_and_of_the_combined_gradient():
    """Both in NumPy float64: before the exchange and after it are different things."""
    devices = gradient(0, 24), gradient(24, 64)
    before = (3 * clipped(devices[0], 1.0) + 5 * clipped(devices[1], 1.0)) / 8
    after = clipped((3 * devices[0] + 5 * devices[1]) / 8, 1.0)
    np.testing.assert_allclose(one_window(elche.DDPConfig(max_grad_norm=1.0)), before, rtol=1e-5)
    combined = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    np.testing.assert_allclose(one_window(tx=combined), after, rtol=1e-5)
    assert np.linalg.norm(before) < 0.9 < 0.999 < np.linalg.norm(after)


@pytest.mark.parametrize("exchange", ["auto", "host"])
def test_every_local_step_is_clipped(exchange):
    """Each device's own steps in NumPy float64, and their average by the number of steps."""
    train = elche.build_train_step(
        linear_loss, optax.sgd(0.1), devices=jax.devices()[:2], cadence=Script([(3, 5)]),
        averaging=elche.ParameterAveraging(), max_grad_norm=1.0,
        exchange=elche.HostExchange() if exchange == "host" else None,
    )  # fmt: skip
    state = train.init({"w": np.zeros(3, "f")})
    data = {"x": X.astype("f"), "y": Y.astype("f")}
    for window in train.windows(data, 8, shuffle=False):
        state, _ = train(state, window)
    ends, free = [], []
    for first, steps in ((0, 3), (24, 5)):
        w, largest = np.zeros(3), 0.0
        for start in range(first, first + 8 * steps, 8):
            x, y = X[start : start + 8], Y[start : start + 8]
            grad = 2 * x.T @ (x @ w - y) / 8
            largest = max(largest, np.linalg.norm(grad))
            w = w - 0.1 * clipped(grad, 1.0)
        ends.append(w)
        free.append(largest)
    want = (3 * ends[0] + 5 * ends[1]) / 8
    got = np.asarray(elche.unreplicate(state.params)["w"])
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert min(free) > 1.0  # both had something to clip


WIDE = 800  # columns of three numbers: more than 8 KiB


def wide_loss(params, batch, rng):
    wide = (batch["x"] @ params["wide"]).sum(-1) / WIDE**0.5
    out = batch["x"] @ params["w"] + params["bias"] + wide + params["none"].sum()
    return ((out - batch["y"]) ** 2).mean()


def test_small_arrays_are_summed_together_and_clipped_with_the_rest():
    """In one buffer per device, others alone; the norm that is clipped is that of all."""
    train = elche.build_train_step(
        wide_loss, optax.sgd(1.0), devices=jax.devices()[:2], cadence=Script([(3, 5)]),
        config=elche.DDPConfig(max_grad_norm=1.0),
    )  # fmt: skip
    zeros = {"w": (3,), "bias": (), "wide": (3, WIDE), "none": (0, 2)}
    state = train.init({name: np.zeros(shape, "f") for name, shape in zeros.items()})
    data = {"x": X.astype("f"), "y": Y.astype("f")}
    with train.windows(data, 8, shuffle=False) as windows:
        for window in windows:
            state, _ = train(state, window)
        (runner,) = train._runners._runners.values()
        assert [sums.shape for sums in runner.sums.take().own.grads] == [(2, 3, WIDE), (2, 4)]

    def numpy(first, last):
        w, bias = gradient(first, last), -2 * Y[first:last].mean()
        wide = np.repeat(w / WIDE**0.5, WIDE)
        return clipped(np.concatenate([w, [bias], wide]), 1.0)

    want = (3 * numpy(0, 24) + 5 * numpy(24, 64)) / 8
    params = elche.unreplicate(state.params)
    got = np.concatenate([np.ravel(params[name]) for name in ("w", "bias", "wide")])
    np.testing.assert_allclose(-got, want, rtol=1e-5, atol=1e-7)


# -- precision ------------------------------------------------------------------------


def test_clipped_gradients_keep_the_dtypes_of_their_parameters():
    """The norm of gradients of two dtypes has the wider one; a pending gradient its own."""

    def loss(params, batch, rng):
        out = batch["x"].astype("float32") @ params["w"]
        return out.mean().astype("float64") + params["wide"].sum()

    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        train = elche.build_train_step(
            loss, optax.sgd(1.0), devices=jax.devices()[:2],
            cadence=elche.Replay([(3, 1)] * 2),
            averaging=elche.MeanGradient(delay=1), config=elche.DDPConfig(max_grad_norm=1.0),
        )  # fmt: skip
        state = train.init({"w": np.zeros(3, "f"), "wide": np.zeros(2)})
        for window in train.windows({"x": X, "y": Y}, 8, shuffle=False):
            state, metrics = train(state, window)
        (pending,) = state.averaging.pending
    assert metrics["finite"]
    assert [leaf.dtype.name for leaf in pending.progress] == ["float32", "float64"]


def test_a_window_without_the_digits_that_the_state_has():
    train = elche.build_train_step(linear_loss, optax.sgd(0.1), devices=jax.devices()[:2])
    with jax.enable_x64(True):
        train.init({"w": np.zeros(3), "wide": np.zeros(2)})
    message = (
        r"^TrainStep.windows: state must have a dtype that JAX has enabled, got float64 in leaf "
        r"\.params\['w'\]\. Train with jax_enable_x64 as it was at TrainStep\.init\.$"
    )
    with pytest.raises(ValueError, match=message):
        train.windows({"x": X, "y": Y}, 8)


def squares(params, batch):
    return (batch["x"] @ params["w"] + params["frozen"] - batch["y"]) ** 2


FORMS = {
    "scalar": lambda p, batch, rng: squares(p, batch).mean(),
    "vector": lambda p, batch, rng: squares(p, batch),
    "weighted": lambda p, batch, rng: elche.Weighted(
        (squares(p, batch) * batch["weight"]).sum() / batch["weight"].sum(), batch["weight"].sum()
    ),
}


@table(form=FORMS, options=[{}, {"microbatch_split": 2}, {"clip": 1.0}])
def test_float64_parameters_get_float64_gradients(form, options):
    """Two steps by hand, with uneven counts; the last of the vectors is not full."""
    options = dict(options)
    norm = options.pop("clip", None)
    size = 61 if form == "vector" else 64
    data = {"x": X[:size] / 10, "y": Y[:size], "weight": RNG.integers(1, 9, size)}
    data = {name: rows.astype("d") for name, rows in data.items()}
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        train = elche.build_train_step(
            FORMS[form], optax.sgd(0.1), devices=jax.devices()[:2],
            cadence=elche.Replay([(3, 1)] * 2),
            trainable=lambda path, leaf: "frozen" not in path,
            config=elche.DDPConfig(max_grad_norm=norm), **options,
        )  # fmt: skip
        state = train.init({"w": np.full(3, np.pi), "frozen": np.float64(np.e)})
        with train.windows(data, 8, shuffle=False, drop_last=False) as windows:
            for window in windows:
                assert window.counts == (3, 1)
                state, _ = train(state, window)
    got, w = np.asarray(state.params["w"]), np.full(3, np.pi)
    assert got.dtype == np.float64
    for begin in (0, 32):
        sums, total = np.zeros(3), 0.0
        for rows in (slice(begin, begin + 24), slice(begin + 24, min(begin + 32, size))):
            x, y, weight = (data[name][rows] for name in ("x", "y", "weight"))
            if form != "weighted":
                weight = np.ones(len(x))
            own = 2 * x.T @ (weight * (x @ w + np.e - y)) / weight.sum()
            sums += weight.sum() * (own if norm is None else clipped(own, norm))
            total += weight.sum()
        w = w - 0.1 * sums / total
    np.testing.assert_allclose(got, [w, w], rtol=1e-13)


def digit_loss(seen):
    def loss_fn(params, batch, rng):
        seen.update(jax.tree.map(lambda leaf: leaf.dtype.name, {"p": params, "b": batch}))
        x = batch["image"].reshape(len(batch["image"]), -1)
        hidden = nn.relu(x @ params["a"])
        logits = (hidden @ params["b"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])

    return loss_fn


def digit_params():
    rng = np.random.default_rng(0)
    return {
        "a": (rng.normal(size=(64, 32)) / 8).astype("f"),
        "b": (rng.normal(size=(32, 10)) / 6).astype("f"),
    }


def train_digits(epochs=3, world=2, seen=None, **options):
    config = elche.DDPConfig(**options.pop("config", {}))
    train = elche.build_train_step(
        digit_loss({} if seen is None else seen), optax.adam(3e-3), cadence=elche.FixedTotal(4),
        devices=jax.devices()[:world], config=config, **options,
    )  # fmt: skip
    state = train.init(digit_params())
    history = []
    for window in train.windows(digits(), 16, epochs=epochs):
        state, metrics = train(state, window)
        history.append(metrics)
    return train, state, [jax.device_get(m) for m in history]


@cache
def whole_accuracy():
    """Where nothing is rounded."""
    return accuracy(train_digits()[1])


def accuracy(state):
    evaluate = elche.build_eval_step(
        lambda p, b: {"hit": (nn.relu(b["image"].reshape(-1, 64) @ p["a"]) @ p["b"]).argmax(-1)
                      == b["label"]},
        devices=jax.devices()[:2],
    )  # fmt: skip
    return evaluate(elche.unreplicate(state.params), digits(), 64)["hit"]


@pytest.mark.slow  # test_a_window_in_bfloat16_is_the_float32_sum_of_its_microbatches
def test_bfloat16_compute_keeps_float32_masters():
    """Every window's update is that of the bfloat16 gradient, summed in float32."""
    seen = {}
    train, state, history = train_digits(seen=seen, config={"compute_dtype": "bfloat16"})
    assert seen == {
        "p": {"a": "bfloat16", "b": "bfloat16"}, "b": {"image": "bfloat16", "label": "int32"},
    }  # fmt: skip
    kinds = {leaf.dtype.name for leaf in jax.tree.leaves((state.params, state.opt_state[0].mu))}
    assert kinds == {"float32"}
    sums = next(iter(train._runners._runners.values())).sums.take().own
    assert {leaf.dtype.name for leaf in jax.tree.leaves(sums)} == {"float32"}
    assert accuracy(state) > whole_accuracy() - 0.02 > 0.85
    assert np.mean([m["loss"] for m in history[-5:]]) < 0.5 * history[0]["loss"]


def test_a_window_in_bfloat16_is_the_float32_sum_of_its_microbatches():
    """Against one gradient per microbatch in bfloat16, cast and summed by NumPy."""
    half = elche.DDPConfig(compute_dtype="bfloat16")
    loss = digit_loss({})
    train = elche.build_train_step(
        loss, optax.sgd(1.0), devices=jax.devices()[:2], config=half, cadence=Script([(5, 3)])
    )
    params = digit_params()
    state = train.init(params)
    data = {name: leaf[:128] for name, leaf in digits().items()}
    for window in train.windows(data, 16, shuffle=False):
        state, _ = train(state, window)

    @jax.jit
    def grad(batch):
        def low(params):
            narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
            batch16 = {**batch, "image": batch["image"].astype(jnp.bfloat16)}
            return loss(narrow, batch16, None).mean()

        return jax.grad(low)(params)

    parts = [grad({k: v[i : i + 16] for k, v in data.items()}) for i in range(0, 128, 16)]
    for name, leaf in params.items():
        assert parts[0][name].dtype == jnp.float32
        mean = np.mean([np.asarray(part[name], np.float64) for part in parts], axis=0)
        got = leaf - np.asarray(elche.unreplicate(state.params)[name])
        np.testing.assert_allclose(got, mean, rtol=1e-3, atol=2e-6)


@pytest.mark.slow  # test_the_scale_follows_flax_step_by_step and test_a_scale_keeps_small_gradients
@pytest.mark.parametrize("scale", [64.0, DynamicScale(scale=64.0)])
def test_the_loss_that_is_reported_is_not_scaled(scale):
    plain, scaled = (train_digits(epochs=1, loss_scale=s)[2] for s in (None, scale))
    np.testing.assert_allclose([m["loss"] for m in scaled], [m["loss"] for m in plain], rtol=1e-5)


def tiny_loss(params, batch, rng):
    """In float16 its gradient, 1e-9 and less, is zero: the numbers end at 6e-8."""
    return (batch["x"] * params["w"] * batch["small"] * batch["small"]).mean()


@pytest.mark.parametrize("world", [1, slow(2)])
def test_a_scale_keeps_small_gradients(world):
    data = {"x": np.linspace(0.1, 0.5, 64).astype("f"), "small": np.full(64, 2e-4, "f")}

    def moved(**options):
        train = elche.build_train_step(
            tiny_loss, optax.sgd(1e8), devices=jax.devices()[:world],
            config=elche.DDPConfig(compute_dtype="float16"), cadence=elche.FixedTotal(4), **options,
        )  # fmt: skip
        state = train.init({"w": np.zeros((), "f")})
        for window in train.windows(data, 16, shuffle=False):
            state, metrics = train(state, window)
        return float(elche.unreplicate(state.params)["w"]), metrics

    want = -1e8 * 4e-8 * data["x"].mean()
    assert moved()[0] == 0
    assert moved(loss_scale=2.0**14)[0] == pytest.approx(want, rel=1e-2)
    got, metrics = moved(loss_scale=DynamicScale(scale=2.0**14))
    assert got == pytest.approx(want, rel=1e-2)
    assert metrics["loss_scale"] == 2.0**14


@pytest.mark.slow  # test_the_scale_follows_flax_step_by_step, and the test in float16 above
def test_a_dynamic_scale_is_found_and_training_goes_on():
    """From far too high: windows are dropped, the scale halved each time, then all is well."""
    scale = DynamicScale(scale=2.0**24, growth_interval=20)
    train, state, history = train_digits(
        config={"compute_dtype": "float16"}, loss_scale=scale, epochs=4
    )
    dropped = [m["loss_scale"] for m in history if not m["finite"]]
    assert train.skipped == len(dropped) >= 3
    first = [2.0**24 / 2**n for n in range(len(dropped))][:3]
    assert dropped[:3] == first
    scales = [m["loss_scale"] for m in history]
    assert max(b / a for a, b in pairwise(scales)) == 2.0  # it grows again
    assert accuracy(state) > 0.85
    elche.check_replicas(state)
    kept = elche.unreplicate(state.loss_scale)
    assert float(kept.scale) in (scales[-1], 2 * scales[-1], scales[-1] / 2)
    assert (kept.growth_interval, kept.fin_steps.dtype) == (20, jnp.int32)


def test_the_scale_follows_flax_step_by_step():
    """The same overflow pattern through Flax's own `value_and_grad`."""
    scale = DynamicScale(scale=8.0, growth_interval=2)
    finite = [1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 1]
    data = {"x": np.repeat(np.where(finite, 1.0, np.inf), 2).astype("f")}
    train = elche.build_train_step(
        lambda p, b, rng: (b["x"] * p["w"]).mean(), optax.sgd(0.0), devices=jax.devices()[:2],
        loss_scale=scale, nonfinite="skip",
    )  # fmt: skip
    state, got, want = train.init({"w": np.ones((), "f")}), [], []

    @jax.jit
    def stepped(scale, bad):
        return scale.value_and_grad(lambda w: w * bad)(jnp.float32(1)).dynamic_scale

    for window, fine in zip(train.windows(data, 1, shuffle=False), finite, strict=True):
        want.append((float(scale.scale), bool(fine)))
        scale = stepped(scale, np.float32(1.0 if fine else np.inf))
        state, metrics = train(state, window)
        got.append((float(metrics["loss_scale"]), bool(metrics["finite"])))
        assert metrics["loss"] == (1.0 if fine else np.inf), "it is reported without the scale"
    assert got == want
    assert len({s for s, _ in want}) > 2


def test_a_scale_that_falls_for_ever_raises():
    data = {"x": np.full(64, np.nan, "f")}
    train = elche.build_train_step(
        lambda p, b, rng: (b["x"] * p["w"]).mean(), optax.sgd(0.1), devices=jax.devices()[:2],
        loss_scale=DynamicScale(), max_skips=5,
    )  # fmt: skip
    state = train.init({"w": np.ones((), "f")})
    with pytest.raises(elche.NonFiniteError, match="train: 5 windows in a row were"):
        for window in train.windows(data, 2):
            state, _ = train(state, window)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss_scale": 0}, ValueError, "loss_scale must be above 0, got 0"),
        ({"loss_scale": float("inf")}, ValueError, "loss_scale must be finite, got inf"),
        ({"loss_scale": "dynamic"}, TypeError, "must be a number or a .*DynamicScale, got str"),
        ({"loss_scale": DynamicScale(), "nonfinite": "ignore"}, ValueError,
         "nonfinite must be 'raise' or 'skip' with a dynamic loss_scale, .* got 'ignore'"),
    ],
)  # fmt: skip
def test_scales_that_are_none(options, error, message):
    with pytest.raises(error, match=f"^build_train_step: .*{message}"):
        elche.build_train_step(tiny_loss, optax.sgd(0.1), **options)


def test_a_metric_of_the_scales_name():
    train = elche.build_train_step(
        lambda p, b, rng: (b["x"].mean() * p["w"], {"loss_scale": b["x"].mean()}), optax.sgd(0.1),
        devices=jax.devices()[:2], loss_scale=DynamicScale(), has_aux=True,
    )  # fmt: skip
    train.init({"w": np.ones((), "f")})
    with pytest.raises(TypeError, match="aux must not use the name 'loss_scale', which every"):
        train.windows({"x": np.ones(8, "f")}, 2)


@pytest.mark.parametrize("knob", ["compute_dtype", "exchange_dtype"])
@pytest.mark.parametrize(
    ("dtype", "got"),
    [
        ("int8", "'int8'"),
        (jnp.int8, "'int8'"),
        (np.dtype("f8"), "'float64'"),
        (("f4", -1), r"\('f4', -1\)"),
        ("bf16", "'bf16'"),
        ([], r"\[\]"),
    ],
)
def test_types_that_are_none(knob, dtype, got):
    with pytest.raises(ValueError, match=rf"^DDPConfig: {knob} must be one of .*, got {got}\.$"):
        elche.DDPConfig(**{knob: dtype})


def test_a_dtype_is_as_good_as_its_name():
    named = elche.DDPConfig(compute_dtype="bfloat16", exchange_dtype="bfloat16")
    given = elche.DDPConfig(compute_dtype=jnp.bfloat16, exchange_dtype=np.dtype(jnp.bfloat16))
    assert given == named
    seen = {}
    train = elche.build_train_step(
        digit_loss(seen), optax.sgd(1.0), devices=jax.devices()[:1], compute_dtype=np.float16
    )
    train.init(digit_params())
    train.windows({name: leaf[:8] for name, leaf in digits().items()}, 4)
    assert seen["b"] == {"image": "float16", "label": "int32"}


# -- the wire -------------------------------------------------------------------------


@pytest.mark.slow  # test_two_bytes_on_the_wire_err_by_two_roundings, without training
def test_two_bytes_on_the_wire():
    """Every gradient within two roundings; the same accuracy; replicas equal."""
    config = {"exchange_dtype": "bfloat16"}
    params = digit_params()
    data = {name: leaf[:128] for name, leaf in digits().items()}
    applied = {}
    for name in ("float32", "bfloat16"):
        train = elche.build_train_step(
            digit_loss({}), optax.sgd(1.0), devices=jax.devices()[:3], cadence=Script([(5, 1, 2)]),
            config=elche.DDPConfig(exchange_dtype=name),
        )  # fmt: skip
        state = train.init(params)
        for window in train.windows(data, 16, shuffle=False):
            state, _ = train(state, window)
        elche.check_replicas(state)
        applied[name] = jax.tree.map(lambda a, b: a - np.asarray(b)[0], params, state.params)
    for name, exact in applied["float32"].items():
        apart = np.abs(applied["bfloat16"][name] - exact)
        assert apart.max() > 0
        assert apart.max() <= 2.0**-6 * np.abs(exact).max()
    _, state, _ = train_digits(config=config)
    assert accuracy(state) > whole_accuracy() - 0.02 > 0.85


# -- model state ----------------------------------------------------------------------


def norm_loss(params, model_state, batch, rng):
    """Keeps the statistics of the data it saw, counts, and remembers the largest."""
    x = batch["x"]
    stats = {"mean": x.mean(0), "var": x.var(0)}
    state = {
        "stats": stats,
        "largest": jnp.maximum(model_state["largest"], x.max()),
        "calls": model_state["calls"] + 1,
    }
    return ((x @ params["w"]) ** 2).mean(), state


@pytest.mark.parametrize("merge", [None, {"stats": "pooled", "largest": "max", "calls": "auto"}])
def test_model_state_is_merged_by_its_rules(merge):
    """One microbatch per device: pooled statistics are those of the whole window."""
    x = np.random.default_rng(0).normal(size=(12, 2)).astype("f") * [1, 5] + [[0, 3]] * 12
    x[:4] += 10
    first = {
        "stats": {"mean": np.zeros(2, "f"), "var": np.ones(2, "f")},
        "largest": np.float32(-np.inf if merge else 0),
        "calls": np.int32(0),
    }
    train = elche.build_train_step(
        norm_loss,
        optax.sgd(0.0),
        devices=jax.devices()[:3],
        merge=merge,
        cadence=elche.EveryBatch(),
    )
    state = train.init({"w": np.ones(2, "f")}, model_state=first)
    for window in train.windows({"x": x.astype("f")}, 4, shuffle=False):
        state, _ = train(state, window)
    got = jax.device_get(elche.unreplicate(state.model_state))
    parts = x.astype("f").astype(np.float64).reshape(3, 4, 2)
    np.testing.assert_allclose(got["stats"]["mean"], x.mean(0), rtol=1e-5)
    var = parts.reshape(-1, 2).var(0) if merge else parts.var(1).mean(0)
    np.testing.assert_allclose(got["stats"]["var"], var, rtol=1e-5)
    largest = parts.max() if merge else parts.max((1, 2)).mean()
    np.testing.assert_allclose(got["largest"], largest, rtol=1e-6)
    assert got["calls"] == 1
    elche.check_replicas(state)


def least_loss(params, model_state, batch, rng):
    """Keeps the least of the data it saw, and a constant mask."""
    least = jnp.minimum(model_state["least"], batch["x"].min(0))
    return ((batch["x"] @ params["w"]) ** 2).mean(), model_state | {"least": least}


@table(
    averaging=[None, elche.ParameterAveraging(), elche.DiLoCo(optax.sgd(0.7))],
    exchange=[None, elche.HostExchange()],
)
def test_what_begins_as_no_number_drops_no_window(averaging, exchange):
    x = np.random.default_rng(0).normal(size=(24, 2)).astype("f")
    train = elche.build_train_step(
        least_loss, optax.sgd(0.01), devices=jax.devices()[:3], averaging=averaging,
        exchange=exchange, cadence=elche.EveryBatch(),
    )  # fmt: skip
    start = {"least": np.full(2, np.inf, "f"), "mask": np.array([0, -np.inf], "f")}
    state = train.init({"w": np.ones(2, "f")}, model_state=start)
    for window in train.windows({"x": x}, 4, shuffle=False):
        state, metrics = train(state, window)
        assert metrics["finite"]
    got = jax.device_get(elche.unreplicate(state.model_state))
    # the mean of the devices' minima in the first window, then of what each makes of that
    first, second = x.reshape(2, 3, 4, 2).min(axis=2)
    want = np.minimum(first.mean(axis=0), second).mean(axis=0)
    np.testing.assert_allclose(got["least"], want, rtol=1e-6)
    assert got["mask"].tolist() == [0, -np.inf]


@table(averaging=[None, elche.ParameterAveraging()], bad=[np.nan, np.inf])
def test_what_becomes_no_number_drops_its_window(averaging, bad):
    """Also a NaN that takes the place of an `inf`."""

    def loss(params, model_state, batch, rng):
        new = jnp.where(batch["x"].max() > 9, bad, model_state["sum"])
        return (batch["x"] @ params["w"]).mean(), {"sum": new}

    x = np.ones((8, 2), "f")
    x[4] = 10
    start = np.array([0, np.inf if np.isnan(bad) else 0], "f")
    train = elche.build_train_step(
        loss, optax.sgd(0.01), devices=jax.devices()[:2], averaging=averaging, nonfinite="skip",
        cadence=elche.EveryBatch(),
    )  # fmt: skip
    state, finite = train.init({"w": np.ones(2, "f")}, model_state={"sum": start}), []
    for window in train.windows({"x": x}, 2, shuffle=False):
        state, metrics = train(state, window)
        finite.append(bool(metrics["finite"]))
    assert finite == [True, False]
    assert elche.unreplicate(state.model_state)["sum"].tolist() == start.tolist()


def test_a_state_that_begins_as_nan_is_not_finite():
    """As a damaged one is; local steps have always gone on with it."""
    train = elche.build_train_step(
        least_loss, optax.sgd(0.01), devices=jax.devices()[:2], nonfinite="skip",
        cadence=elche.EveryBatch(),
    )  # fmt: skip
    start = {"least": np.full(2, np.inf, "f"), "mask": np.array([0, np.nan], "f")}
    state = train.init({"w": np.ones(2, "f")}, model_state=start)
    for window in train.windows({"x": np.ones((8, 2), "f")}, 2):
        state, metrics = train(state, window)
        assert not metrics["finite"]
    assert train.skipped == 2


def test_model_state_of_8_bits():
    def loss(params, model_state, batch, rng):
        new = batch["x"].max().astype(jnp.float8_e4m3fn)
        return (batch["x"] @ params["w"]).mean(), {"mean": new, "max": new}

    train = elche.build_train_step(
        loss, optax.sgd(0.01), devices=jax.devices()[:2], merge={"mean": "mean", "max": "max"},
        cadence=elche.EveryBatch(),
    )  # fmt: skip
    start = {"mean": jnp.float8_e4m3fn(1), "max": jnp.float8_e4m3fn(1)}
    state = train.init({"w": np.ones(2, "f")}, model_state=start)
    x = np.repeat(np.array([2, 3], "f"), 4).reshape(4, 2)
    for window in train.windows({"x": x}, 2, shuffle=False):
        state, _ = train(state, window)
    for merge, want in (("mean", 2.5), ("max", 3)):
        got = elche.unreplicate(state.model_state)[merge]
        assert got.dtype == jnp.float8_e4m3fn and float(got) == want


@cache
def weighting(slope, **options):
    """A step of two parameters, whose data say what they weigh."""

    def loss(params, batch, rng):
        value = (params["w"] * jnp.array([3.0, 4.0])).sum() * batch["x"].mean() * slope + 0.01
        return elche.Weighted(value, batch["weight"][0])

    return elche.build_train_step(
        loss, optax.sgd(1.0), devices=jax.devices()[:2], cadence=Script([(4, 4)]), **options
    )


def weighted_window(weight, slope=1.0, **options):
    """One window of 8 microbatches of this weight; the step of two parameters, and the metrics."""
    train = weighting(slope, **options)
    state = train.init({"w": np.zeros(2, "f")})
    data = {"x": np.arange(1, 9, dtype="f"), "weight": np.full(8, weight, "f")}
    with train.windows(data, 1, shuffle=False) as windows:
        state, metrics = train(state, next(windows))
    return np.asarray(state.params["w"])[0], jax.device_get(metrics)


def test_gradients_are_clipped_whatever_the_weights():
    for weight in (1.0, 1e-22, 1e-29, 1e22):
        step, _ = weighted_window(weight, max_grad_norm=1.0)
        np.testing.assert_allclose(step, [-0.6, -0.8], rtol=1e-5, err_msg=str(weight))


def test_weights_whose_sum_has_no_inverse():
    for weight in (1.0, 2e37):
        step, metrics = weighted_window(weight, slope=1e-3)
        np.testing.assert_allclose(step, [-0.0135, -0.018], rtol=1e-5, err_msg=str(weight))
        np.testing.assert_allclose(metrics["loss"], 0.01, rtol=1e-6)


def test_the_mean_of_equal_metrics_is_their_value():
    def loss(params, batch, rng):
        return params["w"] * batch["x"].mean() + 1.0, {"one": jnp.float32(1)}

    train = elche.build_train_step(
        loss, optax.sgd(0.0), devices=jax.devices()[:2], has_aux=True,
        cadence=elche.Replay([(41, 0), (47, 0), (55, 6)]),
    )  # fmt: skip
    state = train.init({"w": np.float32(0)})
    with train.windows({"x": np.ones(149, "f")}, 1) as windows:
        for window in windows:
            state, metrics = train(state, window)
            assert (float(metrics["loss"]), float(metrics["one"])) == (1, 1)
