"""What a device computes in a window whose exchange is on the host; no collective in it.

A window is three programs on every device: `accumulate` takes its steps, `deliver` makes
the snapshot that leaves it, `apply` takes up what the host has made of the snapshots.
With `x` the parameters that all devices know the average to be, `g[d](t)` the progress of
device `d` in window `t` and `delta(t)` the average of them,

    x       = x + outer's update for delta(t)                 (x - delta(t) without one)
    y[d]    = x - sum of g[d](s) over the windows s > t it has begun since

so that a device that has not waited keeps what it has done since; one that has waited has
`y[d] = x`, the same on all devices.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from elche_jax.averaging.delayed import correct
from elche_jax.averaging.host.average import AverageUpdate, Delivery
from elche_jax.averaging.program import LocalProgram, LocalSteps, finite, opt_rules, seen
from elche_jax.averaging.state import AveragingState
from elche_jax.engine.fetch import CallArgs
from elche_jax.engine.merge import MergeRules
from elche_jax.engine.microbatch import all_finite, chosen, computed_once
from elche_jax.engine.state import TrainState

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PendingUpdate:
    """What a device has done in a window whose average it has not taken up.

    Attributes:
        progress: What it has taken off its parameters, float32.
        steps: Its optimizer steps.
        own: Whether what it did is finite.
        model_state: Its model state at the end, leaves that are merged.
    """

    progress: list[Any]
    steps: Any
    own: Any
    model_state: list[Any]


@dataclass(frozen=True)
class HostProgram(LocalProgram):
    """The functions of a window, each for one device by itself.

    Attributes:
        ahead: Whether devices go on while a window is averaged.
    """

    ahead: bool = False

    @property
    def late(self) -> bool:
        """Whether averages are taken up late: by devices that run ahead."""
        return self.ahead

    def zeros(self, state: TrainState) -> LocalSteps:
        """Before the first step."""
        none = jnp.zeros((), jnp.int32)
        return super().zeros(state).replace(extra={"total": none, "examples": none})

    def begun(self, state: TrainState, local: LocalSteps, call_args: CallArgs) -> LocalSteps:
        """The local steps to go on with; it learns the work of all devices."""
        local = super().begun(state, local, call_args)
        total, examples = call_args.totals
        return local.replace(extra={"total": total, "examples": examples})

    def deliver(
        self, state: TrainState, local: LocalSteps, anew: Any, fine: Any
    ) -> tuple[tuple[TrainState, Delivery], None]:
        """Ends the device's part of a window.

        Args:
            state: The state it began with, `params` being those that are trained.
            local: Where its steps have led.
            anew: Whether the host knows nothing of windows before: then what the device
                has done in them, and is not averaged, goes with it.
            fine: What `apply` has said last; passed on.

        Returns:
            Its state, and the delivery. What is not finite is in neither.
        """
        own = finite(state, local)
        kept: AveragingState = state.averaging
        before, structure = jax.tree.flatten(state.params)
        after, opt_state, model_state = chosen(
            own,
            (jax.tree.leaves(local.trained), local.opt_state, local.model_state),
            (before, state.opt_state, state.model_state),
        )
        begin = [jnp.where(anew, x, y) for x, y in zip(kept.base, before, strict=True)]
        progress = [_wide(a) - _wide(b) for a, b in zip(begin, after, strict=True)]
        carried = jnp.where(anew, kept.steps[0], 0)
        steps = carried + jnp.where(own, local.steps, 0)
        known = [_wide(leaf) for leaf in kept.base]
        delivery = Delivery(
            progress,
            steps,
            own,
            seen(local, own),
            sent_leaves(self.merge, model_state),
            _raw(jax.tree.leaves(opt_state)) if self._averages else [],
            sum(jnp.vdot(x, x) for x in known),
            sum(jnp.vdot(x, g) for x, g in zip(known, progress, strict=True)),
            fine,
        )
        state = state.replace(
            params=structure.unflatten(after),
            opt_state=opt_state,
            model_state=model_state,
            averaging=AveragingState(
                kept.outer, kept.base, kept.steps - carried + steps, kept.error
            ),
            microbatches=state.microbatches + local.extra["total"],
            examples=state.examples + local.extra["examples"],
            step=state.step + 1,
        )
        return (state, delivery), None

    def apply(
        self,
        state: TrainState,
        update: AverageUpdate,
        done: PendingUpdate,
        later: list[PendingUpdate],
        fine: Any,
    ) -> tuple[tuple[TrainState, list[list[Any]], Any], None]:
        """Takes up the average of a window.

        Args:
            state: The device's state, `params` being those that are trained.
            update: The average.
            done: What the device did in that window.
            later: What it has done in windows after it, oldest first.
            fine: What `apply` has said before, since the last delivery.

        Returns:
            Its state; its model states at the ends of the later windows, corrected as it
            is itself; and whether all new parameters were finite: else the old ones stay.
        """
        kept: AveragingState = state.averaging
        x = [_wide(leaf) for leaf in kept.base]
        new = [a - move for a, move in zip(x, update.delta, strict=True)]
        outer = kept.outer
        if self.averaging.outer is not None:
            tx = optax.with_extra_args_support(self.averaging.outer)
            updates, made = tx.update(update.delta, outer[0], x)
            outer = (made,)
            moves = zip(new, jax.tree.leaves(updates), update.delta, strict=True)
            new = [m + (u + d) for m, u, d in moves]  # see `elche_jax.averaging.join`
        finite_new = all_finite(new)
        good = computed_once(update.good & finite_new)
        base = [leaf.astype(old.dtype) for leaf, old in zip(new, kept.base, strict=True)]
        base, outer = chosen(good, (base, outer), (kept.base, kept.outer))
        own, steps = base, jnp.zeros_like(kept.steps)
        for window in later:
            own = [_less(y, g) for y, g in zip(own, window.progress, strict=True)]
            steps = steps + window.steps
        trained = jax.tree.structure(state.params).unflatten(own)
        ended = [window.model_state for window in later]
        now = sent_leaves(self.merge, state.model_state)
        told, *ended = [
            self._told(leaves, update.model_state, done.model_state, good, late=bool(later))
            for leaves in (now, *ended)
        ]
        state = state.replace(
            params=trained,
            opt_state=self._opt_state(state, update, trained, done.own, good),
            model_state=with_leaves(self.merge, state.model_state, told),
            averaging=AveragingState(outer, base, steps, kept.error),
        )
        return (state, ended, fine & finite_new), None

    @property
    def _averages(self) -> bool:
        return self.averaging.optimizer_state == "average"

    def _opt_state(
        self, state: TrainState, update: AverageUpdate, trained: PyTree, own: Any, good: Any
    ) -> PyTree:
        """Anew for a device that was left out, where the others' is not to be had."""
        if self._averages:
            leaves, structure = jax.tree.flatten(state.opt_state)
            pairs = zip(update.opt_state, leaves, strict=True)
            new: PyTree = structure.unflatten([_like(leaf, old) for leaf, old in pairs])
            changed = good
        else:
            new, changed = self.tx.init(trained), good
            if self.averaging.optimizer_state == "keep":
                changed = good & ~own
        return chosen(changed, new, state.opt_state)

    def _told(
        self, now: list[Any], common: list[Any], ended: list[Any], good: Any, late: bool
    ) -> list[Any]:
        """Model state, leaves that are merged: the common one; where the device has gone on
        since, its own corrected."""
        rules, leaves = sent_rules(self.merge), []
        for i, (leaf, together) in enumerate(zip(now, common, strict=True)):
            told = correct(rules, i)(leaf, together, ended[i]) if late else together
            leaves.append(jnp.where(good, told, leaf))
        return leaves


