"""What the processes of a job know alike of a window: what each measures travels in its exchange.

A record is made from these numbers alone, so it is the same in every process, and so are the plans
that follow from it.
"""

from collections.abc import Sequence
from math import inf, isfinite
from typing import Any

import jax
import numpy as np

from elche_jax import _check as check
from elche_jax._processes import noting_errors
from elche_jax.averaging.exchange import HostExchange
from elche_jax.cadence import WindowPlan, WindowRecord
from elche_jax.data.order import Cursor
from elche_jax.data.source import IterableSource, MapSource, Source
from elche_jax.engine.digests import Described, digest_of, number_of
from elche_jax.engine.job import Job, Measured
from elche_jax.engine.merge import MergeRules
from elche_jax.engine.replicas import ReplicaMismatch
from elche_jax.engine.shapes import named, one_of
from elche_jax.engine.state import TrainState
from elche_jax.engine.timing import WindowTimes
from elche_jax.engine.trainable import Selection
from elche_jax.train.in_flight import InFlight
from elche_jax.train.spec import DataPlan

PyTree = Any

SAMPLES = 8
"""Examples by which arrays are compared between processes, beside their number."""

UNKNOWN, APART = -1, -2
"""In place of a number for the replicas: nothing to compare; those of the process itself differ."""

NOTHING = 0, UNKNOWN, False, False, 0
"""Of a device that is in time, in a process that wants nothing, before `numbered`: `plan`,
`replicas`, `left_out`, `late` and `wishes`."""


def check_alike(job: Job, exchange: HostExchange | None) -> None:
    """Raise if the devices would not apply the same mean with the same bits; all have to ask."""
    if exchange is not None and not job.alike:
        must = "be None where the processes' devices do not compute the same bits"
        todo = (
            "Each would apply the mean by itself, and GPUs or unlike processors round differently."
        )
        raise ValueError(check.message("build_train_step", "exchange", must, exchange, todo))


def check_same_start(
    job: Job, params: PyTree, model_state: PyTree, rng: Any, selection: Selection, merge: MergeRules
) -> None:
    """Raise unless all processes begin a run from the same values, and exchange the same leaves."""
    if not job.one_process:
        frozen = f"frozen {[name for name, _ in named(selection.split(params)[1], 'params')]}"
        job.check_same(
            "TrainStep.init", params=digest_of(params), model_state=digest_of(model_state),
            rng=digest_of(rng), trainable=Described.of(frozen), merge=list(merge.rules),
        )  # fmt: skip


def check_same_optimizer(job: Job, state: TrainState) -> None:
    """Raise unless optimizers keep arrays of the same shapes, which may be exchanged."""
    if not job.one_process:
        # by their names, as the text of a structure may hold addresses of functions
        leaves = named(one_of((state.opt_state, state.averaging)))
        shapes = [(path, leaf.shape, str(leaf.dtype)) for path, leaf in leaves]
        name = "shapes of the optimizer's state"
        job.check_same("TrainStep.init", **{name: repr(shapes).encode()})


@noting_errors
def check_same_data(job: Job, plan: DataPlan, start: Cursor) -> None:
    """Raise unless all processes read the same data in the same way.

    Of arrays the number of examples and some of them are compared. Of a map-style dataset it is
    the number and the shapes, as it may change its examples at random; of an iterable the shapes,
    as its examples would be used up.
    """
    if not job.one_process:
        job.check_same(
            "windows", data=fingerprint(plan), batch_size=plan.batch_size, epochs=plan.epochs,
            seed=plan.seed, shuffle=plan.shuffle, drop_last=plan.drop_last,
            mask_key=plan.mask_key, cursor=start,
        )  # fmt: skip


def fingerprint(plan: DataPlan) -> str | Described:
    """Return what of the data can be compared between processes, see `check_same_data`."""
    source: Source = plan.source
    if isinstance(source, IterableSource):
        return f"microbatches of {_kinds(plan.microbatch, 0)}"
    said = f"{source.size} examples of {_kinds(plan.microbatch, 1)}"
    if isinstance(source, MapSource):
        return said
    numbers = np.unique(np.linspace(0, source.size - 1, SAMPLES).astype(np.int64))
    return Described(said, digest_of(source.rows(numbers)))


def _kinds(microbatch: PyTree, skip: int) -> PyTree:
    """Return dtypes and shapes as text, without the first dimensions."""
    return jax.tree.map(lambda leaf: f"{leaf.dtype}{[*leaf.shape[skip:]]}", microbatch)


def measured_rows(
    window: InFlight,
    times: WindowTimes,
    free: Sequence[float],
    sync_ms: float,
    steady: bool,
    own: Sequence[bool],
) -> np.ndarray:
    """Return what this process tells of a window, a row per device.

    Args:
        window: The window.
        times: When its devices were done.
        free: When each device was done with its previous window.
        sync_ms: The smallest wait of its devices in the last exchange; infinite if unknown.
        steady: Whether nothing was compiled for the window.
        own: For each device, whether its own sums are finite.

    Returns:
        float32, one column for each field of `Measured`; `plan` and `replicas` are unknown.
    """
    before = max(free)
    begun = max(window.requested, before)
    idle = 1e3 * max(0.0, window.requested - before) if isfinite(before) else 0.0
    rows = [
        (busy, 1e3 * (done - begun), idle, sync_ms, steady, window.cold, *NOTHING, mine)
        for busy, done, mine in zip(times.busy_ms(free), times.arrived, own, strict=True)
    ]
    return np.array(rows, np.float32)


