"""What a training step knows of its run besides the state: plain numbers for a checkpoint."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from elche_jax.averaging.rules import AveragingRule
from elche_jax.cadence.base import State
from elche_jax.engine.local import average
from elche_jax.engine.mapped import AXIS
from elche_jax.engine.merge import MergeRules
from elche_jax.engine.state import AveragingState, PendingUpdate, TrainState
from elche_jax.engine.trainable import Selection
from elche_jax.train.divergence import DivergenceReader, divergence_of
from elche_jax.train.finite import FiniteWatch
from elche_jax.train.live_scheduler import LiveScheduler
from elche_jax.train.options import Options

PyTree = Any

logger = logging.getLogger("elche_jax")


def run_to_dict(
    scheduler: LiveScheduler, watch: FiniteWatch, divergence: DivergenceReader | None
) -> dict[str, Any]:
    """The run as plain numbers and an array of counts, which `restore_run` takes."""
    state = scheduler.state
    keeps = isinstance(state.cadence, State)  # a user's own may be anything
    return {
        "cadence": state.to_dict() if keeps else None,
        "cadence_name": scheduler.cadence_name,
        "counts": scheduler.history_array,
        "divergence": [asdict(seen) for seen in scheduler.divergence],
        "unread": None if divergence is None else divergence.unread,
        "skipped": watch.skipped,
        "in_a_row": watch.in_a_row,
        "left_out": list(watch.left_out),
    }


def restore_run(
    saved: Mapping[str, Any], world_size: int, scheduler: LiveScheduler, watch: FiniteWatch,
    divergence: DivergenceReader | None,
) -> None:  # fmt: skip
    """Goes on where the run of a dict of `run_to_dict` was.

    What was measured on another number of devices, or by another cadence or one with other
    arguments, says nothing here: it begins anew, and a log line says so.

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
    seen = [] if divergence is None else saved["divergence"]
    scheduler.restart(saved["counts"], [divergence_of(one) for one in seen])
    unread = saved.get("unread")
    if divergence is not None:
        divergence.restore(unread or ())
    if saved["cadence_name"] != scheduler.cadence_name:
        logger.warning(
            "elche: the checkpoint is of a run with %s, this one has %s: the cadence begins anew.",
            saved["cadence_name"],
            scheduler.cadence_name,
        )
    elif saved["cadence"] is None:
        logger.warning(
            "elche: the state of %s was not saved, as it is no elche_jax.cadence.State: the "
            "cadence begins anew.",
            scheduler.cadence_name,
        )
    else:
        try:
            scheduler.restore(saved["cadence"])
        except (TypeError, ValueError) as error:  # it was built with other arguments, say
            logger.warning("elche: the cadence begins anew: %s", error)


def join_devices(
    state: TrainState, averaging: AveragingRule | None, selection: Selection, merge: MergeRules
) -> TrainState:
    """One device's state of those of several, for another number of devices.

    What is the same on all devices is taken as it is. Where they have their own, parameters
    are averaged as at the end of the run (`TrainStep.average`), other floats are averaged,
    and of the rest the largest is taken.

    Args:
        state: Host arrays, leaves `(devices it was of, ...)`.
        averaging: The rule; None where everything is the same.
        selection: Which parameters are trained.
        merge: How model state is merged.
    """
    params = state.params
    if averaging is not None:
        size = len(state.step)
        mean = jax.vmap(partial(average, averaging, selection, size), axis_name=AXIS)
        params = jax.tree.map(np.asarray, mean(state.replace(opt_state=None))[0])
    averaged = jax.tree.map(lambda x, y: x[0] if _alike(x) else y[0], state.params, params)
    joined = jax.tree.map(join_rows, state.replace(params=None)).replace(params=averaged)
    kept: AveragingState | None = joined.averaging
    if averaging is not None and kept is not None:  # what is pending is in the parameters now
        joined = joined.replace(averaging=kept.replace(pending=_idle(kept, merge)))
    return joined


def adopt(
    state: TrainState, options: Options, selection: Selection, merge: MergeRules
) -> TrainState:
    """A state as this run goes on with it: what is pending in it is what this run has pending.

    Another number of devices, or an exchange on the host, leaves it to `base` and `steps` what
    the devices' steps did. Gradients that a run without windows pending has are lost.

    Args:
        state: Host arrays, of one device or stacked.
        options: What was asked for.
        selection: Which parameters are trained.
        merge: How model state is merged.
    """
    kept: AveragingState | None = state.averaging
    if kept is None or not kept.pending:
        return state
    if not options.pending:
        if not any(np.any(one.steps) for one in kept.pending):
            return state
        if options.averaging is None:
            logger.warning(
                "elche: gradients of up to %d windows were not applied when this run was saved; "
                "they are left out, as it goes on on one device or over the host.",
                len(kept.pending),
            )
        return state.replace(averaging=kept.replace(pending=_idle(kept, merge)))
    known = sum(one.steps for one in kept.pending)
    if options.averaging is None or np.array_equal(known, kept.steps[..., 0]):
        return state
    *older, last = _idle(kept, merge)
    now = jax.tree.leaves(selection.split(state.params)[0])
    progress = [np.subtract(x, y, dtype=np.float32) for x, y in zip(kept.base, now, strict=True)]
    own = merge.of_sent(state.model_state)
    merged = [np.asarray(leaf) for leaf in merge.sent.changes(kept.merged, own)]
    last = replace(last, progress=progress, steps=kept.steps[..., 0], model_state=merged)
    return state.replace(averaging=kept.replace(pending=(*older, last)))


def _idle(kept: AveragingState, merge: MergeRules) -> tuple[PendingUpdate, ...]:
    """Windows in which nothing was done."""
    unchanged = merge.sent.unchanged(kept.merged)
    return tuple(
        replace(
            one,
            progress=jax.tree.map(np.zeros_like, one.progress),
            steps=np.zeros_like(one.steps),
            own=np.ones_like(one.own),
            model_state=unchanged,
        )
        for one in kept.pending
    )


def join_rows(rows: np.ndarray) -> np.ndarray:
    """One of the devices' own arrays: themselves where they are alike, else the mean of
    floats, and the largest of the rest."""
    if _alike(rows):
        return rows[0]
    floats = jax.numpy.issubdtype(rows.dtype, jax.numpy.floating)
    return np.asarray(
        rows.astype(np.float64).mean(axis=0) if floats else rows.max(axis=0), rows.dtype
    )


def _alike(rows: np.ndarray) -> bool:
    """Whether all devices have the same bytes."""
    flat = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
    return bool((flat == flat[:1]).all())


def rows_to_dict(rows: PyTree) -> PyTree:
    """What a run has not reported yet as plain numbers, which `rows_of` takes."""
    return jax.tree.map(lambda row: row.tolist(), rows)


def rows_of(saved: PyTree, world_size: int) -> PyTree:
    """What the next window of a run reports of the last one, see `Runner.unreported`.

    Of another number of devices the first one has it all, without what is not finite: of
    that no window tells.
    """

    def rows(saved: list[float]) -> np.ndarray:
        row = np.array(saved, np.float32)
        if len(row) == world_size:
            return row
        total = row.sum(where=np.isfinite(row), dtype=np.float32)
        return np.append(total, np.zeros(world_size - 1, np.float32))

    if saved is None:
        return None
    return tuple(jax.tree.map(rows, one, is_leaf=lambda x: isinstance(x, list)) for one in saved)
