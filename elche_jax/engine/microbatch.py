"""The gradient of one microbatch, with its data, random key and precision."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from elche_jax.engine.fetch import CallArgs, Payload
from elche_jax.engine.loss import Form, LossFn, batch_size_of, microbatch_terms
from elche_jax.engine.precision import Precision
from elche_jax.engine.state import TrainState
from elche_jax.engine.trainable import Selection

PyTree = Any


class Terms(NamedTuple):
    """The results of one microbatch.

    Attributes:
        grads: Gradient of the mean loss, float32, in the structure of the trained parameters.
        loss: Mean loss.
        weight: Weight; if 0, the gradient is zero and the model state unchanged.
        metrics: Metrics times the weight.
        model_state: Model state after the microbatch.
    """

    grads: PyTree
    loss: Any
    weight: Any
    metrics: dict[str, Any]
    model_state: PyTree


LEAVES_PER_REDUCTION = 8
"""Number of equally shaped arrays that one reduction checks for non-finite values."""

Gradient = Callable[[Any, PyTree, PyTree], Terms]
"""`gradient(i, trained parameters, model state)`, for microbatch `i` of a call."""


@dataclass(frozen=True)
class Microbatches:
    """Computes gradients of microbatches.

    Attributes:
        loss_fn: The user's loss function.
        form: Form of the loss.
        metrics: Names of the auxiliary metrics.
        key_impl: Name of the PRNG implementation of the run's key.
        selection: The trained parameters.
        precision: Precision of the computation.
    """

    loss_fn: LossFn
    form: Form
    metrics: tuple[str, ...]
    key_impl: str
    selection: Selection = field(default_factory=Selection)
    precision: Precision = field(default_factory=Precision)

    def gradient(self, state: TrainState, payload: Payload, call_args: CallArgs) -> Gradient:
        """Return the gradient as a function of a microbatch's index in a call.

        Args:
            state: Provides the frozen parameters, the key and the loss scale.
            payload: Data of the call.
            call_args: Arguments of the call.
        """
        scale = self.precision.scale_of(state.loss_scale)
        _, frozen = self.selection.split(state.params)
        cast = self.precision.cast
        key = jax.random.wrap_key_data(state.key, impl=self.key_impl)

        def terms(trained: PyTree, model_state: PyTree, batch: PyTree, valid: Any, rng: Any) -> Any:
            # cast inside what is differentiated: gradients then have the dtypes of the parameters
            params = cast(self.selection.join(trained, frozen))
            loss, aux = microbatch_terms(
                self.loss_fn, self.form, params, model_state, cast(batch), valid, rng
            )
            return (loss if scale is None else loss * scale), (loss, aux)

        def unscaled(grad: Any) -> Any:
            # before the division: small float16 gradients would become zero again
            grad = grad.astype(jnp.float32)
            return grad if scale is None else grad / scale

        def gradient(i: Any, trained: PyTree, model_state: PyTree) -> Terms:
            place = call_args.start + i
            batch = payload.fetch(i, call_args.count)
            # XLA must not fuse the gradient with the fetch, so that every capacity and
            # placement gives the same bits.
            batch = jax.lax.optimization_barrier(batch)
            valid = call_args.valid(place, batch_size_of(batch))
            # by its place in the run, so that keys depend neither on the device nor on the counts
            rng = jax.random.fold_in(key, state.microbatches + place)
            grads, (loss, (weight, metrics, new_state)) = jax.grad(terms, has_aux=True)(
                trained, model_state, batch, valid, rng
            )
            if self.form == "weighted":  # weight 0 contributes nothing, even if the loss is NaN
                grads, new_state = jax.tree.map(
                    lambda new, old: jnp.where(weight > 0, new, old),
                    (grads, new_state),
                    (jax.tree.map(jnp.zeros_like, grads), model_state),
                )
            return Terms(jax.tree.map(unscaled, grads), loss, weight, metrics, new_state)

        return gradient


def clip(grads: PyTree, max_norm: float | None, weight: Any = 1.0) -> PyTree:
    """Scale `grads` so that the global norm of `grads / weight` is at most `max_norm`."""
    if max_norm is None:
        return grads
    norm = optax.tree.norm(grads) / weight
    # a norm that overflows must not turn the gradient into zeros
    factor = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-30))
    factor = computed_once(jnp.where(jnp.isfinite(norm), factor, jnp.nan))
    return jax.tree.map(lambda g: g * factor, grads)


def all_finite(tree: PyTree) -> Any:
    """Return whether all elements of a tree of floats are finite.

    `x - x` is 0 for a finite `x` and NaN otherwise. Equally shaped arrays are first added in
    groups, as each reduction adds to the compile time.
    """
    alike: dict[Any, list[Any]] = {}
    for leaf in map(jnp.asarray, jax.tree.leaves(tree)):
        alike.setdefault((leaf.shape, leaf.dtype), []).append(jax.lax.sub(leaf, leaf))
    zeros = [
        functools.reduce(jax.lax.add, leaves[at : at + LEAVES_PER_REDUCTION])
        for leaves in alike.values()
        for at in range(0, len(leaves), LEAVES_PER_REDUCTION)
    ]
    sums = [jax.lax.reduce_sum(zero, range(zero.ndim)).astype(jnp.float32) for zero in zeros]
    return jax.lax.reduce_sum(jnp.stack([jnp.float32(0), *sums]), (0,)) == 0


def chosen(flag: Any, new: PyTree, old: PyTree) -> PyTree:
    """Select between two trees of equal structure by a scalar flag."""
    # `lax.select`: a `jnp.where` is a call in the program that takes long to trace
    return jax.tree.map(lambda a, b: jax.lax.select(flag, a, b), new, old)


def computed_once(value: Any) -> Any:
    """Keep XLA from duplicating the computation of a scalar that every leaf of a tree uses.

    XLA's CPU compiler would otherwise fuse a copy of it into the kernel of every leaf. For a
    flag that depends on all leaves, code size and compile time then grow with the square of
    their number. It never fuses the output of a sort, so the scalar passes through one.
    """
    return jax.lax.sort(jnp.stack([value, value]))[0]


def floats(tree: PyTree) -> list[Any]:
    """Return the leaves of a float dtype."""
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
