"""What a device computes in a window: accumulate, then combine.

With `N` the sum of all weights, the update is made of

    g = (1 / N) * sum over devices and microbatches of weight * grad(loss)

(the exact mean over the data of the window). `accumulate` sums on each device, without a
collective, so that devices run at their own pace; `combine` sums over devices in float32
and takes the optimizer step, alike on every device.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from elche_jax.engine.exchange import packed_psum, psum_bfloat16
from elche_jax.engine.fetch import Orders, Payload
from elche_jax.engine.loss import Form, LossFn, batch_size_of, microbatch_terms
from elche_jax.engine.mapped import AXIS
from elche_jax.engine.merge import MergeRules, changes, merged
from elche_jax.engine.precision import Precision, adjust
from elche_jax.engine.state import TrainState
from elche_jax.engine.trainable import Selection

PyTree = Any
Body = Callable[[Any, PyTree], PyTree]


class LoopHook(Protocol):
    """What emulation puts round the loop over microbatches."""

    def check(self, world_size: int) -> None:
        """Raises `ValueError` where it does not fit the number of devices."""
        ...

    def begin(self, device: Any, step: Any, fresh: Any) -> Any:
        """Before the loop; gives a float32 scalar zero that the loop depends on."""
        ...

    def around(self, body: Body, device: Any, i: Any, carry: PyTree) -> PyTree:
        """Runs one microbatch; gives the new carry."""
        ...

    def end(self, device: Any, count: Any, carry: PyTree) -> Any:
        """After the loop; gives a float32 scalar zero that the results depend on."""
        ...

    def settle(self) -> None:
        """After the dispatch, on the host: raises what could not be raised in the program."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """What a device has summed over its microbatches of a window; all float32.

    Attributes:
        grads: Sum of `weight * grad(loss)`, like the parameters that are trained.
        loss: Sum of `weight * loss`.
        weight: Sum of the weights.
        count: Number of microbatches.
        examples: Number of valid examples.
        metrics: Sums of `weight * metric`.
        model_state: The device's model state after its last microbatch.
    """

    grads: PyTree
    loss: Any
    weight: Any
    count: Any
    examples: Any
    metrics: dict[str, Any]
    model_state: PyTree

    def replace(self, **changes: Any) -> "Sums":
        """A copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Program:
    """The two functions of a window, per device; traced, no state of their own.

    Attributes:
        loss_fn: The user's loss.
        form: Its form.
        metrics: Names of the auxiliary metrics.
        tx: The optax optimizer.
        world_size: Number of devices.
        key_impl: Name of the PRNG implementation of the run's key.
        max_grad_norm: Clips each device's mean gradient before the exchange; or None.
        drop_nonfinite: Drop the update of a window that is not finite.
        selection: Which parameters are trained.
        merge: How model state is merged.
        precision: What the loss is computed in.
        exchange_dtype: Type of the gradients on the wire.
        hook: Emulation, or None.
    """

    loss_fn: LossFn
    form: Form
    metrics: tuple[str, ...]
    tx: optax.GradientTransformation
    world_size: int
    key_impl: str
    max_grad_norm: float | None = None
    drop_nonfinite: bool = True
    selection: Selection = field(default_factory=Selection)
    merge: MergeRules = field(default_factory=lambda: MergeRules((), ()))
    precision: Precision = field(default_factory=Precision)
    exchange_dtype: str = "float32"
    hook: LoopHook | None = None

    def zeros(self, params: PyTree, model_state: PyTree) -> Sums:
        """Sums of no microbatch."""
        zero = jnp.zeros((), jnp.float32)
        trained, _ = self.selection.split(params)
        grads = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trained)
        metrics = dict.fromkeys(self.metrics, zero)
        return Sums(grads, zero, zero, zero, zero, metrics, model_state)

    def accumulate(
        self, state: TrainState, sums: Sums, payload: Payload, orders: Orders
    ) -> tuple[tuple[Sums, Any], None]:
        """Adds `orders.count` microbatches to the sums.

        Returns:
            `((sums, token), None)`; the token is small and never donated, so that a
            thread can wait for it.
        """
        start = self.zeros(state.params, state.model_state)
        fresh = orders.fresh
        sums = jax.tree.map(lambda a, b: jnp.where(fresh, a, b), start, sums)
        sums, token = self._loop(state, sums, payload, orders)
        return (sums, token), None

    def combine(self, state: TrainState, sums: Sums) -> tuple[TrainState, Any, dict[str, Any]]:
        """Exchanges the sums and takes one optimizer step.

        Returns:
            The new state, whether this device's own sums are finite, and the metrics.
        """
        trained, frozen = self.selection.split(state.params)
        total, own, finite = self._exchange(self._clip(sums), state.model_state)
        worked = total.weight > 0  # else nothing was counted: a window without effect
        scale = jnp.where(worked, 1.0 / total.weight, 0.0)
        grads = jax.tree.map(lambda g, p: (g * scale).astype(p.dtype), total.grads, trained)
        tx = optax.with_extra_args_support(self.tx)  # some ask for the loss, or the work done
        updates, opt_state = tx.update(
            grads, state.opt_state, trained, value=total.loss * scale, grad=grads,
            microbatches=state.microbatches, examples=state.examples,
        )  # fmt: skip
        params = self.selection.join(optax.apply_updates(trained, updates), frozen)
        finite &= ~worked | _all_finite((_floats(total.model_state), updates))
        good = (finite | (not self.drop_nonfinite)) & worked
        kept = (state.params, state.opt_state, state.model_state)
        made = (params, opt_state, total.model_state)
        params, opt_state, model_state = jax.tree.map(
            lambda new, old: jnp.where(good, new, old), made, kept
        )
        metrics = {name: value * scale for name, value in total.metrics.items()}
        metrics |= {"loss": total.loss * scale, "weight": total.weight, "finite": finite}
        if state.loss_scale is not None:
            metrics["loss_scale"] = state.loss_scale.scale
        state = state.replace(
            params=params,
            opt_state=opt_state,
            model_state=model_state,
            microbatches=state.microbatches + total.count.astype(jnp.int32),
            examples=state.examples + total.examples.astype(jnp.int32),
            step=state.step + 1,
            loss_scale=adjust(state.loss_scale, finite),
        )
        return state, own, metrics

    def window(
        self, state: TrainState, payload: Payload, orders: Orders, single: bool
    ) -> tuple[TrainState, Any, dict[str, Any]]:
        """Both at once, for one device; `single` says the window is one microbatch."""
        sums = self.zeros(state.params, state.model_state)
        if single and self.hook is None:
            sums = self._body(state, payload, orders)(jnp.int32(0), sums)
        else:
            sums, _ = self._loop(state, sums, payload, orders)
        return self.combine(state, sums)

    def _loop(
        self, state: TrainState, sums: Sums, payload: Payload, orders: Orders
    ) -> tuple[Sums, Any]:
        body = self._body(state, payload, orders)
        if self.hook is None:
            sums = jax.lax.fori_loop(0, orders.count, body, sums)
            return sums, sums.weight
        hook = self.hook
        device = jnp.int32(0) if self.world_size == 1 else jax.lax.axis_index(AXIS)
        zero = hook.begin(device, state.step, orders.fresh)
        sums = sums.replace(loss=sums.loss + zero)
        sums = jax.lax.fori_loop(
            0, orders.count, lambda i, carry: hook.around(body, device, i, carry), sums
        )
        zero = hook.end(device, orders.count, sums)
        return sums.replace(loss=sums.loss + zero), sums.weight + zero

    def _body(self, state: TrainState, payload: Payload, orders: Orders) -> Body:
        scale = self.precision.scale_of(state.loss_scale)
        trained, frozen = self.selection.split(state.params)
        cast = self.precision.cast

        def terms(trained: PyTree, model_state: PyTree, batch: PyTree, valid: Any, rng: Any) -> Any:
            params = cast(self.selection.join(trained, frozen))
            loss, aux = microbatch_terms(
                self.loss_fn, self.form, params, model_state, cast(batch), valid, rng
            )
            return (loss if scale is None else loss * scale), (loss, aux)

        gradient = jax.grad(terms, has_aux=True)
        key = jax.random.wrap_key_data(state.key, impl=self.key_impl)

        def body(i: Any, sums: Sums) -> Sums:
            place = orders.start + i
            batch = payload.fetch(i, orders.count)
            # The gradient's code must not depend on where the microbatch came from, so
            # that every capacity and placement gives the same bits.
            batch = jax.lax.optimization_barrier(batch)
            valid = orders.valid(place, batch_size_of(batch))
            rng = jax.random.fold_in(key, state.microbatches + place)
            grads, (loss, (weight, metrics, model_state)) = gradient(
                trained, sums.model_state, batch, valid, rng
            )
            if self.form == "weighted":  # weight 0: nothing, even where it is not a number
                kept = (jax.tree.map(jnp.zeros_like, grads), sums.model_state)
                grads, model_state = jax.tree.map(
                    lambda new, old: jnp.where(weight > 0, new, old), (grads, model_state), kept
                )

            def add(total: Any, grad: Any) -> Any:
                grad = grad.astype(jnp.float32)
                return total + (grad if scale is None else grad / scale) * weight

            return Sums(
                jax.tree.map(add, sums.grads, grads),
                sums.loss + loss * weight,
                sums.weight + weight,
                sums.count + 1,
                sums.examples + valid.astype(jnp.float32),
                {name: sums.metrics[name] + metrics[name] for name in self.metrics},
                model_state,
            )

        return body

    def _clip(self, sums: Sums) -> Sums:
        if self.max_grad_norm is None:
            return sums
        norm = optax.tree.norm(sums.grads) / jnp.where(sums.weight > 0, sums.weight, 1.0)
        # a norm that overflows must not turn the gradient into zeros
        factor = jnp.minimum(1.0, self.max_grad_norm / jnp.maximum(norm, 1e-30))
        factor = jnp.where(jnp.isfinite(norm), factor, jnp.nan)
        return sums.replace(grads=jax.tree.map(lambda g: g * factor, sums.grads))

    def _exchange(self, sums: Sums, before: PyTree) -> tuple[Sums, Any, Any]:
        """Sums over the devices, and model state merged.

        Returns:
            The sums; whether this device's own are finite; and whether all are, with
            what they sum up to.
        """
        own = _all_finite((sums.grads, sums.loss, sums.weight))
        # a device without work has the state of before, which is no news
        own &= ~(sums.weight > 0) | _all_finite((sums.weight, _floats(sums.model_state)))
        if self.world_size == 1:
            return sums, own, own
        grads, state = sums.grads, sums.model_state
        moved = changes(self.merge, state, before, sums.weight)
        bad = (~own).astype(jnp.float32)
        small = sums.replace(grads=None, model_state=None)
        if self.exchange_dtype == "bfloat16":
            grads = psum_bfloat16(grads, AXIS, self.world_size)
            small, moved, bad = packed_psum((small, moved, bad), AXIS)
        else:
            grads, small, moved, bad = packed_psum((grads, small, moved, bad), AXIS)
        state = merged(self.merge, state, before, sums.weight, moved, small.weight)
        total = small.replace(grads=grads, model_state=state)
        return total, own, (bad == 0) & _all_finite((grads, small.loss, small.weight))


def _all_finite(tree: PyTree) -> Any:
    return jnp.all(jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]))


def _floats(tree: PyTree) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
