"""Saving and restoring a run: its plain numbers, and states for other devices or options."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from elche_jax import _check as check
from elche_jax._log import logger
from elche_jax.averaging.rules import AveragingRule
from elche_jax.cadence.state import State
from elche_jax.engine.axis import DeviceAxis
from elche_jax.engine.bits import raw, with_type_of
from elche_jax.engine.job import Job
from elche_jax.engine.lane import kinds_of
from elche_jax.engine.local import average
from elche_jax.engine.mapped import AXIS
from elche_jax.engine.merge import MergeRules, difference
from elche_jax.engine.state import AveragingState, PendingUpdate, TrainState, no_update
from elche_jax.engine.trainable import Selection
from elche_jax.observe.events import strings
from elche_jax.train import speeds
from elche_jax.train.divergence import DivergenceReader, divergence_of
from elche_jax.train.finite import FiniteWatch
from elche_jax.train.live_scheduler import LiveScheduler
from elche_jax.train.options import Options

PyTree = Any

ALWAYS = {"cadence", "cadence_name", "counts", "divergence", "in_a_row", "left_out", "skipped"}
"""Keys of a run that every version has saved."""

BY_RANK = {"kinds", "places", "throughput"}
"""Keys of lists with an entry per device. Earlier versions have saved none or only some of them."""


def run_to_dict(
    job: Job,
    scheduler: LiveScheduler,
    watch: FiniteWatch,
    divergence: DivergenceReader | None,
) -> dict[str, Any]:
    """Return the run as plain numbers and an array of counts, for `restore_run`.

    Args:
        job: The devices; all processes must have read `job.places` before.
        scheduler: Plans and records.
        watch: Counts windows that are not finite.
        divergence: Reads how far the devices drift apart; or None.
    """
    state = scheduler.state
    keeps = isinstance(state.cadence, State)  # a user-defined state need not be serializable
    return {
        "kinds": list(kinds_of(job.devices)),
        "places": list(job.places),
        "throughput": list(scheduler.throughput),
        "lost": list(scheduler.lost),
        "cadence": state.to_dict() if keeps else None,
        "cadence_name": type(scheduler.cadence).__name__,
        "counts": scheduler.history_array,
        "next_window": scheduler.next_window,
        "divergence": [asdict(seen) for seen in scheduler.divergence],
        "unread": None if divergence is None else divergence.unread,
        "skipped": watch.skipped,
        "in_a_row": watch.in_a_row,
        "left_out": list(watch.left_out),
    }


def restore_run(
    saved: Mapping[str, Any], job: Job, scheduler: LiveScheduler, watch: FiniteWatch,
    divergence: DivergenceReader | None,
) -> tuple[PyTree, Mapping[str, Any] | None]:  # fmt: skip
    """Restore a run from the dict of `run_to_dict`.

    On different devices the cadence begins with the known speeds of those that were there before,
    or else of their kind. Measurements by a different cadence, or by one with other arguments, do
    not apply: the cadence starts over, and the first live process logs a line that says so.

    Returns:
        The last window's metrics that the next one reports, see `rows_of`; and the windows that
        were pending on the host, see `HostRunner.pending`.

    Raises:
        TypeError, ValueError: `saved` is not such a dict; the run is then unchanged.
    """
    rule, where = "be the dict that run_to_dict returned", "TrainStep.restore_run"
    check.instance(where, "saved", saved, Mapping, rule, brief=True)
    if absent := sorted(ALWAYS - saved.keys()):
        raise ValueError(check.message(where, "saved", rule, f"one without the keys {absent}"))
    left_out = check.integers(where, "saved['left_out']", saved["left_out"], low=0)
    before = len(left_out)
    counts = _counts_of(saved["counts"], before, where, rule)
    # earlier versions numbered windows by the counts
    saved = {"next_window": len(counts), **saved}
    skipped, in_a_row, window = (
        check.integer(where, f"saved[{name!r}]", saved[name], low=0)
        for name in ("skipped", "in_a_row", "next_window")
    )
    check.integers(where, "saved['lost']", saved.get("lost", ()), low=0)
    _check_by_rank(saved, before, where)
    same = before == job.world_size
    try:  # before anything is changed
        unreported = rows_of(job, saved.get("unreported"))
        pending = _pending_of(saved.get("pending"))
        seen = []
        if same and divergence is not None:
            seen = [divergence_of(one) for one in saved["divergence"]]
            divergence.restore(saved.get("unread") or ())
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        names = "divergence, unread, unreported or pending"
        got = f"one whose {names} is damaged ({type(error).__name__}: {error})"
        raise ValueError(check.message(where, "saved", rule, got)) from error
    watch.restore(skipped, left_out if same else [0] * job.world_size, in_a_row)
    say = logger.warning if job.at == 0 else logger.debug
    if same:
        scheduler.restart(counts, seen, window)
        _restore_cadence(saved, job, scheduler, say)
        return unreported, pending
    scheduler.restart(window=window)
    knows = _believe(saved, kinds_of(job.devices), job, scheduler)
    say(
        "elche: the number of devices is %d, the checkpoint's was %d: %sthe guard's history "
        "and counts_history start over%s.",
        job.world_size,
        before,
        "" if knows else "the cadence, ",
        ", counts begin with the speeds that are known" if knows else "",
    )
    return unreported, pending


def _check_by_rank(saved: Mapping[str, Any], devices: int, where: str) -> None:
    """Check what a saved run says of each of its devices."""
    for name in sorted(BY_RANK & saved.keys()):
        argument = f"saved[{name!r}]"
        entries = check.items(where, argument, saved[name], "entries by rank")
        check.per_device(where, argument, len(entries), devices)
        if name == "throughput":  # None if unknown
            check.reals(where, argument, [1 if rate is None else rate for rate in entries], above=0)
        else:
            strings(where, argument, entries)


def _restore_cadence(
    saved: Mapping[str, Any], job: Job, scheduler: LiveScheduler, say: Callable[..., None]
) -> None:
    """Restore the cadence on as many devices as before, or say why it starts over."""
    kinds, name = kinds_of(job.devices), type(scheduler.cadence).__name__
    saved_kinds = saved.get("kinds", kinds)
    if saved["cadence_name"] != name:
        why = f"the checkpoint is of a run with {saved['cadence_name']}, this one has {name}"
    elif _moved(saved, job) and _believe(saved, kinds, job, scheduler):
        say(
            "elche: the devices are not those that the checkpoint's run had in the end: counts "
            "begin with the speeds that are known."
        )
        return
    elif scheduler.cadence.estimates and _told_apart(saved_kinds, kinds):
        here, there = ", ".join(kinds), ", ".join(saved_kinds)
        why = f"the devices are of {here}, the checkpoint's were of {there}"
    elif saved["cadence"] is None:
        why = f"the state of {name} was not saved, as it is not an elche_jax.cadence.State"
    else:
        try:
            scheduler.restore(saved["cadence"])
        except (TypeError, ValueError) as error:  # for example, built with other arguments
            say("elche: the cadence starts over: %s", error)
        return
    say("elche: %s: the cadence starts over.", why)


def _pending_of(saved: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the pending windows of a saved run with their arrays; JSON turns these into lists."""
    if not saved:
        return saved
    asked = {name: saved[name] for name in ("step", "metrics", "merge")}
    arrays = [np.asarray(array) for array in saved["arrays"] or ()]  # None except in the first
    return asked | {"windows": int(saved["windows"]), "arrays": arrays}


