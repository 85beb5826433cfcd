"""Averaging with `delay=1`: nobody waits for the exchange.

A window's exchange is of the parameters that it begins with, which the window before has
made, and so needs nothing of its steps. It is launched before them and applied after:

    y[d](t)  this device's parameters at the end of window t
    z[d]     where its steps of window t + 1 lead, from y[d](t)
    x(t + 1) what the exchange of window t makes of x(t) and the y[d](t)

    y[d](t + 1) = z[d] + (x(t + 1) - y[d](t))

Each device goes on from its own parameters and is corrected one window late; replicas
differ by one window's steps. Shares are those of window t, whose metrics are reported with
window t + 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from elche_jax.averaging.join import Join, share_of
from elche_jax.averaging.program import LocalProgram, LocalSteps, finite, other_bytes, seen
from elche_jax.averaging.state import AveragingState
from elche_jax.engine.exchange import packed_psum
from elche_jax.engine.fetch import CallArgs, Payload
from elche_jax.engine.mapped import AXIS
from elche_jax.engine.merge import MergeRules, changes, merged
from elche_jax.engine.microbatch import all_finite, chosen, computed_once
from elche_jax.engine.state import TrainState

PyTree = Any


class Exchanged(NamedTuple):
    """What the exchange of the window before has brought.

    Attributes:
        base: The parameters that are trained, the same on all devices.
        correction: What this device's are to be moved by, float32.
        outer: State of the outer optimizer.
        error: What this device's differences have lost to compression.
        model_state: The merged model state.
        metrics: Metrics of the window before.
        fine: Whether the parameters it made are finite; else they are not taken.
    """

    base: list[Any]
    correction: list[Any]
    outer: tuple[Any, ...]
    error: list[Any]
    model_state: PyTree
    metrics: dict[str, Any]
    fine: Any


@dataclass(frozen=True)
class DelayedProgram(LocalProgram):
    """The functions of a window whose exchange is that of the window before."""

    def zeros(self, state: TrainState) -> LocalSteps:
        """Before the first step."""
        local = super().zeros(state)
        none = jnp.zeros((), jnp.int32)
        return local.replace(extra={"total": none, "examples": none, "before": local.sums})

    def begun(self, state: TrainState, local: LocalSteps, call_args: CallArgs) -> LocalSteps:
        """The local steps to go on with; in the first call of a window it keeps the sums of the
        window before, which the exchange reports, and learns the work of all devices."""
        fresh, (total, examples) = call_args.fresh, call_args.totals
        extra = {"total": total, "examples": examples, "before": local.sums}
        start = self.zeros(state).replace(extra=extra)
        return jax.tree.map(lambda a, b: jnp.where(fresh, a, b), start, local)

    def combine(
        self, state: TrainState, local: LocalSteps
    ) -> tuple[TrainState, Any, dict[str, Any]]:
        """Exchanges and corrects, one after the other."""
        new, own, metrics = self._apply(state, local, self._exchange(state, local.extra["before"]))
        if self.world_size == 1:  # which waits for nobody, and keeps no sums between windows
            metrics |= self.means(seen(local, own))
        return new, own, metrics

    def last_call(
        self, state: TrainState, local: LocalSteps, payload: Payload, call_args: CallArgs
    ) -> tuple[tuple[TrainState, LocalSteps, Any], dict[str, Any]]:
        """The window's last call and its end in one program, so that they may overlap.

        Returns:
            `((state, local steps, whether this device's own part was finite), metrics)`.
        """
        local = self.begun(state, local, call_args)
        exchanged = self._exchange(state, local.extra["before"])
        local, _ = self.loop(state, local, payload, call_args)
        local, exchanged = jax.lax.optimization_barrier((local, exchanged))
        state, own, metrics = self._apply(state, local, exchanged)
        return (state, local, own), metrics

    def unreported(self, local: LocalSteps) -> dict[str, Any]:
        """What of a window's local steps the next window reports."""
        return local.sums

    def reporting(self, local: LocalSteps, unreported: dict[str, Any]) -> LocalSteps:
        """The local steps with the sums that another run's last window has left."""
        return local.replace(**unreported)

    def _exchange(self, state: TrainState, before: dict[str, Any]) -> Exchanged:
        kept: AveragingState = state.averaging
        trained, _ = self.work.selection.split(state.params)
        own = jax.tree.leaves(trained)
        size = self.world_size
        # of a device that was left out there is nothing: it has no steps
        share = share_of(
            kept.steps[0], jnp.bool_(True), self.averaging.exponent, state.step - 1, size
        )
        join = Join(self.averaging, size)
        joined = join(kept.base, own, kept.outer[0], kept.error, share)
        made = (joined.params, joined.outer, joined.error)
        fine = all_finite(joined.params) & share.sound
        good = computed_once(share.good & fine)
        base, outer, error = chosen(good, made, (kept.base, kept.outer[0], kept.error))
        correction = [
            jnp.where(good, x.astype(jnp.float32) - y.astype(jnp.float32), 0)
            for x, y in zip(base, own, strict=True)
        ]
        model_state = self._merge_before(state, share.own, good)
        # a device that had work and has no steps was left out
        left_out = (before["count"] > 0) & (kept.steps[0] == 0)
        sums = jax.tree.map(lambda x: jnp.where(left_out, 0, x), before)
        totals = self.summed(sums | {"bad": left_out.astype(jnp.float32)})
        totals["bad"] += ~fine
        metrics = self.means(totals) | self.said(joined, ~left_out, share)
        metrics["exchange_bytes"] += other_bytes(self.averaging, self.merge, state, size)
        return Exchanged(base, correction, (outer,), error, model_state, metrics, fine)

    def _merge_before(self, state: TrainState, share: Any, good: Any) -> PyTree:
        """The devices' model states at the end of the window before as one."""
        now = state.model_state
        if self.world_size == 1 or not jax.tree.leaves(now):
            return now
        # changes are counted from nothing, as there is no common state that they began with
        nothing = jax.tree.map(jnp.zeros_like, now)
        moved = packed_psum(changes(self.merge, now, nothing, share), AXIS)
        together = merged(self.merge, now, nothing, share, moved, jnp.float32(1))
        return chosen(good, together, now)

    def _apply(
        self, state: TrainState, local: LocalSteps, exchanged: Exchanged
    ) -> tuple[TrainState, Any, dict[str, Any]]:
        own = finite(state, local)
        leaves, structure = jax.tree.flatten(local.trained)
        corrected = [
            jnp.where(own, (z.astype(jnp.float32) + move).astype(z.dtype), x)
            for z, move, x in zip(leaves, exchanged.correction, exchanged.base, strict=True)
        ]
        trained = structure.unflatten(corrected)
        _, frozen = self.work.selection.split(state.params)
        opt_state = chosen(own, local.opt_state, self.tx.init(trained))
        kept = AveragingState(
            outer=exchanged.outer,
            base=exchanged.base,
            steps=jnp.where(own, local.steps, 0)[None],
            error=exchanged.error,
        )
        state = state.replace(
            params=self.work.selection.join(trained, frozen),
            opt_state=opt_state,
            model_state=self._model_state(state, local, own, exchanged.model_state),
            averaging=kept,
            microbatches=state.microbatches + local.extra["total"],
            examples=state.examples + local.extra["examples"],
            step=state.step + 1,
        )
        return state, own & exchanged.fine, exchanged.metrics

    def _model_state(
        self, state: TrainState, local: LocalSteps, own: Any, together: PyTree
    ) -> PyTree:
        """Model states are corrected by rule, variances by a factor, so that they stay
        above 0; what is the maximum stays the maximum."""
        before, structure = jax.tree.flatten(state.model_state)
        after, common = jax.tree.leaves(local.model_state), jax.tree.leaves(together)
        leaves = []
        for i in range(len(after)):
            leaf = correct(self.merge, i)(after[i], common[i], before[i])
            leaves.append(jnp.where(own, leaf, common[i]))
        return structure.unflatten(leaves)


def correct(rules: MergeRules, leaf: int) -> Callable[[Any, Any, Any], Any]:
    """How a leaf of model state is corrected: by a function of the device's own, the
    common one and that which the device had when it was exchanged."""
    return _CORRECT["variance" if rules.mean_of[leaf] is not None else rules.rules[leaf]]


def _move(z: Any, x: Any, y: Any) -> Any:
    move = x - y
    return jnp.where(jnp.isfinite(move), z + move, z).astype(z.dtype)


def _scale(z: Any, x: Any, y: Any) -> Any:
    factor = x / jnp.where(y > 0, y, 1)
    return jnp.where((y > 0) & jnp.isfinite(factor), z * factor, z).astype(z.dtype)


def _stay(z: Any, x: Any, y: Any) -> Any:
    del x, y
    return z


def _largest(z: Any, x: Any, y: Any) -> Any:
    del y
    return jnp.maximum(z, x) if z.dtype != jnp.bool_ else z | x


_CORRECT: dict[str, Callable[[Any, Any, Any], Any]] = {
    "mean": _move,
    "pooled": _move,
    "variance": _scale,
    "max": _largest,
    "keep": _stay,
}
