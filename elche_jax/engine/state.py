"""The state that every device holds a copy of."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a window changes. Leaves are stacked: `(world_size,) + shape`.

    Attributes:
        params: Parameters.
        opt_state: State of the optax optimizer.
        model_state: What the model carries besides (BatchNorm statistics), or None.
        key: Raw data of the run's PRNG key, uint32. The key of microbatch `i` is
            `fold_in(key, i)`.
        microbatches: Microbatches used so far, int32: the number of the next one.
        examples: Valid examples used so far, int32.
        step: Windows so far, int32; those whose update was dropped count too.
        loss_scale: Dynamic scale of the loss, or None.
        averaging: What `averaging` adds, or None where it adds nothing.
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

    def replace(self, **changes: Any) -> "TrainState":
        """A copy with some fields changed."""
        return replace(self, **changes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PendingUpdate:
    """What a device has done in a window whose mean it has not taken up.

    Attributes:
        progress: What is averaged, float32: the gradients' sums, or what its steps have taken
            off its parameters; empty where its state tells.
        steps: What it weighs: the sum of weights, or its optimizer steps; float32.
        own: Whether what it did is finite.
        model_state: Of every leaf of model state that is merged its value at the end, or,
            where means come late, what the window has changed, see `MergeRules.change`.
    """

    progress: list[Any]
    steps: Any
    own: Any
    model_state: list[Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AveragingState:
    """What averaging adds to the training state; leaves are stacked like its own.

    Attributes:
        outer: State of the outer optimizer, one per fragment.
        base: The parameters of the last exchange, in the order of the leaves that are
            trained; empty where they are the training state's own.
        steps: This device's steps since the last exchange of every fragment, float32,
            `(fragments,)`; None where none are left over.
        error: What this device's contributions have lost to compression, float32, in the
            order of the leaves that are trained; empty unless `compression="int8"`.
        merged: Model state of the last mean, leaves that are merged; empty where it is the
            training state's own.
        pending: Windows whose mean is to be taken up, oldest first.
    """

    outer: tuple[PyTree, ...] = ()
    base: list[Any] = field(default_factory=list)
    steps: Any = None
    error: list[Any] = field(default_factory=list)
    merged: list[Any] = field(default_factory=list)
    pending: tuple[PendingUpdate, ...] = ()

    def replace(self, **changes: Any) -> "AveragingState":
        """A copy with some fields changed."""
        return replace(self, **changes)
