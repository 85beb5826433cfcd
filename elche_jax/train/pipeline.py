"""The life of windows: planned ahead, dispatched by the loop, over when all devices are."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from elche_jax.cadence import WindowPlan, WindowRecord, clamp_counts
from elche_jax.data.order import Cursor
from elche_jax.data.reader import Reader
from elche_jax.engine.host.coordinator import Outcome
from elche_jax.engine.replicas import ReplicaMismatch, mismatch
from elche_jax.engine.runner import Call, Launch, Watched
from elche_jax.engine.timing import ENDS, Clock, WindowTimes
from elche_jax.train.divergence import DivergenceReader
from elche_jax.train.feed import Feed
from elche_jax.train.finite import FiniteWatch
from elche_jax.train.live_scheduler import LiveScheduler
from elche_jax.train.timing import Timing

PyTree = Any
R = TypeVar("R", bound=Watched)

IN_FLIGHT = 2
"""Windows that may be dispatched and not yet over."""

LATE = "left out: late"
"""Why such a window counts as skipped, for the timeline."""

LOOKAHEAD = 4
"""Windows planned and not yet over, where plans do not depend on reports."""


@dataclass(frozen=True, eq=False)
class Window:
    """The work between two synchronisations, its data on the devices.

    Attributes:
        plan: What it is, in plain numbers.
        cursor: The place in the data after this window; `windows(cursor=...)` goes on
            from there.
    """

    plan: WindowPlan
    cursor: Cursor
    calls: tuple[Call, ...] = field(repr=False)

    @property
    def index(self) -> int:
        """Number of the window in the run."""
        return self.plan.window

    @property
    def epoch(self) -> int:
        """Its epoch."""
        return self.plan.epoch

    @property
    def counts(self) -> tuple[int, ...]:
        """Microbatches per device."""
        return self.plan.counts

    @property
    def examples(self) -> int:
        """Valid examples of all devices."""
        return self.plan.examples


@dataclass(frozen=True)
class InFlight:
    """A window that was dispatched and is not over.

    Attributes:
        plan: The window.
        asked: When the loop asked for it, `time.perf_counter` seconds.
        steady: Whether its times are to be told to the cadence, as far as is known.
        finite: Whether it was finite, or for each device whether it was; on the devices.
        own: The same of each device's own sums.
        sums: Checksums of the state after it, or None.
        metrics: The window's metrics, on the devices.
        cold: Whether its programs run for the first time.
        timed: Whether the devices' own times are known when it is over.
    """

    plan: WindowPlan
    asked: float
    steady: bool
    finite: Any
    own: Any
    sums: jax.Array | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    cold: bool = False
    timed: bool = True


class Pipeline(Generic[R]):
    """What the threads of one call of `windows` share.

    A window is *planned* by the prefetch thread, *dispatched* by the loop and *over*
    when every device has combined. Plans wait for reports: a window is planned when all
    but one of the windows before it are over, while that one still runs, so that a
    change of speed shows in the second window after the one it was measured in. The
    second window of all waits for the first one, as no speed is known yet.

    Args:
        feed: Loads and places windows.
        scheduler: Plans and records.
        start: Where in the data to begin.
        epochs: Number of epochs; None for no end.
        watch: Told of every window whether it was finite.
        runner: What runs the windows; for whoever made the run.
        combines: Whether the devices synchronise at the end of a window.
        compared: What of a state must be the same on all devices, shapes.
        divergence: Reads how far the devices drifted apart in a window; or None.
        in_flight: Windows that may be dispatched and not yet over.
        timing: Decides which windows are timed; None: all.
    """

    def __init__(
        self,
        feed: Feed,
        scheduler: LiveScheduler,
        start: Cursor,
        epochs: int | None,
        watch: FiniteWatch,
        runner: R,
        combines: bool = True,
        compared: PyTree = None,
        divergence: DivergenceReader | None = None,
        in_flight: int = IN_FLIGHT,
        timing: Timing | None = None,
    ):
        self._feed, self._scheduler = feed, scheduler
        self._start, self._epochs, self._in_flight = start, epochs, in_flight
        self._watch, self._divergence, self.runner = watch, divergence, runner
        self._compared, self._timing = compared, timing or Timing(always=True)
        # without a synchronisation devices end apart, and the CPU's runtime starts a
        # program on all of them at once
        self._remote = feed.devices[0].platform != "cpu"
        self._lockstep = not combines and not self._remote
        self._changed = threading.Condition()
        self._planned = 0
        self._over = 0
        self._current: int | None = None  # the window handed out and not used yet
        self._asked, self._cold = 0.0, False
        self._dispatches = 0
        self._flights: dict[int, InFlight] = {}
        self._error: BaseException | None = None
        self.told = False
        self.trained: int | None = None  # the window dispatched last
        self._closed = False
        self._unseen: list[InFlight] = []
        self._tardy: dict[int, InFlight] = {}
        self._landing: int | None = None
        self.clock: Clock | None = None

    # -- the prefetch thread ---------------------------------------------------------

    def plan(self, stop: threading.Event) -> Iterator[Window]:
        """Makes the windows of the run, waiting for reports where plans need them."""
        cursor = self._start
        depth = self._in_flight if self._scheduler.adaptive else LOOKAHEAD
        while self._epochs is None or cursor.epoch < self._epochs:
            reader = self._feed.open_epoch(cursor)
            begun = cursor.microbatch
            while self._wait(stop, depth):
                window = self._make(cursor, reader)
                if window is None:
                    break
                cursor = window.cursor
                with self._changed:
                    self._planned += 1
                yield window
            if stop.is_set():
                return
            if cursor.microbatch == begun == 0:
                raise ValueError(
                    f"data must hold at least one microbatch per epoch, epoch "
                    f"{cursor.epoch} has none. An iterator can be used for one epoch only."
                )
            cursor = cursor.next_epoch()
        self._wait(stop, 1)

    def _wait(self, stop: threading.Event, below: int) -> bool:
        """Waits until fewer than `below` windows are open, or none where plans are to follow
        from times that are still to come; False when told to stop."""
        assert self.clock is not None  # who plans has begun

        def may_plan() -> bool:
            waits = self._timing.surprised or not self._scheduler.knows
            return self._planned - self._over < (1 if waits else below)

        self.clock.wait(self._changed, lambda: stop.is_set() or self._error or may_plan())
        if self._error is not None:
            raise self._error
        return not stop.is_set()

    def _make(self, cursor: Cursor, reader: Reader) -> Window | None:
        if reader.available(cursor.microbatch, 1) == 0:
            return None
        counts = self._without_late(self._scheduler.plan(cursor.window))
        there = reader.available(cursor.microbatch, sum(counts))
        counts = clamp_counts(counts, there)
        examples, calls = self._feed.load(counts, cursor.microbatch, reader)
        plan = WindowPlan(cursor.window, cursor.epoch, counts, examples, first=cursor.microbatch)
        return Window(plan, cursor.advance(there), calls)

    def _without_late(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """A device that owes what it should have delivered gets no more until it has."""
        if self._scheduler.scripted:  # a recording says who gets what
            return counts
        late = self.late
        left = tuple(0 if rank in late else count for rank, count in enumerate(counts))
        return left if any(left) else counts

    def wake(self) -> None:
        """Lets every waiting thread look again."""
        with self._changed:
            self._changed.notify_all()

    # -- the training loop -----------------------------------------------------------

    def asked(self) -> None:
        """The loop asks for a window: the one before is given up if it was not used."""
        self._asked = time.perf_counter()
        with self._changed:
            if self._current is not None:
                self._current = None
                self._over += 1
                self._changed.notify_all()
        self.check()

    def handed_out(self, window: Window) -> None:
        """The loop gets a window."""
        self._current = window.index

    def dispatching(self, window: Window) -> None:
        """Before the dispatch: waits while too many windows are in flight."""
        if self._closed:
            self._look_back(self._in_flight)
        assert self.clock is not None  # who has a window has begun
        self.clock.wait(
            self._changed,
            lambda: self._error or self._closed or len(self._flights) < self._in_flight,
        )
        with self._changed:
            self.check()
            # only now: whoever interrupts the wait may use the window again
            if self._current == window.index:
                self._current = None
            else:  # given up before: it counts as planned anew
                self._planned += 1
        self._dispatches += 1

    def given_up(self) -> None:
        """The dispatch failed: the window counts as over, so that nobody waits for it."""
        with self._changed:
            self._over += 1
            self._changed.notify_all()

    def compiled(self) -> None:
        """What the window needs was compiled first: its time begins now."""
        self._asked, self._cold = time.perf_counter(), True

    def launch(self, at: float) -> Launch:
        """The dispatch that begins now, for whoever makes it."""
        return Launch(None if self._closed else self.clock, self._dispatches, at)

    def dispatched(
        self,
        window: Window,
        at: float,
        steady: bool,
        finite: Any,
        token: jax.Array,
        sums: jax.Array | None = None,
        metrics: Mapping[str, Any] | None = None,
        timed: bool = True,
    ) -> None:
        """After the dispatch: hands the window to the threads that time it.

        Args:
            window: The window.
            at: When its dispatch began.
            steady: Whether nothing was compiled for it.
            finite: Whether it is finite: a bool, or one per device, on the devices.
            token: Ready where a device is done; its entries say whether what the
                device itself had summed is finite.
            sums: Checksums of the new state, where they were asked for.
            metrics: The window's metrics; arrays that nobody gives up.
            timed: Whether the devices' own times are known when it is over.
        """
        self._scheduler.dispatched(window.counts)
        self.trained = window.index
        cold, self._cold = self._cold, False
        if self._remote and isinstance(finite, jax.Array):
            finite.copy_to_host_async()  # to read it when the window is over waits for nothing
        in_flight = InFlight(
            window.plan, self._asked, steady, finite, token, sums, metrics or {}, cold, timed
        )
        with self._changed:
            if self._closed:  # nobody times it
                self._unseen.append(in_flight)
                return
            self._flights[self._dispatches] = in_flight
        assert self.clock is not None  # it timed the dispatch
        self.clock.combining(self._dispatches, at, token)

    def finish(self) -> None:
        """The loop has used its last window: waits until those in flight are over."""
        if self.clock is not None:
            self.clock.wait(self._changed, lambda: self._error or self._closed or not self._flights)
        self.check()

    @property
    def late(self) -> frozenset[int]:
        """Ranks of devices that owe what they should have delivered."""
        return frozenset() if self.clock is None else self.clock.late

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def _look_back(self, spare: int) -> None:
        """Looks at windows in flight at the close, or trained after it, but for the last."""
        while len(self._unseen) > spare:
            self._verify(self._unseen.pop(0))

    def settle(self) -> None:
        """A new run begins: raises what the windows have brought that nobody looked at."""
        self._look_back(0)
        if not self.told:
            self.check()

    def check(self) -> None:
        """Raises what a thread has run into."""
        if self._error is not None:
            self.told = True
            raise self._error

    def close(self) -> None:
        """Ends the timing; windows in flight go on, unmeasured."""
        with self._changed:
            self._closed = True
            if self.clock is None or not self.clock.ends_windows:
                self._unseen += [f for n, f in self._flights.items() if n != self._landing]
            self._flights.clear()
            self._changed.notify_all()
        if self.clock is not None:
            self.clock.close()

    # -- the watching threads --------------------------------------------------------

    def over(self, times: WindowTimes, outcome: Outcome | None = None) -> None:
        """Every device is done with a window, or late.

        Args:
            times: When they were.
            outcome: What came of it, where the exchange is on the host.
        """
        with self._changed:
            window = self._flights.get(times.window)
            self._landing = times.window  # seen to here: not once more after a close
        free = ENDS.before(self._feed.devices, times.arrived)
        if self._lockstep:
            free = [min(max(free), end) for end in times.arrived]
        # one that runs ahead has no synchronisation, which its next window could wait for
        ahead = outcome is not None and outcome.ahead
        ENDS.note(self._feed.devices, times.arrived if ahead else times.combined)
        if window is None:  # the run was closed
            return
        if outcome is not None:
            if outcome.will_be_known:
                self._tardy[times.window] = window
            if outcome.late:
                self._scheduler.skipped(window.plan, LATE)
                self._watch.late(window.plan, outcome.late)
            window = _with(window, outcome)
        record = self._record(window, times, free, outcome)
        self._timing.observe(record, window.timed)
        self._scheduler.measured(record)
        self._scheduler.told(window.plan, window.metrics)
        self._verify(window)
        with self._changed:
            self._flights.pop(times.window, None)
            self._over += 1
            self._changed.notify_all()

    def learned(self, times: WindowTimes, begins: Sequence[float] | None) -> None:
        """A window that was over without some device: now its times are known, too.

        Args:
            times: When the devices were done.
            begins: When they began; None where the late one's time says nothing.
        """
        window = self._tardy.pop(times.window, None)
        if window is not None and begins is not None:
            self._scheduler.learned(_measured(window, times, begins, ahead=False))

    def _record(
        self,
        window: InFlight,
        times: WindowTimes,
        free: Sequence[float],
        outcome: Outcome | None,
    ) -> WindowRecord:
        loss, divergence, metrics = None, None, window.metrics
        if self._divergence is not None:
            divergence = self._divergence.read(window.plan, metrics)
        if self._scheduler.wants_loss and "loss" in metrics:
            loss = float(np.asarray(metrics["loss"]))
        ahead, late = (False, ()) if outcome is None else (outcome.ahead, outcome.late)
        return _measured(
            window, times, free, ahead, left_out=late, divergence=divergence, loss=loss
        )

    def _verify(self, window: "InFlight") -> None:
        finite = bool(np.asarray(window.finite).all())
        skipped = self._watch.skipped
        error: Exception | None = self._watch.see(window.plan, finite, window.own)
        if self._watch.skipped > skipped:
            self._scheduler.skipped(window.plan, self._watch.event)
        if window.sums is not None and error is None:
            where = f"train: after window {window.plan.window}"
            text = mismatch(where, self._compared, self._feed.devices, window.sums)
            error = None if text is None else ReplicaMismatch(text)
        if error is not None:
            self.failed(error)

    def failed(self, error: BaseException) -> None:
        """A thread has run into an exception; the loop raises it."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()


def _with(window: InFlight, outcome: Outcome) -> InFlight:
    average = outcome.average
    return replace(
        window,
        steady=window.steady and not outcome.late,
        finite=average.metrics["finite"],
        own=average.own,
        sums=None if outcome.missing or outcome.late else window.sums,
        metrics=average.metrics,
    )


def _measured(
    window: InFlight, times: WindowTimes, free: Sequence[float], ahead: bool, **known: Any
) -> WindowRecord:
    begun = max(window.asked, *free)
    ends = times.arrived if ahead else times.combined
    return window.plan.measured(
        busy_ms=times.busy_ms(free),
        wall_ms=1e3 * (max(ends) - begun),
        sync_ms=times.sync_ms,
        skew_ms=times.skew_ms,
        steady=window.steady and window.timed,
        cold=window.cold,
        **known,
    )
