"""The scheduler: a cadence with a shift detector, made robust to reports of real runs.

Pure. The controller keeps one `SchedulerState`, calls `Scheduler.plan` before a window and
`Scheduler.update` with every report.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from statistics import median_low
from typing import Any

import numpy as np

from elche_jax import _check as check
from elche_jax.cadence.base import STABLE, Cadence, Verdict, WindowReport
from elche_jax.cadence.estimate import as_times, measured_ms, update_ms
from elche_jax.cadence.reports import (
    averaged_ms,
    missed,
    rescale_sync,
    with_ms,
    without_pauses,
)
from elche_jax.cadence.shift import Shift, ShiftState
from elche_jax.cadence.state import State

# 8: errors below 10 % shrink by a tenth with each report, so less than half of them is left
REPLAN_AFTER = 8
"""Number of reports of one plan after which its counts are fitted to the estimates."""

# 3: with 5 a lasting change takes effect a window later, and two odd windows in five are rare
SYNC_REPORTS = 3
"""Number of last known costs whose median is taken as the cost of a synchronisation."""

# 4: the standard error halves; with 8 the windows after them gain another 0.1 %
AVERAGED = 4
"""Number of first reports of a new plan whose mean are the estimates."""

ON_TARGET = 0.75
"""Share of the target at which `ElChe` leaves the anchor as it is: between a half and 1."""


@dataclass(frozen=True)
class SchedulerState:
    """State of `Scheduler`.

    Attributes:
        cadence: State of the cadence.
        shift: State of the shift detector, or ``None`` without one.
        shifts: Number of shifts detected so far.
        settled: Whether a window that ran a plan made from measured times has been reported.
        agreed: Number of reports of the current plan since its counts last changed or were
            fitted to the estimates.
        averaged: Number of reports averaged so far, at most `AVERAGED`, which also stands for no
            more averaging; 0 while the estimates come from a window that did not run a plan made
            from measured times.
        sync_ms: The last known costs of a synchronisation in milliseconds, at most
            `SYNC_REPORTS`, oldest first.
    """

    cadence: Any
    shift: ShiftState | None
    shifts: int = 0
    settled: bool = False
    agreed: int = 0
    averaged: int = 0
    sync_ms: tuple[float, ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        """Microbatches per device in the next window."""
        return self.cadence.counts

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a dict that ``json.dumps`` accepts.

        Returns:
            The fields, with states as dicts; the inverse is `Scheduler.from_dict`.

        Raises:
            TypeError: If the cadence's state has no ``to_dict``.

        Examples:
            >>> from elche_jax.cadence import EveryBatch
            >>> Scheduler(EveryBatch(), shift=None).init(2).to_dict()
            ... # doctest: +NORMALIZE_WHITESPACE
            {'cadence': {'counts': [1, 1]}, 'shift': None, 'shifts': 0, 'settled': False,
             'agreed': 0, 'averaged': 0, 'sync_ms': []}
        """
        where, rule = "SchedulerState.to_dict", "be an elche_jax.cadence.State"
        todo = "Derive the cadence's state class from State to store it."
        check.instance(where, "cadence", self.cadence, State, rule, todo)
        shift = self.shift and self.shift.to_dict()
        parts = {"cadence": self.cadence.to_dict(), "shift": shift, "sync_ms": [*self.sync_ms]}
        return vars(self) | parts


