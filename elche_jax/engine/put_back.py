"""The state as of the last mean, as if the windows that are pending had not run."""

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

    def nothing(update: PendingUpdate) -> PendingUpdate:
        progress, steps = jax.tree.map(zero, (update.progress, update.steps))
        unchanged = rule.merge_rules.unchanged(kept.merged)
        own = fleet.put(np.ones(update.own.shape, np.bool_))
        return PendingUpdate(progress, steps, own, [apart(leaf) for leaf in unchanged])

    state = rule.agreed(state)
    kept = averaging_of(state)
    base, merged = jax.tree.map(apart, (kept.base, kept.merged))
    steps, pending = jax.tree.map(zero, kept.steps), tuple(map(nothing, kept.pending))
    state = with_averaging(state, base=base, merged=merged, steps=steps, pending=pending)
    return state.replace(
        microbatches=less(state.microbatches, microbatches),
        examples=less(state.examples, examples),
        step=less(state.step, windows),
    )
