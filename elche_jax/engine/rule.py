"""What a window does to the training state: the interface of rules, and what they share.

A window of a rule, on every device:

    zeros -> body (per microbatch) -> finish -> contribute -> a mean over devices -> apply

A transport calls these and does the mean: the devices among themselves
(`elche_jax.engine.collective`), or the host (`elche_jax.engine.host`). With windows pending,
`apply` gets the mean of an earlier window than the one that has just been finished.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from elche_jax.averaging.rules import Compression
from elche_jax.engine.fetch import CallArgs, Payload
from elche_jax.engine.loop import Carry
from elche_jax.engine.merge import MergeRules, start_of
from elche_jax.engine.microbatch import Microbatches
from elche_jax.engine.reduce import Contribution, Mean, Reduction
from elche_jax.engine.state import AveragingState, PendingUpdate, TrainState

PyTree = Any
Leaves = list[Any]


@dataclass(frozen=True)
class Ended:
    """A window that is exchanged, on one device.

    Attributes:
        before: The state that it began with; read where none is pending.
        after: The device's state.
        done: What the device did in it.
        part: The part of the parameters that is exchanged.
        later: What it has done in windows since, oldest first.
    """

    before: TrainState
    after: TrainState
    done: PendingUpdate
    part: int
    later: Sequence[PendingUpdate] = ()


@dataclass(frozen=True)
class Rule(ABC):
    """What a window does; every function is of one device, traced, without state of its own.

    Attributes:
        work: The gradient of a microbatch.
        tx: The optax optimizer.
        size: Number of devices.
        merge: How model state is merged.
        compression: Type of what is averaged on the wire.
        late: Whether means are applied after later windows have begun; then devices go on
            from what they have of their own.
        pending: Windows that are pending in the state at the end of one.
        max_grad_norm: Clips gradients to this norm; or None.
        parts: Parts that the parameters are exchanged in, in turn.
    """

    work: Microbatches
    tx: optax.GradientTransformation
    size: int
    merge: MergeRules
    compression: Compression | None = None
    late: bool = False
    pending: int = 0
    max_grad_norm: float | None = None
    parts: int = 1

    @abstractmethod
    def reads(self, state: TrainState) -> TrainState:
        """What microbatches read: every argument costs the thread that dispatches."""

    @abstractmethod
    def common(self, state: TrainState) -> TrainState:
        """What of a state is the same on all devices, the rest being None or left out."""

    @abstractmethod
    def zeros(self, state: TrainState) -> Any:
        """What a device carries from microbatch to microbatch, before the first one."""

    @abstractmethod
    def body(
        self, state: TrainState, payload: Payload, call_args: CallArgs
    ) -> Callable[[Any, Any], Any]:
        """One microbatch of a call: `body(i, carry) -> carry`."""

    @abstractmethod
    def finish(
        self, state: TrainState, carry: Any, anew: Any = False
    ) -> tuple[TrainState, PendingUpdate]:
        """The end of a device's own part of a window.

        Args:
            state: The state that the window began with.
            carry: Where its microbatches have led.
            anew: Whether what the device has done in windows before, and is not averaged, is
                to be brought with this one.

        Returns:
            The device's state, and what it has done.
        """

    @abstractmethod
    def contribute(self, ended: Ended, sums: dict[str, Any]) -> tuple[Contribution, Leaves]:
        """What a device brings to the mean, and what is lost on the wire.

        Args:
            ended: The window.
            sums: What the device has summed in it, see `sums_of`.
        """

    @abstractmethod
    def apply(self, ended: Ended, mean: Mean) -> tuple[TrainState, Any]:
        """Takes up a mean.

        Args:
            ended: The window that it is of.
            mean: The mean, and whether it is good.

        Returns:
            The state, and whether what was made of the mean is finite, if the mean is.
        """

    @abstractmethod
    def reduction(self, state: TrainState) -> Reduction:
        """How contributions become a mean.

        Args:
            state: A device's state, or its shapes.
        """

    @property
    def apart(self) -> bool:
        """Whether every device has an optimizer state of its own."""
        return False

    def agreed(self, state: TrainState) -> TrainState:
        """What the devices have last agreed on, for one that takes it over from another."""
        kept = state.averaging
        if kept is None or not kept.merged:
            return state
        return state.replace(model_state=self.with_leaves(state.model_state, kept.merged))

    def reports(self, state: TrainState) -> dict[str, Any]:
        """Metrics that are part of the state a window begins with."""
        del state
        return {}

    def sums_of(self, carry: Carry) -> dict[str, Any]:
        """What a device has summed over its microbatches: `loss`, `weight` and `metrics`."""
        return {"loss": carry.loss, "weight": carry.weight, "metrics": carry.metrics}

    # -- state that is merged ------------------------------------------------------------

    @property
    def merge_rules(self) -> MergeRules:
        """The rules of the leaves of model state that are merged."""
        return self.merge.sent if self.size > 1 else self.merge.sent.alone

    def merged_leaves(self, model_state: PyTree) -> Leaves:
        """The leaves of model state that are merged."""
        return self.merge.of_sent(model_state)

    def with_leaves(self, model_state: PyTree, merged: Leaves) -> PyTree:
        """Model state with other leaves where they are merged."""
        leaves, structure = jax.tree.flatten(model_state)
        new = iter(merged)
        pairs = zip(leaves, self.merge.rules, strict=True)
        return structure.unflatten([old if rule == "keep" else next(new) for old, rule in pairs])

    def brought(self, rules: MergeRules, before: Leaves, now: Leaves) -> Leaves:
        """What is exchanged of leaves that are merged: changes where the rule is a mean, so
        that what no device changed stays bit for bit."""
        return [
            wide(new) - start_of(wide(old)) if i in rules.means else raw(new)
            for i, (old, new) in enumerate(zip(before, now, strict=True))
        ]

    def taken(self, rules: MergeRules, before: Leaves, mean: Leaves, spread: Leaves) -> Leaves:
        """The leaves of a mean: of changes, or values."""
        more = iter(spread)
        leaves = []
        for i, (old, new) in enumerate(zip(before, mean, strict=True)):
            if i not in rules.means:
                leaves.append(like(new, old))
                continue
            moved = new if rules.mean_of[i] is None else new + next(more)
            leaves.append(start_of(old) + moved.astype(old.dtype))
        return leaves

    def changes(self, before: TrainState, now: PyTree, anew: Any) -> Leaves:
        """What a window has changed of the leaves that are merged, where means come late."""
        rules, begun = self.merge_rules, self.merged_leaves(before.model_state)
        base = _last_merged(before)
        begun = [jnp.where(anew, x, y) for x, y in zip(base, begun, strict=True)]
        pairs = zip(begun, self.merged_leaves(now), strict=True)
        return [rules.change(i, old, new) for i, (old, new) in enumerate(pairs)]

    def merged(self, ended: Ended, mean: Mean) -> tuple[Leaves, Leaves]:
        """The merged leaves of model state, by this mean and by the last one."""
        rules, count = self.merge_rules, len(self.merge_rules.rules)
        if not self.late:
            old = self.merged_leaves(ended.before.model_state)
            return self.taken(rules, old, mean.state[:count], mean.spread), old
        old, more = _last_merged(ended.after), iter(mean.spread)
        new = [rules.changed(i, x, mean.state[i]) for i, x in enumerate(old)]
        for i, pooled in enumerate(rules.mean_of):
            if pooled is not None:
                new[i] += next(more).astype(new[i].dtype)
        return new, old

    def with_merged(self, ended: Ended, merged: Leaves) -> tuple[PyTree, AveragingState | None]:
        """A device's model state, by the last mean and what it has done since; and what
        averaging adds to the state."""
        rules, own, kept = self.merge_rules, merged, ended.after.averaging
        for one in ended.later if self.late else ():
            pairs = zip(own, one.model_state, strict=True)
            own = [rules.changed(i, x, change) for i, (x, change) in enumerate(pairs)]
        if kept is not None and kept.merged:
            kept = kept.replace(merged=merged)
        return self.with_leaves(ended.after.model_state, own), kept


def _last_merged(state: TrainState) -> Leaves:
    """Model state of the last mean, where means come late."""
    return [] if state.averaging is None else state.averaging.merged


def wide(leaf: Any) -> Any:
    """An array in float32, in which differences and means are made."""
    return leaf.astype(jnp.float32)


def raw(leaf: Any) -> Any:
    """A key as numbers, which can leave the device; any other array as it is."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def like(new: Any, old: Any) -> Any:
    """The way back."""
    return jax.random.wrap_key_data(new, impl=jax.random.key_impl(old)) if _is_key(old) else new


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
