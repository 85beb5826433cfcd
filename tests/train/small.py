"""A small training step on small data."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax

import elche_jax as elche


def loss_fn(params, batch, rng):
    return jnp.mean((batch["x"] @ params["w"]) ** 2)


PARAMS = {"w": np.ones(3, "float32")}


def data(size=64):
    return {"x": np.random.default_rng(0).normal(size=(size, 3)).astype("float32")}


class Broken:
    """A data set whose example 17 cannot be read."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        if i == 17:
            raise OSError("example 17 is damaged")
        return {"x": np.ones(3, "float32")}


def build(world=2, **options):
    return elche.build_train_step(
        options.pop("loss", loss_fn), optax.sgd(0.1), devices=jax.devices()[:world], **options
    )


def threads():
    """The library's threads; one that compiles ends by itself, and is waited for."""
    for thread in threading.enumerate():
        if thread.name == "elche-compile":
            thread.join(30)
    return [t.name for t in threading.enumerate() if t.name.startswith("elche-")]
