"""What a device computes in a window of its own optimizer steps, and how windows end.

`accumulate` takes the steps, without a collective; `combine` joins what the devices have
made of the common parameters. See `elche_jax.averaging.rules` for the equations.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from elche_jax.averaging.fragments import assign_fragments
from elche_jax.averaging.join import (
    Join,
    Joined,
    Share,
    distances,
    mean,
    pick,
    put,
    share_of,
    switch,
)
from elche_jax.averaging.rules import Averaging
from elche_jax.averaging.state import AveragingState, common_part
from elche_jax.engine.exchange import packed_psum
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
from elche_jax.engine.state import TrainState
from elche_jax.engine.trainable import Selection

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LocalSteps:
    """What a device carries through its steps of a window.

    Attributes:
        trained: Its parameters, those that are trained.
        opt_state: State of its optimizer.
        model_state: Its model state.
        loss: Sum of `weight * loss`, float32.
        weight: Sum of the weights, float32.
        count: Number of microbatches, float32.
        steps: Number of optimizer steps, float32: microbatches that had a weight.
        examples: Number of valid examples, float32.
        metrics: Sums of `weight * metric`, float32.
        extra: What a rule keeps besides, see `LocalProgram.begun`.
    """

    trained: PyTree
    opt_state: PyTree
    model_state: PyTree
    loss: Any
    weight: Any
    count: Any
    steps: Any
    examples: Any
    metrics: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def sums(self) -> dict[str, Any]:
        """What there is to report of it."""
        named = {"loss": self.loss, "weight": self.weight, "metrics": self.metrics}
        return named | {"count": self.count, "examples": self.examples}

    def replace(self, **changes: Any) -> "LocalSteps":
        """A copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True)
