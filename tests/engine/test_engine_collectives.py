"""Collectives inside a mapped function of the user's, against NumPy in float64."""

from functools import cache
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from elche_jax import broadcast_from, weighted_mean, weighted_psum

AXIS = "mine"
FLOATS = [jnp.float16, jnp.bfloat16, jnp.float32]
EXACT = {jnp.float16: 2e-3, jnp.bfloat16: 1.6e-2, jnp.float32: 1e-6}


def mapped(fn, *args, devices=None):
    """The function under `pmap` over as many devices as the arguments have entries.

    JAX is to find no implicit promotion in it.
    """
    world = len(jax.tree.leaves(args)[0])
    devices = devices or jax.devices()[:world]
    with jax.numpy_dtype_promotion("strict"):
        return program(fn, tuple(devices))(*args)


@cache
def program(fn, devices):
    return jax.pmap(fn, axis_name=AXIS, devices=devices)


# few forms, as each one is compiled
SHAPES = [(0, 1), (3, 2)]
weights_of = st.one_of(
    *(st.lists(st.integers(0, 50), min_size=n, max_size=n).filter(any) for n in (2, 4))
)


def sums_and_means(tree, weight):
    return weighted_psum(tree, weight, AXIS), weighted_mean(tree, weight, AXIS)


@settings(max_examples=25)
@given(weights=weights_of, seed=st.integers(0, 99))
def test_sums_and_means_of_any_tree(weights, seed):
    rng = np.random.default_rng(seed)
    world = len(weights)
    host = [rng.normal(size=(world, *shape)) for shape in SHAPES]
    tree = {dtype.__name__: [jnp.asarray(leaf, dtype) for leaf in host] for dtype in FLOATS}
    w = np.array(weights, np.float64)
    sums, means = mapped(sums_and_means, tree | {"none": None}, jnp.asarray(weights))
    assert sums["none"] is None
    size = float(np.abs(w).sum())
    for dtype, tolerance in EXACT.items():
        name, close = dtype.__name__, {"rtol": tolerance, "atol": tolerance * 4}
        for got, mean, leaf in zip(sums[name], means[name], tree[name], strict=True):
            assert got.dtype == mean.dtype == dtype
            want = np.tensordot(w, np.asarray(leaf, np.float64), 1)
            got, mean = np.asarray(got), np.asarray(mean)
            for rank in range(world):
                np.testing.assert_allclose(np.float64(got[rank]) / size, want / size, **close)
                np.testing.assert_allclose(np.float64(mean[rank]), want / w.sum(), **close)


