"""Linen modules: what `from_linen` trains is what a loss function written by hand does."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.core import freeze
from flax_nets import LinenCNN, LinenMLP, assert_equal, cross_entropy, data, stepped, trained
from marks import slow

import elche_jax as elche
from elche_jax.adapters.linen import from_linen

X = data()["x"]
SGD = optax.sgd(0.1)
WORLDS = pytest.mark.parametrize("world", [1, slow(4)])


def mlp_by_hand(params, batch, rng):
    outputs = LinenMLP().apply(
        {"params": params}, batch["x"], deterministic=False, rngs={"dropout": rng}
    )
    return cross_entropy(outputs, batch)


def cnn_by_hand(params, model_state, batch, rng):
    variables = {"params": params, "batch_stats": model_state["batch_stats"]}
    outputs, new = LinenCNN().apply(
        variables, batch["x"], train=True, rngs={"dropout": rng}, mutable=["batch_stats"]
    )
    hit = outputs.argmax(-1) == batch["y"]
    return cross_entropy(outputs, batch), (dict(new), {"accuracy": hit})


def with_accuracy(outputs, batch):
    return cross_entropy(outputs, batch), {"accuracy": outputs.argmax(-1) == batch["y"]}


@WORLDS
@pytest.mark.slow  # the CNN is trained by hand, and dropout in the next one
def test_an_mlp_with_dropout_is_trained_as_by_hand(world):
    model = from_linen(LinenMLP(), cross_entropy)
    params, model_state = model.init(3, {"x": X[:1]})
    assert model_state is None
    assert_equal(params, LinenMLP().init(jax.random.key(3), X[:1], True)["params"])
    got, _ = trained(model, params, world=world)
    want, _ = trained(mlp_by_hand, params, world=world)
    assert_equal(got, want)
    assert not np.array_equal(got.params["Dense_0"]["kernel"], params["Dense_0"]["kernel"])


@WORLDS
def test_a_cnn_with_batch_norm_is_trained_as_by_hand(world):
    model = from_linen(LinenCNN(), with_accuracy)
    params, model_state = model.init(jax.random.key(3), {"x": X[:1]})
    assert list(model_state) == ["batch_stats"]
    options = {"has_aux": True, "merge": {"batch_stats": "pooled"}, "world": world}
    got, metrics = trained(model, params, model_state, **options)
    want, wanted = trained(cnn_by_hand, params, model_state, **options)
    assert_equal(got, want)
    assert metrics == wanted
    moved = got.model_state["batch_stats"]["BatchNorm_0"]["mean"]
    assert np.abs(moved).max() > 0


@pytest.mark.slow  # the CNN has dropout by hand, and contracts train it in two splits
def test_the_split_does_not_matter_with_dropout():
    model = from_linen(LinenMLP(), cross_entropy)
    params, _ = model.init(3, {"x": X[:1]})
    even, odd = (
        trained(model, params, cadence=elche.Replay([counts] * 4))[0] for counts in [(4, 4), (7, 1)]
    )
    assert_equal(odd.params, even.params, rtol=1e-5)


def test_predict_and_evaluate_without_dropout_by_running_averages():
    model = from_linen(LinenCNN(), cross_entropy)
    state = stepped(model, *model.init(3, {"x": X[:1]}))
    variables = model.merge(state.params, state.model_state)
    want = LinenCNN().apply(variables, X, train=False)
    got = elche.predict(model.apply_fn, state.params, X, 24, model_state=state.model_state)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    evaluate = elche.build_eval_step(
        model.metric_fn(lambda outputs, batch: {"hit": outputs.argmax(-1) == batch["y"]})
    )
    found = evaluate(state.params, data(), 24, model_state=state.model_state)
    assert found == {"hit": pytest.approx(float(np.mean(want.argmax(-1) == data()["y"])))}


class Partitioned(nn.Module):
    """Says how a mesh would partition its kernel and its state."""

    names: bool

    @nn.compact
    def __call__(self, x):
        def given(init, *names):
            return nn.with_partitioning(init, names) if self.names else init

        calls = self.variable("seen", "calls", given(lambda: jnp.zeros(3), "model"))
        if not self.is_initializing() and self.is_mutable_collection("seen"):
            calls.value += 1
        init = given(nn.initializers.lecun_normal(), None, "model")
        return nn.Dense(3, kernel_init=init)(x.reshape(len(x), -1))


@pytest.mark.parametrize("form", ["from_linen", slow("from_head")])
def test_parameters_with_names_of_partitions_are_trained_as_those_without(form):
    ends = []
    for names in (True, False):
        module = Partitioned(names)
        if form == "from_linen":
            model = from_linen(module, cross_entropy)
            params, model_state = model.init(3, {"x": X[:1]})
        else:
            head = SimpleNamespace(module=module, params=module.init(jax.random.key(3), X[:1]))
            model = elche.from_head(head, cross_entropy)
            params, model_state = model.params, model.model_state
        cadence = elche.Replay([(4, 4)] * 4)
        state, _ = trained(model, params, model_state, world=2, cadence=cadence)
        outputs = elche.predict(
            model.apply_fn, state.params, X, 24, model_state=state.model_state,
            devices=jax.devices()[:2],
        )  # fmt: skip
        ends.append((jax.tree.leaves((state.params, state.model_state)), outputs))
        assert jax.tree.structure(state.params) == jax.tree.structure(params)
        assert nn.meta.unbox(state.model_state["seen"]["calls"]).tolist() == [16] * 3
    assert_equal(*ends)


class Noisy(nn.Module):
    """Two random streams and what is to be known of them; a constant beside the state."""

    @nn.compact
    def __call__(self, x, training):
        scale = self.variable("constants", "scale", lambda: jnp.float32(2))
        seen = self.variable("seen", "calls", lambda: jnp.int32(0))
        if training and not self.is_initializing():
            seen.value += 1
            if self.is_mutable_collection("constants"):
                scale.value += 1
            self.sow("intermediates", "x", x)
            noise = jax.random.normal(self.make_rng("noise"), x.shape)
            other = jax.random.normal(self.make_rng("dropout"), x.shape)
            x = jnp.stack([noise, other])
        return nn.Dense(1, use_bias=False)(x), scale.value


def noise_loss(outputs, batch):
    noise, other = outputs[0]
    return (noise**2 + other).mean()


def test_streams_have_keys_of_their_own():
    x, rng = np.ones((2, 3), "float32"), jax.random.key(5)
    model = from_linen(Noisy(), noise_loss, rngs=("noise", "dropout"), mutable=["seen"])
    params, state = model.init(0, {"x": x})
    params = {"Dense_0": {"kernel": np.eye(3, dtype="float32")[:, :1]}}
    loss, _ = model(params, state, {"x": x}, rng)
    keys = dict(zip(("noise", "dropout"), jax.random.split(rng), strict=True))
    (noise, other), _ = Noisy().apply(
        {"params": params, **state}, x, True, rngs=keys, mutable=["seen"]
    )[0]
    assert not np.array_equal(noise, other)
    np.testing.assert_array_equal(loss, (noise**2 + other).mean())


def test_collections_that_are_not_mutable_stay_and_what_is_sown_is_no_state():
    model = from_linen(Noisy(), noise_loss, rngs=("noise", "dropout"), mutable=["seen"])
    params, state = model.init(0, {"x": np.ones((1, 3), "float32")})
    assert state == {"constants": {"scale": 2}, "seen": {"calls": 0}}
    train = elche.build_train_step(model, SGD, devices=jax.devices()[:2])
    run = train.init(params, model_state=state)
    for window in train.windows({"x": np.ones((16, 3), "float32")}, 4):
        run, _ = train(run, window)
    end = jax.device_get(elche.unreplicate(run.model_state))
    assert end == {"constants": {"scale": 2}, "seen": {"calls": 2}}, "two windows, max of devices"
    everything = from_linen(Noisy(), noise_loss, rngs=("noise", "dropout"))
    _, new = everything(params, state, {"x": np.ones((2, 3))}, jax.random.key(0))
    assert new["constants"]["scale"] == 3


class Pair(nn.Module):
    @nn.compact
    def __call__(self, a, b=0.0, *, scale=1.0, is_training):
        return nn.Dense(2)(a) * scale + b + (100 if is_training else 0)


@pytest.mark.parametrize(
    ("inputs", "batch", "add"),
    [
        (None, {"image": 1, "x": 0}, 0),
        (None, {"inputs": 0, "image": 1}, 0),
        (None, (0, 1), 0),
        (None, [0, 1], 0),
        ("z", {"x": 1, "z": 0}, 0),
        (lambda batch: batch["z"], {"x": 1, "z": 0}, 0),
        (lambda batch: (batch["z"], 5.0), {"z": 0}, 5),
        (lambda batch: {"a": batch["z"], "b": 7.0}, {"z": 0}, 7),
    ],
)
def test_inputs_come_from_where_they_are_said_to_be(inputs, batch, add):
    """0 stands for the inputs, 1 for others of another width, which would not fit."""
    arrays = [np.arange(6, dtype="float32").reshape(2, 3), np.ones((2, 5), "float32")]
    model = from_linen(Pair(), lambda outputs, batch: outputs.sum(), inputs=inputs)
    put = jax.tree.map(lambda i: arrays[i], batch)
    params, _ = model.init(0, put)
    want = nn.Dense(2).apply({"params": params["Dense_0"]}, arrays[0]) + add
    np.testing.assert_allclose(model.apply_fn(params, put), want, rtol=1e-6)
    np.testing.assert_allclose(model(params, put, jax.random.key(0)), (want + 100).sum(), rtol=1e-6)
    if not callable(inputs):  # an array is the inputs themselves, for predict
        np.testing.assert_allclose(model.apply_fn(params, arrays[0]), want, rtol=1e-6)


def test_keyword_arguments_may_be_said():
    model = from_linen(
        Pair(), lambda outputs, batch: outputs.sum(),
        train_kwargs={"is_training": False, "scale": 2.0}, eval_kwargs={"is_training": True},
    )  # fmt: skip
    x = np.ones((2, 3), "float32")
    params, _ = model.init(0, x)
    plain = nn.Dense(2).apply({"params": params["Dense_0"]}, x)
    np.testing.assert_allclose(model.apply_fn(params, x), plain + 100, rtol=1e-6)
    np.testing.assert_allclose(model(params, x, jax.random.key(0)), 2 * plain.sum(), rtol=1e-6)


@pytest.mark.parametrize("switch", ["train", "training", "is_training", "deterministic",
                                    "use_running_average"])  # fmt: skip
def test_every_switch_is_found(switch):
    namespace = {"nn": nn, "jnp": jnp}
    source = f"""class Switched(nn.Module):
    @nn.compact
    def __call__(self, x, {switch}=None):
        self.param("w", nn.initializers.ones, ())
        return x * 0 + {switch}"""
    exec(source, namespace)
    model = from_linen(namespace["Switched"](), lambda outputs, batch: outputs.mean())
    params, _ = model.init(0, np.ones((1,), "float32"))
    training = float(switch not in ("deterministic", "use_running_average"))
    x = np.ones((2,), "float32")
    assert model(params, x, jax.random.key(0)) == training
    assert model.apply_fn(params, x).tolist() == [1 - training] * 2


def test_weighted_losses_and_masks_reach_the_step():
    """A last microbatch of 2 examples, by a mask, as the mean over all examples."""

    def loss(outputs, batch):
        each = (outputs[:, 0] - 1) ** 2
        return elche.Weighted((each * batch["mask"]).sum() / batch["mask"].sum(),
                              batch["mask"].sum())  # fmt: skip

    model = from_linen(nn.Dense(1), loss)
    x = np.random.default_rng(0).normal(size=(6, 3)).astype("float32")
    params, _ = model.init(0, {"x": x})
    train = elche.build_train_step(model, SGD, devices=jax.devices()[:2])
    state = train.init(params)
    for window in train.windows({"x": x}, 4, drop_last=False, mask_key="mask"):
        state, metrics = train(state, window)
    assert metrics["weight"] == 6

    def whole(params):
        return ((nn.Dense(1).apply({"params": params}, x)[:, 0] - 1) ** 2).mean()

    want = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.jit(jax.grad(whole))(params))
    assert_equal(jax.device_get(elche.unreplicate(state.params)), jax.device_get(want), rtol=1e-5)


def test_inputs_of_any_mapping_are_keyword_arguments():
    class Scaled(nn.Module):
        @nn.compact
        def __call__(self, x, scale):
            return nn.Dense(2)(x) * scale

    model = from_linen(
        Scaled(), cross_entropy, inputs=lambda batch: freeze({"x": batch["x"], "scale": 2.0})
    )
    batch = {"x": np.ones((2, 3), "float32")}
    params, _ = model.init(0, batch)
    want = Scaled().apply({"params": params}, batch["x"], 2.0)
    np.testing.assert_array_equal(model.apply_fn(params, batch), want)
