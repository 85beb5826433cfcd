"""Exchanges by hand, against NumPy in float64; what is wrong is named."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

import elche_jax as elche
from elche_jax._processes import PROCESSES
from elche_jax.engine.lane import lanes_of
from elche_jax.engine.reductions import weighted_averager

DEVICES = jax.devices()[:3]
DDP3 = elche.DDP(DEVICES)  # compiled once per shapes, over all tests


def stacked(*rows):
    return jax.pmap(lambda x: x, devices=DEVICES)(np.stack(rows))


@settings(max_examples=25)
@given(
    counts=st.lists(st.integers(0, 1000), min_size=3, max_size=3).filter(any),
    seed=st.integers(0, 99),
)
def test_weighted_means_are_exact(counts, seed):
    rng = np.random.default_rng(seed)
    host = rng.normal(size=(3, 4)).astype("float32")
    grads = {"w": stacked(*host), "frozen": None, "masked": optax.MaskedNode()}
    out = DDP3.weighted_all_reduce_gradients(grads, counts)
    assert out["frozen"] is None and out["masked"] == optax.MaskedNode()
    want = np.average(host.astype("float64"), axis=0, weights=counts)
    np.testing.assert_allclose(out["w"], [want] * 3, rtol=1e-5, atol=1e-6)
    elche.check_replicas(out["w"])


def test_the_mean_is_that_of_equal_weights():
    host = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    out = DDP3.all_reduce_gradients([stacked(*host)])
    np.testing.assert_allclose(out[0], [host.astype("float64").mean(axis=0)] * 3, rtol=1e-5)
    for counts in ((1, 1, 1), (7, 7, 7)):
        again = DDP3.weighted_all_reduce_gradients([stacked(*host)], counts)
        np.testing.assert_allclose(again[0], out[0], rtol=1e-6)


def test_a_device_without_work_may_hold_anything():
    out = DDP3.weighted_all_reduce_gradients(stacked([1.0], [np.nan], [4.0]), (2, 0, 1))
    assert out.tolist() == [[2.0]] * 3


@pytest.mark.parametrize("sync", [DDP3.sync_params, DDP3.sync_buffers])
def test_sync_gives_everybody_what_rank_0_has(sync):
    tree = {
        "w": stacked([-0.0, np.nan], [1.0, 2.0], [3.0, 4.0]).astype(jnp.bfloat16),
        "n": stacked([1], [2], [3]),
        "none": None,
    }
    out = sync(tree)
    elche.check_replicas({"w": out["w"], "n": out["n"]})
    for name in ("w", "n"):
        assert out[name].dtype == tree[name].dtype
        assert np.asarray(out[name])[2].tobytes() == np.asarray(tree[name])[0].tobytes()
    # pure: what went in is as it was
    assert np.asarray(tree["n"]).tolist() == [[1], [2], [3]]


def test_an_optimizer_state_without_arrays_stays():
    state = optax.sgd(0.1).init({"w": jnp.zeros(2)})
    assert DDP3.sync_params(state) == state


def test_replicate_and_properties():
    assert DDP3.world_size == 3 and list(DDP3.devices) == DEVICES
    elche.check_replicas(DDP3.replicate({"w": np.arange(3.0)}))


def test_wrap_takes_replicas_as_they_are():
    rows = [{"w": np.full((2, 2), r, "float32"), "n": jnp.int32(r)} for r in range(3)]
    ddp, params = elche.DDP.wrap(rows, DEVICES)
    assert ddp.world_size == 3
    for rank, device in enumerate(DEVICES):
        shard = params["w"].addressable_data(rank)
        assert shard.devices() == {device} and float(shard[0, 0, 0]) == rank
    rows[0]["w"][:] = 9  # copied
    assert ddp.sync_params(params)["w"].tolist() == np.zeros((3, 2, 2)).tolist()


def test_wrap_takes_keys():
    keys = [jax.random.key(seed) for seed in range(3)]
    ddp, tree = elche.DDP.wrap([{"rng": key} for key in keys], DEVICES)
    assert tree["rng"].dtype == keys[0].dtype and tree["rng"].shape == (3,)
    assert tree["rng"].addressable_data(1).devices() == {DEVICES[1]}
    draws = ddp.map(jax.random.normal)(tree["rng"])
    np.testing.assert_array_equal(draws, [jax.random.normal(key) for key in keys])


def test_one_program_per_shapes():
    ddp, grads, compiles = elche.DDP(DEVICES), [stacked([1.0], [2.0], [3.0])], []

    def listener(event, seconds, **_):
        compiles.extend([event] if "backend_compile" in event else [])

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        ddp.weighted_all_reduce_gradients(grads, (1, 2, 3))
        assert compiles, "the listener must see the first one"
        compiles.clear()
        for counts in ((3, 2, 1), (0, 0, 5), (1, 1, 1)):
            ddp.weighted_all_reduce_gradients(grads, counts)
        ddp.all_reduce_gradients(grads)
        assert not compiles
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


ONE = {"w": np.ones(2, "float32")}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: elche.DDP(DEVICES[:1]), ValueError,
            r"DDP: devices must hold at least two devices, got 1\. A single device needs no",
        ),
        (lambda: elche.DDP([DEVICES[0]] * 2), ValueError, r"DDP: no device may appear twice"),
        (lambda: elche.DDP(["cpu"] * 2), TypeError, r"DDP: devices must be jax\.Device objects"),
        (
            lambda: DDP3.weighted_all_reduce_gradients(stacked([1.0], [1.0], [1.0]), (1, 2)),
            ValueError,
            r"DDP\.weighted_all_reduce_gradients: batch_counts must have one entry per device "
            r"\(3\), got 2\.",
        ),
        (
            lambda: DDP3.weighted_all_reduce_gradients(stacked([1.0], [1.0], [1.0]), (0, 0, 0)),
            ValueError, r"batch_counts must have an entry above 0, got \(0\.0, 0\.0, 0\.0\)",
        ),
        (
            lambda: DDP3.weighted_all_reduce_gradients(stacked([1.0], [1.0], [1.0]), (2, -1, 1)),
            ValueError, r"batch_counts\[1\] must be at least 0, got -1",
        ),
        (
            lambda: DDP3.weighted_all_reduce_gradients(stacked([1.0], [1.0], [1.0]), "abc"),
            TypeError, r"batch_counts must be a sequence of numbers, got 'abc'",
        ),
        (
            lambda: DDP3.all_reduce_gradients({"n": stacked([1], [2], [3])}), TypeError,
            r"DDP\.all_reduce_gradients: every leaf of grads must be a float array, but leaf \['n'",
        ),
        (
            lambda: DDP3.sync_params({"w": jnp.ones(2)}), ValueError,
            r"DDP\.sync_params: every leaf must be stacked, .* \(3\), but leaf \['w'\] is an array",
        ),
        (
            lambda: elche.DDP.wrap([ONE, ONE], DEVICES), ValueError,
            r"DDP\.wrap: replicas must have one entry per device \(3\), got 2",
        ),
        (
            lambda: elche.DDP.wrap([ONE, ONE, {"v": ONE["w"]}], DEVICES), ValueError,
            r"got different ones for replicas 2 and 0: structure .*'v'.* instead of .*'w'",
        ),
        (
            lambda: elche.DDP.wrap([ONE, {"w": np.ones(3, "float32")}, ONE], DEVICES), ValueError,
            r"replicas 1 and 0: leaf \['w'\] is float32\[3\] instead of float32\[2\]",
        ),
        (
            lambda: elche.DDP.wrap([ONE, ONE, {"w": np.ones(2)}], DEVICES), ValueError,
            r"replicas 2 and 0: leaf \['w'\] is float64\[2\] instead of float32\[2\]",
        ),
        (
            lambda: elche.DDP.wrap([{"n": 2**40}] * 3, DEVICES), ValueError,
            r"^DDP\.wrap: integers must fit int32, .* got 1099511627776 in leaf \['n'\]\. Switch",
        ),
        (
            lambda: elche.DDP.wrap(["a"] * 3, DEVICES), TypeError,
            r"^DDP\.wrap: every leaf must be an array of numbers, but leaf replicas is of dtype <U",
        ),
        (
            lambda: elche.DDP.wrap([np.ones(2, np.longdouble)] * 3, DEVICES), TypeError,
            r"^DDP\.wrap: every leaf must be an array of numbers, but leaf replicas is of .*128\.$",
        ),
        (
            lambda: DDP3.sync_params(np.full((3, 1), 2**40)), ValueError,
            r"^DDP\.sync_params: integers must fit int32, .* got 1099511627776 in leaf tree\.",
        ),
        (
            lambda: DDP3.sync_params({"w": np.array(["a", "b", "c"])}), TypeError,
            r"^DDP\.sync_params: every leaf must be an array of numbers, but leaf \['w'\] is",
        ),
        (
            lambda: DDP3.all_reduce_gradients(np.ones((3, 2), np.longdouble)), TypeError,
            r"^DDP\.all_reduce_gradients: every leaf must be an array of numbers, but leaf tree is",
        ),
        (
            lambda: DDP3.sync_params({"w": np.ones(3), 1: np.ones(3)}), TypeError,
            r"^DDP\.sync_params: dicts in tree must have keys of one type, as JAX sorts them, got",
        ),
        (
            lambda: elche.DDP.wrap(3 * [{"w": np.ones(3), 1: np.ones(3)}], DEVICES), TypeError,
            r"^DDP\.wrap: dicts in replicas must have keys of one type, as JAX sorts them, got",
        ),
        (
            lambda: DDP3.replicate({"w": np.ones(3), 1: np.ones(3)}), TypeError,
            r"^replicate: dicts in tree must have keys of one type, as JAX sorts them, got several",
        ),
    ],
)  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_loop_of_ones_own_is_plain_training():
    """Unequal shares of one batch, gradients by hand: the same as one device with all of it."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 3)).astype("float32"), rng.normal(size=12).astype("float32")
    counts, tx = (6, 4, 2), optax.adam(0.1)

    def loss(params, x, y):
        return jnp.mean((x @ params["w"] - y) ** 2)

    gradient, step = jax.jit(jax.grad(loss)), jax.jit(tx.update)
    want = {"w": jnp.zeros(3)}
    params = DDP3.replicate(want)
    opt, want_opt = DDP3.replicate(tx.init(want)), tx.init(want)
    update = jax.pmap(lambda g, o, p: tx.update(g, o, p), devices=DEVICES)
    for _ in range(5):
        parts, at = [], 0
        for rank, count in enumerate(counts):
            own = jax.tree.map(lambda leaf, r=rank: leaf[r], jax.device_get(params))
            parts.append(gradient(own, x[at : at + count], y[at : at + count])["w"])
            at += count
        grads = DDP3.weighted_all_reduce_gradients({"w": stacked(*map(np.asarray, parts))}, counts)
        updates, opt = update(grads, opt, params)
        params = jax.tree.map(jnp.add, params, updates)
        updates, want_opt = step(gradient(want, x, y), want_opt, want)
        want = optax.apply_updates(want, updates)
    np.testing.assert_allclose(elche.unreplicate(params)["w"], want["w"], rtol=1e-5)


