"""The life of windows: planned ahead, dispatched by the loop, completed on all devices."""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import jax
import numpy as np

from elche_jax import _progress
from elche_jax._processes import ExchangeLost, ProcessLostError
from elche_jax._waiting import interruptible
from elche_jax.cadence import WindowPlan, WindowRecord
from elche_jax.data.order import Cursor
from elche_jax.engine.compile_cache import CompileCache
from elche_jax.engine.devices import one_reader
from elche_jax.engine.host.coordinator import Outcome
from elche_jax.engine.job import Measured
from elche_jax.engine.runner import Launch
from elche_jax.engine.survey import Survey
from elche_jax.engine.timing import ENDS, WindowTimes
from elche_jax.train.divergence import DivergenceReader
from elche_jax.train.feed import Feed
from elche_jax.train.finite import FiniteWatch
from elche_jax.train.in_flight import InFlight, Window
from elche_jax.train.live_scheduler import KEPT, LiveScheduler
from elche_jax.train.lost import TakeOver
from elche_jax.train.options import Options
from elche_jax.train.planning import R
from elche_jax.train.telling import Telling, finite_by_rank, plan_number, plans_error, record_of
from elche_jax.train.timing import Timing
from elche_jax.train.wishes import Wishes

# one window runs while the next is planned from the last report and its data are placed
IN_FLIGHT = 2
"""Windows that may be dispatched and not yet complete."""

LATE = "left out: late"
"""Reason in the timeline for a window that was averaged without a late device."""


