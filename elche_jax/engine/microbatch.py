"""The gradient of one microbatch: where its data, its key and its precision come from."""

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
    """What a microbatch gives.

    Attributes:
        grads: Gradient of its mean loss, float32, like the parameters that are trained.
        loss: Its mean loss.
        weight: Its weight; where it is 0, gradient and model state say nothing new.
        metrics: Its metrics times its weight.
        model_state: The model state after it.
        valid: Number of its valid examples.
    """

    grads: PyTree
    loss: Any
    weight: Any
    metrics: dict[str, Any]
    model_state: PyTree
    valid: Any


TOGETHER = 8
"""Arrays of one shape that are looked at together for numbers that are not finite."""

Gradient = Callable[[Any, PyTree, PyTree], Terms]
"""`gradient(i, trained parameters, model state)` of microbatch `i` of a call."""


@dataclass(frozen=True)
class Microbatches:
    """How the gradient of a microbatch is computed.

    Attributes:
        loss_fn: The user's loss.
        form: Its form.
        metrics: Names of the auxiliary metrics.
        key_impl: Name of the PRNG implementation of the run's key.
        selection: Which parameters are trained.
        precision: What the loss is computed in.
    """

    loss_fn: LossFn
    form: Form
    metrics: tuple[str, ...]
    key_impl: str
    selection: Selection = field(default_factory=Selection)
    precision: Precision = field(default_factory=Precision)

    def gradient(self, state: TrainState, payload: Payload, call_args: CallArgs) -> Gradient:
        """The gradient as a function of the microbatch's number in a call.

        Args:
            state: Gives the frozen parameters, the key and the loss scale.
            payload: The data of the call.
            call_args: Those of the call.
        """
        scale = self.precision.scale_of(state.loss_scale)
        _, frozen = self.selection.split(state.params)
        cast = self.precision.cast
        key = jax.random.wrap_key_data(state.key, impl=self.key_impl)

        def terms(trained: PyTree, model_state: PyTree, batch: PyTree, valid: Any, rng: Any) -> Any:
            params = cast(self.selection.join(trained, frozen))
            loss, aux = microbatch_terms(
                self.loss_fn, self.form, params, model_state, cast(batch), valid, rng
            )
            return (loss if scale is None else loss * scale), (loss, aux)

        def unscaled(grad: Any) -> Any:
            grad = grad.astype(jnp.float32)
            return grad if scale is None else grad / scale

        def gradient(i: Any, trained: PyTree, model_state: PyTree) -> Terms:
            place = call_args.start + i
            batch = payload.fetch(i, call_args.count)
            # The gradient's code must not depend on where the microbatch came from, so
            # that every capacity and placement gives the same bits.
            batch = jax.lax.optimization_barrier(batch)
            valid = call_args.valid(place, batch_size_of(batch))
            rng = jax.random.fold_in(key, state.microbatches + place)
            grads, (loss, (weight, metrics, new_state)) = jax.grad(terms, has_aux=True)(
                trained, model_state, batch, valid, rng
            )
            if self.form == "weighted":  # weight 0: nothing, even where it is not a number
                grads, new_state = jax.tree.map(
                    lambda new, old: jnp.where(weight > 0, new, old),
                    (grads, new_state),
                    (jax.tree.map(jnp.zeros_like, grads), model_state),
                )
            return Terms(jax.tree.map(unscaled, grads), loss, weight, metrics, new_state, valid)

        return gradient


def clip(grads: PyTree, max_norm: float | None, weight: Any = 1.0) -> PyTree:
    """Scales a gradient down to a norm; `grads / weight` is what the norm is of."""
    if max_norm is None:
        return grads
    norm = optax.tree.norm(grads) / weight
    # a norm that overflows must not turn the gradient into zeros
    factor = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-30))
    factor = jnp.where(jnp.isfinite(norm), factor, jnp.nan)
    factor = computed_once(factor)
    return jax.tree.map(lambda g: g * factor, grads)


def all_finite(tree: PyTree) -> Any:
    """Whether all numbers of a tree of floats are finite.

    A number less itself is 0 if it is finite, and NaN if not. Arrays of a shape are added up
    by some at a time, as every reduction takes its time to compile.
    """
    alike: dict[Any, list[Any]] = {}
    for leaf in map(jnp.asarray, jax.tree.leaves(tree)):
        alike.setdefault((leaf.shape, leaf.dtype), []).append(jax.lax.sub(leaf, leaf))
    zeros = [
        functools.reduce(jax.lax.add, leaves[at : at + TOGETHER])
        for leaves in alike.values()
        for at in range(0, len(leaves), TOGETHER)
    ]
    sums = [jax.lax.reduce_sum(zero, range(zero.ndim)).astype(jnp.float32) for zero in zeros]
    return jax.lax.reduce_sum(jnp.stack([jnp.float32(0), *sums]), (0,)) == 0


def chosen(flag: Any, new: PyTree, old: PyTree) -> PyTree:
    """The first of two trees alike where a scalar flag is true, else the second."""
    return jax.tree.map(lambda a, b: jax.lax.select(flag, a, b), new, old)


def computed_once(value: Any) -> Any:
    """The same scalar, for whatever is computed for every array of a tree.

    XLA's CPU compiler would otherwise compute it anew in each of them: a flag that looks at
    all of a tree's arrays and chooses each of them takes code, and time to compile, in the
    square of their number. It puts nothing that comes out of a sort into another kernel.
    """
    return jax.lax.sort(jnp.stack([value, value]))[0]


def floats(tree: PyTree) -> list[Any]:
    """The leaves that are floats."""
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
