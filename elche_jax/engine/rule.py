"""The base class of rules, which define how a window changes the training state.

A window of a rule, on every device:

    zeros -> body (per microbatch) -> finish -> contribute -> a mean over devices -> apply

A transport calls these and computes the mean, either by collectives of the devices
(`elche_jax.engine.collective`) or on the host (`elche_jax.engine.host`). With windows pending,
`apply` gets the mean of an earlier window than the one just finished.
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
    """A finished window whose mean is computed or applied, on one device.

    Attributes:
        before: The device's state at the start of the window; used only if no window is
            pending.
        after: The device's current state.
        done: The device's update in the window.
        part: Index of the part of the parameters that is exchanged.
        later: The device's updates in later windows, oldest first.
    """

    before: TrainState
    after: TrainState
    done: PendingUpdate
    part: int
    later: Sequence[PendingUpdate] = ()


@dataclass(frozen=True)
class Rule(ABC):
    """How a window changes the state; methods are pure, traced, and run on one device.

    Attributes:
        work: Computes the gradient of a microbatch.
        tx: The optax optimizer.
        size: Number of devices.
        merge: Rules that merge model state.
        compression: Type of payloads on the wire.
        late: Whether means are applied after later windows have begun; devices then continue
            from their own results.
        pending: Number of windows that are pending in the state between two windows.
        max_grad_norm: Norm to which gradients are clipped; or None.
        parts: Number of parts of the parameters, which are exchanged in turn.
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
        """Keep only what microbatches read, as every argument slows down the dispatch."""

    @abstractmethod
    def common(self, state: TrainState) -> TrainState:
        """Keep only what is the same on all devices; the rest becomes None or is left out."""

    @abstractmethod
    def zeros(self, state: TrainState) -> Any:
        """Return the initial carry of the loop over a device's microbatches."""

    @abstractmethod
    def body(
        self, state: TrainState, payload: Payload, call_args: CallArgs
    ) -> Callable[[Any, Any], Any]:
        """Return the loop body, `body(i, carry) -> carry`, which runs microbatch `i` of a call."""

    @abstractmethod
    def finish(
        self, state: TrainState, carry: Any, catch_up: Any = False
    ) -> tuple[TrainState, PendingUpdate]:
        """Finish a device's own part of a window.

        Args:
            state: The state at the start of the window.
            carry: The carry after its microbatches.
            catch_up: Whether the update is to include the device's work in earlier windows
                that was never averaged.

        Returns:
            The device's new state, and its update.
        """

    @abstractmethod
    def contribute(self, ended: Ended, sums: dict[str, Any]) -> tuple[Contribution, Leaves]:
        """Return a device's contribution to the mean, and its new rounding errors.

        Args:
            ended: The window.
            sums: The device's sums over its microbatches, see `sums_of`.
        """

    @abstractmethod
    def apply(self, ended: Ended, mean: Mean) -> tuple[TrainState, Any]:
        """Apply the mean of a window.

        Args:
            ended: The window.
            mean: Its mean.

        Returns:
            The new state, and False if it would not be finite although the mean is.
        """

    @abstractmethod
    def reduction(self, state: TrainState) -> Reduction:
        """Return the reduction of contributions to a mean.

        Args:
            state: A device's state, or its shapes.
        """

    @property
    def apart(self) -> bool:
        """Whether every device has its own optimizer state."""
        return False

    def agreed(self, state: TrainState) -> TrainState:
        """Return the state as of the last mean, for a device that copies it from another."""
        kept = state.averaging
        if kept is None or not kept.merged:
            return state
        return state.replace(model_state=self.with_leaves(state.model_state, kept.merged))

    def reports(self, state: TrainState) -> dict[str, Any]:
        """Return the metrics that are read from the state at the start of a window."""
        del state
        return {}

    def sums_of(self, carry: Carry) -> dict[str, Any]:
        """Return a device's sums over its microbatches: `loss`, `weight` and `metrics`."""
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
        """Replace the leaves of model state that are merged."""
        leaves, structure = jax.tree.flatten(model_state)
        new = iter(merged)
        pairs = zip(leaves, self.merge.rules, strict=True)
        return structure.unflatten([old if rule == "keep" else next(new) for old, rule in pairs])

    def brought(self, rules: MergeRules, before: Leaves, now: Leaves) -> Leaves:
        """Return what is exchanged of merged leaves: changes if the rule is a mean, else values.

        With changes, a leaf that no device changed stays bitwise the same.
        """
        return [
            wide(new) - start_of(wide(old)) if i in rules.means else raw(new)
            for i, (old, new) in enumerate(zip(before, now, strict=True))
        ]

    def taken(self, rules: MergeRules, before: Leaves, mean: Leaves, spread: Leaves) -> Leaves:
        """Return the merged leaves, given the mean of what `brought` returned."""
        more = iter(spread)
        leaves = []
        for i, (old, new) in enumerate(zip(before, mean, strict=True)):
            if i not in rules.means:
                leaves.append(like(new, old))
                continue
            moved = new if rules.mean_of[i] is None else new + next(more)
            leaves.append(start_of(old) + moved.astype(old.dtype))
        return leaves

    def changes(self, before: TrainState, now: PyTree, catch_up: Any) -> Leaves:
        """Return a window's changes of the merged leaves, if means are applied late."""
        rules, begun = self.merge_rules, self.merged_leaves(before.model_state)
        base = _last_merged(before)
        begun = [jnp.where(catch_up, x, y) for x, y in zip(base, begun, strict=True)]
        pairs = zip(begun, self.merged_leaves(now), strict=True)
        return [rules.change(i, old, new) for i, (old, new) in enumerate(pairs)]

    def merged(self, ended: Ended, mean: Mean) -> tuple[Leaves, Leaves]:
        """Return the merged leaves of model state after this mean and after the last one."""
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
        """Return a device's model state and averaging state, given the merged leaves.

        If means are applied late, the device's changes since are applied on top.
        """
        rules, own, kept = self.merge_rules, merged, ended.after.averaging
        for one in ended.later if self.late else ():
            pairs = zip(own, one.model_state, strict=True)
            own = [rules.changed(i, x, change) for i, (x, change) in enumerate(pairs)]
        if kept is not None and kept.merged:
            kept = kept.replace(merged=merged)
        return self.with_leaves(ended.after.model_state, own), kept


def _last_merged(state: TrainState) -> Leaves:
    """Return the merged leaves as of the last mean, if means are applied late."""
    return [] if state.averaging is None else state.averaging.merged


def wide(leaf: Any) -> Any:
    """Cast to float32, in which differences and means are computed."""
    return leaf.astype(jnp.float32)


def raw(leaf: Any) -> Any:
    """Return the data of a PRNG key, which unlike the key can be copied to the host."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def like(new: Any, old: Any) -> Any:
    """Invert `raw`."""
    return jax.random.wrap_key_data(new, impl=jax.random.key_impl(old)) if _is_key(old) else new


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