def test_a_pmap_with_the_same_axis_name_is_compiled_once():
    """Its own arrays and those of an exchange are of one kind to it."""
    ddp = elche.DDP(jax.devices()[:2])
    compiles = []
    step = jax.pmap(lambda x: x * 2, ddp.axis_name, devices=ddp.devices)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiles.append(event) if "backend_compile" in event else None
    )
    try:
        x = step(ddp.replicate(np.ones(3, "float32")))
        assert compiles
        compiles.clear()
        for _ in range(2):
            x = step(x)
        averaged = ddp.all_reduce_gradients(x)
        compiles.clear()
        step(averaged)
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiles == []


@pytest.mark.parametrize("counts", [(1e-40, 3e-40, 0), (1e39, 0, 3e39), (1e300, 1e308, 1e308)])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_counts_and_gradients_of_any_size(counts, size):
    """Also where float32 holds neither their products nor their sums."""
    rows = np.array([[1.0], [5.0], [2.0]], "f") * np.float32(size)
    out = DDP3.weighted_all_reduce_gradients(stacked(*rows), counts)
    want = np.average(rows.astype("float64"), axis=0, weights=np.array(counts) / max(counts))
    np.testing.assert_allclose(out, [want] * 3, rtol=1e-6)


def test_weights_of_64_bits():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        ddp = elche.DDP(DEVICES)
        for counts in ((0.1, 0.1, 0.1), (2**24 + 1, 1, 1)):
            rows = np.array([[1.0], [2.0], [4.0]])
            out = ddp.weighted_all_reduce_gradients(rows, counts)
            assert out.dtype == np.float64
            want = np.average(rows, axis=0, weights=counts)
            np.testing.assert_allclose(out, [want] * 3, rtol=1e-15)


