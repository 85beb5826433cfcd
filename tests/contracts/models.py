"""Real models and data of the contract tests."""

from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import elche_jax as elche


@cache
def digits() -> dict[str, np.ndarray]:
    """The 1797 handwritten digits, float32 images and int32 labels.

    Read from scikit-learn's file: importing it would take every worker a second.
    """
    sklearn = find_spec("sklearn")
    assert sklearn is not None and sklearn.origin is not None
    file = Path(sklearn.origin).parent / "datasets/data/digits.csv.gz"
    rows = np.loadtxt(file, np.float32, delimiter=",")
    return {
        "image": rows[:, :64].reshape(-1, 8, 8, 1) / 16,
        "label": rows[:, 64].astype("int32"),
    }


class Cnn(nn.Module):
    """A small convolutional net; dropout and BatchNorm on request."""

    dropout: float = 0.0
    norm: bool = False

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Conv(8, (3, 3), use_bias=not self.norm)(x)
        if self.norm:
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.relu(x)
        x = nn.avg_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1)
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(10)(x)


@cache
def variables(model: Cnn) -> dict:
    init = jax.jit(partial(model.init, train=False))
    return jax.device_get(init(jax.random.key(0), digits()["image"][:1]))


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def vector_loss(model: Cnn):
    """One loss per example."""

    def loss_fn(params, batch, rng):
        logits = model.apply({"params": params}, batch["image"], train=True, rngs={"dropout": rng})
        return cross_entropy(logits, batch)

    return loss_fn


def scalar_loss(model: Cnn):
    """The mean over the microbatch."""
    vector = vector_loss(model)
    return lambda params, batch, rng: vector(params, batch, rng).mean()


def norm_loss(model: Cnn):
    """The mean over the microbatch, with BatchNorm statistics as model state."""

    def loss_fn(params, model_state, batch, rng):
        logits, updates = model.apply(
            {"params": params, **model_state},
            batch["image"],
            train=True,
            rngs={"dropout": rng},
            mutable=["batch_stats"],
        )
        accuracy = (logits.argmax(-1) == batch["label"]).astype(jnp.float32)
        return cross_entropy(logits, batch).mean(), (updates, {"accuracy": accuracy})

    return loss_fn


class Script(elche.Cadence):
    """A cadence that gives the counts of a list, over and over."""

    adaptive = False
    scripted = True

    def __init__(self, counts):
        self.script = list(counts)

    def init(self, world_size):
        return elche.Replay(self.script).init(world_size)

    def update(self, state, report, verdict=elche.STABLE):
        return state

    def counts_at(self, window):
        return self.script[window % len(self.script)]


def run(train, state, data, batch_size, windows=None, **options):
    """Trains; gives the state and the windows used."""
    used = []
    with train.windows(data, batch_size, **options) as iterator:
        for window in iterator:
            state, _ = train(state, window)
            used.append(window)
            if windows is not None and len(used) == windows:
                break
    return state, used


def host(tree):
    """One copy of a replicated pytree on the host."""
    return jax.device_get(elche.unreplicate(tree))


def assert_close(a, b, rtol=1e-5, atol=1e-7):
    paths = jax.tree_util.tree_flatten_with_path(a)[0]
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(paths, jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


def assert_bitwise(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    paths = jax.tree_util.tree_flatten_with_path(a)[0]
    for (path, x), y in zip(paths, jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype and x.tobytes() == y.tobytes(), jax.tree_util.keystr(path)
