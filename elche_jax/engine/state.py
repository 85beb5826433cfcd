"""The training state; every device holds a copy of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
import numpy as np

PyTree = Any


@dataclass(frozen=True)
class Replaceable:
    """A dataclass with a method to copy it with other values."""

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        return replace(self, **changes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState(Replaceable):
    """Everything that training changes. Leaves are stacked: `(world_size,) + shape`.

    Attributes:
        params: Parameters.
        opt_state: State of the optax optimizer.
        model_state: Other state of the model, such as BatchNorm statistics, or None.
        key: Raw data of the run's PRNG key, uint32. The key of microbatch `i` is
            `fold_in(key, i)`.
        microbatches: Microbatches used so far, int32: the index of the next one.
        examples: Valid examples used so far, int32; saturates at 2**31 - 1.
        step: Windows so far, int32, including those whose update was dropped.
        loss_scale: Dynamic scale of the loss, or None.
        averaging: State that `averaging` needs, or None.
    """

    params: PyTree
    opt_state: PyTree
    model_state: PyTree
    key: jax.Array
    microbatches: jax.Array
    examples: jax.Array
    step: jax.Array
    loss_scale: PyTree = None
    averaging: PyTree = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PendingUpdate:
    """A device's own update in a window whose mean it has not applied yet.

    Attributes:
        progress: The quantity to average, in the dtype of sums (`wide_dtype`): the sums of
            gradients, or the parameters before its local steps minus those after; empty if the
            device's state implies it.
        steps: Its weight: the sum of weights, or its number of optimizer steps; float32.
        own: Whether its result is finite.
        model_state: For every leaf of model state that is merged, its change in the window,
            see `MergeRules.differences` and, if means are applied late, `MergeRules.changes`.
    """

    progress: list[Any]
    steps: Any
    own: Any
    model_state: list[Any]


def no_update(like: PendingUpdate, unchanged: Sequence[Any]) -> PendingUpdate:
    """Return the update of a window in which a device did nothing, as host arrays.

    Args:
        like: An update of these shapes.
        unchanged: Its changes of model state, see `MergeRules.unchanged`.
    """
    progress = [np.zeros(leaf.shape, leaf.dtype) for leaf in like.progress]
    steps, own = np.zeros(like.steps.shape, np.float32), np.ones(like.own.shape, np.bool_)
    return PendingUpdate(progress, steps, own, list(unchanged))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AveragingState(Replaceable):
    """The part of the training state that only averaging needs; its leaves are stacked, too.

    Attributes:
        outer: State of the outer optimizer, one per fragment.
        base: The trained parameters as of the last exchange, in the order of their leaves;
            empty if they equal those of the training state.
        steps: This device's steps since the last exchange of every fragment, float32,
            `(fragments,)`; None if there are never any between windows.
        error: Rounding errors of this device's contributions, float32, in the order of the
            trained leaves; empty unless `compression="int8"`.
        merged: The merged leaves of model state as of the last mean; empty if they equal those
            of the training state.
        pending: This device's updates in windows whose mean it has not applied yet, oldest first.
    """

    outer: tuple[PyTree, ...] = ()
    base: list[Any] = field(default_factory=list)
    steps: Any = None
    error: list[Any] = field(default_factory=list)
    merged: list[Any] = field(default_factory=list)
    pending: tuple[PendingUpdate, ...] = ()


def averaging_of(state: TrainState) -> AveragingState:
    """Return the averaging state, empty if there is none."""
    return state.averaging or AveragingState()


def with_averaging(state: TrainState, **changes: Any) -> TrainState:
    """Replace fields of the averaging state, if there is one."""
    if state.averaging is None:
        return state
    return state.replace(averaging=state.averaging.replace(**changes))
