"""What a training step knows of its run besides the state: plain numbers for a checkpoint."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import jax
import numpy as np

from elche_jax.averaging.guards import Divergence
from elche_jax.averaging.program import average
from elche_jax.averaging.rules import Averaging
from elche_jax.cadence.base import State
from elche_jax.engine.mapped import AXIS
from elche_jax.engine.state import TrainState
from elche_jax.engine.trainable import Selection
from elche_jax.train.finite import FiniteWatch
from elche_jax.train.guarding import GuardWatch
from elche_jax.train.pace import Pace

logger = logging.getLogger("elche_jax")


def run_to_dict(pace: Pace, watch: FiniteWatch, guard: GuardWatch | None) -> dict[str, Any]:
    """The run as plain numbers and an array of counts, which `restore_run` takes."""
    state = pace.state
    keeps = isinstance(state.cadence, State)  # a user's own may be anything
    return {
        "cadence": state.to_dict() if keeps else None,
        "cadence_name": pace.cadence_name,
        "counts": pace.history_array,
        "divergence": [] if guard is None else [asdict(seen) for seen in guard.history],
        "skipped": watch.skipped,
        "in_a_row": watch.in_a_row,
        "left_out": list(watch.left_out),
    }


def restore_run(
    saved: Mapping[str, Any], world_size: int, pace: Pace, watch: FiniteWatch,
    guard: GuardWatch | None,
) -> None:  # fmt: skip
    """Goes on where the run of a dict of `run_to_dict` was.

    What was measured on another number of devices, or by another cadence, says nothing
    here: it begins anew, and a log line says so.

    Raises:
        ValueError: The cadence's state is not one of this cadence.
    """
    before = len(saved["left_out"])
    if before != world_size:
        logger.warning(
            "elche: the checkpoint is of %d devices, these are %d: the cadence, the guard's "
            "history and counts_history begin anew.",
            before,
            world_size,
        )
        watch.restore(saved["skipped"], [0] * world_size, saved["in_a_row"])
        return
    watch.restore(saved["skipped"], saved["left_out"], saved["in_a_row"])
    pace.restart(saved["counts"])
    if guard is not None:
        guard.restore([_divergence(seen) for seen in saved["divergence"]])
    if saved["cadence_name"] != pace.cadence_name:
        logger.warning(
            "elche: the checkpoint is of a run with %s, this one has %s: the cadence begins anew.",
            saved["cadence_name"],
            pace.cadence_name,
        )
    elif saved["cadence"] is not None:
        pace.restore(saved["cadence"])


def join(
    state: TrainState,
    common: Callable[[TrainState], TrainState],
    averaging: Averaging | None,
    selection: Selection,
) -> TrainState:
    """One device's state of those of several, for another number of devices.

    What is the same on all devices is taken as it is. Where they have their own, parameters
    are averaged as at the end of the run (`TrainStep.average`), other floats are averaged,
    and of the rest the largest is taken.

    Args:
        state: Host arrays, leaves `(devices it was of, ...)`.
        common: Gives what is the same on all devices.
        averaging: The rule; None where everything is the same.
        selection: Which parameters are trained.
    """
    size = len(state.step)
    same = set(map(id, jax.tree.leaves(common(state))))
    if averaging is not None:
        mean = jax.vmap(partial(average, averaging, selection, size), axis_name=AXIS)
        params = jax.tree.map(np.asarray, mean(state.replace(opt_state=None))[0])
    else:
        params = state.params

    def one(leaf: Any) -> Any:
        if id(leaf) in same:
            return leaf[0]
        floats = jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
        wide = leaf.astype(np.float64).mean(axis=0) if floats else leaf.max(axis=0)
        return np.asarray(wide, leaf.dtype)

    joined = jax.tree.map(one, state.replace(params=None))
    return joined.replace(params=jax.tree.map(lambda leaf: leaf[0], params))


def _divergence(saved: Mapping[str, Any]) -> Divergence:
    values: Any = {name: tuple(x) if isinstance(x, list) else x for name, x in saved.items()}
    return Divergence(**values)
