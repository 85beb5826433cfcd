"""Counts the windows of a run that are not finite, and finds the errors of these."""

from typing import Any

from elche_jax.cadence import WindowPlan
from elche_jax.train.finite import FiniteWatch
from elche_jax.train.live_scheduler import LiveScheduler
from elche_jax.train.run_errors import RunErrors


class FiniteCheck:
    """Checks that windows are finite.

    Args:
        watch: Counts those that are not.
        scheduler: Records them.
        errors: Takes the error of one of them.
    """

    def __init__(self, watch: FiniteWatch, scheduler: LiveScheduler, errors: RunErrors):
        self._watch, self._scheduler, self._errors = watch, scheduler, errors

    def __call__(self, plan: WindowPlan, finite: bool, own: Any, number: int) -> None:
        """Check a window.

        Args:
            plan: The window.
            finite: Whether it was finite.
            own: For each device, whether its own sums were, see `FiniteWatch.observe`.
            number: Number of the dispatch since which all processes know this.
        """
        skipped = self._watch.skipped
        error = self._watch.observe(plan, finite, own)
        if self._watch.skipped > skipped:
            self._scheduler.on_skip(plan, self._watch.event)
        if error is not None:
            self._errors.found(number, error)
