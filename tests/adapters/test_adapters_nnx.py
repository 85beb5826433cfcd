"""NNX modules: what `from_nnx` trains is what a loss function written by hand does."""

import zlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax_nets import NnxCNN, NnxMLP, assert_equal, cross_entropy, data, stepped, trained
from marks import slow

import elche_jax as elche
from elche_jax.adapters.nnx import from_nnx

X = data()["x"]
WORLDS = pytest.mark.parametrize("world", [1, slow(4)])


def strings(tree):
    """Nested dicts with strings for keys."""
    return {str(k): strings(v) for k, v in tree.items()} if isinstance(tree, dict) else tree


def pure(module, kind):
    return strings(nnx.to_pure_dict(nnx.state(module, kind)))


def filled(state, tree):
    """A state of nnx with the values of nested dicts with strings for keys."""
    state = jax.tree.map(lambda x: x, state)  # variables of its own
    nnx.replace_by_pure_dict(state, nnx.restore_int_paths(tree))
    return state


def by_hand(module, has_state):
    """A loss function by the functional API of flax: split, merge, and streams reseeded."""
    clone = nnx.clone(module)
    clone.train()
    graph, params, stats, rest = nnx.split(clone, nnx.Param, nnx.BatchStat, ...)

    def run(tree, stats_tree, batch, rng):
        parts = filled(params, tree), filled(stats, stats_tree)
        model = nnx.merge(graph, *parts, rest, copy=True)
        for path, node in nnx.iter_graph(model):
            if isinstance(node, nnx.RngStream):
                name = "/".join(map(str, (*path, "key")))
                node.key.set_value(jax.random.fold_in(rng, zlib.crc32(name.encode())))
                node.count.set_value(jnp.uint32(0))
        loss = cross_entropy(model(batch["x"]), batch)
        return loss, pure(model, nnx.BatchStat)

    return run if has_state else lambda params, batch, rng: run(params, {}, batch, rng)[0]


@WORLDS
def test_an_mlp_with_dropout_is_trained_as_by_hand(world):
    module = NnxMLP(nnx.Rngs(0))
    model = from_nnx(module, cross_entropy)
    assert model.model_state is None
    assert_equal(model.params, pure(module, nnx.Param))
    got, _ = trained(model, model.params, world=world)
    loss_fn = by_hand(module, has_state=False)
    want, _ = trained(loss_fn, pure(module, nnx.Param), world=world)
    assert_equal(got, want)
    assert not np.array_equal(got.params["bias"], module.bias[...])


@WORLDS
@pytest.mark.slow  # the MLP is trained by hand, and its state is in what predicts
def test_a_cnn_with_batch_norm_is_trained_as_by_hand(world):
    module = NnxCNN(nnx.Rngs(0))
    model = from_nnx(module, cross_entropy)
    assert_equal(model.model_state, pure(module, nnx.BatchStat))
    options = {"merge": {"norm": "pooled"}, "world": world}
    got, metrics = trained(model, model.params, model.model_state, **options)
    loss_fn = by_hand(module, has_state=True)
    state = [pure(module, kind) for kind in (nnx.Param, nnx.BatchStat)]
    want, wanted = trained(loss_fn, *state, **options)
    assert_equal(got, want)
    assert metrics == wanted
    assert np.abs(got.model_state["norm"]["mean"]).max() > 0


def everything(module):
    leaves = jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        nnx.to_pure_dict(nnx.state(module)),
    )
    return jax.device_get(leaves), nnx.graphdef(module)


def test_the_module_stays_as_it_is_until_it_is_updated():
    module = NnxCNN(nnx.Rngs(0))
    module.eval()
    before, graph = everything(module)
    model = from_nnx(module, cross_entropy)
    state = stepped(model, model.params, model.model_state)
    after, graph_after = everything(module)
    assert_equal(after, before)
    assert graph == graph_after

    merged = model.merge(state.params, state.model_state)
    assert nnx.graphdef(merged) == graph
    assert_equal(everything(module)[0], before)
    model.update(state.params, state.model_state)
    for one in (module, merged):
        assert_equal(jax.device_get(pure(one, nnx.Param)), state.params)
        assert_equal(jax.device_get(pure(one, nnx.BatchStat)), state.model_state)
    assert_equal(jax.device_get(model.params), state.params)
    assert_equal(jax.device_get(model.model_state), state.model_state)
    # arrays of their own: what is done with the ones leaves the others
    copies = model.params
    jax.tree.map(lambda x: x.delete(), copies)
    np.testing.assert_array_equal(merged(X), module(X))


def test_shared_variables_stay_shared():
    module = NnxMLP(nnx.Rngs(0))
    model = from_nnx(module, cross_entropy)
    params = model.params
    params["bias"] += 1
    merged = model.merge(params)
    assert merged.bias is merged.layers[1].bias
    assert merged.bias[...].tolist() == [1, 1, 1]


@pytest.mark.slow  # as test_adapters_linen, and test_contract_splits
def test_the_split_does_not_matter_with_dropout():
    model = from_nnx(NnxMLP(nnx.Rngs(0)), cross_entropy)
    even, odd = (
        trained(model, model.params, cadence=elche.Replay([counts] * 4))[0]
        for counts in [(4, 4), (7, 1)]
    )
    assert_equal(odd.params, even.params, rtol=1e-5)


