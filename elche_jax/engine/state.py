"""The state that every device holds a copy of."""

from dataclasses import dataclass, replace
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
        averaging: State of `averaging=DiLoCo(...)`, or None.
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
