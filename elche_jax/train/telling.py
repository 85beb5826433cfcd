"""What processes tell each other about their windows, and the records that follow from it.

What each process measures travels in the exchange of a window. A record is made from these numbers
alone, so it is the same in every process, and so are the plans that follow from it.

Without pending windows, the exchange of a window comes after its microbatches, and tells how long
they took. With pending windows it comes before them, so that it overlaps with them, and tells about
the previous window. At the end of a loop, a separate exchange tells what is left.
"""

from collections.abc import Callable, Sequence
from math import inf, isfinite
from typing import Any

import numpy as np

from elche_jax.cadence import WindowPlan, WindowRecord
from elche_jax.engine.digests import number_of
from elche_jax.engine.job import Job, Measured
from elche_jax.engine.lane import Fleet
from elche_jax.engine.replicas import ReplicaMismatch
from elche_jax.engine.timing import ENDS, WindowTimes
from elche_jax.train.in_flight import InFlight
from elche_jax.train.live_scheduler import KEPT

UNKNOWN, APART = -1, -2
"""In place of a number for the replicas: nothing to compare; the process's own replicas differ."""

NOTHING = 0, UNKNOWN, False, False, 0
"""`plan`, `replicas`, `left_out`, `late` and `wishes` before `numbered` sets the first two, for a
device that is in time, in a process without wishes."""


class Telling:
    """What a process has told the others, and what it has still to tell.

    Attributes:
        of_last: Whether the exchange of a window tells about the previous window.
        untold: The window that the next exchange tells about; None if there is none.
        mismatch: A difference between this process's own replicas; None if there is none.

    Args:
        fleet: The devices of this process.
        pending: Whether windows are pending in the state between two windows.
        verifies: Whether the result of the last comparison of replicas is told at the end of a
            loop.
    """

    def __init__(self, fleet: Fleet, pending: bool, verifies: bool):
        self._fleet, self._job = fleet, fleet.job
        self.of_last = pending and not self._job.one_process
        self.untold: InFlight | None = None
        self.mismatch: ReplicaMismatch | None = None
        self._sync_ms, self._replicas = inf, UNKNOWN
        # not whether there is a number: a process with a late device has none
        self._verifies, self._owes = verifies and not self._job.one_process, False
        # by window, the ranks that were late when it was averaged
        self._late: dict[int, frozenset[int]] = {}

    def late_after(self, window: int) -> frozenset[int]:
        """Return the ranks that were late at the average of a window, or of the last one before."""
        known = [number for number in list(self._late) if number <= window]
        return self._late[max(known)] if known else frozenset()

    def averaged(self, window: int, rows: np.ndarray) -> tuple[int, ...]:
        """Note which ranks were late when a window was averaged on the host.

        Args:
            window: Its number.
            rows: See `Measured`.

        Returns:
            The ranks that had work in it and are not part of the mean.
        """
        told = Measured(*rows.T)
        self._late[window] = frozenset(np.flatnonzero(told.late).tolist())
        if len(self._late) > KEPT:
            del self._late[min(self._late)]
        return tuple(np.flatnonzero(told.left_out).tolist())

    def dispatched(self, window: InFlight) -> None:
        """Note that a window was dispatched; the next one may have to tell about it."""
        self._owes = self.of_last or self._verifies
        if self.of_last:
            self.untold = window

    def rows_of_last(self, window: InFlight | None, plan: int) -> np.ndarray:
        """Return what to tell about the previous window, see `Measured`.

        Args:
            window: The previous window, or None.
            plan: A number for the plan of the window whose exchange carries it.
        """
        if window is None:
            rows = unmeasured_rows([True] * self._fleet.world_size)
        elif window.rows is None:  # its run was closed
            rows = unmeasured_rows(np.asarray(window.token).tolist())
        else:
            rows = window.rows
        return numbered(rows, plan, self._replicas)

    def survey(self, window: InFlight, plan: int, steady: Callable[[], bool]) -> np.ndarray:
        """Return what to tell in the exchange of a window.

        If it tells about that window itself, this waits until the devices are done.

        Args:
            window: The window.
            plan: A number for its plan.
            steady: Returns whether nothing was compiled for it.
        """
        launch = window.launch
        if self.of_last:
            return self.rows_of_last(window.tells, plan)
        # no clock, or no times: the run was closed, and plans no more
        if launch.watch is None or (times := launch.watch.accumulated(launch.number)) is None:
            return self.rows_of_last(None, plan)
        free = ENDS.before(self._fleet.devices, times.arrived)
        own = [True] * self._fleet.world_size
        rows = measured_rows(window, times, free, self._sync_ms, steady(), own)
        return numbered(rows, plan, self._replicas)

    def completed(
        self, window: InFlight, times: WindowTimes, free: Sequence[float], known: dict[str, Any]
    ) -> InFlight | None:
        """Note that a window is complete; return the one that its exchange told about.

        Args:
            window: The window.
            times: When the devices were done.
            free: When they were done with their previous work.
            known: Further fields of its record, which all processes know.
        """
        # first runs of programs cost more, also those of an exchange among fewer processes
        self._sync_ms = times.sync_ms if window.steady and not window.cold else inf
        self._replicas, window.known = UNKNOWN, known
        if self.of_last:
            own = np.asarray(window.token).tolist()
            window.rows = measured_rows(window, times, free, times.sync_ms, window.steady, own)
        return self.told_by(window)

    def told_by(self, window: InFlight) -> InFlight | None:
        """Return the window that this one's exchange told about; None if there is none."""
        if not self.of_last:
            return window
        told, window.tells = window.tells, None
        return told

    def rest(self) -> tuple[InFlight | None, np.ndarray | None]:
        """Tell what is left at the end of a loop; return the window it is about, and all rows.

        Both are None if nothing is left. All processes must call it after the same window.
        """
        told, owes = self.untold, self._owes
        self.untold, self._owes = None, False
        if not owes:
            return None, None
        rows = self._job.gather_rows(self.rows_of_last(told, 0))
        self._replicas = UNKNOWN
        return told, rows

    def replicas_error(self, rows: np.ndarray) -> ReplicaMismatch | None:
        """Return an error if these rows say that replicas differ; this process's own, if any."""
        error = replicas_error(self._job, rows)
        return error and (self.mismatch or error)

    def verified(self, sums: Any, error: ReplicaMismatch | None) -> None:
        """Note the checksums of this process's replicas, and the error if they differ."""
        if self._job.one_process:
            return
        self._replicas = replicas_number(sums)
        if error is not None:
            self.mismatch, self._replicas = error, APART