def test_predict_and_evaluate_without_dropout_by_running_averages():
    module = NnxCNN(nnx.Rngs(0))
    model = from_nnx(module, cross_entropy)
    state = stepped(model, model.params, model.model_state)
    model.update(state.params, state.model_state)
    module.eval()
    want = module(X)
    got = elche.predict(model.apply_fn, state.params, X, 24, model_state=state.model_state)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    evaluate = elche.build_eval_step(
        model.metric_fn(lambda outputs, batch: {"hit": outputs.argmax(-1) == batch["y"]})
    )
    found = evaluate(state.params, data(), 24, model_state=state.model_state)
    assert found == {"hit": pytest.approx(float(np.mean(want.argmax(-1) == data()["y"])))}


class Streams(nnx.Module):
    """What its random streams give, and how far they are."""

    def __init__(self, rngs):
        self.w = nnx.Param(jnp.zeros(()))
        self.one, self.other = rngs.one.fork(), rngs.one.fork()
        self.many = rngs.one.split(3)

    def __call__(self, x):
        return [self.one(), self.one(), self.other(), *self.many.key[...]], self.one.count[...]


def test_streams_begin_anew_for_every_microbatch_by_its_key_and_their_place():
    def keys(seed, rng):
        model = from_nnx(Streams(nnx.Rngs(one=seed)), lambda outputs, batch: outputs)
        (keys, count), _ = model.run(model.params, None, X, rng, True)
        assert count == 2
        return [jax.random.key_data(key).tolist() for key in keys]

    first = keys(0, jax.random.key(1))
    assert len({tuple(key) for key in first}) == 6
    assert keys(5, jax.random.key(1)) == first, "nothing of the module's own keys is left"
    second = keys(0, jax.random.key(2))
    assert all(a != b for a, b in zip(first, second, strict=True))


