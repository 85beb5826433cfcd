"""A small problem for the trainer's tests, and the loop that a user would write."""

from contextlib import contextmanager
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax

import elche_jax as elche

X = np.random.default_rng(0).normal(size=(192, 5)).astype("float32")
DATA = {"x": X, "y": np.sin(X).sum(axis=1)}
HELD_OUT = {"x": X[:50] + 1, "y": np.cos(X[:50]).sum(axis=1)}
PARAMS = {
    "a": np.random.default_rng(1).normal(size=(5, 8)).astype("float32"),
    "b": np.random.default_rng(2).normal(size=8).astype("float32"),
}
COUNTS = [(2, 1, 1, 0), (1, 2, 2, 1), (1, 1, 1, 1)]
"""Counts of the windows of a run; they are repeated."""


def errors(params, batch, mask=1.0):
    return (jnp.tanh(batch["x"] @ params["a"]) * mask @ params["b"] - batch["y"]) ** 2


def loss_fn(params, batch, rng):
    """Per-example losses with dropout, and a metric."""
    mask = jax.random.bernoulli(rng, 0.8, (8,))
    error = errors(params, batch, mask)
    return error, {"mae": jnp.sqrt(error)}


def stateful_loss_fn(params, model_state, batch, rng):
    """The same with running means."""
    error, metrics = loss_fn(params, batch, rng)
    mean = 0.9 * model_state["mean"] + 0.1 * batch["x"].mean(axis=0)
    return error, ({"mean": mean}, metrics)


MODEL_STATE = {"mean": np.zeros(5, "float32")}


def metric_fn(params, batch):
    return {"error": errors(params, batch)}


def held_out_error(params):
    """What the evaluation must give, by NumPy."""
    hidden = np.tanh(HELD_OUT["x"] @ np.asarray(params["a"], "float64"))
    return ((hidden @ np.asarray(params["b"], "float64") - HELD_OUT["y"]) ** 2).mean()


def replay(devices=4, windows=100):
    """A cadence whose counts are known."""
    rows = [row if devices == 4 else (sum(row),) for row in COUNTS]
    return elche.Replay((rows * windows)[:windows])


def trainer(devices=4, loss=loss_fn, **options):
    """A trainer on so many devices."""
    options.setdefault("cadence", replay(devices))
    return elche.Trainer(
        loss, optax.adam(1e-2), has_aux=True, devices=jax.devices()[:devices], **options
    )


kept_trainer = cache(trainer)


def shared(devices=4, loss=loss_fn):
    """A trainer for all tests with these arguments: compiled once, and each run begins anew."""
    return kept_trainer(devices, loss)


@contextmanager
def evaluating(values, name="error"):
    """The shared trainer, whose evaluations give one of these values after another."""
    one, left = shared(), iter(values)
    kept = one._evaluation
    one._evaluation = metric_fn, lambda *arguments, **options: {name: next(left)}
    try:
        yield one
    finally:
        one._evaluation = kept


def loop(train, epochs=3, model_state=None):
    """The user's loop over the same work: state, and the metrics of every window."""
    state = train.init(PARAMS, model_state=model_state)
    seen = []
    for window in train.windows(DATA, 8, epochs):
        state, metrics = train(state, window)
        seen.append((window, {name: np.asarray(value) for name, value in metrics.items()}))
    return train, state, seen


@cache
def kept_loops(devices):
    train = elche.build_train_step(
        loss_fn, optax.adam(1e-2), has_aux=True, devices=jax.devices()[:devices],
        cadence=replay(devices),
    )  # fmt: skip
    return cache(lambda epochs: loop(train, epochs))


def own_loop(devices=4, epochs=3):
    """That loop with the default options, and a step that is no trainer's; run once."""
    return kept_loops(devices)(epochs)


def steps(folder):
    """The checkpoints in a folder: windows that they hold."""
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def same_bits(one, other):
    """Whether two pytrees are bitwise the same."""
    a, b = jax.tree.leaves(one), jax.tree.leaves(other)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    return all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(a, b, strict=True)
    )
