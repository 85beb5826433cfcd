"""What a device computes in a window: accumulate, then combine.

With `N` the sum of all weights, the update is made of

    g = (1 / N) * sum over devices and microbatches of weight * grad(loss)

(the exact mean over the data of the window). `accumulate` sums on each device, without a
collective, so that devices run at their own pace; `combine` sums over devices with one
`psum` of one flat float32 buffer and takes the optimizer step, alike on every device.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from elche_jax.engine.fetch import Orders, Payload
from elche_jax.engine.loss import Form, LossFn, batch_size_of, microbatch_terms
from elche_jax.engine.mapped import AXIS
from elche_jax.engine.state import TrainState

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
        grads: Sum of `weight * grad(loss)`, like the parameters.
        loss: Sum of `weight * loss`.
        weight: Sum of the weights.
        count: Number of microbatches.
        metrics: Sums of `weight * metric`.
        model_state: The device's model state after its last microbatch.
    """

    grads: PyTree
    loss: Any
    weight: Any
    count: Any
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
        hook: Emulation, or None.
    """

    loss_fn: LossFn
    form: Form
    metrics: tuple[str, ...]
    tx: optax.GradientTransformation
    world_size: int
    key_impl: str
    max_grad_norm: float | None = None
    hook: LoopHook | None = None

    def zeros(self, params: PyTree, model_state: PyTree) -> Sums:
        """Sums of no microbatch."""
        zero = jnp.zeros((), jnp.float32)
        grads = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        metrics = dict.fromkeys(self.metrics, zero)
        return Sums(grads, zero, zero, zero, metrics, model_state)

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

    def combine(self, state: TrainState, sums: Sums) -> tuple[TrainState, dict[str, Any]]:
        """Exchanges the sums and takes one optimizer step."""
        total = self._exchange(self._clip(sums), state.model_state)
        worked = total.weight > 0  # else nothing was counted: a window without effect
        scale = jnp.where(worked, 1.0 / total.weight, 0.0)
        grads = jax.tree.map(lambda g, p: (g * scale).astype(p.dtype), total.grads, state.params)
        tx = optax.with_extra_args_support(self.tx)  # some ask for the loss
        updates, opt_state = tx.update(
            grads, state.opt_state, state.params, value=total.loss * scale, grad=grads
        )
        params = optax.apply_updates(state.params, updates)
        state_floats, _ = _partition(total.model_state)
        finite = _all_finite((total.grads, total.loss, total.weight))
        finite &= ~worked | _all_finite((state_floats, updates))
        good = finite & worked
        kept = (state.params, state.opt_state, state.model_state)
        made = (params, opt_state, total.model_state)
        params, opt_state, model_state = jax.tree.map(
            lambda new, old: jnp.where(good, new, old), made, kept
        )
        metrics = {name: value * scale for name, value in total.metrics.items()}
        metrics["loss"] = total.loss * scale
        metrics["weight"] = total.weight
        metrics["finite"] = finite
        state = state.replace(
            params=params,
            opt_state=opt_state,
            model_state=model_state,
            microbatches=state.microbatches + total.count.astype(jnp.int32),
            step=state.step + 1,
        )
        return state, metrics

    def window(
        self, state: TrainState, payload: Payload, orders: Orders, single: bool
    ) -> tuple[TrainState, dict[str, Any]]:
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
        def terms(params: PyTree, model_state: PyTree, batch: PyTree, valid: Any, rng: Any) -> Any:
            return microbatch_terms(self.loss_fn, self.form, params, model_state, batch, valid, rng)

        gradient = jax.value_and_grad(terms, has_aux=True)
        key = jax.random.wrap_key_data(state.key, impl=self.key_impl)

        def body(i: Any, sums: Sums) -> Sums:
            place = orders.start + i
            batch = payload.fetch(i, orders.count)
            # The gradient's code must not depend on where the microbatch came from, so
            # that every capacity and placement gives the same bits.
            batch = jax.lax.optimization_barrier(batch)
            valid = orders.valid(place, batch_size_of(batch))
            rng = jax.random.fold_in(key, state.microbatches + place)
            (loss, (weight, metrics, model_state)), grads = gradient(
                state.params, sums.model_state, batch, valid, rng
            )
            if self.form == "weighted":  # weight 0: nothing, even where it is not a number
                kept = (jax.tree.map(jnp.zeros_like, grads), sums.model_state)
                grads, model_state = jax.tree.map(
                    lambda new, old: jnp.where(weight > 0, new, old), (grads, model_state), kept
                )
            return Sums(
                jax.tree.map(lambda s, g: s + g.astype(jnp.float32) * weight, sums.grads, grads),
                sums.loss + loss * weight,
                sums.weight + weight,
                sums.count + 1,
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

    def _exchange(self, sums: Sums, before: PyTree) -> Sums:
        """Sums over the devices; model state changes by the mean change, by weight.

        The change is exchanged, not the value: what no device changed stays bit for bit.
        """
        if self.world_size == 1:
            return sums
        floats, integers = _partition(sums.model_state)
        worked = sums.weight > 0
        old, _ = _partition(before)
        weighted = [
            jnp.where(worked, (x - b).astype(jnp.float32) * sums.weight, 0)
            for x, b in zip(floats, old, strict=True)
        ]
        parts = (sums.grads, sums.loss, sums.weight, sums.count, sums.metrics, weighted)
        leaves, structure = jax.tree.flatten(parts)
        flat = jnp.concatenate([leaf.reshape(-1) for leaf in leaves])
        flat = jax.lax.psum(flat, AXIS)
        summed, at = [], 0
        for leaf in leaves:
            summed.append(flat[at : at + leaf.size].reshape(leaf.shape))
            at += leaf.size
        grads, loss, weight, count, metrics, weighted = jax.tree.unflatten(structure, summed)
        floats = [b + (x / weight).astype(b.dtype) for x, b in zip(weighted, old, strict=True)]
        integers = [jax.lax.pmax(x, AXIS) for x in integers]
        model_state = _join(sums.model_state, floats, integers)
        return Sums(grads, loss, weight, count, metrics, model_state)


def _all_finite(tree: PyTree) -> Any:
    return jnp.all(jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]))


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _partition(tree: PyTree) -> tuple[list[Any], list[Any]]:
    leaves = jax.tree.leaves(tree)
    return [x for x in leaves if _is_float(x)], [x for x in leaves if not _is_float(x)]


def _join(tree: PyTree, floats: list[Any], others: list[Any]) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    first, second = iter(floats), iter(others)
    return jax.tree.unflatten(
        structure, [next(first) if _is_float(leaf) else next(second) for leaf in leaves]
    )