class Pipeline(TakeOver[R]):
    """State shared by the threads of one call of `windows`.

    A window is *planned* by the prefetch thread, *dispatched* by the loop and *complete*
    when every device has combined. If the loop does not wait for the exchange, a window may be
    *lost* before it is complete; it is then dispatched again.

    Attributes:
        combines: Whether the devices synchronise at the end of a window.
        trained: Number of the window dispatched last, or None.
        wishes: What processes ask of each other.

    Args:
        feed: Loads and places windows.
        scheduler: Plans and records.
        start: Where in the data to begin.
        watch: Counts windows that are not finite.
        runner: Runs the windows.
        cache: Compiled programs.
        options: The options of the training step.
        timing: Decides which windows are timed; None for all.
        divergence: Reads how far the devices drifted apart; None in gradient mode.
    """

    combines: ClassVar[bool] = True

    def __init__(
        self,
        feed: Feed,
        scheduler: LiveScheduler,
        start: Cursor,
        watch: FiniteWatch,
        runner: R,
        cache: CompileCache,
        options: Options,
        timing: Timing | None = None,
        divergence: DivergenceReader | None = None,
    ):
        in_flight = IN_FLIGHT if options.host is None else options.host.in_flight
        telling = Telling(feed.fleet, options.pending > 0, options.verify_every is not None)
        super().__init__(feed, scheduler, start, runner, in_flight, timing, telling)
        self._cache, self._watch, self._options = cache, watch, options
        self._of_run = scheduler.run  # the loop may still hold these windows when the next begins
        self._divergence = divergence
        # whether windows end in an exchange with other processes, which also carries times
        self._surveys = self.combines and not self._job.one_process
        self.wishes = Wishes(self._job.one_process, in_flight)
        lanes = feed.fleet.in_lanes()
        on_host = [lane.ranks for lane in lanes if lane.devices[0].platform == "cpu"]
        self._remote = len(on_host) < len(lanes)
        self._one_reader = any(map(one_reader, feed.fleet.devices))
        # without a synchronisation, devices end at different times, but the CPU runtime starts
        # a program on all devices of a lane at once
        self._lockstep = [] if self.combines else on_host
        self._unwatched: list[InFlight] = []  # in flight at the close, or dispatched later
        self._unchecked = 0  # the first window not yet checked for being finite
        self._not_finite = set[int]()  # windows counted as not finite, the last ones
        self._plans: deque[WindowPlan] = deque(maxlen=options.pending)  # of pending windows
        self._watching: int | None = None  # the thread that records a window
        self.trained: int | None = None
        self._without_times: dict[int, InFlight] = {}  # complete, except for a late device
        self._completing: int | None = None
        _progress.opened(start.window, self._job.ranks, jax.process_index())

    # -- the training loop -----------------------------------------------------------

    @contextmanager
    def dispatch(
        self, window: Window, hold: Callable[[], bool] = lambda: False
    ) -> Generator[InFlight]:
        """Dispatch a window; the body of the `with` launches its programs.

        First waits while too many windows are in flight, then compiles what the first window
        needs. The body fills in the token and whatever else the programs return. If it raises,
        the window counts as complete, so that no plan waits for it, unless its exchange was lost:
        then it runs again.

        Args:
            window: The window.
            hold: See `Launch.hold`.
        """
        self._admit(window)
        launch = None
        try:
            if not self.runner.begun:
                self.runner.begin(window.calls)
                # as if requested now: the first window's time excludes compilation
                self._requested, self._cold = time.perf_counter(), True
            # after the first compiles, as these must not make the first window unsteady
            misses, at = self._cache.misses, time.perf_counter()
            survey = None
            if self._surveys:
                survey = Survey(lambda: self._measured(flight, misses), self._scheduler.lost)
            launch = Launch(
                self._live_clock, self.wishes.dispatches, at, window.counts, window.examples,
                survey, hold=hold,
            )  # fmt: skip
            flight = InFlight(window.plan, self._requested, launch, self._cold)
            flight.tells = self._telling.untold
            if self.runner.runs_ahead:  # otherwise windows are not taken back
                flight.again = replace(window, calls=())
            with _progress.phase("window", window.index):
                yield flight
        except BaseException as error:
            if launch is not None and launch.watch is not None:
                launch.watch.dropped(launch.number)
            with self._changed:
                if not isinstance(error, ExchangeLost):  # else it runs again
                    self._open.discard(window.index)
                self._changed.notify_all()
            raise
        flight.steady = self._cache.misses == misses
        self._hand_over(flight)

    def _admit(self, window: Window) -> None:
        """Wait until a window may be dispatched, and take it."""
        if self.closed:
            self._check_unwatched(keep=self._in_flight)
        assert self.clock is not None  # set before any window is handed out
        self.clock.wait(self._changed, lambda: self._over or not self._full or self._lost)
        with self._changed:
            self.errors.release(self.wishes.dispatches - self._in_flight)
            if self._full and self._lost:
                raise ExchangeLost
            # not before the wait: if it is interrupted, the loop may use the window again
            if self._current == window.index:
                self._current = None
            else:  # it was dropped, and counted as complete
                self._open.add(window.index)
        self.wishes.dispatches += 1

    def _hand_over(self, flight: InFlight) -> None:
        """Hand a dispatched window to the watcher threads."""
        self._cold = False
        self._scheduler.on_dispatch(flight.plan, begins=self.trained is None)
        self.trained = flight.plan.window
        self._telling.dispatched(flight)
        if self._remote and isinstance(flight.finite, jax.Array):
            flight.finite.copy_to_host_async()  # the watcher thread reads it without a wait
        launch = flight.launch
        with self._changed:
            if self.closed:  # there are no watcher threads any more
                self._unwatched.append(flight)
                return
            self._flights[launch.number] = flight
        assert self.clock is not None  # set before any window is handed out
        self.clock.combining(launch.number, launch.at, flight.token, flight.timed)

    def finish(self) -> None:
        """Wait until the windows in flight are complete; all processes of a job must call it.

        Lost windows stay lost until the loop goes on.
        """
        self._wait_for_records()
        self._tell_rest()
        self.errors.release(None)
        self.check_emulation()

    def check_emulation(self) -> None:
        """Raise the errors that the programs of emulated devices could not raise."""
        if self._options.emulate is not None:
            self._options.emulate.settle()

    def end(self) -> None:
        """Call `finish` at the end of the loop.

        Raises:
            ProcessLostError: If windows are lost.
        """
        self.finish()
        if self._lost:
            self.errors.keep(self._ended())
            self.errors.check()

    def _ended(self) -> ProcessLostError:
        """Return the error for windows that are lost when the loop has ended."""
        first = min((one.plan.window for one in self._flights.values()), default=self._next)
        return self.ended(first)

    def settle(self) -> None:
        """Raise the windows' error if the loop has not seen it, before a new run begins."""
        self._check_unwatched()
        if not (self.closed or self.errors.raised):  # the caller still holds the loop's iterator
            self._wait_for_records()
        self._tell_rest()
        if not self.errors.raised:
            self.errors.release(None)
            self.check_emulation()

    def _tell_rest(self) -> None:
        """Tell the other processes what no window's exchange tells them; all must call it."""
        told, rows = (None, None) if self.errors.first else self._telling.rest()
        if rows is None:
            return
        if (error := self._telling.replicas_error(rows)) is not None:
            self.errors.found(self.wishes.dispatches, error)
        if told is not None:
            # the number of the next window: no plan already made may depend on this record
            at = told.plan.window + 1 if self._current is None else self._current
            lost = self._job.members.lost
            self._record_across(told, rows, lost, at, self.wishes.dispatches)

    def close(self) -> None:
        """End the timing; windows in flight go on, unmeasured.

        In a job of several processes, wait for their records first: otherwise the processes might
        know different records when they plan again. In one process, wait for a while for windows
        whose work would be lost.

        Raises:
            KeyboardInterrupt: If a Ctrl-C was held back in the last window.
        """
        _progress.closed()
        try:
            self._wait_for_rest()
        finally:
            self._close()
        if self.errors.take_interrupt():
            raise KeyboardInterrupt

    def _wait_for_rest(self) -> None:
        """Wait for the records that a close needs."""
        patience = 0.0 if self.clock is None else self.clock.patience
        with interruptible(), self._changed:
            if not self._job.one_process:
                if self._watching != threading.get_ident():
                    self._changed.wait_for(lambda: self.errors.first or self._recorded)
            elif patience:
                self._changed.wait_for(lambda: self._recorded or self.errors.broken, patience)

    def _close(self) -> None:
        with self._changed:
            if self._lost and not self.errors.raised:
                self.errors.keep(self._ended())
            self.closed = True
            # windows of a host exchange are dropped, as they were not averaged
            if self.clock is None or not self.clock.ends_windows:
                flights = self._flights.items()
                self._unwatched += [one for n, one in flights if n != self._completing]
            self._flights.clear()
            self._changed.notify_all()
        if self.clock is not None:
            self.clock.close()

    # -- the watcher threads ---------------------------------------------------------

    def on_complete(self, times: WindowTimes, outcome: Outcome | None = None) -> None:
        """Record a window that every device, except late ones, has completed.

        Args:
            times: When the devices were done.
            outcome: The result of an exchange on the host; None for one on the devices.
        """
        with self._changed:
            window = self._flights.get(times.window)
            self._completing = times.window  # it is checked here, not again after a close
            self._watching = threading.get_ident()
        try:
            free = ENDS.before(self._feed.fleet.devices, times.arrived, self._lockstep)
            # if devices run ahead, their next window does not wait for the synchronisation
            ahead, late = (False, ()) if outcome is None else (outcome.ahead, outcome.late)
            ENDS.note(self._feed.fleet.devices, times.arrived if ahead else times.combined)
            if window is None:  # the run was closed
                return
            survey, late_window = window.launch.survey, None
            if outcome is not None:
                if survey is not None:  # from all processes
                    late = self._telling.averaged(window.plan.window, survey.found)
                elif outcome.will_be_known:
                    late_window = window
                if late:
                    self._scheduler.on_skip(window.plan, LATE)
                    self._watch.on_late(window.plan, late)
                window = window.averaged(outcome)
            loss, divergence, metrics = None, None, window.metrics
            if self._divergence is not None:
                divergence = self._divergence.read(window.plan, metrics)
            if self._scheduler.wants_loss and "loss" in metrics:
                loss = float(np.asarray(metrics["loss"]))
            known: Any = {"divergence": divergence, "loss": loss}
            if late_window is not None:  # `window` itself is not steady any more
                self._without_times[times.window] = replace(
                    late_window, known={"loss": loss}, donated=None
                )
            if survey is None:
                self._record(window, window.measured(times, free, ahead, left_out=late, **known))
                self._check_finite(window, window.token, times.window)
            else:
                rows = np.asarray(survey.found)
                self.wishes.found(times.window, Measured(*rows.T).wishes)
                error = plans_error(self._job, window.plan, rows)
                if (error := error or self._telling.replicas_error(rows)) is not None:
                    self.errors.found(times.window, error)
                told = self._telling.completed(window, times, free, known)
                if told:
                    at = window.plan.window
                    self._record_across(told, rows, survey.lost, at, times.window)
            self._check_replicas(window)
            _progress.completed(window.plan.window, self.combines)
            # last: the loop must not go on to the end of the run before all is recorded
            with self._changed:
                flight = self._flights.pop(times.window, None)
                self._open.discard(window.plan.window)
                self._changed.notify_all()
            if flight is not None:
                flight.donated = None  # the next window may still refer to this one
        finally:
            with self._changed:  # this may be the loop's thread, where a later close has to wait
                self._watching = None

    def _record(self, window: InFlight, record: WindowRecord, at: int | None = None) -> None:
        if window.used or not window.timed:  # otherwise its duration says nothing, either
            self._timing.observe(record, window.timed)
        self._scheduler.observe(record, at, self._of_run)
        self._scheduler.on_metrics(window.plan, window.metrics)

    def _record_across(
        self, told: InFlight, rows: np.ndarray, lost: Sequence[int], at: int, number: int
    ) -> None:
        """Record a window whose rows all processes know since window `at`, dispatch `number`."""
        if told.rows is not None or not self._telling.of_last:  # else its run was closed
            left = [rank for rank in range(self._job.world_size) if rank not in lost]
            self._record(told, record_of(told.plan, rows, left, **told.known), at)
        self._check_finite(told, finite_by_rank(rows, lost), number)

    def _measured(self, flight: InFlight, misses: int) -> np.ndarray:
        """Return the rows this process sends in a window's exchange; called in a lane's thread."""
        number = flight.launch.number
        with self._changed:  # until the ends of earlier windows are noted
            self._changed.wait_for(
                lambda: self._over or min(self._flights, default=number) >= number
            )
        rows = self._telling.survey(
            flight, plan_number(flight.plan), lambda: self._cache.misses == misses
        )
        Measured(*rows.T).wishes[:] = self.wishes.own
        return rows

    def on_late_times(self, times: WindowTimes, begins: Sequence[float] | None) -> None:
        """Report a window that was complete except for a late device, which is now done too.

        Args:
            times: When the devices were done.
            begins: When they began; None if the late device's time is not representative.
        """
        window = self._without_times.pop(times.window, None)
        if window is not None and begins is not None:
            self._scheduler.observe_late(
                window.measured(times, begins, ahead=False, **window.known)
            )

    # -- checks of windows that are complete -----------------------------------------

    def _check_unwatched(self, keep: int = 0) -> None:
        """Check windows that no thread watches, except for the last `keep`."""
        while len(self._unwatched) > keep:
            window = self._unwatched.pop(0)
            survey, told = window.launch.survey, self._telling.told_by(window)
            own = window.token
            if survey is not None:
                own = finite_by_rank(np.asarray(survey.found), survey.lost)
            if told is not None:
                self._check_finite(told, own, window.launch.number)
            self._check_replicas(window)

    def _check_finite(self, window: InFlight, own: Any, number: int) -> None:
        """Check that a window is finite; all processes know `own` since dispatch `number`.

        Args:
            window: The window.
            own: By rank, whether a device's own sums were finite.
            number: Number of the dispatch.
        """
        # with windows pending, the window that applies a mean says whether it is finite
        finite = bool(np.asarray(own if self._telling.of_last else window.finite).all())
        self._count(window.plan, finite, own, number)

    def _count(self, plan: WindowPlan, finite: bool, own: Any, number: int) -> None:
        """Count a window that is not finite, only once: after a loss, some windows run again.

        Args:
            plan: The window.
            finite: Whether it was finite.
            own: For each device, whether its own sums were finite, see `FiniteWatch.observe`.
            number: Number of the dispatch since which all processes know this.
        """
        again = plan.window < self._unchecked
        self._unchecked = max(self._unchecked, plan.window + 1)
        if again and (finite or plan.window in self._not_finite):
            return
        if not finite:
            # no window before these can still be pending or in flight, and so run again
            kept = {window for window in self._not_finite if window > self._unchecked - KEPT}
            self._not_finite = kept | {plan.window}
        skipped = self._watch.skipped
        error = self._watch.observe(plan, finite, own)
        if self._watch.skipped > skipped:
            self._scheduler.on_skip(plan, self._watch.event)
        if error is not None:
            self.errors.found(number, error)

    def _check_replicas(self, window: InFlight) -> None:
        """Check that a window's replicas are equal, if they were compared."""