class Switched(nnx.Module):
    """Takes its switch and its keys in the call; shows what it got."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones(()))

    def __call__(self, x, *, deterministic, rngs=None):
        noise = 0 if rngs is None else jax.random.normal(rngs.noise(), ())
        return self.w * x * deterministic + noise


def test_the_switch_and_the_keys_of_a_call_are_given():
    model = from_nnx(Switched(), lambda outputs, batch: outputs.mean())
    x, rng = jnp.ones(4), jax.random.key(3)
    want = jax.random.normal(nnx.Rngs(rng).noise(), ())
    assert model(model.params, x, rng) == want
    assert model.apply_fn(model.params, x).tolist() == [1] * 4


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.base = nnx.Linear(3, 2, rngs=rngs)
        self.lora = nnx.LoRA(3, 2, 2, rngs=rngs)

    def __call__(self, x):
        return self.base(x) + self.lora(x)


@pytest.mark.parametrize("how", ["trainable", "param_type"])
def test_only_a_part_is_trained(how):
    module = Adapted(nnx.Rngs(0))
    base = jax.device_get(pure(module, nnx.filterlib.PathContains("base")))
    filters = {"param_type": nnx.LoRAParam} if how == "param_type" else {}
    model = from_nnx(module, lambda outputs, batch: ((outputs - 1) ** 2).mean(-1), **filters)
    options = {"trainable": model.trainable(nnx.LoRAParam)} if how == "trainable" else {}
    train = elche.build_train_step(
        model, optax.adamw(0.1, weight_decay=0.5), devices=jax.devices()[:2], **options
    )
    state = train.init(model.params, model_state=model.model_state)
    for window in train.windows({"x": np.ones((32, 3), "float32")}, 4):
        state, _ = train(state, window)
    end = jax.device_get(elche.unreplicate(state))
    frozen = end.params if how == "trainable" else end.model_state
    assert_equal({"base": frozen["base"]}, base)
    assert np.abs(end.params["lora"]["lora_b"]).min() > 0
    assert ("base" in end.params) == (how == "trainable")


class Sower(nnx.Module):
    def __init__(self, rngs):
        self.out = nnx.Linear(3, 2, rngs=rngs)
        self.seen = nnx.Intermediate(jnp.zeros(()))
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.seen.set_value(x.mean())
        self.new = nnx.Intermediate(x)
        self.calls.set_value(self.calls.get_value() + 1)
        return self.out(x)


def test_intermediates_are_no_state():
    module = Sower(nnx.Rngs(0))
    model = from_nnx(module, lambda outputs, batch: outputs.mean())
    assert list(model.params) == ["out"] and list(model.model_state) == ["calls"]
    x = jnp.ones((2, 3))
    _, new = model(model.params, model.model_state, x, jax.random.key(0))
    assert new == {"calls": 1}
    assert module.calls.get_value() == 0 and not hasattr(module, "new")


class Bare(nnx.Module):
    """Arrays and dicts of arrays where others have one variable each."""

    def __init__(self):
        self.shift = jnp.ones(3)
        self.both = nnx.Param({"w": jnp.ones(3), "b": jnp.zeros(3)})

    def __call__(self, x):
        both = self.both.get_value()
        self.shift = self.shift + 1
        return (x * both["w"] + both["b"] + self.shift).sum(-1)


def test_arrays_without_a_variable_are_state_and_a_variable_may_hold_several():
    module = Bare()
    model = from_nnx(module, lambda outputs, batch: outputs)
    assert sorted(model.params["both"]) == ["b", "w"]
    assert_equal(model.model_state, {"shift": jnp.ones(3)})
    x = jnp.ones((2, 3))
    loss, new = model(model.params, model.model_state, x, jax.random.key(0))
    assert loss.tolist() == [9, 9]
    assert_equal(new, {"shift": jnp.full(3, 2.0)})
    model.update({"both": {"w": jnp.zeros(3), "b": jnp.ones(3)}}, new)
    assert module(x).tolist() == [12, 12]


class Positive(nnx.Param):
    """Is the exponential of what it holds."""

    def get_value(self, **options):
        return jnp.exp(super().get_value(**options))


class Scaled(nnx.Module):
    def __init__(self):
        self.scale = Positive(jnp.full(1, 0.5))
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        return x * self.scale.get_value()


@pytest.mark.parametrize("head", [False, True])
def test_a_variable_may_overload_get_value(head):
    module = Scaled()
    if head:
        given = SimpleNamespace(module=module, params=nnx.state(module, nnx.Param))
        model = elche.from_head(given, lambda outputs, batch: outputs[:, 0])
    else:
        model = from_nnx(module, lambda outputs, batch: outputs[:, 0])
    # what is trained is what the variable holds
    assert_equal(model.params, {"scale": jnp.full(1, 0.5)})
    x = jnp.ones((2, 1))
    np.testing.assert_allclose(
        model.apply_fn(model.params, model.model_state, x), np.exp([[0.5]] * 2), rtol=1e-6
    )

    def loss(params):
        return model(params, model.model_state, x, jax.random.key(0))[0].mean()

    gradient = jax.jit(jax.grad(loss))(model.params)
    np.testing.assert_allclose(gradient["scale"], np.exp([0.5]), rtol=1e-6)
    if not head:
        model.update(model.params, model.model_state)
        merged = model.merge(model.params, model.model_state)
        for one in (module, merged):
            assert one.scale.get_raw_value().tolist() == [0.5]


def test_training_reaches_parts_that_are_switched_off():
    """A module handed over in evaluation mode is trained in training mode."""
    module = NnxMLP(nnx.Rngs(0))
    module.eval()
    model = from_nnx(module, cross_entropy)
    run = jax.jit(lambda key: model.run(model.params, None, X, key, True)[0])
    first, second = map(run, jax.random.split(jax.random.key(0)))
    assert not np.array_equal(first, second)
    batch = {"x": X}
    np.testing.assert_array_equal(model.apply_fn(model.params, batch), module(X))


class Keyed(nnx.Module):
    """Cannot be called without `rngs`."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones(()))

    def __call__(self, x, rngs):
        return self.w * x if rngs is None else self.w * x + jax.random.normal(rngs.noise(), ())


def test_keys_that_a_call_needs_are_none_in_evaluation():
    model = from_nnx(Keyed(), lambda outputs, batch: outputs.mean())
    x, rng = jnp.ones(4), jax.random.key(3)
    assert model(model.params, x, rng) == 1 + jax.random.normal(nnx.Rngs(rng).noise(), ())
    assert model.apply_fn(model.params, x).tolist() == [1] * 4


class Lifted(nnx.Module):
    """A layer under a transform that hands all variables back, and a parameter that is written."""

    def __init__(self, rngs):
        self.norm, self.out = nnx.BatchNorm(3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)
        self.scale = nnx.Param(jnp.float32(1))

    def __call__(self, x):
        self.scale.set_value(self.scale.get_value() * 2)
        x = nnx.remat(lambda norm, x: norm(x))(self.norm, x)
        return nnx.jit(lambda out, x: out(x))(self.out, x)[:, 0] * self.scale


def test_what_a_call_writes_into_a_parameter_holds_for_that_call():
    model = from_nnx(Lifted(nnx.Rngs(0)), lambda outputs, batch: outputs)
    x, call = jnp.arange(6.0).reshape(2, 3), jax.jit(model)
    first, stats = call(model.params, model.model_state, x, jax.random.key(0))
    again, _ = jax.jit(lambda *args: model(*args))(
        model.params, model.model_state, x, jax.random.key(0)
    )
    np.testing.assert_array_equal(first, again)
    half = model.params | {"scale": jnp.float32(0.5)}
    np.testing.assert_allclose(call(half, stats, x, jax.random.key(0))[0], first / 2, rtol=1e-6)
    assert list(stats) == ["norm"]
    train = elche.build_train_step(model, optax.sgd(0.0), devices=jax.devices()[:1])
    state = train.init(model.params, model_state=model.model_state)
    for window in train.windows({"x": np.asarray(x)}, 2, epochs=2):
        state, _ = train(state, window)
    assert elche.unreplicate(state.params)["scale"] == 1
