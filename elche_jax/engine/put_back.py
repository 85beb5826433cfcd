"""The state as of the last mean, as if the windows that are pending had not run."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from elche_jax.engine.lane import Fleet
from elche_jax.engine.rule import Rule
from elche_jax.engine.state import PendingUpdate, TrainState, averaging_of, with_averaging


def without_pending(
    rule: Rule, fleet: Fleet, state: TrainState, windows: int, microbatches: int, examples: int
) -> TrainState:
    """Return a state in which nothing is pending, to run the pending windows again.

    Parameters and merged model state are those of the last mean. What a device has of its own
    stays: the state of its optimizer under `optimizer_state="keep"`, rounding errors, and model
    state that is not merged.

    Args:
        rule: The rule of the windows.
        fleet: The devices.
        state: A state between two windows; it is not modified, and shares arrays with the result.
        windows: Number of windows whose updates are pending in it.
        microbatches: Their microbatches, of all devices.
        examples: Their valid examples.
    """

    def zero(leaf: Any) -> Any:
        return fleet.put(np.zeros(leaf.shape, leaf.dtype))

    def less(leaf: Any, number: int) -> Any:
        return fleet.put(np.asarray(leaf) - leaf.dtype.type(number))

    def apart(leaf: Any) -> Any:  # no array may be in a state twice
        return fleet.put(leaf) if isinstance(leaf, np.ndarray) else leaf.copy()

    state = rule.agreed(state)
    kept = averaging_of(state)
    unchanged = rule.merge_rules.unchanged(kept.merged)
    nothing = tuple(no_update(one, unchanged) for one in kept.pending)
    base, merged, pending = jax.tree.map(apart, (kept.base, kept.merged, nothing))
    steps = jax.tree.map(zero, kept.steps)
    state = with_averaging(state, base=base, merged=merged, steps=steps, pending=pending)
    return state.replace(
        microbatches=less(state.microbatches, microbatches),
        examples=less(state.examples, examples),
        step=less(state.step, windows),
    )


def no_update(like: PendingUpdate, unchanged: Sequence[Any]) -> PendingUpdate:
    """Return the update of a window in which a device did nothing, as host arrays.

    Args:
        like: An update of these shapes.
        unchanged: Its changes of model state, see `MergeRules.unchanged`.
    """
    progress = [np.zeros(leaf.shape, leaf.dtype) for leaf in like.progress]
    steps, own = np.zeros(like.steps.shape, np.float32), np.ones(like.own.shape, np.bool_)
    return PendingUpdate(progress, steps, own, list(unchanged))