def measured_rows(
    window: InFlight,
    times: WindowTimes,
    free: Sequence[float],
    sync_ms: float,
    steady: bool,
    own: Sequence[bool],
) -> np.ndarray:
    """Return what this process tells about a window, a row per device.

    Args:
        window: The window.
        times: When its devices were done.
        free: When each device was done with its previous window.
        sync_ms: The smallest wait of its devices in the last exchange; infinite if unknown.
        steady: Whether nothing was compiled for the window.
        own: For each device, whether its own sums are finite.

    Returns:
        float32, one column for each field of `Measured`; `numbered` sets `plan` and `replicas`.
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
    """Return the rows of a window for which a process has no times, see `measured_rows`."""
    return np.array([(0, 0, 0, inf, False, False, *NOTHING, mine) for mine in own], np.float32)


def numbered(rows: np.ndarray, plan: int, replicas: int = UNKNOWN) -> np.ndarray:
    """Return rows with the numbers of a plan and of replicas.

    Args:
        rows: See `measured_rows`.
        plan: See `plan_number`.
        replicas: See `replicas_number`; or `UNKNOWN` or `APART`.
    """
    rows = rows.copy()
    told = Measured(*rows.T)
    told.plan[:], told.replicas[:] = plan, replicas
    return rows


def finite_by_rank(rows: np.ndarray, lost: Sequence[int]) -> np.ndarray:
    """Return, by rank, whether a device's own sums were finite; True for lost devices."""
    own = Measured(*rows.T).own > 0
    own[list(lost)] = True
    return own


def plan_number(plan: WindowPlan) -> int:
    """Return a number for the parts of a plan that must be the same in all processes."""
    return number_of(repr((plan.window, plan.epoch, plan.first, plan.counts)).encode())


def replicas_number(sums: Any) -> int:
    """Return a number for replicas with these checksums.

    Args:
        sums: Checksums of a process's devices, all equal; `(devices, leaves, 2)`.
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
                f"a different plan for its window from process {first}: here window "
                f"{plan.window} has counts {plan.counts}. Loops must take the same windows, and a "
                "cadence or guard of your own must compute the same everywhere."
            )
    return None


def replicas_error(job: Job, rows: np.ndarray) -> ReplicaMismatch | None:
    """Return an error if the processes have different replicas; for `rows` see `record_of`."""
    told, rule = _by_process(job, rows), "train: all replicas must be bitwise equal, but"
    # a process with a late device does not read the checksums
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
    """Return, by process index, what each live process tells alike for all its devices."""
    return {process: Measured(*rows[ranks[0]]) for process, ranks in job.ranks_of.items()}


def record_of(
    plan: WindowPlan, rows: np.ndarray, left: Sequence[int], **known: Any
) -> WindowRecord:
    """Return the record of a window from the rows of all devices.

    With `r[d]` the time from the end of the previous window, as seen by the process of device `d`,
    until that device was done,

        skew = max - min over d of r[d],    wall = max over d of r[d] + sync

    Other work that a loop does before it asks for a window does not count unless it makes this loop
    later than those of the other processes. Without pending windows, the cost of the exchange is
    known only after it, so `sync` is that of the previous window; if unknown, it is 0 and the
    window is cold.

    Args:
        plan: The window.
        rows: For each device of the job a row of `Measured`, `(devices, fields)`.
        left: Ranks of the remaining devices.
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
