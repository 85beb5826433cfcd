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
        self._next = 0  # the first window that was not checked yet
        self._counted = set[int]()  # those that were not finite

    def __call__(self, plan: WindowPlan, finite: bool, own: Any, number: int) -> None:
        """Check a window, if it was not counted before: after a loss, some run again.

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