def test_means_over_lanes_of_two_dtypes():
    lanes = lanes_of(DEVICES, [0, 0, 1])
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        rows = np.array([[1.0], [2.0], [4.0]])
        tree = lanes.put({"a": rows.astype("float32"), "b": rows})
        for dtype in ("float32", "float64"):
            out = weighted_averager(lanes)(tree, lanes.put(np.array([1, 1, 2], dtype)))
            assert [leaf.dtype.name for leaf in out.values()] == ["float32", "float64"]
            assert [np.asarray(leaf).tolist() for leaf in out.values()] == 2 * [3 * [[2.75]]]


def test_replicas_of_floats_of_4_bits_are_compared():
    rows = jnp.array([[1.0], [1.0], [1.5]], jnp.float4_e2m1fn)
    alike = DDP3.sync_params(stacked(*rows))
    elche.check_replicas(alike)
    with pytest.raises(elche.ReplicaMismatch, match="leaf tree on cpu:2 differs from cpu:0 in 1 "):
        elche.check_replicas(stacked(*rows))


def test_floats_of_8_bits():
    rows = np.array([[1.0], [2.0], [4.0]], jnp.float8_e4m3fn)
    out = DDP3.weighted_all_reduce_gradients(stacked(*rows), (1, 1, 2))
    assert out.dtype == rows.dtype and out.astype("f").tolist() == [[2.75]] * 3


