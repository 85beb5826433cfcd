"""Small models with synthetic data, to try out `elche-jax advise`."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn

EXAMPLES = 8_192


def mlp() -> dict[str, Any]:
    """Return a job with a three-layer perceptron of width 512."""
    model = nn.Sequential([nn.Dense(512), nn.relu, nn.Dense(512), nn.relu, nn.Dense(10)])
    return _job(model, (64,), batch_size=64)


def cnn() -> dict[str, Any]:
    """Return a job with two convolutions on 16 x 16 images."""
    layers = [
        nn.Conv(16, (3, 3), strides=2), nn.relu,
        nn.Conv(32, (3, 3), strides=2), nn.relu,
        lambda x: x.reshape(len(x), -1), nn.Dense(10),
    ]  # fmt: skip
    return _job(nn.Sequential(layers), (16, 16, 3), batch_size=32)


def transformer() -> dict[str, Any]:
    """Return a job with two attention blocks of width 64 on sequences of length 32."""
    return _job(Transformer(), (32, 16), batch_size=16)


class Transformer(nn.Module):
    """Transformer blocks, then a classifier of the mean over all positions."""

    width: int = 64
    blocks: int = 2

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return 10 logits for inputs of shape `(examples, positions, features)`."""
        x = nn.Dense(self.width)(x)
        for _ in range(self.blocks):
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
            wide = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
            x = x + nn.Dense(self.width)(wide)
        return nn.Dense(10)(x.mean(axis=1))


MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    "mlp": mlp,
    "cnn": cnn,
    "transformer": transformer,
}


def cross_entropy(model: nn.Module) -> Callable[..., jax.Array]:
    """Return the loss function of a classifier for batches of examples `x` and labels `y`."""

    def loss_fn(params: Any, batch: Any, rng: jax.Array) -> jax.Array:
        logits: Any = model.apply(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    return loss_fn


def _job(model: nn.Module, shape: tuple[int, ...], batch_size: int) -> dict[str, Any]:
    """Return arguments of `elche.advise` for a classifier of examples of the given shape."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, *shape)).astype("float32")
    data = {"x": x, "y": rng.integers(0, 10, EXAMPLES).astype("int32")}
    return {
        "loss_fn": cross_entropy(model),
        "optimizer": optax.adam(1e-3),
        "params": jax.jit(model.init)(jax.random.key(0), x[:1]),
        "data": data,
        "batch_size": batch_size,
    }
