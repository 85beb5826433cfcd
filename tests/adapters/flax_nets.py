"""Modules, losses and data of the tests of the adapters; and training by loss functions."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn, nnx

import elche_jax as elche

TX = optax.sgd(0.05, momentum=0.9)


def data(examples=64):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(examples, 8, 8, 1)).astype("float32")
    return {"x": x, "y": (rng.integers(0, 3, examples)).astype("int32")}


def cross_entropy(outputs, batch):
    """One loss per example."""
    return optax.softmax_cross_entropy_with_integer_labels(outputs, batch["y"])


class LinenMLP(nn.Module):
    """Dropout twice; the switch is `deterministic`."""

    @nn.compact
    def __call__(self, x, deterministic: bool):
        x = nn.relu(nn.Dense(16)(x.reshape(len(x), -1)))
        x = nn.Dropout(0.3, deterministic=deterministic)(x)
        x = nn.relu(nn.Dense(8)(x))
        return nn.Dense(3)(nn.Dropout(0.3, deterministic=deterministic)(x))


class LinenCNN(nn.Module):
    """BatchNorm and dropout; the switch is `train`."""

    @nn.compact
    def __call__(self, x, *, train: bool):
        x = nn.Conv(4, (3, 3))(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.8)(x))
        x = nn.Dropout(0.2, deterministic=not train)(x.mean(axis=(1, 2)))
        return nn.Dense(3)(x)


class NnxMLP(nnx.Module):
    """Layers in a list, dropout between them, and the last bias used twice."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(n, m, rngs=rngs) for n, m in [(64, 16), (16, 3)]])
        self.drops = nnx.List([nnx.Dropout(0.3, rngs=rngs) for _ in range(2)])
        self.bias = self.layers[1].bias
        self.rngs = rngs

    def __call__(self, x):
        x = x.reshape(len(x), -1)
        for layer, drop in zip(self.layers, self.drops, strict=True):
            x = layer(drop(nnx.relu(x)))
        return x + self.bias[...]


class NnxCNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.8, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        return self.out(self.drop(x.mean(axis=(1, 2))))


def trained(loss_fn, params, model_state=None, world=2, epochs=2, **options):
    """The state after training, on the host; and the metrics of the last window, plain."""
    train = elche.build_train_step(loss_fn, TX, devices=jax.devices()[:world], **options)
    state = train.init(params, model_state=model_state, rng=7)
    for window in train.windows(data(), batch_size=4, epochs=epochs):
        state, metrics = train(state, window)
    elche.check_replicas(state)
    return jax.device_get(elche.unreplicate(state)), {
        k: np.asarray(v).tolist() for k, v in metrics.items()
    }


class Stepped(NamedTuple):
    params: Any
    model_state: Any


def stepped(loss_fn, params, model_state=None):
    """Parameters and model state after a step of gradient descent, without a training step."""
    batch = {name: leaf[:8] for name, leaf in data().items()}

    def loss(params):
        if model_state is None:
            return loss_fn(params, batch, jax.random.key(7)).mean(), None
        value, new = loss_fn(params, model_state, batch, jax.random.key(7))
        return value.mean(), new

    grads, new = jax.jit(jax.grad(loss, has_aux=True))(params)
    moved = jax.tree.map(lambda p, g: np.asarray(p - 0.1 * g), params, grads)
    return Stepped(moved, jax.device_get(new))


def assert_equal(got, want, rtol=0.0):
    """Equal to the bit, or up to `rtol`, structure and dtypes included."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    named = jax.tree_util.tree_flatten_with_path(want)[0]
    for (path, b), a in zip(named, jax.tree.leaves(got), strict=True):
        assert jnp.result_type(a) == jnp.result_type(b), path
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * 0.1, err_msg=str(path))
