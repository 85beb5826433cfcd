"""A training step to ask the wrong things of."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import elche_jax as elche


def loss_fn(params, batch, rng):
    return jnp.mean((batch["x"] @ params["w"]) ** 2)


DATA = {"x": np.ones((20, 3), "float32")}


PARAMS = {"w": np.ones(3, "float32")}


def build(loss=loss_fn, **options):
    options.setdefault("devices", jax.devices()[:2])
    return elche.build_train_step(loss, optax.sgd(0.1), **options)


def windows(loss=loss_fn, data=DATA, batch_size=4, build_options=None, model_state=None, **options):
    """Asks for windows; whatever is wrong must come up before anything is compiled."""
    train = build(loss, **(build_options or {}))
    train.init(PARAMS, model_state=model_state)
    try:
        return train.windows(data, batch_size, **options)
    finally:
        assert train.report().compile_misses == 0
