"""Small runs of many kinds, that can be stopped and taken up again."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.dynamic_scale import DynamicScale

import elche_jax as elche

SCRIPT = {
    1: [(5,), (3,)] * 64,
    2: [(5, 3), (2, 2), (2, 4)] * 32,
    4: [(3, 1, 2, 2), (1, 1, 1, 1), (2, 0, 1, 3)] * 32,
}
"""Counts for so many devices; a window has the same microbatches on 2 and on 4."""

EVERY = 3
"""Windows between two checkpoints."""


def data(size=96):
    x = np.random.default_rng(0).normal(size=(size, 4)).astype("float32")
    return {"x": x, "y": np.sin(x).sum(axis=1)}


@dataclass(frozen=True)
class Case:
    """A model and what is asked of `build_train_step`."""

    loss: Any
    params: Any
    optimizer: Any = field(default_factory=lambda: optax.adam(1e-2))
    model_state: Any = None
    options: dict = field(default_factory=dict)

    def build(self, world=4, cadence=None, **options):
        chosen = {"cadence": cadence or elche.Replay(SCRIPT[world])} | self.options | options
        devices = jax.devices()[:world]
        return elche.build_train_step(self.loss, self.optimizer, devices=devices, **chosen)

    def init(self, train):
        return train.init(self.params, model_state=self.model_state, rng=7)


def weights(*shape, dtype="float32"):
    rows = np.random.default_rng(1).normal(size=shape) * 0.3
    return jnp.asarray(rows, dtype)


def plain_loss(params, batch, rng):
    hidden = jnp.tanh(batch["x"] @ params["a"])
    return (hidden @ params["b"] - batch["y"]) ** 2


def dropout_loss(params, model_state, batch, rng):
    x = (batch["x"] - model_state["mean"]) / jnp.sqrt(model_state["var"] + 1e-3)
    hidden = jnp.tanh(x @ params["a"]) * jax.random.bernoulli(rng, 0.8, (5,))
    new = {
        "mean": 0.9 * model_state["mean"] + 0.1 * batch["x"].mean(axis=0),
        "var": 0.9 * model_state["var"] + 0.1 * batch["x"].var(axis=0),
        "seen": model_state["seen"] + 1,
    }
    return (hidden @ params["b"] - batch["y"]) ** 2, new


STATISTICS = {"mean": np.zeros(4, "float32"), "var": np.ones(4, "float32"), "seen": np.int32(0)}
PLAIN = {"a": weights(4, 5), "b": weights(5)}


def frozen_loss(params, batch, rng):
    noise = jax.random.normal(params["noise"], (5,))
    hidden = jnp.tanh(batch["x"] @ params["a"]) + 0.1 * noise
    return (hidden[:, params["ids"]] @ params["b"] - batch["y"]) ** 2


class Layer(NamedTuple):
    w: Any
    b: Any


ODD = {
    "a.b": {"c/d": weights(4, 5, dtype="bfloat16"), "": weights(5)},
    "%2E": [weights(5), (jnp.float32(0.5), weights(0, 3))],
    "layer": Layer(weights(5), jnp.bfloat16(0.25)),
    "größe": {"0": weights(1, 1, 5), "nothing": None},
}


def odd_loss(params, batch, rng):
    first, (scale, empty) = params["%2E"]
    hidden = jnp.tanh(batch["x"] @ params["a.b"]["c/d"].astype("float32") + params["a.b"][""])
    hidden = hidden * first * scale + params["größe"]["0"][0]
    out = hidden @ params["layer"].w + params["layer"].b.astype("float32") + empty.sum()
    return (out - batch["y"]) ** 2


OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
HOST = elche.DDPConfig(exchange="host")
KEEP = {"optimizer_state": "keep"}

GRADIENTS = {
    "dropout": Case(dropout_loss, PLAIN, model_state=STATISTICS),
    "multi_steps": Case(plain_loss, PLAIN, optax.MultiSteps(optax.adam(1e-2), 4)),
    "scaled": Case(
        plain_loss, PLAIN, options={"loss_scale": DynamicScale(scale=2.0**14, growth_interval=4)}
    ),
    "frozen": Case(
        frozen_loss, PLAIN | {"noise": jax.random.key(3), "ids": np.array([4, 2, 0, 1, 3])},
        options={"trainable": {"a": True, "b": True, "noise": False, "ids": False}},
    ),
    "odd": Case(odd_loss, ODD),
}  # fmt: skip


def averaged(rule, model_state=None, **options):
    loss = plain_loss if model_state is None else dropout_loss
    return Case(loss, PLAIN, model_state=model_state, options={"averaging": rule} | options)


AVERAGES = {
    "keep": averaged(elche.ParameterAveraging(**KEEP), STATISTICS, merge="keep"),
    "average": averaged(elche.ParameterAveraging(), STATISTICS),
    "fragments": averaged(elche.DiLoCo(OUTER, fragments=2)),
    "int8": averaged(elche.DiLoCo(OUTER, compression="int8")),
    "delay": averaged(elche.ParameterAveraging(**KEEP, delay=1), STATISTICS),
    "delayed_diloco": averaged(elche.DiLoCo(OUTER, delay=1)),
    "host": averaged(elche.ParameterAveraging(**KEEP), config=HOST),
    "late_host": averaged(
        elche.ParameterAveraging(**KEEP, delay=2), STATISTICS, exchange=elche.HostExchange()
    ),
    "late_host_gradients": averaged(
        elche.MeanGradient("int8", delay=1), exchange=elche.HostExchange()
    ),
}
CASES = GRADIENTS | AVERAGES


def run(
    case, folder=None, *, world=4, cadence=None, until=None, resume="auto", rows=None, train=None,
    **options,
):  # fmt: skip
    """Trains two epochs, or up to a window, by a step that is given or built for it.

    Returns the state and the training step.
    """
    train = train or case.build(world, cadence, **options)
    state, cursor, saver = case.init(train), None, None
    if folder is not None:
        asked = elche.Checkpoints(folder, every_windows=EVERY, keep_last=100)
        saver = elche.Checkpointer(train, asked)
        state, cursor = saver.restore(state, resume)
    state, _ = loop(train, state, rows or data(), cursor, saver, until)
    return state, train


def loop(train, state, rows, cursor, saver, until):
    """Trains two epochs, or up to a window, and saves; gives the state and the last metrics."""
    metrics = None
    try:
        with train.windows(rows, 2, epochs=2, cursor=cursor) as windows:
            for window in windows:
                state, metrics = train(state, window)
                if saver is not None:
                    saver.save(state, window)
                if window.index + 1 == until:
                    break
    finally:
        if saver is not None:
            saver.close()
    return state, metrics


def content(state):
    """The bytes of a state by name, those of every device."""
    return {
        jax.tree_util.keystr(path): raw(leaf).tobytes()
        for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
    }


def raw(leaf):
    """A leaf on the host; of keys their data."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.array(jax.random.key_data(leaf) if is_key else leaf)


def steps(folder):
    """The steps of the checkpoints in a folder."""
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