@pytest.mark.parametrize(
    ("call", "where", "leaf"),
    [
        (DDP3.replicate, "replicate: tree", r"\['w'\]"),
        (lambda tree: elche.DDP.wrap(3 * [tree], DEVICES), "DDP.wrap: replicas", r"\[0\]\['w'\]"),
        (DDP3.sync_params, "DDP.sync_params: tree", r"\['w'\]"),
        (DDP3.map(lambda tree: tree), "DDP.map: tree", r"\[0\]\['w'\]"),
    ],
)
def test_masked_arrays_are_named(call, where, leaf):
    masked = np.ma.masked_array([1.0, 2.0, 3.0], [0, 1, 0])
    message = rf"^{where}: every leaf must be a plain array, but leaf {leaf} is a masked one"
    with pytest.raises(TypeError, match=message):
        call({"w": masked})


@pytest.mark.parametrize("name", ["all_reduce_gradients", "sync_params"])
def test_reductions_need_all_processes(name, monkeypatch):
    ddp = elche.DDP(jax.devices()[:2])
    tree = ddp.replicate({"w": np.ones(3, "float32")})
    monkeypatch.setattr(PROCESSES, "gone", frozenset({3}))
    with pytest.raises(elche.ProcessLostError, match=r"process 3 of .* needs all") as found:
        getattr(ddp, name)(tree)
    assert found.value.processes == (3,)
    assert ddp.map(lambda x: 2 * x)(tree["w"]).tolist() == [[2.0] * 3] * 2  # each by itself
