"""Microbatches that cannot run in parts: an error that says why, before anything is compiled."""

import logging
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import slow
from parted import (
    BATCH,
    INSTEAD,
    MIXES,
    PARAMS,
    RAGGED,
    data,
    devices_of,
    normalized,
    refused,
    scalar,
    train_on,
    vector,
)  # fmt: skip

import elche_jax as elche

TODO = "Pass a number of parts, 'auto', or one of these by kind."


@pytest.mark.parametrize(
    ("split", "error", "message"),
    [
        (2.5, TypeError, f"microbatch_split must be an integer, got 2.5 (float). {TODO}"),
        (True, TypeError, f"microbatch_split must be an integer, got True (bool). {TODO}"),
        ("four", TypeError, f"microbatch_split must be an integer, got 'four' (str). {TODO}"),
        (0, ValueError, f"microbatch_split must be at least 1, got 0. {TODO}"),
        ({"cpu": -1}, ValueError, f"microbatch_split['cpu'] must be at least 1, got -1. {TODO}"),
        (
            {"cpu": "4"}, TypeError,
            f"microbatch_split['cpu'] must be an integer, got '4' (str). {TODO}",
        ),
        (
            {"L4": 4}, ValueError,
            "microbatch_split must name kinds of the devices ('cpu'), got 'L4'. Leave it out.",
        ),
    ],
)  # fmt: skip
def test_bad_splits(split, error, message):
    with pytest.raises(error, match=f"^build_train_step: {re.escape(message)}$"):
        train_on(devices_of("lane"), split=split)


def test_a_size_that_has_no_such_parts():
    message = (
        "windows: batch_size must be a multiple of 4, the number of parts on cpu "
        "(microbatch_split), got 6."
    )
    refused(message, scalar, batch=6)


def test_batch_norm():
    def loss(params, model_state, batch, rng):
        mean = batch["x"].mean(0)
        return scalar(params, batch, rng), {"seen": model_state["seen"], "mean": mean}

    message = (
        "windows: loss_fn must return model_state unchanged under microbatch_split, got another "
        "value of leaf ['mean']. Statistics of parts (BatchNorm) are not those of the microbatch. "
    ) + INSTEAD
    refused(message, loss, model_state={"seen": np.float32(0), "mean": np.zeros(3, "float32")})


def test_dropout():
    @jax.jit
    def loss(params, batch, rng):
        keep = jax.random.bernoulli(rng, 0.9, batch["x"].shape)
        return scalar(params, batch | {"x": batch["x"] * keep}, rng)

    message = (
        "windows: loss_fn must not use its rng under microbatch_split, got a loss that does. Parts "
        "would draw other numbers (dropout) than the microbatch. "
    ) + INSTEAD
    refused(message, loss)


def contrastive(params, batch, rng):
    z = jnp.tanh(batch["x"] * params["w"] + params["b"])
    return -jax.nn.log_softmax(z @ z.T)[jnp.arange(len(z)), jnp.arange(len(z))]


def divided_by_a_constant(params, batch, rng):
    return vector(params, batch, rng).sum() / BATCH


def constant_weight(params, batch, rng):
    return elche.Weighted(scalar(params, batch, rng), jnp.float32(1))


def fixed_mask(params, batch, rng):
    keep = jax.random.bernoulli(jax.random.key(0), 0.5, batch["x"].shape)
    return scalar(params, batch | {"x": batch["x"] * keep}, rng)


@pytest.mark.parametrize(
    ("loss", "what", "percent"),
    [
        (normalized, "a loss", "{}"),
        (contrastive, "a loss", "{}"),
        (fixed_mask, "a gradient ['b']", "{}"),
        (divided_by_a_constant, "a loss", "50.00"),
        (constant_weight, "a weight", "100.00"),
    ],
)
def test_losses_that_need_the_whole_microbatch(loss, what, percent):
    refused(MIXES.replace("{}", what, 1).replace("{}", percent), loss)


