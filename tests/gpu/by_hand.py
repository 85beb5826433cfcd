"""A small problem on one GPU, and the loop that one would write for it by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

BATCH = 4
X = np.random.default_rng(0).normal(size=(192, 6)).astype("float32")
DATA = {"x": X, "y": np.sin(X).sum(axis=1)}  # 48 microbatches
HELD_OUT = {"x": X[:50] + 1, "y": np.cos(X[:50]).sum(axis=1)}
PARAMS = {
    "a": np.random.default_rng(1).normal(size=(6, 16)).astype("float32"),
    "b": np.random.default_rng(2).normal(size=16).astype("float32"),
}


def gpu() -> jax.Device:
    """The first GPU; the CPU is the default of the suite."""
    return jax.devices("cuda")[0]


def errors(params, batch, mask=1.0):
    return (jnp.tanh(batch["x"] @ params["a"]) * mask @ params["b"] - batch["y"]) ** 2


def loss_fn(params, batch, rng):
    """Per-example losses with dropout: what a microbatch's key is, shows."""
    return errors(params, batch, jax.random.bernoulli(rng, 0.8, (16,)))


def metric_fn(params, batch):
    return {"error": errors(params, batch)}


def each_error(params, data=HELD_OUT):
    """What the evaluation measures of each example, by NumPy in float64."""
    a, b = (np.asarray(params[name], "float64") for name in "ab")
    return (np.tanh(data["x"].astype("float64") @ a) @ b - data["y"]) ** 2


def windows_by_hand(counts, tx, *, loss=loss_fn, params=PARAMS, data=DATA, first=0):
    """Trains windows of so many microbatches, in the order of the data, by a plain `jit` step.

    Args:
        counts: Microbatches of each window.
        tx: The optimizer.
        loss: One loss per example.
        params: Parameters at the start.
        data: What the microbatches are made of.
        first: Number of the first microbatch.

    Returns:
        The parameters after each window.
    """

    @jax.jit
    def step(params, opt_state, batches, first):
        def gradient(i):
            batch = jax.tree.map(lambda leaf: leaf[i], batches)
            key = jax.random.fold_in(jax.random.key(0), first + i)
            return jax.grad(lambda p: loss(p, batch, key).mean())(params)

        count = len(batches["x"])
        grads = [gradient(i) for i in range(count)]
        mean = jax.tree.map(lambda *parts: sum(parts) / count, *grads)
        updates, opt_state = tx.update(mean, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = jax.device_put(params, gpu())
    opt_state, history = tx.init(params), []
    for count in counts:
        rows = slice(first * BATCH, (first + count) * BATCH)
        batches = {k: v[rows].reshape(count, BATCH, *v.shape[1:]) for k, v in data.items()}
        params, opt_state = step(params, opt_state, batches, first)
        history.append(jax.device_get(params))
        first += count
    return history
