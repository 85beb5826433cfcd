"""C2 and C3: any split gives the same parameters; replicas are bitwise equal."""

from functools import cache

import jax
import numpy as np
import optax
import pytest
from marks import slow
from models import Cnn, Script, assert_close, digits, host, norm_loss, run, scalar_loss, variables

import elche_jax as elche

SPLITS = [(7, 1), slow((4, 4)), slow((1, 7)), slow((8, 0))]


def train_split(split, loss_fn, params, model_state=None, **options):
    devices = jax.devices()[: len(split)]
    train = elche.build_train_step(
        loss_fn, optax.adam(1e-3), devices=devices, cadence=Script([split]), **options
    )
    state = train.init(params, model_state=model_state, rng=7)
    state, used = run(train, state, digits(), 8, windows=20)
    assert len(used) == 20 and all(sum(w.counts) == 8 for w in used)
    elche.check_replicas(state)
    return state


def with_dropout(split):
    model = Cnn(dropout=0.5)
    return train_split(split, scalar_loss(model), variables(model)["params"])


def with_batch_norm(split):
    model = Cnn(norm=True, dropout=0.2)
    found = variables(model)
    stats = {"batch_stats": found["batch_stats"]}
    return train_split(split, norm_loss(model), found["params"], stats, has_aux=True)


@cache
def on_one_device(train):
    """What every split is compared with."""
    return jax.device_get(elche.unreplicate(train((8,))))


@pytest.mark.slow  # test_splits_of_a_model_with_batch_norm, which has dropout, too
@pytest.mark.parametrize("split", SPLITS)
def test_splits_of_a_model_with_dropout(split):
    one, two = on_one_device(with_dropout), with_dropout(split)
    # Adam divides by the root of tiny second moments: atol is 1e-3 of one step
    assert_close(host(two.params), one.params, rtol=1e-5, atol=1e-6)
    assert int(host(two.microbatches)) == 160


def test_dropout_is_really_drawn_anew_for_every_microbatch():
    """With one key for all the split test would hold for the wrong reason."""
    seen = []

    def loss_fn(params, batch, rng):
        draw = jax.random.uniform(rng)
        return params["w"].sum() * draw, {"draw": draw}

    train = elche.build_train_step(
        loss_fn, optax.sgd(0.1), devices=jax.devices()[:2], cadence=Script([(1, 0)]), has_aux=True
    )
    state = train.init({"w": np.ones(1, "float32")}, rng=3)
    for window in train.windows({"x": np.zeros((6, 1))}, 1):
        state, metrics = train(state, window)
        seen.append(float(metrics["draw"]))
    key = jax.random.key(3)
    want = [float(jax.random.uniform(jax.random.fold_in(key, i))) for i in range(6)]
    np.testing.assert_allclose(seen, want, rtol=1e-6)


@pytest.mark.parametrize("split", SPLITS)
def test_splits_of_a_model_with_batch_norm(split):
    """The parameters do not depend on the split; the statistics follow the data."""
    one, two = on_one_device(with_batch_norm), with_batch_norm(split)
    assert_close(host(two.params), one.params, rtol=1e-5, atol=1e-6)
    a = one.model_state["batch_stats"]["BatchNorm_0"]
    b = host(two.model_state)["batch_stats"]["BatchNorm_0"]
    np.testing.assert_allclose(a["mean"], b["mean"], rtol=0.2, atol=0.02)
    assert int(host(two.microbatches)) == 160


def test_model_state_is_the_mean_by_weight(devices4):
    """By hand: floats are weighted by the microbatches, integers take the maximum."""

    def loss_fn(params, model_state, batch, rng):
        state = {
            "value": model_state["value"] + batch["x"].mean(),
            "steps": model_state["steps"] + 1,
        }
        return (params["w"] ** 2).sum(), state

    start = {"value": np.float32(10.0), "steps": np.int32(5)}
    train = elche.build_train_step(
        loss_fn, optax.sgd(0.1), devices=devices4, cadence=Script([(3, 1, 0, 2)])
    )
    state = train.init({"w": np.ones(2, "float32")}, model_state=start)
    data = {"x": np.arange(6, dtype="float32")[:, None]}
    state, _ = run(train, state, data, 1, shuffle=False)
    ends = [10 + 0 + 1 + 2, 10 + 3, None, 10 + 4 + 5]
    want = (3 * ends[0] + 1 * ends[1] + 2 * ends[3]) / 6
    np.testing.assert_allclose(host(state.model_state)["value"], want, rtol=1e-6)
    assert int(host(state.model_state)["steps"]) == 8
    elche.check_replicas(state)


def test_model_state_that_nothing_changes_keeps_its_bits(devices4):
    """`(w1 x + w2 x) / (w1 + w2)` would not: it drifts by the last bit."""
    rng = np.random.default_rng(0)
    start = {name: rng.normal(size=500).astype(name) for name in ("float32", "float16")}
    train = elche.build_train_step(
        lambda params, state, batch, rng: ((params["w"] ** 2).sum(), state),
        optax.sgd(0.1), devices=devices4[:2], cadence=Script([(1, 2)]),
    )  # fmt: skip
    state = train.init({"w": np.ones(2, "float32")}, model_state=start)
    state, used = run(train, state, {"x": np.zeros((90, 1), "float32")}, 1)
    assert len(used) == 30
    for name, leaf in host(state.model_state).items():
        assert np.asarray(leaf).tobytes() == start[name].tobytes(), name


def test_a_flipped_bit_in_one_replica_is_named(devices4):
    tree = elche.replicate({"a": np.zeros(3), "b": {"c": np.ones(4, "float32")}}, devices4)
    elche.check_replicas(tree)
    shards = [s.data for s in tree["b"]["c"].addressable_shards]
    bits = np.asarray(shards[2]).view(np.uint32).copy()
    bits[0, 3] ^= 1
    shards[2] = jax.device_put(bits.view(np.float32), devices4[2])
    tree["b"]["c"] = jax.make_array_from_single_device_arrays(
        (4, 4), tree["b"]["c"].sharding, shards
    )
    with pytest.raises(
        elche.ReplicaMismatch,
        match=r"leaf \['b'\]\['c'\] on .*2.* differs from .*0.* in 1 of 4 elements",
    ):
        elche.check_replicas(tree)
