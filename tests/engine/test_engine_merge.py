"""Model states of several devices made one: every rule against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from marks import slow
from reduced import TRANSPORTS, contribution, reduced

from elche_jax.engine.merge import resolve_merge
from elche_jax.engine.reduce import Reduction
from elche_jax.engine.wire import Encoded

STATE = {"bn": {"mean": (4,), "var": (4,)}, "peak": (2,), "seed": (3,), "count": (), "seen": (5,)}
RULES = {"bn": "pooled", "peak": "max", "seed": "first", "count": "max", "seen": "max"}


def random_states(rng, world):
    """One state before, and one per device after."""

    def one(scale):
        return {
            "bn": {
                "mean": rng.normal(size=4).astype("float32") * scale,
                "var": rng.uniform(0.1, 2, 4).astype("float32"),
            },
            "peak": rng.normal(size=2).astype("float32"),
            "seed": rng.normal(size=3).astype("float32"),
            "count": np.int32(rng.integers(-50, 50)),
            "seen": rng.integers(0, 2, 5).astype(bool),
        }

    return one(3.0), [one(1.0) for _ in range(world)]


PROGRAMS = {}


def programs_of(resolved, structure):
    """What a device brings, and what is made of the mean, compiled once for rules and names."""
    key = resolved.rules, str(structure)
    if key not in PROGRAMS:

        def brought(start, leaves, weight):
            return contribution(Encoded([]), weight, resolved.differences(start, leaves))

        PROGRAMS[key] = jax.jit(brought), Reduction(resolved), jax.jit(resolved.apply_differences)
    return PROGRAMS[key]


def merge(rules, before, after, weights):
    """Merges with the library, on either transport; a device without weight keeps what it had."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), before)
    resolved = resolve_merge(rules, shapes)
    start, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, before))
    brought, reduction, applied = programs_of(resolved, structure)
    each = [
        brought(start, jax.tree.leaves(one), float(weight))
        for one, weight in zip(after, weights, strict=True)
    ]
    made = []
    for transport in TRANSPORTS:
        mean, _ = reduced(transport, reduction, each)
        leaves = applied(start, mean.state, mean.spread)
        made.append(jax.tree.map(np.asarray, structure.unflatten(leaves)))
    for mine, theirs in zip(*map(jax.tree.leaves, made), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    return made[0]


# few numbers of devices, as programs are compiled for each
weights_of = st.one_of(
    *(
        st.lists(st.sampled_from([0.0, 1.0, 2.5, 7.0]), min_size=n, max_size=n).filter(any)
        for n in (2, 4)
    )
)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), weights=weights_of)
def test_every_rule_against_numpy(seed, weights):
    before, after = random_states(np.random.default_rng(seed), len(weights))
    got = merge(RULES, before, after, weights)
    w = np.array(weights, np.float64) / sum(weights)
    worked = [state for state, weight in zip(after, weights, strict=True) if weight]

    means = np.stack([s["bn"]["mean"] for s in after]).astype(np.float64)
    variances = np.stack([s["bn"]["var"] for s in after]).astype(np.float64)
    mean = w @ means
    close = dict(rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(got["bn"]["mean"], mean, **close)
    np.testing.assert_allclose(got["bn"]["var"], w @ (variances + (means - mean) ** 2), **close)
    np.testing.assert_array_equal(got["peak"], np.max([s["peak"] for s in worked], axis=0))
    np.testing.assert_array_equal(got["seed"], worked[0]["seed"])
    assert got["count"] == max(s["count"] for s in worked)
    np.testing.assert_array_equal(got["seen"], np.any([s["seen"] for s in worked], axis=0))
    for name, leaf in before.items():
        for a, b in zip(jax.tree.leaves(got[name]), jax.tree.leaves(leaf), strict=True):
            assert (a.shape, a.dtype) == (np.shape(b), b.dtype)


def test_pooled_variance_is_that_of_all_the_data_together():
    rng = np.random.default_rng(0)
    parts = [rng.normal(loc, 2, size=(n, 3)) for loc, n in ((0, 40), (5, 10), (-3, 25))]
    after = [{"mean": p.mean(0).astype("f"), "var": p.var(0).astype("f")} for p in parts]
    before = {"mean": np.zeros(3, "f"), "var": np.ones(3, "f")}
    got = merge("pooled", before, after, [len(p) for p in parts])
    whole = np.concatenate(parts)
    np.testing.assert_allclose(got["mean"], whole.mean(0), rtol=1e-5)
    np.testing.assert_allclose(got["var"], whole.var(0), rtol=1e-5)
    mean_of_variances = np.average([p.var(0) for p in parts], axis=0, weights=[40, 10, 25])
    assert (whole.var(0) > 1.5 * mean_of_variances).all()  # what "mean" would have given


def test_pooled_variance_far_from_zero():
    """Means that moved by 2000 in one window, variances of a hundredth."""
    rng = np.random.default_rng(3)
    parts = rng.normal(2000, 0.1, size=(3, 50, 4)).astype("f").astype(np.float64)
    after = [{"mean": p.mean(0).astype("f"), "var": p.var(0).astype("f")} for p in parts]
    got = merge("pooled", {"mean": np.zeros(4, "f"), "var": np.ones(4, "f")}, after, [1, 1, 1])
    np.testing.assert_allclose(got["var"], parts.reshape(-1, 4).var(0), rtol=0.02)


@pytest.mark.parametrize("rule", ["mean", "pooled", "max", "first"])
def test_what_no_device_changed_stays_bit_for_bit(rule):
    rng = np.random.default_rng(1)
    before = {
        "mean": rng.normal(size=50).astype("f") * 1e3,
        "var": rng.uniform(size=50).astype("f"),
    }
    got = merge(rule, before, [before] * 3, [1, 2, 4])
    for name, leaf in before.items():
        assert got[name].tobytes() == leaf.tobytes()


@pytest.mark.parametrize("rule", ["mean", "pooled", "max", "first"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_equal_values_are_their_own_mean(rule, dtype):
    """They fall to a five-hundredth: the change has fewer bits than the value needs."""
    before = {"mean": jnp.ones(3, dtype), "var": jnp.full(3, 2, dtype)}
    after = {"mean": jnp.full(3, 0.0019, dtype), "var": jnp.full(3, 0.0037, dtype)}
    got = merge(rule, before, [after] * 4, [1, 1, 1, 1])
    for name, leaf in after.items():
        assert got[name].dtype == leaf.dtype
        limit = 2.0**-23 if dtype == "float32" else 0  # of the value before, which was up to 2
        np.testing.assert_allclose(got[name].astype("f"), leaf.astype("f"), rtol=0, atol=limit)


@pytest.mark.parametrize("rule", ["mean", "pooled", "max", "first"])
def test_a_device_without_work_has_no_say_even_where_it_is_no_number(rule):
    good = {"mean": np.ones(2, "f"), "var": np.full(2, 3, "f")}
    bad = {"mean": np.full(2, np.nan, "f"), "var": np.full(2, np.inf, "f")}
    got = merge(rule, {"mean": np.zeros(2, "f"), "var": np.ones(2, "f")}, [bad, good], [0, 2])
    assert got["mean"].tolist() == [1, 1] and got["var"].tolist() == [3, 3]


def test_defaults_functions_and_subtrees():
    shapes = {"a": jnp.zeros(2), "b": {"n": jnp.int32(0), "flag": jnp.bool_(True)}}
    assert resolve_merge(None, shapes).rules == ("mean", "max", "max")
    assert resolve_merge("first", shapes).rules == ("first", "first", "first")
    assert resolve_merge({"a": "max", "b": "auto"}, shapes).rules == ("max", "max", "max")
    pick = resolve_merge(lambda path, leaf: "first" if "flag" in path else "auto", shapes)
    assert pick.rules == ("mean", "first", "max")
    assert resolve_merge(None, None).rules == ()


PAIR = {"x": {"mean": jnp.zeros(3), "var": jnp.zeros(3)}, "n": jnp.int32(0)}


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ("average", ValueError, r"one of 'auto', 'mean', .* got 'average' for leaf \['n'\]\.$"),
        ({"x": "mean", "n": "mean"}, TypeError, r"'max' or 'first' .* got 'mean' for leaf \['n'\]"),
        ({"x": "mean"}, ValueError, r"structure of model_state, .* but in merge 'n' is missing"),
        ({"x": {"mean": "pooled", "var": "mean"}, "n": "max"}, ValueError,
         r"pairs of leaves `mean` and `var` .* leaf \['x'\]\['mean'\] without its partner"),
        ({"x": 3, "n": "max"}, ValueError, r"got 3 for leaf \['x'\]\['mean'\]"),
        (lambda p: "max", TypeError, r" must take \(path, leaf\), got a function of \(p\)\.$"),
    ],
)  # fmt: skip
def test_rules_that_do_not_fit(rules, error, message):
    with pytest.raises(error, match=r"^TrainStep\.init: merge.*" + message):
        resolve_merge(rules, PAIR)


def test_pooled_leaves_of_two_shapes():
    with pytest.raises(ValueError, match="without its partner"):
        resolve_merge("pooled", {"mean": jnp.zeros(3), "var": jnp.zeros(1)})


@pytest.mark.parametrize("world", [3, slow(5)])
def test_what_falls_to_nearly_nothing_is_not_negative(world):
    """A rounded change would lead across 0, and a second moment or variance has a root."""
    rng = np.random.default_rng(4)
    before = {"mean": rng.uniform(1, 2, 200).astype("f"), "var": rng.uniform(1, 2, 200).astype("f")}
    after = {name: leaf * np.float32(1e-9) for name, leaf in before.items()}
    for rule in ("mean", "pooled"):
        got = merge(rule, before, [after] * world, [1] * world)
        for name, leaf in before.items():
            assert (got[name] >= 0).all() and (got[name] <= 1e-6 * leaf).all()
