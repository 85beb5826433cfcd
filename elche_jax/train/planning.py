"""Plans windows ahead of the loop, from the records that all processes of a job know."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Generic, TypeVar

from elche_jax import _progress
from elche_jax._waiting import Condition
from elche_jax.cadence import WindowPlan, clamp_counts
from elche_jax.data.order import Cursor
from elche_jax.data.reader import Reader
from elche_jax.data.source import Stopped
from elche_jax.engine.runner import FleetRunner
from elche_jax.engine.timing import Clock
from elche_jax.train.feed import Feed
from elche_jax.train.in_flight import InFlight, Run, Window
from elche_jax.train.live_scheduler import LiveScheduler
from elche_jax.train.run_errors import RunErrors
from elche_jax.train.telling import Telling
from elche_jax.train.timing import Timing

R = TypeVar("R", bound=FleetRunner)

LOOKAHEAD = 4
"""Windows that may be planned and not yet complete if plans do not depend on reports."""


class Planning(Generic[R]):
    """Plans the windows of a run, and tracks which are planned and which are in flight.

    Plans wait for reports. With two windows in flight, a window is planned while the one before it
    still runs and all earlier ones are complete, so a change of speed takes effect in the second
    window after the one in which it was measured. The second window of a run waits for the first,
    as no speed is known before.

    Attributes:
        runner: Runs the windows.
        clock: Times the windows; set by `Windows`.
        closed: Whether the run was closed; windows dispatched after that are not timed.
        errors: The errors of the threads.

    Args:
        feed: Loads and places windows.
        scheduler: Plans and records.
        start: Where in the data to begin.
        runner: Runs the windows.
        in_flight: Windows that may be dispatched and not yet complete.
        timing: Decides which windows are timed; None for all.
        telling: What processes tell each other about windows.
    """

    def __init__(
        self, feed: Feed, scheduler: LiveScheduler, start: Cursor, runner: R, in_flight: int,
        timing: Timing | None, telling: Telling,
    ):  # fmt: skip
        self._feed, self._scheduler, self._start, self.runner = feed, scheduler, start, runner
        self._timing, self._telling = timing or Timing(lambda: True), telling
        self._job, self._in_flight = feed.fleet.job, in_flight
        self._ahead = in_flight if scheduler.cadence.adaptive else LOOKAHEAD
        # guards everything below, and is notified of every change
        self._changed = Condition()
        self._open: set[int] = set()  # windows that are planned and not complete
        self._current: int | None = None  # the window handed out and not used yet
        self._asks: int | None = None  # the window that the loop waits for
        self._next = start.window  # the next one to be handed out
        self._last = -1  # the last one of the run, once it is known
        self._requested, self._cold = 0.0, False
        self._flights: dict[int, InFlight] = {}  # by number of the dispatch
        self.errors = RunErrors(self._changed, self._job)
        self.closed = False
        self.clock: Clock | None = None

    @property
    def late(self) -> frozenset[int]:
        """Ranks of the devices that did not deliver in time and get no work until they do."""
        return frozenset() if self.clock is None else self.clock.late

    # -- the prefetch thread ---------------------------------------------------------

    def plan(self, stop: threading.Event, run: Run) -> Iterator[Window]:
        """Yield the windows of a run, waiting for reports if plans depend on them.

        Args:
            stop: Set when the thread must end; nothing more is then read.
            run: The run.
        """
        with suppress(Stopped):
            yield from self._plan(stop, run)

    def _plan(self, stop: threading.Event, run: Run) -> Iterator[Window]:
        cursor = self._start
        epochs = self._feed.epochs
        while epochs is None or cursor.epoch < epochs:
            reader = self._feed.open_epoch(cursor, stop)
            begun = cursor.microbatch
            while self._wait(stop, self._ahead, cursor.window):
                with _progress.phase("data", cursor.window):
                    window = self._make(cursor, reader, run)
                if window is None:
                    break
                cursor = window.cursor
                if cursor.epoch + 1 == epochs and self.runner.runs_ahead and self._feed.rereads:
                    ends = reader.available(cursor.microbatch, 1) == 0
                    self._last = window.index if ends else -1
                with self._changed:
                    self._open.add(window.index)
                yield window
            if stop.is_set():
                return
            if cursor.microbatch == begun == 0:
                raise ValueError(
                    f"data must hold at least one microbatch per epoch, but epoch "
                    f"{cursor.epoch} has none. An iterator can be used for one epoch only."
                )
            cursor = cursor.next_epoch()
        self._wait(stop, 1, cursor.window)

    def _wait(self, stop: threading.Event, below: int, window: int) -> bool:
        """Wait until another window may be planned.

        Args:
            stop: Set when the thread must end.
            below: Fewer windows than this must be planned and not complete; none at all if
                the plan depends on times that are not known yet.
            window: Number of the window.

        Returns:
            False if the thread must end.
        """
        assert self.clock is not None  # Windows sets it before it starts the thread

        self.clock.wait(
            self._changed,
            lambda: stop.is_set() or self.errors.first or self._may_plan(window, below),
        )
        if self.errors.first is not None:
            raise self.errors.first
        return not stop.is_set()

    def _may_plan(self, window: int, below: int) -> bool:
        """Return whether a window may be planned, see `_wait`."""
        if not self._job.one_process:
            known = min(self._open, default=window) > self._known_at(window, below)
            # else the loop would wait for a plan that waits for a window the loop has to run again
            return known or (self._asks == window and self._lost)
        waits = self._timing.surprised or not self._scheduler.knows()
        return len(self._open) < (1 if waits else below)

    def _known_at(self, window: int, ahead: int) -> int:
        """Return the last window whose record the plan for `window` takes into account.

        It does not depend on what a process happens to know when it plans: all must plan alike.
        """
        last = window - ahead
        return last if self._scheduler.knows(last) else window - 1

    def _make(self, cursor: Cursor, reader: Reader, run: Run) -> Window | None:
        if reader.available(cursor.microbatch, 1) == 0:
            return None
        known = None if self._job.one_process else self._knows(cursor.window)
        late = self.late if known is None else self._telling.late_after(known)
        asked = self._scheduler.plan(cursor.window, known, late)
        available = reader.available(cursor.microbatch, sum(asked))
        counts, share = clamp_counts(asked, available), available / sum(asked)
        examples, calls = self._feed.load(counts, cursor.microbatch, reader)
        plan = WindowPlan(
            cursor.window, cursor.epoch, counts, examples, first=cursor.microbatch, share=share
        )
        after = replace(cursor.advance(available), first=reader.first)
        return Window(plan, after, calls, run)

    def _knows(self, window: int) -> int:
        """Return the last window that the plan for `window` takes into account, see `_known_at`.

        If the loop waits for a plan that would follow from a lost window, it is the last window
        before the lost ones. All processes lose the same windows, and their loops wait for the same
        plan.
        """
        known = self._known_at(window, self._ahead)
        with self._changed:
            return min(known, min(self._open) - 1) if self._open and self._lost else known

    @property
    def _lost(self) -> bool:
        """Whether the windows in flight are lost, and all earlier ones are recorded."""
        clock = self._live_clock
        first = None if clock is None else clock.lost
        return first is not None and min(self._flights, default=first) >= first

    @property
    def _recorded(self) -> bool:
        """Whether all windows in flight are recorded, except for lost ones."""
        return not self._flights or self._lost

    @property
    def _full(self) -> bool:
        """Whether the maximum number of windows is in flight."""
        return len(self._flights) >= self._in_flight

    @property
    def _live_clock(self) -> Clock | None:
        """The clock; None once the run is closed."""
        return None if self.closed else self.clock

    @property
    def _over(self) -> bool:
        """Whether threads must stop waiting for windows: the run is closed or has failed."""
        return self.closed or self.errors.first is not None

    def _wait_for_records(self) -> None:
        """Wait until every window dispatched so far is recorded or lost, alike in all processes."""
        if self.clock is not None:
            self.clock.wait(self._changed, lambda: self._over or self._recorded)
        self.errors.check()

    def wake(self) -> None:
        """Make every waiting thread check its condition again."""
        with self._changed:
            self._changed.notify_all()

    # -- the loop --------------------------------------------------------------------

    def on_request(self) -> None:
        """Note that the loop asks for a window; the previous one is dropped if unused."""
        self._requested = time.perf_counter()
        with self._changed:
            if self._current is not None:
                self._open.discard(self._current)
                self._current = None
            self._asks = self._next
            self._changed.notify_all()
        self.errors.check()

    def on_elsewhere(self, seconds: float) -> None:
        """Exclude time that the loop spent on other work from the window that it got last."""
        self._requested += seconds

    def on_handed_out(self, window: Window) -> None:
        """Note that the loop has got a window."""
        self._current, self._asks, self._next = window.index, None, window.index + 1
