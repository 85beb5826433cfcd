"""Checks of windows that are complete: finite values, and replicas that are equal."""

from typing import Any

import numpy as np

from elche_jax.cadence import WindowPlan
from elche_jax.engine.lane import Fleet
from elche_jax.engine.replicas import ReplicaMismatch, mismatch
from elche_jax.train.finite import FiniteWatch
from elche_jax.train.in_flight import InFlight
from elche_jax.train.live_scheduler import LiveScheduler
from elche_jax.train.run_errors import RunErrors
from elche_jax.train.telling import Telling, finite_by_rank

PyTree = Any


class WindowChecks:
    """Checks the windows of a run.

    Args:
        watch: Counts those that are not finite.
        scheduler: Records these.
        telling: What processes tell each other of them.
        errors: Takes the error of one of them.
        fleet: The devices of this process.
        compared: Shapes of the part of a state that must be equal on all devices.
    """

    def __init__(
        self, watch: FiniteWatch, scheduler: LiveScheduler, telling: Telling, errors: RunErrors,
        fleet: Fleet, compared: PyTree,
    ):  # fmt: skip
        self._watch, self._scheduler = watch, scheduler
        self._telling, self._errors = telling, errors
        self._fleet, self._compared = fleet, compared
        self._next = 0  # the first window of which it was not checked yet whether it is finite
        self._counted = set[int]()  # those that were not
        self._unwatched: list[InFlight] = []

    def unwatched(self, *windows: InFlight) -> None:
        """Take windows that no thread watches: they ran when the run was closed, or later."""
        self._unwatched += windows

    def settle(self, keep: int = 0) -> None:
        """Check these windows, except for the last `keep`."""
        while len(self._unwatched) > keep:
            self._late(self._unwatched.pop(0))

    def _late(self, window: InFlight) -> None:
        """Check a window of a run that was closed, and its replicas."""
        survey, told = window.launch.survey, self._telling.told_by(window)
        own = window.token
        if survey is not None:
            own = finite_by_rank(np.asarray(survey.found), survey.lost)
        if told is not None:
            self.finite(told, own, window.launch.number)
        self.replicas(window)

    def finite(self, window: InFlight, own: Any, number: int) -> None:
        """Check that a window is finite; all know `own`, by rank, since dispatch `number`."""
        # with windows pending, that of the mean is known in the window that applies it
        finite = bool(np.asarray(own if self._telling.of_last else window.finite).all())
        self.count(window.plan, finite, own, number)

    def count(self, plan: WindowPlan, finite: bool, own: Any, number: int) -> None:
        """Count a window if it is not finite and was not counted: after a loss, some run again.

        Args:
            plan: The window.
            finite: Whether it was finite.
            own: For each device, whether its own sums were, see `FiniteWatch.observe`.
            number: Number of the dispatch since which all processes know this.
        """
        again, self._next = plan.window < self._next, max(self._next, plan.window + 1)
        if again and (finite or plan.window in self._counted):
            return
        if not finite:
            self._counted.add(plan.window)
        skipped = self._watch.skipped
        error = self._watch.observe(plan, finite, own)
        if self._watch.skipped > skipped:
            self._scheduler.on_skip(plan, self._watch.event)
        if error is not None:
            self._errors.found(number, error)

    def replicas(self, window: InFlight) -> None:
        """Check that a window's replicas are equal, if they were compared."""
        if window.sums is not None:
            where = f"train: after window {window.plan.window}"
            text = mismatch(where, self._compared, self._fleet.devices, window.sums)
            error = None if text is None else ReplicaMismatch(text)
            self._telling.verified(window.sums, error)
            # else the next exchange tells it
            if error is not None and self._fleet.job.one_process:
                self._errors.keep(error)
