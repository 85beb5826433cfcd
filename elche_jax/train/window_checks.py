"""Checks of windows that are complete: finite values, and replicas that are equal."""

from typing import Any

import numpy as np

from elche_jax.engine.lane import Fleet
from elche_jax.engine.replicas import ReplicaMismatch, mismatch
from elche_jax.train.across import finite_by_rank
from elche_jax.train.finite_check import FiniteCheck
from elche_jax.train.in_flight import InFlight
from elche_jax.train.run_errors import RunErrors
from elche_jax.train.telling import Telling

PyTree = Any


class WindowChecks:
    """Checks the windows of a run.

    Args:
        finite: Checks that they are finite.
        telling: What processes tell each other of them.
        errors: Takes an error of their replicas.
        fleet: The devices of this process.
        compared: Shapes of the part of a state that must be equal on all devices.
    """

    def __init__(
        self, finite: FiniteCheck, telling: Telling, errors: RunErrors, fleet: Fleet,
        compared: PyTree,
    ):  # fmt: skip
        self._finite, self._telling, self._errors = finite, telling, errors
        self._fleet, self._compared = fleet, compared
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
        self._finite(window.plan, finite, own, number)

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