class Net(nn.Module):
    """A network that computes in bfloat16 by itself, whose sums over examples round a lot."""

    norm: bool

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(64, dtype=jnp.bfloat16)(jnp.tile(x[:, None], (1, 256, 1)))
        if self.norm:
            x = nn.BatchNorm(use_running_average=False, dtype=jnp.bfloat16)(x)
        return nn.Dense(1, dtype=jnp.bfloat16)(nn.relu(x)).astype(jnp.float32).mean((1, 2))


@pytest.mark.parametrize("norm", [slow(False), True])
def test_models_that_compute_in_16_bits_are_judged_by_their_loss(norm):
    model = Net(norm)
    params = jax.jit(model.init)(jax.random.key(0), data()["x"])

    def loss(params, batch, rng):
        out, _ = model.apply(params, batch["x"], mutable=["batch_stats"], rngs={"dropout": rng})
        return (out - batch["y"]) ** 2

    train = elche.build_train_step(
        loss, optax.sgd(0.1), devices=devices_of("one"), microbatch_split=2,
        trainable=lambda path, leaf: "batch_stats" not in path,
    )  # fmt: skip
    train.init(params)
    if norm:
        with pytest.raises(ValueError, match=r"got a loss of 8 examples that differs by"):
            train.windows(data(), BATCH)
    else:
        train.windows(data(), BATCH).close()


def test_a_loss_that_takes_no_float32_is_compared_in_its_own_type():
    def loss(params, batch, rng):
        ones = jnp.ones((3, 1), jnp.bfloat16)
        x = jax.lax.dot(batch["x"], ones) * params["w"][0]  # takes floats of one size only
        return jax.lax.add(x, jnp.zeros_like(ones[:1]) * x)[:, 0] ** 2

    train_on(devices_of("one"), loss, 4, compute_dtype="bfloat16")


def test_zeros_do_not_hide_that_examples_mix():
    def loss(params, batch, rng):
        x = batch["x"] @ params["w"] * params["b"]
        return jnp.mean((x - x.mean()) ** 2)

    zeros = jax.tree.map(np.zeros_like, PARAMS)
    train = elche.build_train_step(
        loss, optax.sgd(0.1), devices=jax.devices()[:1], microbatch_split=2
    )
    train.init(zeros)
    with pytest.raises(ValueError, match=r"must treat every example of a microbatch by itself"):
        train.windows(data(), BATCH)


def test_a_metric_that_is_no_mean():
    def loss(params, batch, rng):
        return scalar(params, batch, rng), {"largest": batch["x"].max()}

    refused(MIXES.replace("{}", "a metric 'largest'", 1), loss, has_aux=True)


def test_a_masked_loss_that_divides_by_all_examples():
    def loss(params, batch, rng):
        return jnp.where(batch["mask"], vector(params, batch, rng), 0).mean()

    refused(MIXES, loss, **RAGGED)


def test_a_loss_of_fixed_shapes():
    def loss(params, batch, rng):
        return scalar(params, batch | {"x": batch["x"].reshape(BATCH, 3)}, rng)

    message = (
        "windows: loss_fn must take 2 examples, a part of 8, under microbatch_split, got {}. Take "
        "the number of examples from the batch."
    )
    refused(message, loss)


def test_another_form_for_parts():
    def loss(params, batch, rng):
        losses = vector(params, batch, rng)
        return losses if len(losses) == BATCH else losses.mean()

    message = (
        "windows: loss_fn must take 2 examples, a part of 8, under microbatch_split, got a scalar "
        "loss instead of a vector loss."
    )
    refused(message, loss)


def test_what_cannot_be_checked_is_said(caplog):
    rows = data()
    rows["x"][0] = np.nan
    train = elche.build_train_step(
        scalar, optax.sgd(0.1), devices=jax.devices()[:1], microbatch_split=2
    )
    train.init(PARAMS)
    with caplog.at_level(logging.WARNING, logger="elche_jax"):
        train.windows(rows, BATCH).close()
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "elche: microbatch_split was not checked, as the gradient of 8 examples is not finite or "
        "does not fit the memory; the loss must treat every example by itself."
    ]
