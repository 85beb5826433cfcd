"""What a process tells the others of its windows, and what of the last one only the next will tell.

Without pending windows the exchange of a window comes after its microbatches, and tells how long
they took. With windows pending it comes before them, so that it crosses while they run, and tells
of the window before. What no exchange tells any more, at the end of a loop, is told by itself.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import numpy as np

from elche_jax.engine.job import Measured
from elche_jax.engine.lane import Fleet
from elche_jax.engine.replicas import ReplicaMismatch
from elche_jax.engine.timing import ENDS, WindowTimes
from elche_jax.train.across import (
    APART,
    UNKNOWN,
    measured_rows,
    numbered,
    replicas_error,
    replicas_number,
    unmeasured_rows,
)
from elche_jax.train.in_flight import InFlight
from elche_jax.train.live_scheduler import KEPT


class Telling:
    """What a process has told the others, and what it has not.

    Attributes:
        of_last: Whether the exchange of a window tells of the one before.
        untold: That one; None if there is none.
        mismatch: A difference between this process's own replicas.

    Args:
        fleet: The devices of this process.
        pending: Whether windows are pending in the state between two windows.
        verifies: Whether what the last comparison of replicas found is told at the end of a loop.
    """

    def __init__(self, fleet: Fleet, pending: bool, verifies: bool):
        self._fleet, self._job = fleet, fleet.job
        self.of_last = pending and not self._job.one_process
        self.untold: InFlight | None = None
        self.mismatch: ReplicaMismatch | None = None
        self._sync_ms, self._replicas = inf, UNKNOWN
        # not whether there is a number: one with a late device has none
        self._verifies, self._owes = verifies and not self._job.one_process, False
        # by window, the ranks that were late when it was averaged
        self._late: dict[int, frozenset[int]] = {}

    def late_after(self, window: int) -> frozenset[int]:
        """Return the ranks that were late at the average of a window, or the last one before."""
        known = [number for number in list(self._late) if number <= window]
        return self._late[max(known)] if known else frozenset()

    def averaged(self, window: int, rows: np.ndarray) -> tuple[int, ...]:
        """Note which ranks were late when a window was averaged on the host.

        Args:
            window: Its number.
            rows: See `Measured`.

        Returns:
            Those that had work in it and are not part of the mean.
        """
        told = Measured(*rows.T)
        self._late[window] = frozenset(np.flatnonzero(told.late).tolist())
        if len(self._late) > KEPT:
            del self._late[min(self._late)]
        return tuple(np.flatnonzero(told.left_out).tolist())

    def dispatched(self, window: InFlight) -> None:
        """Note that a window was dispatched, which the next one may have to tell of."""
        self._owes = self.of_last or self._verifies
        if self.of_last:
            self.untold = window

    def rows_of_last(self, window: InFlight | None, plan: int) -> np.ndarray:
        """Return what to tell of the window before, None for none, see `Measured`.

        Args:
            window: The window before.
            plan: A number for the plan of the window whose exchange tells it.
        """
        if window is None:
            rows = unmeasured_rows([True] * self._fleet.world_size)
        elif window.rows is None:  # of a run that was closed
            rows = unmeasured_rows(np.asarray(window.token).tolist())
        else:
            rows = window.rows
        return numbered(rows, plan, self._replicas)

    def survey(self, window: InFlight, plan: int, steady: Callable[[], bool]) -> np.ndarray:
        """Return what to tell in the exchange of a window; waits until its devices are done.

        Args:
            window: The window.
            plan: A number for its plan.
            steady: Returns whether nothing was compiled for it.
        """
        launch = window.launch
        if self.of_last:
            return self.rows_of_last(window.tells, plan)
        # no clock, or none that ends: of a run that was closed, which plans no more
        if launch.watch is None or (times := launch.watch.accumulated(launch.number)) is None:
            return self.rows_of_last(None, plan)
        free = ENDS.before(self._fleet.devices, times.arrived)
        own = [True] * self._fleet.world_size
        rows = measured_rows(window, times, free, self._sync_ms, steady(), own)
        return numbered(rows, plan, self._replicas)

    def completed(
        self, window: InFlight, times: WindowTimes, free: Sequence[float], known: dict[str, Any]
    ) -> InFlight | None:
        """Note that a window is complete; return the one that its exchange told of.

        Args:
            window: The window.
            times: When the devices were done.
            free: When they were done with what they did before.
            known: Further fields of its record, which all processes know.
        """
        # programs that run for the first time, also those of an exchange among fewer, cost more
        self._sync_ms = times.sync_ms if window.steady and not window.cold else inf
        self._replicas, window.known = UNKNOWN, known
        if self.of_last:
            own = np.asarray(window.token).tolist()
            window.rows = measured_rows(window, times, free, times.sync_ms, window.steady, own)
        return self.told_by(window)

    def told_by(self, window: InFlight) -> InFlight | None:
        """Return the window that another one's exchange told of; None if there is none."""
        if not self.of_last:
            return window
        told, window.tells = window.tells, None
        return told

    def rest(self) -> tuple[InFlight | None, np.ndarray | None]:
        """Tell what no exchange tells any more; return of which window, and the rows of all.

        There are none if there is nothing to tell. All processes have to call it after the same
        window.
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
        """Note the checksums of this process's replicas, and that they differ."""
        if self._job.one_process:
            return
        self._replicas = replicas_number(sums)
        if error is not None:
            self.mismatch, self._replicas = error, APART
