"""Models under the options that change what a loss function is called with."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_nets import TX, LinenCNN, NnxCNN, assert_equal, cross_entropy, data, trained
from marks import slow

import elche_jax as elche
from elche_jax.adapters.linen import from_linen
from elche_jax.adapters.nnx import from_nnx

X = data()["x"]


def begin(kind, loss=cross_entropy, **options):
    """A model with parameters and model state."""
    if kind == "nnx":
        model = from_nnx(NnxCNN(nnx.Rngs(0)), loss, **options)
        return model, model.params, model.model_state
    model = from_linen(LinenCNN(), loss, **options)
    return model, *model.init(0, {"x": X[:1]})


@cache
def plain(kind):
    """What a model trains to on one device."""
    state, _ = trained(*begin(kind), world=1)
    return state


@pytest.mark.parametrize("kind", ["linen", slow("nnx")])
def test_half_precision_computes_in_half_and_keeps_state_and_parameters_whole(kind):
    seen = []

    def loss(outputs, batch):
        seen.append(outputs.dtype)
        return cross_entropy(outputs.astype("float32"), batch)

    model, params, model_state = begin(kind, loss)
    config = elche.DDPConfig(compute_dtype="bfloat16")
    half, _ = trained(model, params, model_state, world=1, config=config)
    # BatchNorm of nnx makes its outputs of the dtype of its statistics, which are no parameters
    assert set(seen) == {jnp.dtype("bfloat16" if kind == "linen" else "float32")}
    whole = plain(kind)
    assert jax.tree.map(jnp.result_type, half) == jax.tree.map(jnp.result_type, whole)
    for a, b in zip(jax.tree.leaves(half.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_allclose(a, b, atol=0.05)


class Masked(nnx.Module):
    """BatchNorm that leaves out what is no example."""

    def __init__(self, rngs):
        self.norm, self.out = nnx.BatchNorm(3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x, mask=None):
        return self.out(self.norm(x, mask=None if mask is None else mask[:, None]))


def test_a_mask_reaches_the_module():
    """Six examples in microbatches of four: the last one is filled up with its own first."""
    x = np.random.default_rng(1).normal(size=(6, 3)).astype("float32")
    model = from_nnx(
        Masked(nnx.Rngs(0)),
        lambda outputs, batch: (outputs[:, 0] - 1) ** 2,
        inputs=lambda batch: {"x": batch["x"], "mask": batch["mask"]},
    )
    train = elche.build_train_step(model, TX, devices=jax.devices()[:1])
    state = train.init(model.params, model_state=model.model_state)
    order = []
    for window in train.windows({"x": x}, 4, shuffle=False, drop_last=False, mask_key="mask"):
        state, _ = train(state, window)
        order.append(window.examples)
    assert order == [4, 2]
    mean = np.zeros(3)
    for rows in (x[:4], x[4:]):
        mean = 0.99 * mean + 0.01 * rows.mean(axis=0)
    got = jax.device_get(elche.unreplicate(state.model_state))["norm"]["mean"]
    np.testing.assert_allclose(got, mean, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", ["linen", slow("nnx")])
def test_devices_with_steps_of_their_own(kind):
    """Under averaging with one step per window, on one device: the plain step."""
    model, params, model_state = begin(kind)
    averaging = elche.ParameterAveraging()
    got, _ = trained(
        model, params, model_state, averaging=averaging, world=1, cadence=elche.Replay([(1,)] * 32)
    )
    want = plain(kind)
    assert_equal(got.params, want.params, rtol=1e-5)
    assert_equal(got.model_state, want.model_state, rtol=1e-5)