def _counts_of(saved: Any, devices: int, where: str, rule: str) -> NDArray[np.int64]:
    """Return the saved counts as an array `(windows, devices)`; JSON turns them into lists."""
    try:
        counts = np.asarray(saved)
    except ValueError:
        got = "rows of different lengths"
    else:
        if not counts.size:  # no window yet; an empty list has lost its other axis
            return np.zeros((0, devices), np.int64)
        if counts.dtype.kind in "iu" and counts.shape[1:] == (devices,):
            return counts.astype(np.int64)
        got = f"shape {counts.shape} and dtype {counts.dtype}"
    got = f"one with counts of {got} for {devices} devices"
    raise ValueError(check.message(where, "saved", rule, got))


def _believe(
    saved: Mapping[str, Any], kinds: Sequence[str], job: Job, scheduler: LiveScheduler
) -> bool:
    """Let the cadence begin with the known speeds; return whether it has used any."""
    if not saved.keys() >= BY_RANK:  # written by an earlier version
        return False
    before = list(zip(saved["places"], saved["kinds"], strict=True))
    now = list(zip(job.places, kinds, strict=True))
    return scheduler.believe(speeds.carried_over(saved["throughput"], before, now))


def _moved(saved: Mapping[str, Any], job: Job) -> bool:
    """Return whether the entries by rank of the cadence's state are those of other devices.

    If no place is found again, the hosts have new names, and ranks say more than places.
    """
    before, now = _processes(saved.get("places", job.places)), _processes(job.places)
    others = before != now and not set(before).isdisjoint(now)
    return others or bool(saved.get("lost"))


def _processes(places: Sequence[str]) -> list[str]:
    return [place.rpartition("/")[0] for place in places]


def _told_apart(before: Sequence[str], now: Sequence[str]) -> bool:
    """Return whether speeds by rank are those of other kinds, so that their ratios do not apply."""
    return list(before) != list(now) and max(len(set(before)), len(set(now))) > 1