class LocalProgram:
    """The functions of a window of local steps, per device; traced, no state of their own.

    Attributes:
        work: The gradient of a microbatch.
        tx: The optax optimizer of each device.
        averaging: How parameters are joined.
        world_size: Number of devices.
        merge: How model state is merged.
        max_grad_norm: Clips the gradient of every microbatch; or None.
        hook: Emulation, or None.
    """

    work: Microbatches
    tx: optax.GradientTransformation
    averaging: Averaging
    world_size: int
    merge: MergeRules
    max_grad_norm: float | None = None
    hook: LoopHook | None = None

    def reads(self, state: TrainState) -> TrainState:
        """What the steps begin with."""
        return state.replace(averaging=None)

    def replicated(self, state: TrainState) -> TrainState:
        """What of a state must be the same on all devices, the rest being None."""
        selection, late = self.work.selection, self.late
        return common_part(state, self.averaging, selection, self.merge, late)

    @property
    def late(self) -> bool:
        """Whether averages are taken up late."""
        return bool(self.averaging.delay)

    def zeros(self, state: TrainState) -> LocalSteps:
        """Before the first step."""
        zero = jnp.zeros((), jnp.float32)
        trained, _ = self.work.selection.split(state.params)
        metrics = dict.fromkeys(self.work.metrics, zero)
        return LocalSteps(
            trained, state.opt_state, state.model_state, zero, zero, zero, zero, zero, metrics
        )

    def accumulate(
        self, state: TrainState, local: LocalSteps, payload: Payload, call_args: CallArgs
    ) -> tuple[tuple[LocalSteps, Any], None]:
        """Takes `call_args.count` steps; gives `((local steps, token), None)`."""
        local = self.begun(state, local, call_args)
        local, token = self.loop(state, local, payload, call_args)
        return (local, token), None

    def begun(self, state: TrainState, local: LocalSteps, call_args: CallArgs) -> LocalSteps:
        """The local steps to go on with: none in the first call of a window."""
        fresh = call_args.fresh
        return chosen(fresh, self.zeros(state), local)

    def window(
        self, state: TrainState, payload: Payload, call_args: CallArgs, single: bool
    ) -> tuple[TrainState, Any, dict[str, Any]]:
        """Both at once, for one device; `single` says the window is one microbatch."""
        local = self.begun(state, self.zeros(state), call_args)
        if single and self.hook is None:
            local = self._body(state, payload, call_args)(jnp.int32(0), local)
        else:
            local, _ = self.loop(state, local, payload, call_args)
        return self.combine(state, local)

    def combine(
        self, state: TrainState, local: LocalSteps
    ) -> tuple[TrainState, Any, dict[str, Any]]:
        """Joins the devices.

        Returns:
            The new state, whether this device's own part was finite, and the metrics.
        """
        own = finite(state, local)
        # a device that is left out goes on from what it began the window with
        local = local.replace(model_state=chosen(own, local.model_state, state.model_state))
        share = share_of(local.steps, own, self.averaging.exponent, state.step, self.world_size)
        trained, frozen = self.work.selection.split(state.params)
        new, extra, said = self._join(state, trained, local, own, share)
        made = (
            self.work.selection.join(new, frozen),
            self._optimizer_state(state, local, new, own, share),
            self._merged(self.merge, local.model_state, state.model_state, share),
            extra,
        )
        kept = (state.params, state.opt_state, state.model_state, state.averaging)
        # the outer optimizer may make of finite differences what is not
        fine = all_finite(new) & share.sound
        good = computed_once(share.good & fine)  # else no device has anything to give
        made = chosen(good, made, kept)
        totals = self.summed(seen(local, own))
        totals["bad"] += ~fine
        params, opt_state, model_state, extra = made
        state = state.replace(
            params=params,
            opt_state=opt_state,
            model_state=model_state,
            averaging=extra,
            microbatches=state.microbatches + totals["count"].astype(jnp.int32),
            examples=state.examples + totals["examples"].astype(jnp.int32),
            step=state.step + 1,
        )
        said["exchange_bytes"] += other_bytes(self.averaging, self.merge, state, self.world_size)
        return state, own, self.means(totals) | said

    def loop(
        self, state: TrainState, local: LocalSteps, payload: Payload, call_args: CallArgs
    ) -> tuple[LocalSteps, Any]:
        body = self._body(state, payload, call_args)
        return run_loop(self.hook, state.step, call_args, body, local)

    def _body(
        self, state: TrainState, payload: Payload, call_args: CallArgs
    ) -> Callable[[Any, LocalSteps], LocalSteps]:
        gradient = self.work.gradient(state, payload, call_args)
        tx = optax.with_extra_args_support(self.tx)

        def body(i: Any, local: LocalSteps) -> LocalSteps:
            own = gradient(i, local.trained, local.model_state)
            grads = clip(own.grads, self.max_grad_norm)
            grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, local.trained)
            # the work done is that before the window: within it nobody knows the others'
            updates, opt_state = tx.update(
                grads, local.opt_state, local.trained, value=own.loss, grad=grads,
                microbatches=state.microbatches, examples=state.examples,
            )  # fmt: skip
            trained = optax.apply_updates(local.trained, updates)
            if self.work.form == "weighted":  # no weight, no step
                trained, opt_state = chosen(
                    own.weight > 0, (trained, opt_state), (local.trained, local.opt_state)
                )
            return LocalSteps(
                trained,
                opt_state,
                own.model_state,
                local.loss + own.loss * own.weight,
                local.weight + own.weight,
                local.count + 1,
                local.steps + (1 if self.work.form != "weighted" else own.weight > 0),
                local.examples + own.valid.astype(jnp.float32),
                {name: local.metrics[name] + own.metrics[name] for name in self.work.metrics},
                local.extra,
            )

        return body

    # -- the end of a window ---------------------------------------------------------

    def _join(
        self, state: TrainState, trained: PyTree, local: LocalSteps, own: Any, share: Share
    ) -> tuple[PyTree, AveragingState | None, dict[str, Any]]:
        """The new trained parameters and averaging state, and what there is to say."""
        before, structure = jax.tree.flatten(trained)
        mine = jax.tree.leaves(local.trained)
        join = Join(self.averaging, self.world_size)
        kept = state.averaging
        if kept is None:
            joined = join(before, mine, None, [], share)
            return structure.unflatten(joined.params), None, self.said(joined, own, share)
        parts = assign_fragments([leaf.size for leaf in before], self.averaging.fragments)
        steps = kept.steps + local.steps
        several = len(parts) > 1
        base = kept.base if several else before

        def part(number: int) -> Callable[..., Any]:
            members = parts[number]

            def run(base: Any, mine: Any, outer: Any, error: Any, steps: Any) -> Any:
                exponent, size = self.averaging.exponent, self.world_size
                mine_share = share_of(steps[number], own, exponent, state.step, size)
                joined = join(
                    pick(base, members), pick(mine, members), outer[number],
                    pick(error, members) if error else [], mine_share,
                )  # fmt: skip
                if several:  # the rest of a device that is left out begins anew, too
                    mine = [jnp.where(own, y, x) for x, y in zip(base, mine, strict=True)]
                    steps = jnp.where(own, steps, 0)
                outer = (*outer[:number], joined.outer, *outer[number + 1 :])
                return (
                    put(mine, members, joined.params),
                    put(base if several else [], members, joined.params),
                    outer,
                    put(error, members, joined.error),
                    steps.at[number].set(0),
                    self.said(joined, own, mine_share),
                )

            return run

        which = state.step % len(parts)
        branches = [part(number) for number in range(len(parts))]
        params, base, outer, error, steps, said = switch(
            which, branches, base, mine, kept.outer, kept.error, steps
        )
        return structure.unflatten(params), AveragingState(outer, base, steps, error), said

    def said(self, joined: Joined, own: Any, share: Share) -> dict[str, Any]:
        """Metrics of the synchronisation; those of devices have shape `(devices,)`."""
        numbers = jnp.where(own, joined.numbers, jnp.nan)
        row = jnp.concatenate([numbers, share.own[None]])
        rows = jax.lax.all_gather(row, AXIS) if self.world_size > 1 else row[None]
        *sums, shares = rows.T
        workers = 1 / jnp.where(share.good, (shares**2).sum(), 1)
        sent = jnp.float32(joined.sent)
        return distances(sums) | {"share": shares, "workers": workers, "exchange_bytes": sent}

    def _optimizer_state(
        self, state: TrainState, local: LocalSteps, new: PyTree, own: Any, share: Share
    ) -> PyTree:
        how = self.averaging.optimizer_state
        if how == "reset":
            return self.tx.init(new)
        if how == "keep":
            return chosen(own, local.opt_state, self.tx.init(new))
        rules = opt_rules(state.opt_state)
        return self._merged(rules, local.opt_state, state.opt_state, share)

    def _merged(self, rules: MergeRules, new: PyTree, old: PyTree, share: Share) -> PyTree:
        if self.world_size == 1:
            return new
        moved = packed_psum(changes(rules, new, old, share.own), AXIS)
        return merged(rules, new, old, share.own, moved, jnp.float32(1))

    def summed(self, sums: dict[str, Any]) -> dict[str, Any]:
        """Sums over the devices."""
        return packed_psum(sums, AXIS) if self.world_size > 1 else sums

    def means(self, totals: dict[str, Any]) -> dict[str, Any]:
        """The metrics of a window, from what all devices have seen of it."""
        weight = totals["weight"]
        scale = jnp.where(weight > 0, 1 / weight, 0)
        metrics = {name: value * scale for name, value in totals["metrics"].items()}
        return metrics | {
            "loss": jnp.where(scale > 0, totals["loss"] * scale, jnp.nan),
            "weight": weight,
            "finite": (totals["bad"] == 0) & (~(weight > 0) | (weight >= SMALLEST_WEIGHT)),
        }


