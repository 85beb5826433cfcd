"""The base class of rules, which define how a window changes the training state.

A window of a rule, on every device:

    zeros -> body (per microbatch) -> finish -> contribute -> a mean over devices -> apply

A transport calls these and computes the mean: by collectives of the devices
(`elche_jax.engine.collective`), on the lead of several lanes (`elche_jax.engine.lanes`) or on the
host (`elche_jax.engine.host`). With pending windows, `apply` gets the mean of an earlier window
than the one just finished.

`apply` has two halves: `agree` computes what is the same on all devices and may run on only one of
them; `adopt` puts it into a device's own state.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from elche_jax.averaging.rules import Compression
from elche_jax.engine.fetch import CallArgs, Payload
from elche_jax.engine.merge import MergeRules
from elche_jax.engine.microbatch import Carry, Microbatches
from elche_jax.engine.reduce import Contribution, Mean, Reduction
from elche_jax.engine.state import PendingUpdate, TrainState, averaging_of, with_averaging
from elche_jax.engine.trainable import Selection
from elche_jax.engine.wire import Leaves

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ended:
    """A finished window whose mean is computed or applied, on one device.

    Attributes:
        before: The device's state at the start of the window; used only if no window is
            pending.
        after: The device's current state.
        done: The device's update in the window.
        part: Index of the part of the parameters that is exchanged; known when tracing.
        later: The device's updates in later windows, oldest first.
    """

    before: TrainState
    after: TrainState
    done: PendingUpdate
    part: int = field(metadata={"static": True})
    later: Sequence[PendingUpdate] = ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Agreed:
    """What a mean changes in a state, the same on all devices.

    Attributes:
        trained: Trained parameters of the part that was exchanged, in the order of their leaves.
        opt_state: Averaged state of the optimizer; None unless the rule averages it.
        merged: Merged leaves of model state.
        held: What only `agree` reads and changes, see `Rule.split_lead`.
        loss_scale: Dynamic scale of the loss, or None.
        good: Whether the mean is applied; if not, the state stays as it is.
        fine: False if the new state would not be finite although the mean is.
    """

    trained: Leaves
    opt_state: PyTree
    merged: Leaves
    held: PyTree
    loss_scale: PyTree
    good: Any
    fine: Any


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
        pending: Number of pending windows in the state between two windows.
        max_grad_norm: Norm to which gradients are clipped, or None.
        parts: Number of parts of the parameters, which are exchanged in turn.
        device_loss: Whether the metrics hold each device's own loss.
        takes_agreed: Whether a device's new trained parameters are exactly `Agreed.trained`.
    """

    takes_agreed: ClassVar[bool] = False

    work: Microbatches
    tx: optax.GradientTransformation
    size: int
    merge: MergeRules
    compression: Compression | None = None
    late: bool = False
    pending: int = 0
    max_grad_norm: float | None = None
    parts: int = 1
    device_loss: bool = False

    @abstractmethod
    def reads(self, state: TrainState) -> TrainState:
        """Keep only what microbatches read, as every argument slows down the dispatch."""

    @abstractmethod
    def common(self, state: TrainState) -> TrainState:
        """Keep only what is the same on all devices; the rest becomes None or is left out."""

    @abstractmethod
    def zeros(self, state: TrainState) -> Carry:
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
            catch_up: Whether the update includes the device's work in earlier windows that was
                never averaged.

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
    def agree(self, ended: Ended, mean: Mean) -> Agreed:
        """Compute from the mean of a window what is the same on all devices.

        Args:
            ended: The window.
            mean: Its mean.
        """

    @abstractmethod
    def adopt(self, ended: Ended, agreed: Agreed) -> TrainState:
        """Return the device's state with what the devices agree on.

        Args:
            ended: The window.
            agreed: The result of `agree`, on this device or another.
        """

    @staticmethod
    @abstractmethod
    def split_lead(state: TrainState) -> tuple[TrainState, PyTree]:
        """Split off what only `agree` reads and changes, so that one device can hold it."""

    @staticmethod
    @abstractmethod
    def join_lead(state: TrainState, held: PyTree) -> TrainState:
        """Invert `split_lead`."""

    def apply(self, ended: Ended, mean: Mean) -> tuple[TrainState, Any]:
        """Apply the mean of a window.

        Args:
            ended: The window.
            mean: Its mean.

        Returns:
            The new state, and False if it would not be finite although the mean is.
        """
        agreed = self.agree(ended, mean)
        return self.adopt(ended, agreed), agreed.fine

    @abstractmethod
    def reduction(self, state: TrainState) -> Reduction:
        """Return the reduction of contributions to a mean.

        Args:
            state: A device's state, or its shapes.
        """

    @property
    def rests(self) -> bool:
        """Whether all devices without work are alike, in their contributions and states."""
        return False

    @property
    def thin(self) -> "Rule":
        """The same rule for states without frozen parameters, which do not change."""
        return replace(self, work=replace(self.work, selection=Selection()))

    def in_parts(self, split: int) -> "Rule":
        """Return the same rule for devices that run a microbatch in this many parts."""
        return replace(self, work=replace(self.work, split=split))

    @property
    def apart(self) -> bool:
        """Whether every device has its own optimizer state."""
        return False

    def agreed(self, state: TrainState) -> TrainState:
        """Return the state as of the last mean, for a device that copies it from another."""
        merged = averaging_of(state).merged
        if not merged:
            return state
        return state.replace(model_state=self.merge.with_sent(state.model_state, merged))

    def reports(self, state: TrainState) -> dict[str, Any]:
        """Return the metrics that are read from the state at the start of a window."""
        del state
        return {}

    def sums_of(self, carry: Carry) -> dict[str, Any]:
        """Return a device's sums over its microbatches: `loss`, `weight` and `metrics`."""
        return {"loss": carry.loss, "weight": carry.weight, "metrics": carry.metrics}

    def update(
        self, state: TrainState, grads: PyTree, opt_state: PyTree, trained: PyTree, loss: Any
    ) -> tuple[PyTree, PyTree]:
        """Return the optimizer's updates and new state."""
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, trained)
        # the counter wraps, as keys are made of it: a schedule would start again
        most = jnp.iinfo(state.microbatches.dtype).max
        microbatches = jnp.where(state.microbatches < 0, most, state.microbatches)
        # some optimizers use the loss or the work done so far
        return optax.with_extra_args_support(self.tx).update(
            grads, opt_state, trained, value=loss, grad=grads,
            microbatches=microbatches, examples=state.examples,
        )  # fmt: skip

    # -- state that is merged ------------------------------------------------------------

    @property
    def merge_rules(self) -> MergeRules:
        """The rules of the leaves of model state that are merged."""
        return self.merge.sent if self.size > 1 else self.merge.sent.alone

    def changes(self, before: TrainState, now: PyTree, catch_up: Any) -> Leaves:
        """Return what a device contributes to the merged leaves of model state."""
        rules, end = self.merge_rules, self.merge.of_sent(now)
        begin = self.merge.of_sent(before.model_state)
        if not self.late:
            return rules.differences(begin, end)
        base = averaging_of(before).merged
        begin = [jnp.where(catch_up, x, y) for x, y in zip(base, begin, strict=True)]
        return rules.changes(begin, end)

    def merged(self, ended: Ended, mean: Mean) -> tuple[Leaves, Leaves]:
        """Return the merged leaves of model state after this mean and after the previous one."""
        rules, state = self.merge_rules, mean.state[: len(self.merge_rules.rules)]
        if not self.late:
            old = self.merge.of_sent(ended.before.model_state)
            return rules.apply_differences(old, state, mean.spread), old
        old = averaging_of(ended.after).merged
        return rules.with_spread(rules.apply_changes(old, state), mean.spread), old

    def with_merged(self, ended: Ended, merged: Leaves) -> TrainState:
        """Return the device's state with the merged leaves of a mean.

        If means are applied late, the device continues halfway between its own leaves and the
        merged ones with its later changes.
        """
        after, own = ended.after, merged
        later = ended.later if self.late else ()
        for update in later:
            own = self.merge_rules.apply_changes(own, update.model_state)
        if later:
            own = self.merge_rules.halfway(own, self.merge.of_sent(after.model_state))
        if averaging_of(after).merged:
            after = with_averaging(after, merged=merged)
        return after.replace(model_state=self.merge.with_sent(after.model_state, own))