def sent_leaves(rules: MergeRules, tree: PyTree) -> list[Any]:
    """The leaves of model state that are merged."""
    pairs = zip(jax.tree.leaves(tree), rules.rules, strict=True)
    return [leaf for leaf, rule in pairs if rule != "keep"]


def with_leaves(rules: MergeRules, tree: PyTree, sent: list[Any]) -> PyTree:
    """Model state with other leaves where they are merged."""
    leaves, structure = jax.tree.flatten(tree)
    new = iter(sent)
    pairs = zip(leaves, rules.rules, strict=True)
    return structure.unflatten([old if rule == "keep" else next(new) for old, rule in pairs])


def sent_rules(rules: MergeRules) -> MergeRules:
    """The rules of those leaves that are merged."""
    at = [i for i, rule in enumerate(rules.rules) if rule != "keep"]
    means = [rules.mean_of[i] for i in at]
    return MergeRules(
        tuple(rules.rules[i] for i in at), tuple(m if m is None else at.index(m) for m in means)
    )


def averaged_rules(program: HostProgram, opt_state: PyTree) -> MergeRules:
    """Those of the optimizer state, where that is averaged."""
    if program.averaging.optimizer_state != "average":
        return MergeRules((), ())
    return opt_rules(opt_state)


def _wide(leaf: Any) -> Any:
    return leaf.astype(jnp.float32)


def _less(y: Any, progress: Any) -> Any:
    return (_wide(y) - progress).astype(y.dtype)


def _raw(leaves: list[Any]) -> list[Any]:
    """Keys as numbers, which can leave the device."""
    return [jax.random.key_data(x) if _is_key(x) else x for x in leaves]


def _like(new: Any, old: Any) -> Any:
    if _is_key(old):
        return jax.random.wrap_key_data(new, impl=jax.random.key_impl(old))
    return new


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
