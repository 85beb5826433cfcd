"""How far devices are apart, by packed arrays, beside NumPy in float64."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import slow

import elche_jax as elche
from elche_jax.engine.axis import DeviceAxis, ProcessAxis
from elche_jax.engine.exchange import PACK_BELOW
from elche_jax.engine.mapped import AXIS
from elche_jax.engine.merge import MergeRules
from elche_jax.engine.reduce import Contribution, Reduction, Row
from elche_jax.engine.wire import decoded, encode

HALF = PACK_BELOW // 8 + 100
"""Floats that are packed as float32, and not as float64."""

SIZES = (HALF,), (3, 2), (), (0,), (7,)
AXES = {"devices": DeviceAxis(4), "processes": ProcessAxis(4, ((0, 1), (2, 3)))}
STEPS = np.array([1, 2, 3, 2])


def leaves(seed):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=size), jnp.float32) for size in SIZES]


def contribution(rank, before, compression):
    moved = leaves(rank)
    error = [jnp.zeros_like(x) for x in moved] if compression == "int8" else []
    payload, _ = encode(moved, error, True, compression)
    size = sum(((x - g) ** 2).sum() for x, g in zip(before, decoded(payload), strict=True))
    steps = STEPS[rank]
    row = jnp.stack([jnp.float32(x) for x in Row(steps, 1, 0.5, 4.0 * steps, size, steps)])
    sums = {"loss": 2.0 * steps, "weight": 4.0 * steps, "bad": 0.0}
    return Contribution(payload, row, jax.tree.map(jnp.float32, sums) | {"metrics": {}}, [])


def flat(arrays):
    return np.concatenate([np.asarray(x, np.float64).reshape(-1) for x in arrays])


@pytest.mark.parametrize(
    ("axis", "compression", "x64"),
    [
        ("devices", None, False), ("processes", "int8", True), slow("devices", "int8", False),
        slow("processes", None, False), slow("devices", "int8", True),
    ],
)  # fmt: skip
def test_distances_are_those_of_float64(axis, compression, x64):
    def run(own):
        if axis == "processes":  # each has two devices
            own = [jax.tree.map(lambda x, at=at: x[at], own) for at in range(2)]
        return reduction(AXES[axis], own, 0)[1]

    reduction = Reduction(MergeRules((), ()), elche.ParameterAveraging().weigh, compression)
    with jax.enable_x64(True) if x64 else nullcontext():
        before = leaves(4)
        made = [contribution(rank, before, compression) for rank in range(4)]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *made)
        if axis == "processes":
            stacked = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), stacked)
        metrics = jax.jit(jax.vmap(run, axis_name=AXIS))(stacked)
        metrics = {name: np.asarray(x, np.float64)[0] for name, x in metrics.items()}
    g, shares = np.stack([flat(decoded(one.payload)) for one in made]), STEPS / STEPS.sum()
    mean, norm = shares @ g, np.linalg.norm(g, axis=1)
    length = np.linalg.norm(mean)
    # sums of several devices are rounded to int8 once more where they cross to other processes
    rtol = 1e-2 if compression else 1e-5
    far = np.linalg.norm(g - mean, axis=1) / np.linalg.norm(flat(before) - mean)
    np.testing.assert_allclose(metrics["distance"], far, rtol=rtol)
    np.testing.assert_allclose(metrics["update_norm"], norm, rtol=1e-5)
    np.testing.assert_allclose(metrics["cosine"], g @ mean / (norm * length), rtol=rtol)


def test_what_a_process_lacks_is_never_the_largest():
    """Its zeros are in the place of a second device, also in a window that counts for all."""
    axis = ProcessAxis(3, ((0, 1), (2,)))
    own, there = jnp.array([[-3.0, -5.0], [-4.0, 0.0]]), jnp.ones((2, 2), bool)
    largest = jax.vmap(lambda x, has: axis.largest(list(x), list(has)), axis_name=AXIS)
    assert largest(own, there).tolist() == [-3, -3]
    assert largest(own, there.at[0].set(False)).tolist() == [-4, -4]


@pytest.mark.parametrize("others", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_parameters_of_dtypes_that_nothing_promotes(others):
    """Packed together they would be an error of JAX's."""

    def loss_fn(params, batch, rng):
        w = params["w"].astype(jnp.float32)
        return ((batch["x"] @ w + params["b"]) ** 2).mean()

    params = {"w": np.ones(3, np.float32).astype(others), "b": np.float32(0)}
    train = elche.build_train_step(
        loss_fn, optax.sgd(0.1), devices=jax.devices()[:2],
        averaging=elche.ParameterAveraging(optimizer_state="reset"),
    )  # fmt: skip
    with jax.numpy_dtype_promotion("strict" if others == jnp.bfloat16 else "standard"):
        state = train.init(params)
        with train.windows({"x": np.ones((32, 3), np.float32)}, 4, epochs=1) as windows:
            state, metrics = train(state, next(windows))
    assert state.params["w"].dtype == others
    np.testing.assert_allclose(metrics["distance"], 0, atol=1e-3)  # all saw the same rows