def join_devices(
    state: TrainState, averaging: AveragingRule | None, selection: Selection, merge: MergeRules
) -> TrainState:
    """Join the states of several devices into one device's, for another number of devices.

    Leaves that are equal on all devices are kept. Of the others, parameters are averaged as at
    the end of a run (`TrainStep.average`), other floats by their plain mean, and the rest is
    reduced to the maximum.

    Args:
        state: Host arrays, leaves `(old world size, ...)`.
        averaging: The rule; None in gradient mode, where replicas are equal.
        selection: Which parameters are trained.
        merge: How model state is merged.
    """
    params = state.params
    if averaging is not None:
        size = len(state.step)
        # the saved run may have had more devices than there are now: vmap stands in for them
        mean = partial(average, averaging, selection, DeviceAxis(size))
        params = jax.vmap(mean, axis_name=AXIS)(state.replace(opt_state=None))
        params = jax.tree.map(np.asarray, params)
    averaged = jax.tree.map(lambda x, y: x[0] if _alike(x) else y[0], state.params, params)
    joined = jax.tree.map(join_rows, state.replace(params=None)).replace(params=averaged)
    kept: AveragingState | None = joined.averaging
    if averaging is not None and kept is not None:  # the parameters now include pending updates
        joined = joined.replace(averaging=kept.replace(pending=_idle(kept, merge)))
    return joined


def adopt(
    state: TrainState, options: Options, selection: Selection, merge: MergeRules
) -> TrainState:
    """Adapt the pending updates of a restored state to the options of this run.

    After a change of the number of devices or a host exchange, pending local steps are
    recomputed from `base` and `steps`. Pending gradients are lost if this run keeps no windows
    pending.

    Args:
        state: Host arrays, of one device or stacked.
        options: The options of the training step.
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
                "they are dropped, as this run has one device or exchanges on the host.",
                len(kept.pending),
            )
        return state.replace(averaging=kept.replace(pending=_idle(kept, merge)))
    known = sum(one.steps for one in kept.pending)
    if options.averaging is None or np.array_equal(known, kept.steps[..., 0]):
        return state
    *older, last = _idle(kept, merge)
    now = jax.tree.leaves(selection.split(state.params)[0])
    progress = [difference(x, y) for x, y in zip(kept.base, now, strict=True)]
    own = merge.of_sent(state.model_state)
    merged = [np.asarray(leaf) for leaf in merge.sent.changes(kept.merged, own)]
    last = replace(last, progress=progress, steps=kept.steps[..., 0], model_state=merged)
    return state.replace(averaging=kept.replace(pending=(*older, last)))


def _idle(kept: AveragingState, merge: MergeRules) -> tuple[PendingUpdate, ...]:
    """Return pending updates of zero steps."""
    unchanged = merge.sent.unchanged(kept.merged)
    return tuple(no_update(one, unchanged) for one in kept.pending)


def join_rows(rows: np.ndarray) -> np.ndarray:
    """Join the devices' rows of an array into one.

    Returns:
        The first row if all are equal, else the mean of floats, or the maximum of other dtypes.
    """
    if _alike(rows):
        return rows[0]
    floats = jax.numpy.issubdtype(rows.dtype, jax.numpy.floating)
    return np.asarray(
        rows.astype(np.float64).mean(axis=0) if floats else rows.max(axis=0), rows.dtype
    )


def joined_model_state(job: Job, model_state: PyTree) -> PyTree:
    """Join model states that differ between devices into one on the host.

    In a job of several processes all must call it; all get the same result.

    Args:
        job: The processes.
        model_state: Stacked, with the entries of this process's devices.
    """
    leaves, structure = jax.tree.flatten(model_state)
    rows = {str(at): np.asarray(raw(leaf)) for at, leaf in enumerate(leaves)}
    found = rows if job.one_process else job.rows_at_first(rows)
    left = list(job.members.left)
    joined: list[Any] = job.by_first(lambda: [join_rows(row[left]) for row in found.values()])
    return structure.unflatten(map(with_type_of, leaves, joined))


def _alike(rows: np.ndarray) -> bool:
    """Return whether all rows have the same bytes."""
    # as bytes: NaN is not equal to itself, and -0.0 equals 0.0
    flat = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
    return bool((flat == flat[:1]).all())


def rows_to_dict(job: Job, rows: PyTree) -> PyTree:
    """Return the metrics a run has not reported yet as plain numbers, for `rows_of`.

    In a job of several processes all must call it.

    Args:
        job: The processes.
        rows: Metrics, leaves with an entry for each device of this process; None if there are none.
    """
    leaves, structure = jax.tree.flatten(rows)
    if not leaves:  # the same in all processes
        return None
    by_rank = job.gather_rows(np.stack(leaves, axis=1).astype(np.float32))
    return structure.unflatten(by_rank.T.tolist())


def rows_of(job: Job, saved: PyTree) -> PyTree:
    """Return the last window's metrics that the next one reports, for this process's devices.

    If the number of devices has changed, the first device gets the sum of the finite entries;
    non-finite entries are dropped.

    Args:
        job: The processes.
        saved: What `rows_to_dict` returned.
    """

    def rows(saved: list[float]) -> np.ndarray:
        row = np.array(saved, np.float32)
        if len(row) != job.world_size:
            # the window that reports them sums over the devices, so one may hold them all
            total = row.sum(where=np.isfinite(row), dtype=np.float32)
            row = np.append(total, np.zeros(job.world_size - 1, np.float32))
        return row[list(job.ranks)]

    if saved is None:
        return None
    return tuple(jax.tree.map(rows, one, is_leaf=lambda x: isinstance(x, list)) for one in saved)
