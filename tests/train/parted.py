"""Losses whose microbatches may run in parts or not, and training with them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import elche_jax as elche

BATCH, SIZE = 8, 9 * 8 + 3
COUNTS = {1: [(3,), (4,), (3,)], 2: [(2, 1), (0, 4), (1, 2)], 3: [(1, 0, 2), (2, 1, 1), (1, 1, 1)]}
PARAMS = {"w": np.array([0.3, -0.2, 0.5], "float32"), "b": np.float32(0.1) * np.ones(1, "float32")}


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SIZE, 3)).astype("float32")
    tokens = rng.integers(0, 3, size=SIZE).astype("float32")
    tokens[: BATCH // 2] = 0  # the first parts have nothing to count
    return {"x": x, "y": np.sin(x.sum(1)), "tokens": tokens}


def errors(params, batch):
    return jnp.tanh(batch["x"] @ params["w"] + params["b"][0]) - batch["y"]


def vector(params, batch, rng):
    return errors(params, batch) ** 2


def scalar(params, batch, rng):
    return jnp.mean(vector(params, batch, rng))


def weighted(params, batch, rng):
    tokens = batch["tokens"] * batch.get("mask", 1)
    mean = (vector(params, batch, rng) * tokens).sum() / tokens.sum()  # may be NaN
    return elche.Weighted(mean, tokens.sum())


def masked(params, batch, rng):
    losses = jnp.where(batch["mask"], vector(params, batch, rng), 0)
    return losses.sum() / batch["mask"].sum()  # may be NaN


RAGGED = {"drop_last": False, "mask_key": "mask"}


def devices_of(name, twins=None):
    cpus = jax.devices("cpu")
    return {
        "one": cpus[:1],
        "lane": cpus[:2],
        "lanes": twins and [cpus[0], twins[0]],
        "three": twins and [twins[0], cpus[0], cpus[1]],
    }[name]


def train_on(devices, loss=scalar, split=None, *, rows=None, how=None, **options):
    """The parameters after every window, and the metrics."""
    train = elche.build_train_step(
        loss, optax.sgd(0.5, momentum=0.9), devices=devices, microbatch_split=split,
        cadence=elche.Replay(COUNTS[len(devices)]), **options,
    )  # fmt: skip
    state, history, metrics = train.init(PARAMS), [], []
    rows = data() if rows is None else rows
    for window in train.windows(rows, BATCH, shuffle=False, **(how or {})):
        state, said = train(state, window)
        history.append(jax.device_get(elche.unreplicate(state.params)))
        metrics.append(jax.device_get(said))
    return history, metrics


INSTEAD = "Leave microbatch_split out, so that every device runs whole microbatches."
MIXES = (
    "windows: loss_fn must treat every example of a microbatch by itself under microbatch_split, "
    "got {} of 4 examples that differs by {}% from that of two halves. Statistics over the "
    "microbatch, pairs of its examples, sums divided by a fixed number and fixed weights need it "
    "whole. "
) + INSTEAD


def refused(message, loss, split=4, model_state=None, batch=BATCH, has_aux=False, **how):
    train = elche.build_train_step(
        loss, optax.sgd(0.1), devices=jax.devices()[:2], microbatch_split=split, has_aux=has_aux
    )
    train.init(PARAMS, model_state=model_state)
    pattern = re.escape(message).replace(re.escape("{}"), r"\S.*")
    with pytest.raises(ValueError, match=f"^{pattern}$"):
        train.windows(data(), batch, **how)
    assert train.report().compile_misses == 0


def normalized(params, batch, rng):
    x = batch["x"]
    return scalar(params, batch | {"x": (x - x.mean(0)) / (x.std(0) + 1e-3)}, rng)
