"""The gradient of one microbatch, with its data, random key and precision."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from elche_jax.engine.bits import wide, wide_dtype
from elche_jax.engine.choice import computed_once
from elche_jax.engine.fetch import CallArgs, Payload
from elche_jax.engine.loss import Form, LossFn, batch_size_of, microbatch_terms
from elche_jax.engine.precision import Precision
from elche_jax.engine.state import Replaceable, TrainState
from elche_jax.engine.trainable import Selection

PyTree = Any


@dataclass(frozen=True)
class Carry(Replaceable):
    """The carry of a device's loop over microbatches, common to all rules.

    Attributes:
        loss: Sum of `weight * loss`, float32.
        weight: Sum of the weights, float32.
        metrics: Sums of `weight * metric`, float32.
        model_state: Model state after the last microbatch.
    """

    loss: Any
    weight: Any
    metrics: dict[str, Any]
    model_state: PyTree

    def plus(self, own: "Terms", **changes: Any) -> Self:
        """Return the carry with the terms of one more microbatch, or part of one, added.

        Args:
            own: The terms.
            **changes: Further fields that change.
        """
        return self.replace(
            loss=self.loss + own.loss * own.weight,
            weight=self.weight + own.weight,
            metrics={name: total + own.metrics[name] for name, total in self.metrics.items()},
            model_state=own.model_state,
            **changes,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Terms(Carry):
    """The results of one microbatch, or their sums over several.

    The loss of one microbatch is its mean loss, not multiplied by the weight. If the weight is 0,
    the gradient is zero and the model state unchanged.

    Attributes:
        grads: Gradient of the mean loss, float32 (float64 for float64 parameters), in the
            structure of the trained parameters; in sums, multiplied by the weight.
    """

    grads: PyTree


Part = Callable[[Any, PyTree, PyTree], Terms]
"""`part(p, trained parameters, model state)`, for part `p` of a microbatch."""


@dataclass(frozen=True)
class Gradient:
    """The gradients of the microbatches of a call.

    Attributes:
        read: Reads microbatch `i`, and returns the gradient of its parts.
        split: Number of parts of a microbatch. Their weights sum to that of the microbatch.
        metrics: Names of the auxiliary metrics.
    """

    read: Callable[[Any], Part]
    split: int
    metrics: tuple[str, ...]

    def __call__(self, i: Any, trained: PyTree, model_state: PyTree) -> Terms:
        """Return the terms of microbatch `i`."""
        if self.split == 1:
            return self.read(i)(0, trained, model_state)
        zero = jnp.zeros((), jnp.float32)
        grads = jax.tree.map(lambda x: jnp.zeros(x.shape, wide_dtype(x)), trained)
        sums = Terms(zero, zero, dict.fromkeys(self.metrics, zero), model_state, grads)
        sums = self.add(plus, sums, i, trained)
        weight = jnp.where(sums.weight > 0, sums.weight, 1)
        grads = jax.tree.map(lambda g: g / weight.astype(g.dtype), sums.grads)
        return sums.replace(grads=grads, loss=sums.loss / weight)

    def add(
        self, plus: Callable[[Terms, Terms], Terms], sums: Terms, i: Any, trained: PyTree
    ) -> Terms:
        """Add microbatch `i` to sums, part by part, so that only the sums hold a whole gradient.

        Args:
            plus: Adds the terms of a part.
            sums: The sums so far.
            i: Index of the microbatch.
            trained: The trained parameters.
        """
        part = self.read(i)

        def body(p: Any, sums: Terms) -> Terms:
            return plus(sums, part(p, trained, sums.model_state))

        # a loop, as XLA could otherwise run the parts, and hold their memory, at the same time
        return body(0, sums) if self.split == 1 else jax.lax.fori_loop(0, self.split, body, sums)


def plus(sums: Terms, own: Terms) -> Terms:
    """Return sums with the terms of one more microbatch, or part of one, added."""

    def add(total: Any, g: Any) -> Any:
        return total + g * own.weight.astype(g.dtype)

    return sums.plus(own, grads=jax.tree.map(add, sums.grads, own.grads))


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
        split: Number of equal parts in which a microbatch is run, one after the other.
    """

    loss_fn: LossFn
    form: Form
    metrics: tuple[str, ...]
    key_impl: str
    selection: Selection = field(default_factory=Selection)
    precision: Precision = field(default_factory=Precision)
    split: int = 1

    def gradient(self, state: TrainState, payload: Payload, call_args: CallArgs) -> Gradient:
        """Return the gradients of a call's microbatches.

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
            # cast in the differentiated function, so that gradients have the parameters' dtypes
            params = cast(self.selection.join(trained, frozen))
            loss, aux = microbatch_terms(
                self.loss_fn, self.form, params, model_state, cast(batch), valid, rng
            )
            return (loss if scale is None else loss * scale), (loss, aux)

        def unscaled(grad: Any) -> Any:
            # widened first: the division would make small float16 gradients zero again
            grad = wide(grad)
            return grad if scale is None else grad / jnp.asarray(scale, grad.dtype)

        def read(i: Any) -> Part:
            place = call_args.start + i
            batch = payload.fetch(i, call_args.count)
            # XLA must not fuse the gradient with the fetch, so that every capacity and
            # placement gives the same bits.
            batch = jax.lax.optimization_barrier(batch)
            valid = call_args.valid(place, batch_size_of(batch))
            # from its place in the run, so that keys depend neither on the device nor on the counts
            rng = jax.random.fold_in(key, state.microbatches + place)

            def part(p: Any, trained: PyTree, model_state: PyTree) -> Terms:
                own, count = _part(p, self.split, batch, valid)
                grads, (loss, (weight, metrics, new_state)) = jax.grad(terms, has_aux=True)(
                    trained, model_state, own, count, rng
                )
                made = Terms(loss, weight, metrics, new_state, grads)
                if self.split > 1:
                    made = self._of_part(made)
                if self.form == "weighted" or self.split > 1:
                    made = _worked(made, model_state)
                return made.replace(grads=jax.tree.map(unscaled, made.grads))

            return part

        return Gradient(read, self.split, self.metrics)

    def _of_part(self, made: Terms) -> Terms:
        """Return the terms of a part, with its weight within the microbatch."""
        weight, metrics = made.weight, made.metrics
        if self.form == "scalar":  # the weight of a microbatch is 1, not its number of examples
            weight, metrics = jax.tree.map(lambda x: x / self.split, (weight, metrics))
        # without a valid example, means are 0 / 0
        loss, metrics = jax.tree.map(lambda x: jnp.where(weight > 0, x, 0), (made.loss, metrics))
        return made.replace(loss=loss, weight=weight, metrics=metrics)


def _part(p: Any, split: int, batch: PyTree, valid: Any) -> tuple[PyTree, Any]:
    """Return part `p` of a microbatch, and its number of valid examples."""
    if split == 1:
        return batch, valid
    size = batch_size_of(batch) // split
    own = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, p * size, size), batch)
    return jax.lax.optimization_barrier(own), jnp.clip(valid - p * size, 0, size)


def _worked(made: Terms, model_state: PyTree) -> Terms:
    """Make sure that weight 0 contributes nothing, even if the loss is NaN."""
    grads, new_state = jax.tree.map(
        lambda new, old: jnp.where(made.weight > 0, new, old),
        (made.grads, made.model_state),
        (jax.tree.map(jnp.zeros_like, made.grads), model_state),
    )
    return made.replace(grads=grads, model_state=new_state)


def clip(grads: PyTree, max_norm: float | None, weight: Any) -> PyTree:
    """Scale `grads` so that the global norm of `grads / weight` is at most `max_norm`."""
    if max_norm is None:
        return grads
    # the norm of the quotients: squares of `grads` may overflow, or be flushed to 0
    dtypes = [g.dtype for g in jax.tree.leaves(grads)]
    dtype = reduce(np.promote_types, dtypes, np.dtype(np.float32))
    norm = optax.tree.norm(
        jax.tree.map(lambda g: (g / weight.astype(g.dtype)).astype(dtype), grads)
    )
    # a norm that overflows must not turn the gradient into zeros
    factor = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-30))
    factor = computed_once(jnp.where(jnp.isfinite(norm), factor, jnp.nan))
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
