"""Local steps: every device takes its own optimizer steps, then parameters are averaged.

With `x` the parameters of the last exchange, `y[d]` those of device `d` and `w[d]` its share,

    m = sum over d of w[d] * (x - y[d])
    x = (x - m) + (u + m)        with u the outer optimizer's update for m

which is `x + u`, written so that `u = -m` gives the mean to the last bit. While windows are
pending, a device continues from its own parameters: with `g[d, t]` their decrease in window `t`,

    y[d] = x - sum of g[d, s] over the windows s that it has begun since

See `elche_jax.averaging.rules` for the user's options.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from elche_jax.averaging.fragments import assign_fragments
from elche_jax.averaging.rules import AveragingRule, DeviceWork, ParameterAveraging
from elche_jax.engine.axis import Axis, PerDevice
from elche_jax.engine.bits import wide, wide_dtype
from elche_jax.engine.choice import chosen, computed_once
from elche_jax.engine.fetch import CallArgs, Payload
from elche_jax.engine.finite import all_finite, none_worse
from elche_jax.engine.merge import MergeRules, difference, opt_rules
from elche_jax.engine.microbatch import Carry, clip
from elche_jax.engine.reduce import Contribution, Mean, Reduction, Row, dot, packed, shares_of
from elche_jax.engine.rule import Agreed, Ended, Leaves, Rule
from elche_jax.engine.state import (
    AveragingState,
    PendingUpdate,
    TrainState,
    averaging_of,
    with_averaging,
)
from elche_jax.engine.trainable import Selection
from elche_jax.engine.wire import decoded, encode

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LocalSteps(Carry):
    """The carry of a device's loop over its steps in a window.

    Attributes:
        trained: Its trained parameters.
        opt_state: Its optimizer state.
        steps: Number of optimizer steps, float32: microbatches of positive weight.
    """

    trained: PyTree
    opt_state: PyTree
    steps: Any


@dataclass(frozen=True)
class LocalRule(Rule):
    """A rule that takes local steps in a window and then averages parameters.

    Attributes:
        averaging: The user's averaging rule.
    """

    averaging: AveragingRule = field(default_factory=ParameterAveraging)

    def reads(self, state: TrainState) -> TrainState:
        return state.replace(averaging=None)

    def common(self, state: TrainState) -> TrainState:
        if self.averaging.optimizer_state == "keep":
            state = state.replace(opt_state=None)
        if self.parts > 1 or self.late:
            state = state.replace(params=self.work.selection.split(state.params)[1])
        merged = None if self.late else self.merge.of_sent(state.model_state)
        state = with_averaging(state, steps=None, error=[], pending=())
        return state.replace(model_state=merged)

    def zeros(self, state: TrainState) -> LocalSteps:
        zero = jnp.zeros((), jnp.float32)
        trained, _ = self.work.selection.split(state.params)
        metrics = dict.fromkeys(self.work.metrics, zero)
        return LocalSteps(zero, zero, metrics, state.model_state, trained, state.opt_state, zero)

    def body(
        self, state: TrainState, payload: Payload, call_args: CallArgs
    ) -> Callable[[Any, LocalSteps], LocalSteps]:
        gradient = self.work.gradient(state, payload, call_args)

        def body(i: Any, local: LocalSteps) -> LocalSteps:
            own = gradient(i, local.trained, local.model_state)
            grads = clip(own.grads, self.max_grad_norm, jnp.float32(1))
            # the state before the window, as within it a device does not know the others' work
            updates, opt_state = self.update(state, grads, local.opt_state, local.trained, own.loss)
            trained = optax.apply_updates(local.trained, updates)
            if self.work.form == "weighted":  # a microbatch of weight 0 takes no step
                trained, opt_state = chosen(
                    own.weight > 0, (trained, opt_state), (local.trained, local.opt_state)
                )
            steps = local.steps + jnp.float32(self.work.form != "weighted" or own.weight > 0)
            return local.plus(own, trained=trained, opt_state=opt_state, steps=steps)

        return body

    def finish(
        self, state: TrainState, carry: LocalSteps, catch_up: Any = False
    ) -> tuple[TrainState, PendingUpdate]:
        own = _finite(state, carry)
        trained, frozen = self.work.selection.split(state.params)
        start, structure = jax.tree.flatten(trained)
        # a device that is left out restarts from the last exchange, or the start of the window
        back = structure.unflatten(self._base(state, state)) if self.parts > 1 else trained
        made = (carry.trained, carry.opt_state, carry.model_state)
        mine, opt_state, model_state = chosen(own, made, (back, state.opt_state, state.model_state))
        after = state.replace(
            params=self.work.selection.join(mine, frozen),
            opt_state=opt_state,
            model_state=model_state,
        )
        steps, progress, kept = jnp.where(own, carry.steps, 0), [], averaging_of(state)
        since = kept.steps
        if self.late:
            carried = jnp.where(catch_up, kept.steps[0], 0)
            begin = [jnp.where(catch_up, x, y) for x, y in zip(kept.base, start, strict=True)]
            progress, steps = _progress(begin, jax.tree.leaves(mine)), steps + carried
            since = since - carried + steps
        elif since is not None:
            since = jnp.where(own, since + steps, 0)
        done = PendingUpdate(progress, steps, own, self.changes(state, model_state, catch_up))
        return with_averaging(after, steps=since), done

    def contribute(self, ended: Ended, sums: dict[str, Any]) -> tuple[Contribution, Leaves]:
        before, after, done, part = ended.before, ended.after, ended.done, ended.part
        # a device that is left out must not spoil the means of loss and metrics
        sums = jax.tree.map(lambda x: jnp.where(done.own, x, 0), sums)
        kept, base = averaging_of(after), self._pick(self._base(before, after), part)
        progress, steps = done.progress, done.steps
        if not self.late:
            now = jax.tree.leaves(self.work.selection.split(after.params)[0])
            progress = _progress(base, self._pick(now, part))
            steps = kept.steps[part] if self.parts > 1 else steps
        error, worked = self._pick(kept.error, part), (steps > 0) & done.own
        payload, error = encode(progress, error, worked, self.compression)
        weight = sums["weight"]
        # like the parameters: what compressed payloads are decoded to has one dtype, float32
        x, g = packed(jnp, list(map(wide, base)), decoded(payload))
        ends = [start - less.astype(start.dtype) for start, less in zip(x, g, strict=True)]
        loss = jnp.where(weight > 0, sums["loss"] / jnp.where(weight > 0, weight, 1), 0)
        own = done.own.astype(jnp.float32)
        row = Row(steps, own, loss, weight, dot(ends, ends, jnp), done.steps)
        state = done.model_state
        if self.averaging.optimizer_state == "average":
            leaves = jax.tree.leaves(before.opt_state), jax.tree.leaves(after.opt_state)
            state = state + self._opt_rules(before).differences(*leaves)
        sums["bad"] = (~done.own).astype(jnp.float32)
        contribution = Contribution(payload, jnp.stack(row), sums, state)
        return contribution, self._put(kept.error, part, error)

    def agree(self, ended: Ended, mean: Mean) -> Agreed:
        before, after, part = ended.before, ended.after, ended.part
        x = self._pick(self._base(before, after), part)
        mine = jax.tree.leaves(self.work.selection.split(after.params)[0])
        kept = averaging_of(after)
        new, outer = self._moved(x, self._pick(mine, part), mean.payload, kept, part)
        new = [leaf.astype(old.dtype) for leaf, old in zip(new, x, strict=True)]
        merged, last = self.merged(ended, mean)
        # finite differences may still overflow in the outer optimizer, or in float16, and so may
        # the variance of the devices' means
        fine = all_finite(new) & (~mean.good | none_worse(last, merged, forgive_nan=True))
        good = computed_once(mean.good & fine)
        opt_state = None
        if self.averaging.optimizer_state == "average":
            leaves, structure = jax.tree.flatten(before.opt_state)
            changes = mean.state[len(self.merge_rules.rules) :]
            rules = self._opt_rules(before)
            opt_state = structure.unflatten(rules.apply_differences(leaves, changes))
        merged = chosen(good, merged, last)
        outer = chosen(good, outer, kept.outer)
        return Agreed(new, opt_state, merged, outer, after.loss_scale, good, fine)

    def adopt(self, ended: Ended, agreed: Agreed) -> TrainState:
        before, after, part = ended.before, ended.after, ended.part
        base, good, new = self._base(before, after), agreed.good, agreed.trained
        trained, frozen = self.work.selection.split(after.params)
        mine, structure = jax.tree.flatten(trained)
        kept = averaging_of(after)
        base, mine = chosen(good, self._put(base, part, new), base), self._put(mine, part, new)
        if self.late:
            mine = base
            for one in ended.later:
                pairs = zip(mine, one.progress, strict=True)
                mine = [(wide(y) - g).astype(y.dtype) for y, g in pairs]
        params = structure.unflatten(mine)
        opt_state = self._optimizer_state(ended, params, agreed)
        state = self.with_merged(ended, agreed.merged)
        state = state.replace(params=self.work.selection.join(params, frozen), opt_state=opt_state)
        steps = kept.steps
        if self.late:
            steps = jnp.sum(jnp.stack([jnp.float32(0), *(one.steps for one in ended.later)]))[None]
        elif steps is not None:
            steps = steps.at[part].set(0)
        base = base if kept.base else []
        state = with_averaging(state, base=base, outer=agreed.held, steps=steps)
        if not self.late:  # without any contribution everything stays as it was
            state = state.replace(**chosen(good, _changed(state), _changed(before)))
        return state

    @staticmethod
    def split_lead(state: TrainState) -> tuple[TrainState, PyTree]:
        return with_averaging(state, outer=()), averaging_of(state).outer

    @staticmethod
    def join_lead(state: TrainState, held: PyTree) -> TrainState:
        return with_averaging(state, outer=held)

    def reduction(self, state: TrainState) -> Reduction:
        rules = self.merge_rules
        if self.averaging.optimizer_state == "average":
            rules = rules + self._opt_rules(state)
        return Reduction(
            rules, self.averaging.weigh, self.compression, self.device_loss, spans=self.parts > 1
        )

    @property
    def apart(self) -> bool:
        return self.averaging.optimizer_state == "keep"

    def agreed(self, state: TrainState) -> TrainState:
        state, base = super().agreed(state), averaging_of(state).base
        if not base:
            return state
        trained, frozen = self.work.selection.split(state.params)
        params = jax.tree.structure(trained).unflatten(base)
        return state.replace(params=self.work.selection.join(params, frozen))

    def _moved(
        self, base: Leaves, own: Leaves, mean: Leaves, kept: AveragingState, part: int
    ) -> tuple[Leaves, tuple[PyTree, ...]]:
        """Return the new parameters in the dtype of sums, and the outer optimizer's new state."""
        # on one device the mean equals the device's own result, to the last bit
        middle = own if self.size == 1 else _less(base, mean)
        if self.averaging.outer is None:
            return middle, ()
        tx = optax.with_extra_args_support(self.averaging.outer)
        x = list(map(wide, base))  # like the outer optimizer's state
        mean = [d.astype(leaf.dtype) for d, leaf in zip(mean, x, strict=True)]
        updates, state = tx.update(mean, kept.outer[part], x)
        leaves = jax.tree.leaves(updates)
        new = [m + (u + d) for m, u, d in zip(middle, leaves, mean, strict=True)]
        return new, (*kept.outer[:part], state, *kept.outer[part + 1 :])

    def _optimizer_state(self, ended: Ended, trained: PyTree, agreed: Agreed) -> PyTree:
        how = self.averaging.optimizer_state
        if how == "reset":
            return self.tx.init(trained)
        if how == "keep":  # a device that was left out starts with a fresh state
            own = ended.done.own | ~agreed.good
            return chosen(own, ended.after.opt_state, self.tx.init(trained))
        return agreed.opt_state

    def _opt_rules(self, state: TrainState) -> MergeRules:
        rules = opt_rules(state.opt_state)
        return rules if self.size > 1 else rules.alone

    def _base(self, before: TrainState, after: TrainState) -> Leaves:
        """Return the trained parameters as of the last exchange."""
        base = averaging_of(after).base
        return base or jax.tree.leaves(self.work.selection.split(before.params)[0])

    def _members(self, leaves: Leaves, part: int) -> tuple[int, ...]:
        return assign_fragments([leaf.size for leaf in leaves], self.parts)[part]

    def _pick(self, leaves: Leaves, part: int) -> Leaves:
        """Return the leaves of a part; an empty list stays empty."""
        return [leaves[i] for i in self._members(leaves, part)] if leaves else []

    def _put(self, leaves: Leaves, part: int, new: Leaves) -> Leaves:
        """Replace the leaves of a part."""
        if not leaves:
            return leaves
        at = dict(zip(self._members(leaves, part), new, strict=True))
        return [at.get(i, leaf) for i, leaf in enumerate(leaves)]


