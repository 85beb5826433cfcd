"""What a device computes in a window: accumulate, then combine.

With `N` the sum of all weights, the update is made of

    g = (1 / N) * sum over devices and microbatches of weight * grad(loss)

(the exact mean over the data of the window). `accumulate` sums on each device, without a
collective, so that devices run at their own pace; `combine` sums over devices in float32
and takes the optimizer step, alike on every device.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from elche_jax.engine.exchange import SUM_BELOW, Packing, psum_bfloat16
from elche_jax.engine.fetch import CallArgs, Payload
from elche_jax.engine.loop import LoopHook, run_loop
from elche_jax.engine.loss import SMALLEST_WEIGHT
from elche_jax.engine.mapped import AXIS
from elche_jax.engine.merge import MergeRules, changes, merged
from elche_jax.engine.microbatch import (
    Microbatches,
    all_finite,
    chosen,
    clip,
    computed_once,
    floats,
)
from elche_jax.engine.precision import adjust
from elche_jax.engine.state import TrainState

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """What a device has summed over its microbatches of a window; all float32.

    Attributes:
        grads: Sum of `weight * grad(loss)` of the parameters that are trained, in buffers.
        loss: Sum of `weight * loss`.
        weight: Sum of the weights.
        count: Number of microbatches.
        examples: Number of valid examples.
        metrics: Sums of `weight * metric`.
        model_state: The device's model state after its last microbatch.
    """

    grads: list[Any]
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
        work: The gradient of a microbatch.
        tx: The optax optimizer.
        world_size: Number of devices.
        max_grad_norm: Clips each device's mean gradient before the exchange; or None.
        drop_nonfinite: Drop the update of a window that is not finite.
        merge: How model state is merged.
        exchange_dtype: Type of the gradients on the wire.
        hook: Emulation, or None.
    """

    work: Microbatches
    tx: optax.GradientTransformation
    world_size: int
    max_grad_norm: float | None = None
    drop_nonfinite: bool = True
    merge: MergeRules = field(default_factory=lambda: MergeRules((), ()))
    exchange_dtype: str = "float32"
    hook: LoopHook | None = None

    def reads(self, state: TrainState) -> TrainState:
        """What accumulating reads: every argument costs the thread that dispatches."""
        return state.replace(opt_state=None)

    def replicated(self, state: TrainState) -> TrainState:
        """What of a state must be the same on all devices: all of it."""
        return state

    def zeros(self, state: TrainState) -> Sums:
        """Sums of no microbatch."""
        zero = jnp.zeros((), jnp.float32)
        trained, _ = self.work.selection.split(state.params)
        grads = [jnp.zeros(shape, jnp.float32) for shape in self._packing(trained).shapes]
        metrics = dict.fromkeys(self.work.metrics, zero)
        return Sums(grads, zero, zero, zero, zero, metrics, state.model_state)

    def accumulate(
        self, state: TrainState, sums: Sums, payload: Payload, call_args: CallArgs
    ) -> tuple[tuple[Sums, Any], None]:
        """Adds `call_args.count` microbatches to the sums.

        Returns:
            `((sums, token), None)`; the token is small and never donated, so that a
            thread can wait for it.
        """
        start = self.zeros(state)
        fresh = call_args.fresh
        sums = chosen(fresh, start, sums)
        sums, token = self._loop(state, sums, payload, call_args)
        return (sums, token), None

    def combine(self, state: TrainState, sums: Sums) -> tuple[TrainState, Any, dict[str, Any]]:
        """Exchanges the sums and takes one optimizer step.

        Returns:
            The new state, whether this device's own sums are finite, and the metrics.
        """
        trained, frozen = self.work.selection.split(state.params)
        total, own, finite = self._exchange(self._clip(sums), state.model_state)
        worked = total.weight > 0  # else nothing was counted: a window without effect
        finite &= ~worked | (total.weight >= SMALLEST_WEIGHT)
        scale = computed_once(jnp.where(worked, 1.0 / total.weight, 0.0))
        mean = self._packing(trained).unpack([g * scale for g in total.grads], AXIS)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), mean, trained)
        tx = optax.with_extra_args_support(self.tx)  # some ask for the loss, or the work done
        updates, opt_state = tx.update(
            grads, state.opt_state, trained, value=total.loss * scale, grad=grads,
            microbatches=state.microbatches, examples=state.examples,
        )  # fmt: skip
        params = self.work.selection.join(optax.apply_updates(trained, updates), frozen)
        finite &= ~worked | all_finite((floats(total.model_state), updates))
        good = computed_once((finite | (not self.drop_nonfinite)) & worked)
        kept = (state.params, state.opt_state, state.model_state)
        made = (params, opt_state, total.model_state)
        params, opt_state, model_state = chosen(good, made, kept)
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
        self, state: TrainState, payload: Payload, call_args: CallArgs, single: bool
    ) -> tuple[TrainState, Any, dict[str, Any]]:
        """Both at once, for one device; `single` says the window is one microbatch."""
        sums = self.zeros(state)
        if single and self.hook is None:
            sums = self._body(state, payload, call_args)(jnp.int32(0), sums)
        else:
            sums, _ = self._loop(state, sums, payload, call_args)
        return self.combine(state, sums)

    def _loop(
        self, state: TrainState, sums: Sums, payload: Payload, call_args: CallArgs
    ) -> tuple[Sums, Any]:
        body = self._body(state, payload, call_args)
        return run_loop(self.hook, state.step, call_args, body, sums)

    def _body(
        self, state: TrainState, payload: Payload, call_args: CallArgs
    ) -> Callable[[Any, Sums], Sums]:
        trained, _ = self.work.selection.split(state.params)
        gradient, packing = self.work.gradient(state, payload, call_args), self._packing(trained)

        def body(i: Any, sums: Sums) -> Sums:
            own = gradient(i, trained, sums.model_state)
            grads = packing.pack(own.grads)
            return Sums(
                [total + g * own.weight for total, g in zip(sums.grads, grads, strict=True)],
                sums.loss + own.loss * own.weight,
                sums.weight + own.weight,
                sums.count + 1,
                sums.examples + own.valid.astype(jnp.float32),
                {name: sums.metrics[name] + own.metrics[name] for name in self.work.metrics},
                own.model_state,
            )

        return body

    def _packing(self, trained: PyTree) -> Packing:
        """How gradients are summed: small ones in one buffer.

        An array less is an argument less of both programs, and arguments are a good part of
        what a first window waits for. On one device sums are no arguments.
        """
        like = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), trained)
        return Packing.of(like, below=SUM_BELOW if self.world_size > 1 else 0)

    def _clip(self, sums: Sums) -> Sums:
        weight = jnp.where(sums.weight > 0, sums.weight, 1.0)
        return sums.replace(grads=clip(sums.grads, self.max_grad_norm, weight))

    def _exchange(self, sums: Sums, before: PyTree) -> tuple[Sums, Any, Any]:
        """Sums over the devices, and model state merged.

        Returns:
            The sums; whether this device's own are finite; and whether all are, with
            what they sum up to.
        """
        # a device without work has the state of before, which is no news
        worked = sums.weight > 0
        own = ~worked | all_finite((sums.weight, floats(sums.model_state)))
        if self.world_size == 1:
            own &= all_finite((sums.grads, sums.loss, sums.weight))
            return sums, own, own
        state = sums.model_state
        moved = changes(self.merge, state, before, sums.weight)
        # other numbers that are not finite stay so in the sum
        bad = (~own).astype(jnp.float32)
        others = (sums.replace(grads=None, model_state=None), moved, bad)
        packing, rest = Packing.of(sums.grads), Packing.of(others)
        buffers = packing.pack(sums.grads)
        own &= all_finite((buffers, sums.loss, sums.weight))
        if self.exchange_dtype == "bfloat16":
            buffers = psum_bfloat16(buffers, AXIS, self.world_size)
            summed = jax.lax.psum(rest.pack(others), AXIS)
        else:
            buffers, summed = jax.lax.psum((buffers, rest.pack(others)), AXIS)
        small, moved, bad = rest.unpack(summed, AXIS)
        state = merged(self.merge, state, before, sums.weight, moved, small.weight)
        total = small.replace(grads=packing.unpack(buffers, AXIS), model_state=state)
        return total, own, (bad == 0) & all_finite((buffers, small.loss, small.weight))
