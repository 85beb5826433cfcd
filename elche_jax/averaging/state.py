"""What averaging adds to the training state."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from elche_jax.averaging.fragments import assign_fragments
from elche_jax.averaging.rules import Averaging
from elche_jax.engine.merge import MergeRules
from elche_jax.engine.state import TrainState
from elche_jax.engine.trainable import Selection

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AveragingState:
    """State of `DiLoCo`; leaves are stacked like those of the training state.

    Attributes:
        outer: State of the outer optimizer, one per fragment.
        base: The parameters of the last exchange, in the order of the leaves that are
            trained; empty where they are the training state's own, as with one fragment,
            without delay, and with an exchange on the devices.
        steps: This device's steps since the last exchange of every fragment, float32,
            `(fragments,)`.
        error: What this device's differences have lost to compression, float32, in the
            order of the leaves that are trained; empty unless `compression="int8"`.
    """

    outer: tuple[PyTree, ...]
    base: list[Any]
    steps: Any
    error: list[Any]

    @property
    def replicated(self) -> "AveragingState":
        """The part that must be the same on all devices; the rest is None."""
        return replace(self, steps=None, error=[])


def initial_averaging(
    averaging: Averaging | None, trained: PyTree, on_host: bool = False
) -> AveragingState | None:
    """The state before the first window, of one device; None where there is none.

    Args:
        averaging: The rule.
        trained: Parameters that are trained.
        on_host: Whether the exchange is on the host.

    Raises:
        ValueError: There are more fragments than arrays.
    """
    if averaging is None or (averaging.outer is None and not averaging.delay and not on_host):
        return None
    leaves = jax.tree.leaves(trained)
    parts = assign_fragments([leaf.size for leaf in leaves], averaging.fragments)
    apart = len(parts) > 1 or averaging.delay or on_host
    int8 = averaging.compression == "int8"
    return AveragingState(
        outer=tuple(_init_outer(averaging, [leaves[i] for i in part]) for part in parts),
        base=leaves if apart else [],
        steps=jnp.zeros((len(parts),), jnp.float32),
        error=[jnp.zeros(leaf.shape, jnp.float32) for leaf in leaves] if int8 else [],
    )


def common_part(
    state: TrainState, averaging: Averaging, selection: Selection, merge: MergeRules, late: bool
) -> TrainState:
    """What of a state must be the same on all devices, the rest being None.

    Args:
        state: The state.
        averaging: The rule.
        selection: Which parameters are trained.
        merge: How model state is merged.
        late: Whether averages are taken up late: then devices have parameters and model
            state of their own.
    """
    if averaging.optimizer_state == "keep":
        state = state.replace(opt_state=None)
    if averaging.fragments > 1 or late:
        state = state.replace(params=selection.split(state.params)[1])
    if isinstance(state.averaging, AveragingState):
        state = state.replace(averaging=state.averaging.replicated)
    if late:
        return state.replace(model_state=None)
    kept = zip(jax.tree.leaves(state.model_state), merge.rules, strict=True)
    return state.replace(model_state=[leaf for leaf, rule in kept if rule != "keep"])


def _init_outer(averaging: Averaging, leaves: list[Any]) -> PyTree:
    if averaging.outer is None:
        return ()
    return averaging.outer.init([jnp.asarray(leaf, jnp.float32) for leaf in leaves])
