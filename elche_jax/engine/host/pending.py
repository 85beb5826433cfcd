"""Windows whose average is known on the host and not applied yet, as arrays for a checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from elche_jax.engine.host.average import Average
from elche_jax.engine.host.coordinator import Outcome
from elche_jax.engine.host.session import Begun, Session
from elche_jax.engine.job import Job
from elche_jax.engine.lane import Fleet
from elche_jax.engine.reduce import Mean
from elche_jax.engine.replicas import is_stacked
from elche_jax.engine.state import PendingUpdate

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PendingWindow:
    """A window whose average is known and not applied yet.

    Attributes:
        counts: Microbatches of every device of the job.
        updates: The devices' updates, stacked.
        mean: The mean to apply.
        metrics: Metrics of the window.
    """

    counts: Any
    updates: PendingUpdate
    mean: Mean
    metrics: dict[str, Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PendingWindows:
    """What a session knows that is not in its training state.

    Attributes:
        finite: See `Session.finite`; stacked.
        metrics: Metrics of the window averaged last.
        windows: The windows, oldest first. Progress is empty in the updates of the first one, as
            only later ones are subtracted from its mean.
    """

    finite: Any
    metrics: dict[str, Any]
    windows: list[PendingWindow]


def pending_windows(
    session: Session,
    outcomes: Mapping[int, Outcome],
    fleet: Fleet,
    nothing: Callable[[int], PendingUpdate],
) -> PendingWindows | None:
    """Return the windows of a session that are pending; None if one of them has no average.

    Args:
        session: The session.
        outcomes: The known outcomes, by number of the window.
        fleet: The devices.
        nothing: Returns the update of a rank that got no programs.
    """
    windows: list[PendingWindow] = []
    for begun in session.begun:
        if begun.number not in outcomes:
            return None
        average = outcomes[begun.number].average
        updates = [own or nothing(rank) for rank, own in enumerate(begun.pending)]
        if not windows:
            updates = [replace(own, progress=[]) for own in updates]
        rows = jax.tree.map(lambda *rows: fleet.stack(rows), *updates)
        counts = np.array(begun.counts, np.int32)
        windows.append(PendingWindow(counts, rows, average.mean, average.metrics))
    return PendingWindows(fleet.stack(session.finite), session.metrics, windows)


def arrays_of(pending: PendingWindows, nothing: PendingUpdate, job: Job) -> list[Any] | None:
    """Return pending windows as arrays, for `windows_of`; all processes of a job must call it.

    Args:
        pending: The windows.
        nothing: The update of a device that did nothing, leaves `(1, ...)`.
        job: The processes.

    Returns:
        The arrays, with a row for each device of the job; None in other processes than the first.
    """
    leaves, structure = jax.tree.flatten(pending)
    leaves = [leaf if is_stacked(leaf) else np.asarray(leaf) for leaf in leaves]
    if job.one_process:
        return leaves
    stacked = {str(at): np.asarray(leaf) for at, leaf in enumerate(leaves) if is_stacked(leaf)}
    found = job.rows_at_first(stacked)
    if not job.first:
        return None
    whole = structure.unflatten(found.get(str(at), leaf) for at, leaf in enumerate(leaves))
    # the rows of lost devices are copies of the first device's, whose updates must not count twice
    for rank in job.members.lost:
        for window in whole.windows:
            none = replace(nothing, progress=nothing.progress if window.updates.progress else [])
            for rows, row in zip(
                jax.tree.leaves(window.updates), jax.tree.leaves(none), strict=True
            ):
                rows[rank] = row[0]
    return jax.tree.leaves(whole)


def windows_of(arrays: Sequence[np.ndarray], like: PendingWindows) -> PendingWindows | None:
    """Return the pending windows that `arrays_of` returned as arrays; None if they do not fit.

    Args:
        arrays: The arrays.
        like: Their shapes.
    """
    shapes, structure = jax.tree.flatten(like)
    if [array.shape for array in arrays] != [shape.shape for shape in shapes]:
        return None
    if any(array.dtype.kind in "OSU" for array in arrays):
        return None
    pairs = zip(arrays, shapes, strict=True)
    return structure.unflatten(array.astype(shape.dtype) for array, shape in pairs)


def resume(session: Session, pending: PendingWindows, fleet: Fleet) -> None:
    """Put pending windows into a session that has just begun.

    Args:
        session: The session of the state that they belong to.
        pending: The windows, with a row for each device of the job.
        fleet: The devices of this process.
    """
    places = list(zip(fleet.job.ranks, fleet.devices, strict=True))

    def row(tree: PyTree, rank: int, device: jax.Device) -> PyTree:
        # copied: the CPU backend aliases host memory
        return jax.device_put(jax.tree.map(lambda leaf: np.array(leaf[rank])[None], tree), device)

    session.finite = [row(pending.finite, rank, device) for rank, device in places]
    session.metrics = pending.metrics
    for number, window in enumerate(pending.windows):
        updates = [row(window.updates, rank, device) for rank, device in places]
        # it has its mean, so it is never taken back, which the other fields are for
        counts = tuple(map(int, window.counts))
        session.begun.append(Begun(number, counts, 0, 0, updates, [], [], carries=False))
        average = Average(window.mean, window.metrics, np.ones(fleet.world_size, np.bool_))
        session.due.append((number, Outcome(average, (), (), ahead=True, will_be_known=False)))
