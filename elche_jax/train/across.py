"""What the processes of a job know alike of a window: what each measures travels in its exchange.

A record is made from these numbers alone, so it is the same in every process, and so are the plans
that follow from it.
"""

import hashlib
from collections.abc import Sequence
from math import inf, isfinite
from typing import Any

import numpy as np

from elche_jax import _check as check
from elche_jax.averaging.exchange import HostExchange
from elche_jax.averaging.rules import AveragingRule, MeanGradient
from elche_jax.cadence import WindowPlan, WindowRecord
from elche_jax.data.order import Cursor
from elche_jax.data.source import IterableSource, Source
from elche_jax.engine.job import Job, Measured, digest_of
from elche_jax.engine.timing import WindowTimes
from elche_jax.train.spec import DataPlan

PyTree = Any

SAMPLES = 8
"""Examples by which data are compared between processes, beside their number."""


def check_across(
    job: Job, rule: AveragingRule | MeanGradient, exchange: HostExchange | None
) -> None:
    """Raise for what does not work over several processes yet."""
    if job.one_process:
        return
    rule_text = f"be {{}} in a job of several processes, here {len(job.ranks_of)}"
    where = "build_train_step"
    if exchange is not None:
        raise ValueError(check.message(where, "exchange", rule_text.format("None"), exchange))
    if rule.delay:
        name = type(rule).__name__
        raise ValueError(check.message(name, "delay", rule_text.format("0"), rule.delay))


def check_same_start(job: Job, params: PyTree, model_state: PyTree, rng: Any) -> None:
    """Raise unless all processes begin a run from the same values."""
    if not job.one_process:
        job.check_same(
            "TrainStep.init", params=digest_of(params), model_state=digest_of(model_state),
            rng=digest_of(rng),
        )  # fmt: skip


def check_same_data(job: Job, plan: DataPlan, start: Cursor) -> None:
    """Raise unless all processes read the same data in the same way.

    Of a source with random access the number of examples and some of them are compared, of an
    iterable only the shapes: its examples would be used up.
    """
    if not job.one_process:
        job.check_same(
            "windows", data=_fingerprint(plan), batch_size=plan.batch_size, epochs=plan.epochs,
            seed=plan.seed, shuffle=plan.shuffle, drop_last=plan.drop_last,
            mask_key=plan.mask_key, cursor=start,
        )  # fmt: skip


def _fingerprint(plan: DataPlan) -> Any:
    source: Source = plan.source
    if isinstance(source, IterableSource):
        return plan.microbatch
    numbers = np.unique(np.linspace(0, source.size - 1, SAMPLES).astype(np.int64))
    return source.size, digest_of(source.rows(numbers))


def measured_rows(
    times: WindowTimes,
    free: Sequence[float],
    requested: float,
    sync_ms: float,
    steady: bool,
    cold: bool,
    replicas: int,
) -> np.ndarray:
    """Return what this process tells of a window before its exchange, a row per device.

    Args:
        times: When its devices were done; the ends of the exchange are not known yet.
        free: When each device was done with its previous window.
        requested: When the loop asked for the window.
        sync_ms: The smallest wait of its devices in the last exchange; infinite if unknown.
        steady: Whether nothing was compiled for the window.
        cold: Whether its programs run for the first time.
        replicas: See `number_of`; -1 for nothing to compare.

    Returns:
        float32, one column for each field of `Measured` but `own`.
    """
    before = max(free)
    begun = max(requested, before)
    idle = 1e3 * max(0.0, requested - before) if isfinite(before) else 0.0
    rows = [
        (busy, 1e3 * (done - begun), idle, sync_ms, steady, cold, replicas)
        for busy, done in zip(times.busy_ms(free), times.arrived, strict=True)
    ]
    return np.array(rows, np.float32)


def number_of(sums: Any) -> int:
    """Return a number for the replicas that have these checksums, exact in float32.

    Args:
        sums: Checksums of a process's devices, which agree; `(devices, leaves, 2)`.
    """
    found = hashlib.blake2b(np.asarray(sums)[0].tobytes(), digest_size=3)
    return int.from_bytes(found.digest(), "big")


def replicas_apart(job: Job, rows: np.ndarray) -> str | None:
    """Return an error message if processes found different replicas, else None.

    Args:
        job: The processes.
        rows: See `record_of`.
    """
    found = Measured(*rows.T).replicas
    of_process = [float(found[ranks[0]]) for ranks in job.ranks_of.values()]
    processes = list(job.ranks_of)
    for process, number in zip(processes, of_process, strict=True):
        if number != of_process[0]:
            return (
                "train: all replicas must be bitwise equal, but after the last window that was "
                f"verified those of process {process} differ from those of process {processes[0]}."
            )
    return None


def record_of(plan: WindowPlan, rows: np.ndarray, **known: Any) -> WindowRecord:
    """Return the record of a window from the rows of all devices.

    With `r[d]` the time from the end of the last window, of whichever process, until device `d`
    was done,

        skew = max - min over d of r[d],    wall = max over d of r[d] + sync

    A loop that does other work before it asks for a window does not count unless it is later
    than those of the other processes. What the exchange costs is known after it, so `sync` is that
    of the window before.

    Args:
        plan: The window.
        rows: For each device of the job a row of `Measured`, `(devices, fields)`.
        **known: Further fields of the record.
    """
    told = Measured(*np.asarray(rows, np.float64).T)
    done = told.idle - told.idle.min() + told.ready
    sync = float(told.sync.min())
    sync = 0.0 if sync == inf else sync
    return plan.measured(
        busy_ms=tuple(told.busy.tolist()),
        wall_ms=float(done.max()) + sync,
        sync_ms=sync,
        skew_ms=float(done.max() - done.min()),
        steady=bool(told.steady.all()),
        cold=bool(told.cold.any()),
        **known,
    )
