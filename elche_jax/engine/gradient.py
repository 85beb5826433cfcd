"""The mean gradient: one optimizer step per window, the same on every device.

With `N` the sum of all weights, the update is computed from

    g = (1 / N) * sum over devices and microbatches of weight * grad(loss)

(the exact mean over the data of the window), summed in float32, or in float64 for float64
parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from elche_jax.engine.bits import wide_dtype
from elche_jax.engine.bundles import Plan
from elche_jax.engine.choice import chosen, computed_once
from elche_jax.engine.exchange import SUM_BELOW, Packed, Packing
from elche_jax.engine.fetch import CallArgs, Payload
from elche_jax.engine.finite import all_finite, none_worse
from elche_jax.engine.microbatch import Terms, clip, plus
from elche_jax.engine.precision import adjust
from elche_jax.engine.reduce import Contribution, Mean, Reduction, Row
from elche_jax.engine.rule import Agreed, Ended, Leaves, Rule
from elche_jax.engine.state import PendingUpdate, TrainState, averaging_of, with_averaging
from elche_jax.engine.tentative import TentativeUpdate, Update, plan_of
from elche_jax.engine.wire import encode

PyTree = Any


@dataclass(frozen=True)
class GradientRule(Rule):
    """A rule that takes one optimizer step per window.

    Attributes:
        drop_nonfinite: Whether to drop the update of a window that is not finite.
        packs: Whether small gradients are summed in one buffer. Each array saved is one argument
            fewer of a window's programs, and arguments take a large part of the time of the first
            window. Off if sums are not arguments, or if each array has its own scale.
        plan: Plan of the optimizer's update with joined equations, see `planned`; or None.
    """

    takes_agreed: ClassVar[bool] = True

    drop_nonfinite: bool = True
    packs: bool = False
    plan: Plan | None = field(default=None, compare=False)

    def reads(self, state: TrainState) -> TrainState:
        return state.replace(opt_state=None, averaging=None)

    def common(self, state: TrainState) -> TrainState:
        if state.averaging is not None:  # the caller tests whether it got the same object
            state = state.replace(averaging=None)
        return state.replace(model_state=None) if self.late else state

    def zeros(self, state: TrainState) -> Terms:
        zero = jnp.zeros((), jnp.float32)
        trained, _ = self.work.selection.split(state.params)
        grads = [jnp.zeros(each.shape, each.dtype) for each in self._packing(trained).buffers]
        return Terms(zero, zero, dict.fromkeys(self.work.metrics, zero), state.model_state, grads)

    def body(
        self, state: TrainState, payload: Payload, call_args: CallArgs
    ) -> Callable[[Any, Terms], Terms]:
        trained, _ = self.work.selection.split(state.params)
        gradient, packing = self.work.gradient(state, payload, call_args), self._packing(trained)

        def packed(sums: Terms, own: Terms) -> Terms:
            return plus(sums, own.replace(grads=packing.pack(own.grads)))

        return lambda i, sums: gradient.add(packed, sums, i, trained)

    def finish(
        self, state: TrainState, carry: Terms, catch_up: Any = False
    ) -> tuple[TrainState, PendingUpdate]:
        weight = jnp.where(carry.weight > 0, carry.weight, 1.0)
        grads = clip(carry.grads, self.max_grad_norm, weight)
        # a device without work still has the old state, whose problems were already reported
        own = (carry.weight == 0) | none_worse(state.model_state, carry.model_state)
        own &= all_finite((grads, carry.loss, carry.weight))
        now = carry.model_state
        if self.late:  # the device continues from its own model state
            now = chosen(own, now, state.model_state)
        done = PendingUpdate(grads, carry.weight, own, self.changes(state, now, catch_up))
        return state.replace(model_state=now), done

    def contribute(self, ended: Ended, sums: dict[str, Any]) -> tuple[Contribution, Leaves]:
        done, error = ended.done, averaging_of(ended.before).error
        worked = (done.steps > 0) & done.own
        # rounding errors are kept as those of the device's mean: the next window's weight differs
        unit = jnp.where(worked, done.steps, 1)
        owed = [each * unit for each in error]
        payload, owed = encode(done.progress, owed, worked, self.compression)
        error = [each / unit for each in owed]
        none = jnp.float32(0)
        row = Row(done.steps, done.own.astype(jnp.float32), none, none, none, done.steps)
        sums = sums | {"bad": (~done.own).astype(jnp.float32)}
        return Contribution(payload, jnp.stack(row), sums, done.model_state), error

    def agree(self, ended: Ended, mean: Mean) -> Agreed:
        before, after = ended.before, ended.after
        trained, _ = self.work.selection.split(after.params)
        merged, last = self.merged(ended, mean)
        grads = Packed(self._packing(trained), mean.payload, before.step)

        def judge(updates: PyTree) -> tuple[Any, PyTree]:
            fine = ~mean.good | (none_worse(last, merged) & all_finite((mean.payload, updates)))
            finite = mean.finite & fine
            good = computed_once((finite | (not self.drop_nonfinite)) & mean.good)
            return good, (good, finite, fine)

        state, rest = (trained, after.opt_state), (_counters(before), mean.loss)
        update = TentativeUpdate(self._updater, grads, state, rest)
        if self.plan is None:
            state, verdict = update.applied_if(judge)
        else:
            # XLA may know that there is work, but it does not know that counters are never negative
            precondition = mean.good & (before.examples >= 0)
            state, verdict = update.joined_if(judge, self.plan, precondition)
        (trained, opt_state), (good, finite, fine) = state, verdict
        merged = chosen(good, merged, last)
        # an empty mean, as in the first windows if some are pending, says nothing about the scale
        known = mean.good | ~finite
        loss_scale = chosen(known, adjust(after.loss_scale, finite), after.loss_scale)
        leaves, fine = jax.tree.leaves(trained), fine | ~mean.finite
        return Agreed(leaves, None, merged, opt_state, loss_scale, good, fine)

    def adopt(self, ended: Ended, agreed: Agreed) -> TrainState:
        after, selection = ended.after, self.work.selection
        trained, frozen = selection.split(after.params)
        params = selection.join(jax.tree.structure(trained).unflatten(agreed.trained), frozen)
        # the rounding errors of a dropped window are dropped with it
        errors = averaging_of(after).error, averaging_of(ended.before).error
        error = chosen(agreed.good, *errors)
        state = with_averaging(self.with_merged(ended, agreed.merged), error=error)
        state = state.replace(params=params, loss_scale=agreed.loss_scale)
        return self.join_lead(state, agreed.held)

    @property
    def rests(self) -> bool:
        # each device has its own rounding errors and pending windows
        return not self.late and not self.pending and self.compression is None

    @staticmethod
    def split_lead(state: TrainState) -> tuple[TrainState, PyTree]:
        return state.replace(opt_state=None), state.opt_state

    @staticmethod
    def join_lead(state: TrainState, held: PyTree) -> TrainState:
        return state.replace(opt_state=held)

    def reduction(self, state: TrainState) -> Reduction:
        del state
        return Reduction(
            self.merge_rules, None, self.compression, self.device_loss, pending=self.pending > 0
        )

    def reports(self, state: TrainState) -> dict[str, Any]:
        return {} if state.loss_scale is None else {"loss_scale": state.loss_scale.scale}

    @property
    def _updater(self) -> Update:
        def updated(
            grads: PyTree, state: PyTree, counters: TrainState, loss: Any
        ) -> tuple[PyTree, PyTree]:
            trained, opt_state = state
            updates, opt_state = self.update(counters, grads, opt_state, trained, loss)
            new = optax.apply_updates(trained, updates)
            return (new, opt_state), jax.tree.map(_judged, trained, updates, new)

        return updated

    def planned(self, one: TrainState) -> "GradientRule":
        """Return the same rule with equations of the optimizer's update joined if that pays off.

        For CPU devices. Call it outside of traced functions: in a mapped one, JAX puts the mesh
        into the equations.

        Args:
            one: Shapes of one device's state.
        """
        trained, _ = self.work.selection.split(one.params)
        state, loss = (trained, one.opt_state), jax.ShapeDtypeStruct((), jnp.float32)
        plan = plan_of(self._updater, _sums_like(trained), state, _counters(one), loss)
        return replace(self, plan=plan)

    def _packing(self, trained: PyTree) -> Packing:
        """Return the packing in which gradients are summed.

        On one device, only arrays of one shape share a buffer, which is then a bundle: XLA's
        sharding passes, in which the number of arguments matters, do not run there.
        """
        below = SUM_BELOW if self.packs or self.plan is not None else 0
        return Packing.of(_sums_like(trained), below, alike=self.size == 1)


def _sums_like(trained: PyTree) -> PyTree:
    """Return the shapes and dtypes of sums of gradients."""
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, wide_dtype(p)), trained)


def _judged(old: Any, update: Any, new: Any) -> Any:
    """Return what must be finite for a parameter's step to be taken.

    This is the update. In dtypes with a smaller range than float32 it is the new parameter where
    the old one is finite, as a sum of finite numbers may overflow there.
    """
    if jnp.finfo(new.dtype).max >= jnp.finfo(jnp.float32).max:
        return update
    return jax.lax.select(jax.lax.is_finite(old), new, update.astype(new.dtype))


def _counters(state: TrainState) -> TrainState:
    """Return a state that holds only what `Rule.update` reads."""
    return state.replace(
        params=None, opt_state=None, model_state=None, key=None, loss_scale=None, averaging=None
    )
