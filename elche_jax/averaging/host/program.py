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
from elche_jax.averaging.host.average import Delivery, News
from elche_jax.averaging.program import LocalProgram, Walk, finite, opt_rules, seen
from elche_jax.averaging.state import AveragingState
from elche_jax.engine.fetch import Orders
from elche_jax.engine.merge import MergeRules
from elche_jax.engine.microbatch import all_finite
from elche_jax.engine.state import TrainState

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Since:
    """What a device has done in a window whose average it has not taken up.

    Attributes:
        progress: What it has taken off its parameters, float32.
        steps: Its optimizer steps.
        model_state: Its model state at the end, leaves that are merged.
    """

    progress: list[Any]
    steps: Any
    model_state: list[Any]


@dataclass(frozen=True)
class HostProgram(LocalProgram):
    """The functions of a window, each for one device by itself."""

    def replicated(self, state: TrainState) -> TrainState:
        """What of a state must be the same on all devices, the rest being None.

        A device that runs ahead has parameters and model state of its own.
        """
        _, frozen = self.work.selection.split(state.params)
        return super().replicated(state).replace(params=frozen, model_state=None)

    def zeros(self, state: TrainState) -> Walk:
        """Before the first step."""
        none = jnp.zeros((), jnp.int32)
        return super().zeros(state).replace(extra={"total": none, "examples": none})

    def begun(self, state: TrainState, walk: Walk, orders: Orders) -> Walk:
        """The walk to go on with; it learns the work of all devices."""
        walk = super().begun(state, walk, orders)
        total, examples = orders.totals
        return walk.replace(extra={"total": total, "examples": examples})

    def deliver(
        self, state: TrainState, walk: Walk, anew: Any, fine: Any
    ) -> tuple[tuple[TrainState, Delivery], None]:
        """Ends the device's part of a window.

        Args:
            state: The state it began with.
            walk: Where its steps have led.
            anew: Whether the host knows nothing of windows before: then what the device
                has done in them, and is not averaged, goes with it.
            fine: What `apply` has given last; passed on.

        Returns:
            Its state, and the delivery. What is not finite is in neither.
        """
        own = finite(state, walk)
        kept: AveragingState = state.averaging
        trained, frozen = self.work.selection.split(state.params)
        before, structure = jax.tree.flatten(trained)
        after = [jnp.where(own, y, x) for x, y in zip(before, _leaves(walk.trained), strict=True)]
        begin = [jnp.where(anew, x, y) for x, y in zip(kept.base, before, strict=True)]
        wide = [leaf.astype(jnp.float32) for leaf in begin]
        progress = [
            jnp.where(own, a - b.astype(jnp.float32), 0) for a, b in zip(wide, after, strict=True)
        ]
        steps = jnp.where(own, walk.steps + jnp.where(anew, kept.steps[0], 0), 0)
        opt_state = jax.tree.map(
            lambda new, fresh: jnp.where(own, new, fresh), walk.opt_state, self.tx.init(trained)
        )
        model_state = jax.tree.map(
            lambda new, old: jnp.where(own, new, old), walk.model_state, state.model_state
        )
        known = [leaf.astype(jnp.float32) for leaf in kept.base]
        delivery = Delivery(
            progress,
            steps,
            own,
            seen(walk, own),
            self._sent(self.merge, model_state),
            _raw(_leaves(opt_state)) if self._averages else [],
            sum(jnp.vdot(x, x) for x in known),
            sum(jnp.vdot(x, g) for x, g in zip(known, progress, strict=True)),
            fine,
        )
        state = state.replace(
            params=self.work.selection.join(structure.unflatten(after), frozen),
            opt_state=opt_state,
            model_state=model_state,
            averaging=AveragingState(
                kept.outer, kept.base, jnp.where(anew, 0, kept.steps) + steps, kept.error
            ),
            microbatches=state.microbatches + walk.extra["total"],
            examples=state.examples + walk.extra["examples"],
            step=state.step + 1,
        )
        return (state, delivery), None

    def apply(
        self, state: TrainState, news: News, ended: list[Any], since: list[Since]
    ) -> tuple[tuple[TrainState, Any], None]:
        """Takes up the average of a window.

        Args:
            state: The device's state.
            news: The average.
            ended: The device's model state at the end of that window, leaves that are
                merged.
            since: What it has done in windows after it, oldest first.

        Returns:
            Its state, and whether the new parameters are finite; else the old ones stay.
        """
        kept: AveragingState = state.averaging
        x = [leaf.astype(jnp.float32) for leaf in kept.base]
        new = [a - move for a, move in zip(x, news.delta, strict=True)]
        outer = kept.outer
        if self.averaging.outer is not None:
            tx = optax.with_extra_args_support(self.averaging.outer)
            updates, made = tx.update(news.delta, outer[0], x)
            outer = (made,)
            moves = zip(new, _leaves(updates), news.delta, strict=True)
            new = [m + (u + d) for m, u, d in moves]  # see `elche_jax.averaging.join`
        fine = all_finite(new)
        good = news.good & fine
        base = [leaf.astype(old.dtype) for leaf, old in zip(new, kept.base, strict=True)]
        base, outer = jax.tree.map(
            lambda a, b: jnp.where(good, a, b), (base, outer), (kept.base, kept.outer)
        )
        own, steps = base, jnp.zeros_like(kept.steps)
        for window in since:
            own = [_less(y, g) for y, g in zip(own, window.progress, strict=True)]
            steps = steps + window.steps
        trained, frozen = self.work.selection.split(state.params)
        trained = jax.tree.structure(trained).unflatten(own)
        state = state.replace(
            params=self.work.selection.join(trained, frozen),
            opt_state=self._opt_state(state, news, trained),
            model_state=self._told(state.model_state, news, ended, late=bool(since)),
            averaging=AveragingState(outer, base, steps, kept.error),
        )
        return (state, fine), None

    @property
    def _averages(self) -> bool:
        return self.averaging.optimizer_state == "average"

    def _sent(self, rules: MergeRules, tree: PyTree) -> list[Any]:
        pairs = zip(_leaves(tree), rules.rules, strict=True)
        return [leaf for leaf, rule in pairs if rule != "keep"]

    def _opt_state(self, state: TrainState, news: News, trained: PyTree) -> PyTree:
        if self.averaging.optimizer_state == "reset":
            return self.tx.init(trained)
        if not self._averages:
            return state.opt_state
        leaves, structure = jax.tree.flatten(state.opt_state)
        return structure.unflatten(
            [
                jnp.where(news.good, _like(new, old), old)
                for new, old in zip(news.opt_state, leaves, strict=True)
            ]
        )

    def _told(self, tree: PyTree, news: News, ended: list[Any], late: bool) -> PyTree:
        """Model state: the merged one; of a device that has gone on since, corrected."""
        leaves, structure = jax.tree.flatten(tree)
        at = 0
        for i, rule in enumerate(self.merge.rules):
            if rule == "keep":
                continue
            common, now = news.model_state[at], leaves[i]
            told = correct(self.merge, i)(now, common, ended[at]) if late else common
            leaves[i] = jnp.where(news.good, told, now)
            at += 1
        return structure.unflatten(leaves)


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


def _leaves(tree: PyTree) -> list[Any]:
    return jax.tree.leaves(tree)


def _less(y: Any, progress: Any) -> Any:
    return (y.astype(jnp.float32) - progress).astype(y.dtype)


def _raw(leaves: list[Any]) -> list[Any]:
    """Keys as numbers, which can leave the device."""
    return [jax.random.key_data(x) if _is_key(x) else x for x in leaves]


def _like(new: Any, old: Any) -> Any:
    if _is_key(old):
        return jax.random.wrap_key_data(new, impl=jax.random.key_impl(old))
    return new


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