@dataclass(frozen=True)
class Scheduler:
    """A cadence with a shift detector, made robust to reports of real runs.

    Seven rules are added to the cadence's own, if it estimates times (`ElChe`, `FixedTotal`,
    or any other with ``estimates``):

    - The first report of a window that ran a plan made from measured times replaces the
      estimates. Those came from a short window of equal counts, whose times include one-time
      costs of a program; within the dead zone, their error would never be corrected.
    - With a shift detector, the estimates are the mean of this report and the next ones, up to
      `AVERAGED` in all, and the counts fit them; so again after a shift, from the first report of
      a plan made from it. The cadence's own smoothing and dead zone would keep most of one
      report's error for long. A report with a deviation, or of a window cut short, is smoothed as
      ever; once a device ran nothing, all are.
    - After a confirmed shift of a device's speed the cadence forgets its estimates, and the
      current report replaces them. A device that ran nothing although the cadence gave it work
      (it rests, or is late) keeps its estimate: it is not measured, and while a device has no
      estimate, the counts of all devices keep their proportions.
    - A device that took more than four times its estimate, and whose times do not vary
      otherwise, keeps the estimate for one report: if a pause of one window were taken as its
      speed, the others would get windows that are many times too long.
    - A report whose counts differ from those that plans aim at (as the window was cut short by
      the end of the data, planned before the last change, or held back by ``max_batch_diff``)
      says nothing about the overhead of these plans. Its ``sync_ms`` is rescaled to their busy
      time, see `rescale_sync`; otherwise the last window of every epoch would raise the anchor.
    - The cost of a synchronisation is the median of the last three known costs (of two, the
      smaller one); until two are known, the overhead counts as on target. A cost ten times as
      high, because a process was not scheduled, would otherwise multiply the anchor, which then
      falls by only a tenth per window.
    - Counts that have not changed for `REPLAN_AFTER` reports are fitted to the estimates, which
      are steady by then: within the dead zone, an imbalance of up to 10 % would remain.

    Attributes:
        cadence: The rule for the counts.
        shift: The detector of lasting speed changes, or ``None``.

    Examples:
        >>> from elche_jax.cadence import ElChe
        >>> scheduler = Scheduler(ElChe(anchor=4))
        >>> state = scheduler.init(2)
        >>> scheduler.plan(state)
        (4, 4)
        >>> report = WindowReport((80.0, 40.0), (4, 4), sync_ms=6.0)
        >>> state = scheduler.update(state, report)
        >>> scheduler.plan(state)
        (4, 8)
    """

    cadence: Cadence[Any]
    shift: Shift | None = field(default_factory=Shift)

    def init(self, world_size: int) -> SchedulerState:
        """Return the state before the first window.

        Args:
            world_size: Number of devices.

        Returns:
            The state.

        Raises:
            TypeError: If ``world_size`` is not an integer, the cadence's state has no
                ``counts``, or it is a `State` that cannot be stored.
            ValueError: If the cadence does not allow that many devices.

        Examples:
            >>> from elche_jax.cadence import EveryBatch
            >>> Scheduler(EveryBatch()).init(2).counts
            (1, 1)
        """
        cadence = self._checked("init", self.cadence.init(world_size))
        if isinstance(cadence, State):
            cadence.to_dict()  # raises now, not when the first checkpoint is written
        return SchedulerState(cadence, self.shift and self.shift.init(world_size))

    def plan(self, state: SchedulerState, window: int | None = None) -> tuple[int, ...]:
        """Return the counts of the next window.

        Args:
            state: The state.
            window: Index of the window to plan, from 0 over the whole run. Only a
                scripted cadence (`Replay`) uses it; its counts then do not depend on when
                reports arrive. ``None``: one window per report.

        Returns:
            Microbatches per device.

        Raises:
            ValueError: If a replay has no such window.

        Examples:
            >>> from elche_jax.cadence import Replay
            >>> scheduler = Scheduler(Replay([(4, 4), (2, 6)]))
            >>> scheduler.plan(scheduler.init(2), window=1)
            (2, 6)
        """
        if window is not None and self.cadence.scripted:
            return self.cadence.counts_at(window)
        return state.counts

    def update(
        self,
        state: SchedulerState,
        report: WindowReport,
        verdict: Verdict = STABLE,
        cost_known: bool = True,
    ) -> SchedulerState:
        """Return the state after a report.

        Args:
            state: The current state; it is not modified.
            report: The measurements of a window. A report whose times are all 0 counts as a
                window for the cadence but changes no estimate.
            verdict: The guard's verdict.
            cost_known: Whether ``sync_ms`` says anything about later windows. If not, the
                overhead counts as on target: the anchor neither rises nor falls because of it.

        Returns:
            The next state.

        Raises:
            TypeError: If the report or the verdict is of the wrong class.
            ValueError: If the report is for a different number of devices.

        Examples:
            A device becomes three times slower. The second slow window confirms the
            shift, and the estimate is exact again.

            >>> from elche_jax.cadence import ElChe
            >>> scheduler = Scheduler(ElChe(anchor=10))
            >>> state = scheduler.init(2)
            >>> for slow_ms in (100.0, 100.0, 300.0, 300.0):
            ...     report = WindowReport((slow_ms, 100.0), (10, 10), 10.0)
            ...     state = scheduler.update(state, report)
            >>> state.cadence.ms_per_batch, state.shifts
            ((30.0, 10.0), 1)
        """
        if not (self.cadence.estimates and any(report.wall_ms)):
            cadence = self._checked("update", self.cadence.update(state.cadence, report, verdict))
            return replace(state, cadence=cadence)
        before, shift, shifted = state.cadence, state.shift, False
        # a user's counts may be a list or an array, which cannot be compared with a report's
        planned: tuple[int, ...] = tuple(before.counts)
        measured = measured_ms(report)
        if self.shift is not None and shift is not None:
            # compared with the estimates before they include this report
            shift, shifted = self.shift.update(shift, before.ms_per_batch, measured)
        of_plan = report.counts == planned
        measured_plan = of_plan and None not in before.ms_per_batch
        averaged, averages = state.averaged, False
        # the second condition: without it, devices of 5, 5, 10 and 20 ms kept (40, 37, 20, 10)
        if shifted or (measured_plan and not state.settled):
            before = self._recalibrated(before, report)  # the report is then taken as is
            averaged = int(not shifted)
        elif self.shift is not None and shift is not None:
            first = self.shift.first_deviations(shift)
            times = before.ms_per_batch
            expected = [ms if new else None for ms, new in zip(times, first, strict=True)]
            report = without_pauses(report, expected)
            whole = report.share == 1
            if whole and np.isnan(measured).any():
                # a device may have no work for long: its next report is none of the first ones
                averaged = AVERAGED
            begun = (averaged > 0 or measured_plan) and _can_set_times(before)
            averages = begun and averaged < AVERAGED and whole and not any(shift.runs)
            if averages:
                averaged += 1
                mean = averaged_ms(report, times, averaged)
                before = replace(before, ms_per_batch=as_times(mean))
                report = with_ms(report, mean)
        costs = state.sync_ms
        if cost_known:
            costs = (*costs, report.sync_ms)[-SYNC_REPORTS:]
        if cost_known and len(costs) > 1:
            aim = tuple(self.cadence.aim(before))
            report = rescale_sync(replace(report, sync_ms=median_low(costs)), aim)
        elif target := self.cadence.overhead_target:
            report = replace(report, sync_ms=ON_TARGET * target * max(report.wall_ms))
        cadence = self._checked("update", self.cadence.update(before, report, verdict))
        # reports of other plans do not count, but do not reset the number either
        agreed = state.agreed + of_plan if tuple(cadence.counts) == planned else 0
        # a count that has just moved may be held back by `max_batch_diff`
        if agreed >= REPLAN_AFTER or (averages and tuple(cadence.counts) == planned):
            cadence, agreed = self._checked("replan", self.cadence.replan(cadence)), 0
        return SchedulerState(
            cadence, shift, state.shifts + shifted, state.settled or measured_plan, agreed,
            averaged, costs,
        )  # fmt: skip

    def learn(self, state: SchedulerState, report: WindowReport) -> SchedulerState:
        """Return the state updated with times that a window's update did not have.

        If the cadence's state has a field for its estimates, only they change, and the counts
        that follow from them; otherwise `Cadence.learn` decides what changes.

        Args:
            state: The current state; it is not modified.
            report: The measurements of the window.

        Examples:
            >>> from elche_jax.cadence import ElChe
            >>> scheduler = Scheduler(ElChe())
            >>> report = WindowReport((90.0, 60.0), (10, 10), sync_ms=1.0)
            >>> scheduler.learn(scheduler.init(2), report).cadence.ms_per_batch
            (9.0, 6.0)
        """
        if not (self.cadence.estimates and _replaces(state.cadence, "ms_per_batch")):
            learnt = self.cadence.learn(state.cadence, report)
            return replace(state, cadence=self._checked("learn", learnt))
        ms = as_times(update_ms(state.cadence.ms_per_batch, report))
        cadence = self.cadence.replan(replace(state.cadence, ms_per_batch=ms))
        return replace(state, cadence=self._checked("replan", cadence), agreed=0)

    def without(self, state: SchedulerState, ranks: Collection[int]) -> SchedulerState:
        """Return the state for the remaining devices after some are lost.

        Args:
            state: The current state; it is not modified.
            ranks: Ranks of the lost devices; at least one device remains.

        Examples:
            >>> from elche_jax.cadence import EveryBatch
            >>> scheduler = Scheduler(EveryBatch())
            >>> scheduler.without(scheduler.init(3), [1]).counts
            (1, 1)
        """
        cadence = self._checked("without", self.cadence.without(state.cadence, ranks))
        shift = self.shift and self.shift.init(len(cadence.counts))
        return replace(state, cadence=cadence, shift=shift, agreed=0, averaged=0)

    def _recalibrated(self, state: Any, report: WindowReport) -> Any:
        """Return the cadence's state without the estimates that the report replaces.

        An estimate is kept if the cadence gave the device work and it ran nothing, and the state
        has a field for the estimates. A device that the cadence itself leaves without work is
        forgotten: `FixedTotal` then tries it again.
        """
        after: Any = self.cadence.recalibrate(state)
        missing = missed(report, state.counts)
        # a user's state may be an object that `replace` does not know, or derive its estimates
        if not (any(missing) and _replaces(after, "ms_per_batch")):
            return after
        times = zip(state.ms_per_batch, after.ms_per_batch, missing, strict=True)
        kept = tuple(old if miss else new for old, new, miss in times)
        return replace(after, ms_per_batch=kept)

    def _checked(self, method: str, state: Any) -> Any:
        """Return a state made by the cadence, after checking for the required attributes."""
        needed = ["counts", "ms_per_batch"][: 1 + self.cadence.estimates]
        for name in needed:
            # hasattr would evaluate the counts of a replay, which raises at its end
            if not (hasattr(type(state), name) or name in getattr(state, "__dict__", ())):
                where, rule = type(self.cadence).__name__, f"return a state with {name}"
                raise TypeError(check.message(where, method, rule, check.describe(state)))
        return state

    def from_dict(self, values: Mapping[str, Any]) -> SchedulerState:
        """Return the state that ``to_dict`` was called on.

        Args:
            values: The return value of `SchedulerState.to_dict`, possibly read back from
                JSON.

        Returns:
            A state equal to the original.

        Raises:
            TypeError: If the cadence has no ``state_type``, or a cost is not a number.
            ValueError: If the keys are wrong, as in the state of a different cadence, if a cost is
                below 0 or there are too many, if the cadence's ``check_state`` rejects the state,
                or if only one of the state and this scheduler has a shift detector.

        Examples:
            >>> from elche_jax.cadence import FixedTotal
            >>> scheduler = Scheduler(FixedTotal(8))
            >>> state = scheduler.init(2)
            >>> scheduler.from_dict(state.to_dict()) == state
            True
        """
        where = "Scheduler.from_dict"
        names = sorted(field.name for field in fields(SchedulerState))
        # states of earlier versions lack the costs, and what their estimates are a mean of
        values = {"sync_ms": (), "averaged": AVERAGED, **(given := values)}
        if sorted(values) != names:
            rule = f"have the keys {names}"
            raise ValueError(check.message(where, "values", rule, sorted(given)))
        state_type: object = self.cadence.state_type
        if not (isinstance(state_type, type) and issubclass(state_type, State)):
            rule = "be a subclass of elche_jax.cadence.State"
            todo = "Name the state's class as `state_type` on the cadence's class."
            got = repr(state_type)
            raise TypeError(check.message(where, "state_type of the cadence", rule, got, todo))
        shift = values["shift"]
        if (shift is None) != (self.shift is None):
            rule = "fit the scheduler's"
            got = "none" if shift is None else "one"
            todo = "Resume with the scheduler that wrote the state."
            raise ValueError(check.message(where, "shift", rule, got, todo))
        cadence = state_type.from_dict(values["cadence"])
        self.cadence.check_state(cadence)
        shift = None if shift is None else ShiftState.from_dict(shift)
        costs = check.reals(where, "sync_ms", values["sync_ms"], low=0)
        if len(costs) > SYNC_REPORTS:
            rule = f"have at most {SYNC_REPORTS} entries"
            raise ValueError(check.message(where, "sync_ms", rule, len(costs)))
        parts: dict[str, Any] = {**values, "cadence": cadence, "shift": shift, "sync_ms": costs}
        return SchedulerState(**parts)


def _can_set_times(state: Any) -> bool:
    """Return whether all devices are measured, and a state can be given other estimates.

    A user's state may have them in an array or in a list, and expect to find one.
    """
    times = state.ms_per_batch
    return isinstance(times, tuple) and None not in times and _replaces(state, "ms_per_batch")


def _replaces(state: Any, name: str) -> bool:
    """Return whether `replace` can set an attribute of a state: not a property."""
    return is_dataclass(state) and any(one.name == name and one.init for one in fields(state))