@pytest.mark.parametrize("fn", [weighted_psum, weighted_mean])
def test_results_are_known_to_be_replicated(fn):
    """By `jax.shard_map`, and by `jax.vmap`."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), (AXIS,))
    tree = {"a": np.arange(8.0, dtype="f"), "b": np.arange(8.0, 16.0, dtype="f")}
    weights = np.array([1, 2, 3, 4], "f")
    spec = jax.sharding.PartitionSpec
    sharded = jax.shard_map(
        lambda x, n: fn(x, n[0], AXIS), mesh=mesh, in_specs=spec(AXIS), out_specs=spec()
    )
    rows = {name: leaf.reshape(4, 2) for name, leaf in tree.items()}
    mapped_by_vmap = jax.vmap(lambda x, n: fn(x, n, AXIS), axis_name=AXIS, out_axes=None)
    for out in (jax.jit(sharded)(tree, weights), mapped_by_vmap(rows, weights)):
        for name, leaf in rows.items():
            want = weights.astype("d") @ leaf / (weights.sum() if fn is weighted_mean else 1)
            np.testing.assert_allclose(out[name], want, rtol=1e-6)


@pytest.mark.parametrize("fn", [weighted_psum, weighted_mean])
def test_weight_0_contributes_nothing(fn):
    x = jnp.array([[1.0, 2.0], [jnp.nan, jnp.inf], [3.0, 5.0]])
    out = mapped(lambda x, n: fn(x, n, AXIS), x, jnp.array([2, 0, 2]))
    want = [8.0, 14.0] if fn is weighted_psum else [2.0, 3.5]
    assert out.tolist() == [want] * 3


@pytest.mark.parametrize("weight", [-1.0, jnp.nan])
@pytest.mark.parametrize("fn", [weighted_psum, weighted_mean])
def test_a_weight_below_0_or_not_a_number_shows(fn, weight):
    out = mapped(lambda x, n: fn(x, n, AXIS), jnp.zeros(2), jnp.array([1.0, weight]))
    assert np.isnan(out).all()


def test_the_mean_of_nothing_is_not_a_number():
    out = mapped(lambda x, n: weighted_mean(x, n, AXIS), jnp.ones(2), jnp.zeros(2))
    assert np.isnan(out).all()


def test_half_precision_is_summed_in_float32():
    x = jnp.full(4, 30000.0, jnp.float16)  # two of them overflow
    mean = mapped(lambda x, n: weighted_mean(x, n, AXIS), x, jnp.full(4, 100))
    assert mean.tolist() == [30000.0] * 4


def test_a_mean_of_means_is_the_mean_over_all_examples():
    """What equal weights get wrong: shares of 7, 1 and 2 microbatches."""
    rng = np.random.default_rng(0)
    x, counts = rng.normal(size=(10, 5)).astype("float32"), [7, 1, 2]
    ends = np.cumsum([0, *counts])
    own = np.stack([x[a:b].mean(axis=0) for a, b in pairwise(ends)])
    out = mapped(lambda g, n: weighted_mean(g, n, AXIS), jnp.asarray(own), jnp.asarray(counts))
    np.testing.assert_allclose(out[0], x.astype("float64").mean(axis=0), rtol=1e-5, atol=1e-7)
    assert np.abs(own.mean(axis=0) - out[0]).max() > 0.05


EVERY_DTYPE = [
    np.array([[-0.0, np.nan, np.inf], [1, 2, 3]], np.float32),
    np.array([[-0.0, 65504, 6e-8], [1, 2, 3]], np.float16),
    jnp.array([[-0.0, 3e38, 1], [1, 2, 3]], jnp.bfloat16),
    np.array([[-(2**31), 2**31 - 1], [5, 6]], np.int32),
    np.array([[255, 0], [5, 6]], np.uint8),
    np.array([[-128, 127], [5, 6]], np.int8),
    jnp.array([[-8, 7, -1], [5, 6, 0]], jnp.int4),
    jnp.array([[15, 0, 8], [5, 6, 1]], jnp.uint4),
    jnp.array([[-0.0, 6, 0.5], [1, 1.5, -3]], jnp.float4_e2m1fn),
    np.array([[True, False], [True, True]]),
    np.array([[1 - 2j, -0.0j], [3j, 4]], np.complex64),
]


def test_a_number_of_python_is_a_leaf():
    def both(weight):
        return sums_and_means({"c": 2.0}, weight), broadcast_from({"c": 2.0}, 1, AXIS)

    (sums, means), sent = mapped(both, jnp.array([1.0, 3.0]))
    assert [tree["c"].tolist() for tree in (sums, means, sent)] == [[8.0] * 2, [2.0] * 2, [2.0] * 2]


@pytest.mark.parametrize("source", [0, 1])
def test_broadcast_keeps_every_bit(source):
    sent = [jnp.asarray(rows) for rows in EVERY_DTYPE]
    out = mapped(lambda tree: broadcast_from(tree, source, AXIS), sent)
    for got, rows in zip(out, EVERY_DTYPE, strict=True):
        assert got.dtype == rows.dtype
        for rank in (0, 1):
            assert np.asarray(got)[rank].tobytes() == np.asarray(rows)[source].tobytes()


def test_broadcast_of_typed_keys():
    keys = jax.random.split(jax.random.key(0), 3)
    out = mapped(lambda key: broadcast_from(key, 2, AXIS), keys)
    data = np.asarray(jax.random.key_data(out))
    np.testing.assert_array_equal(data, [np.asarray(jax.random.key_data(keys[2]))] * 3)


@pytest.mark.parametrize(
    ("tree", "weight", "error", "message"),
    [
        ({"n": jnp.arange(2)}, jnp.ones(2), TypeError, r"leaf \['n'\] is of dtype int32"),
        (jnp.arange(2), jnp.ones(2), TypeError, r"leaf tree is of dtype int32"),
        (
            {"w": jnp.ones(2)},
            jnp.ones((2, 1)),
            ValueError,
            r"weight must be a scalar, got .*\(1,\)",
        ),
    ],
)
@pytest.mark.parametrize("fn", [weighted_psum, weighted_mean])
def test_errors(fn, tree, weight, error, message):
    with pytest.raises(error, match=f"{fn.__name__}: .*{message}"):
        mapped(lambda t, n: fn(t, n, AXIS), tree, weight)