def finite(state: TrainState, local: LocalSteps) -> Any:
    """Whether what a device has made of a state is finite, where the state itself was."""

    def broken(new: Any, old: Any) -> Any:
        return jnp.any(~jnp.isfinite(new) & jnp.isfinite(old))

    after, before = (floats((x.opt_state, x.model_state)) for x in (local, state))
    worse = [broken(new, old) for new, old in zip(after, before, strict=True)]
    own = all_finite((local.trained, local.loss, local.weight))
    return computed_once(own & ~jnp.any(jnp.stack([jnp.bool_(False), *worse])))


def other_bytes(averaging: Averaging, merge: MergeRules, state: TrainState, world_size: int) -> int:
    """Bytes that a device puts in for a window besides its parameters.

    Args:
        averaging: The rule.
        merge: How model state is merged.
        state: The state of one device, or its shapes.
        world_size: Number of devices.
    """
    if world_size == 1:
        return 0
    named = list(zip(jax.tree.leaves(state.model_state), merge.rules, merge.mean_of, strict=True))
    sent = sum(leaf.size for leaf, rule, _ in named if rule != "keep")
    sent += sum(leaf.size for leaf, _, mean in named if mean is not None)  # twice
    if averaging.optimizer_state == "average":
        sent += sum(leaf.size for leaf in jax.tree.leaves(state.opt_state))
    return 4 * sent


def seen(local: LocalSteps, own: Any) -> dict[str, Any]:
    """What a device has seen of a window; of one that was left out only its work."""
    sums = jax.tree.map(lambda x: jnp.where(own, x, 0), local.sums)
    work = {"count": local.count, "examples": local.examples}
    return sums | work | {"bad": (~own).astype(jnp.float32)}


def average(
    averaging: Averaging, selection: Selection, world_size: int, state: TrainState
) -> tuple[PyTree, None]:
    """The devices' parameters as one, whether or not a synchronisation is due.

    Arrays are averaged by the steps since their last exchange; without any, they are
    alike.
    """
    trained, frozen = selection.split(state.params)
    kept: AveragingState | None = state.averaging
    if kept is None or not kept.base or world_size == 1:
        return state.params, None
    leaves, structure = jax.tree.flatten(trained)
    parts = assign_fragments([leaf.size for leaf in leaves], averaging.fragments)
    for number, members in enumerate(parts):
        everyone = jnp.bool_(True)
        steps, exponent = kept.steps[number], averaging.exponent
        share = share_of(steps, everyone, exponent, state.step, world_size)
        base, own = pick(kept.base, members), pick(leaves, members)
        leaves = put(leaves, members, mean(base, own, share))
    return selection.join(structure.unflatten(leaves), frozen), None


def opt_rules(opt_state: PyTree) -> MergeRules:
    """Floats are averaged, keys are the first device's, all else is the maximum."""

    def rule(leaf: Any) -> str:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return "first"
        return "mean" if jnp.issubdtype(leaf.dtype, jnp.floating) else "max"

    rules = tuple(map(rule, jax.tree.leaves(opt_state)))
    return MergeRules(rules, (None,) * len(rules))
