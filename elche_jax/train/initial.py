"""The first training state, and its shapes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from elche_jax.engine.loss import describe
from elche_jax.engine.replicas import replicate
from elche_jax.engine.state import TrainState

PyTree = Any


def initial_state(
    optimizer: optax.GradientTransformation,
    params: PyTree,
    model_state: PyTree,
    rng: Any,
    devices: Sequence[jax.Device],
) -> TrainState:
    """Makes the replicated state before the first window; see `TrainStep.init`."""
    check_params(params)
    state = TrainState(
        params=params,
        opt_state=optimizer.init(params),
        model_state=model_state,
        key=jax.random.key_data(as_key(rng)),
        microbatches=jnp.int32(0),
        step=jnp.int32(0),
    )
    return replicate(state, devices)


def check_params(params: PyTree) -> None:
    """Raises where parameters cannot be differentiated by."""
    named = jax.tree_util.tree_flatten_with_path(params)[0]
    if not named:
        raise ValueError("TrainStep.init: params must hold at least one array, got none.")
    for path, leaf in named:
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"TrainStep.init: every leaf of params must be a float array, leaf "
                f"{jax.tree_util.keystr(path)} is {describe(leaf)}. Put what is not trained "
                "into model_state."
            )


def as_key(rng: Any) -> jax.Array:
    """A typed key of a seed, a raw key or a typed key."""
    if isinstance(rng, int) and not isinstance(rng, bool):
        return jax.random.key(rng)
    if isinstance(rng, jax.Array) and jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        key = rng
    elif isinstance(rng, jax.Array) and rng.dtype == jnp.uint32:
        key = jax.random.wrap_key_data(rng)
    else:
        raise TypeError(
            f"TrainStep.init: rng must be a key or an integer seed, got {describe(rng)}."
        )
    if key.shape != ():
        raise TypeError(f"TrainStep.init: rng must be one key, got an array of shape {key.shape}.")
    return key


def key_impl_of(rng: Any) -> str:
    """Name of the PRNG implementation of a key or seed."""
    return str(jax.random.key_impl(as_key(rng)))


def shapes_of(tree: PyTree) -> PyTree:
    """The shapes and dtypes of a pytree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