def average(
    averaging: AveragingRule, selection: Selection, axis: Axis, states: PerDevice
) -> PyTree:
    """Average the devices' parameters between two exchanges.

    An array is weighted by the steps since its last exchange. Without such steps it is the same
    on all devices. Weights that are not finite, of a window that was dropped for it, are replaced
    by the steps.

    Args:
        averaging: The averaging rule.
        selection: Which parameters are trained.
        axis: The devices.
        states: Their states.

    Returns:
        The parameters.
    """
    one, kept = axis.any(states), axis.each(averaging_of, states)
    base = axis.any(kept).base
    if not base or axis.size == 1:
        return one.params
    trained, frozen = selection.split(one.params)
    leaves, structure = jax.tree.flatten(trained)
    own = axis.each(lambda s: jax.tree.leaves(selection.split(s.params)[0]), states)
    parts = assign_fragments([x.size for x in leaves], averaging.fragments)
    # a schedule may have no number for the next window
    window = jnp.maximum(one.step - 1 - averaging.delay, 0)
    for number, members in enumerate(parts):
        steps = axis.rows(axis.each(lambda k, number=number: k.steps[number], kept))
        work = DeviceWork(steps, jnp.zeros_like(steps), steps > 0, window, jnp)
        shares, sound = shares_of(partial(AveragingRule.weigh, averaging), work)
        shares = jnp.where(sound, shares, shares_of(lambda work: work.steps, work)[0])
        x = [base[i] for i in members]
        progress = axis.each(lambda mine, x=x, at=members: _progress(x, [mine[i] for i in at]), own)
        (mean,) = axis.sums((progress, axis.mine(shares)))
        for i, new in zip(members, _less(x, mean), strict=True):
            leaves[i] = new.astype(leaves[i].dtype)
    return selection.join(structure.unflatten(leaves), frozen)


def _finite(state: TrainState, local: LocalSteps) -> Any:
    """Return whether a device's results are finite, except where its state was not before."""
    before, after = ((x.opt_state, x.model_state) for x in (state, local))
    own = all_finite((local.trained, local.loss, local.weight))
    return computed_once(own & none_worse(before, after, forgive_nan=True))


def _changed(state: TrainState) -> dict[str, Any]:
    """Return the fields of a state that a mean changes."""
    names = ("params", "opt_state", "model_state", "averaging")
    return {name: getattr(state, name) for name in names}


def _progress(before: Leaves, after: Leaves) -> Leaves:
    return [difference(x, y) for x, y in zip(before, after, strict=True)]


def _less(params: Leaves, progress: Leaves) -> Leaves:
    return [wide(x) - g.astype(wide_dtype(x)) for x, g in zip(params, progress, strict=True)]