def unmeasured_rows(own: Sequence[bool]) -> np.ndarray:
    """Return the rows of a window of which a process has no times, see `measured_rows`."""
    return np.array([(0, 0, 0, inf, False, False, *NOTHING, mine) for mine in own], np.float32)


def numbered(rows: np.ndarray, plan: int, replicas: int = UNKNOWN) -> np.ndarray:
    """Return rows that also tell of a plan and of replicas.

    Args:
        rows: See `measured_rows`.
        plan: See `plan_number`.
        replicas: See `replicas_number`; or `UNKNOWN`, or `APART`.
    """
    rows = rows.copy()
    told = Measured(*rows.T)
    told.plan[:], told.replicas[:] = plan, replicas
    return rows


def finite_by_rank(rows: np.ndarray, lost: Sequence[int]) -> np.ndarray:
    """Return by rank whether a device's own sums were finite; True for devices that are lost."""
    own = Measured(*rows.T).own > 0
    own[list(lost)] = True
    return own


def plan_number(plan: WindowPlan) -> int:
    """Return a number for what of a plan must be the same in all processes."""
    return number_of(repr((plan.window, plan.epoch, plan.first, plan.counts)).encode())


def replicas_number(sums: Any) -> int:
    """Return a number for the replicas that have these checksums.

    Args:
        sums: Checksums of a process's devices, which agree; `(devices, leaves, 2)`.
    """
    return number_of(np.asarray(sums)[0].tobytes())


def plans_error(job: Job, plan: WindowPlan, rows: np.ndarray) -> RuntimeError | None:
    """Return an error if the processes planned differently.

    Args:
        job: The processes.
        plan: The window.
        rows: See `record_of`.
    """
    told = _by_process(job, rows)
    first = next(iter(told))
    for process, own in told.items():
        if own.plan != told[first].plan:
            return RuntimeError(
                f"train: all processes must plan the same windows, but process {process} has "
                f"another plan for its window than process {first}: here window "
                f"{plan.window} has counts {plan.counts}. Loops must take the same windows, and a "
                "cadence or guard of your own must compute the same everywhere."
            )
    return None


def replicas_error(job: Job, rows: np.ndarray) -> ReplicaMismatch | None:
    """Return an error if the processes have different replicas; arguments as of `plans_error`."""
    told, rule = _by_process(job, rows), "train: all replicas must be bitwise equal, but"
    # one that has a late device does not read the checksums
    known = [own.replicas for own in told.values() if own.replicas != UNKNOWN]
    for process, own in told.items():
        if own.replicas == APART:
            return ReplicaMismatch(f"{rule} after a window those of process {process} differ.")
        if own.replicas not in (UNKNOWN, *known[:1]):
            return ReplicaMismatch(
                f"{rule} after the last window that was verified those of process {process} "
                f"differ from those of process {next(iter(told))}. Most likely their "
                "optimizers differ, or the order in which they train several steps."
            )
    return None


def _by_process(job: Job, rows: np.ndarray) -> dict[int, Measured]:
    """Return what each process that is there tells of all of its devices alike, by its index."""
    return {process: Measured(*rows[ranks[0]]) for process, ranks in job.ranks_of.items()}


def record_of(
    plan: WindowPlan, rows: np.ndarray, left: Sequence[int], **known: Any
) -> WindowRecord:
    """Return the record of a window from the rows of all devices.

    With `r[d]` the time from the end of the last window, of whichever process, until device `d`
    was done,

        skew = max - min over d of r[d],    wall = max over d of r[d] + sync

    A loop that does other work before it asks for a window does not count unless it is later
    than those of the other processes. What the exchange costs is known after it, so `sync` is that
    of the window before; if that is unknown, it is 0 and the window is cold.

    Args:
        plan: The window.
        rows: For each device of the job a row of `Measured`, `(devices, fields)`.
        left: Ranks of the devices that are there.
        **known: Further fields of the record.
    """
    rows = np.asarray(rows, np.float64)
    told = Measured(*rows[list(left)].T)
    done = told.idle - told.idle.min() + told.ready
    sync = float(told.sync.min())
    cold = bool(told.cold.any()) or sync == inf
    sync = 0.0 if sync == inf else sync
    return plan.measured(
        busy_ms=tuple(Measured(*rows.T).busy.tolist()),
        wall_ms=float(done.max()) + sync,
        sync_ms=sync,
        skew_ms=float(done.max() - done.min()),
        steady=bool(told.steady.all()),
        cold=cold,
        left_out=tuple(np.flatnonzero(told.left_out).tolist()),
        **known,
    )
