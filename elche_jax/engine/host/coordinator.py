"""Shared state of the threads of an exchange on the host: open windows and deliveries.

A window is *launched* by the loop, *closed* when every device that got programs has
delivered and the average is computed, and *over* when it has been reported. A device that
has not delivered `timeout_s` seconds after the first one is *late*: the window is closed
without it, no later window waits for it, and it gets no work until all its deliveries have
arrived. The work of a late device is lost. When its delivery arrives, `learned` is called with
the times of the window. If the device was late before and has not been on time since, it is slow
rather than hung once, and the times serve to reduce its work.

If devices run ahead, none waits at the end of a window. The cost of the exchange is then the
idle time of the busiest device before the window, since its last delivery.

If a process of the job ends, the window being averaged is *lost*, and so are those launched after
it, as their devices began them in a job that no longer exists. No window is averaged until the loop
has taken them back, in all processes before the same window.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from elche_jax._processes import ExchangeLost
from elche_jax._waiting import Condition, interruptible
from elche_jax.engine.host.average import Average
from elche_jax.engine.host.limits import Limits, beyond
from elche_jax.engine.host.program import Delivery
from elche_jax.engine.survey import Survey
from elche_jax.engine.timing import Failed, WindowTimes


@dataclass(frozen=True)
class Outcome:
    """The outcome of a closed window.

    Attributes:
        average: Its average.
        late: Ranks of the devices with work that are not part of the average.
        missing: Ranks of the devices with programs, with or without work, that had not delivered.
        ahead: Whether devices ran ahead of it.
        will_be_known: Whether `learned` will be called with its times, once its late devices are
            back.
    """

    average: Average
    late: tuple[int, ...]
    missing: tuple[int, ...]
    ahead: bool
    will_be_known: bool


Done = Callable[[WindowTimes, Outcome], None]
Learned = Callable[[WindowTimes, Sequence[float] | None], None]


@dataclass
class OpenWindow:
    """A window that was launched; guarded by the coordinator's lock.

    Times are seconds of `time.perf_counter`; lists are by rank.

    Attributes:
        number: Number of its dispatch.
        at: When the dispatch began, after averages that the loop had to wait for.
        counts: Microbatches.
        step: Index of the window in the training state.
        absent: Ranks of the devices that got no programs.
        ahead: Whether the loop continues before the window is closed.
        survey: What the processes of a job tell each other of it; None for a single process.
        got: Deliveries so far.
        ends: When the device was done; None if unknown.
        begins: When the device began.
        gaps: Seconds for which the device was idle before the window.
        first: When the first device with work delivered.
        outcome: Its outcome, from the close of the window until it is reported.
        late: Ranks of the devices with work that are not part of the average.
        missing: Ranks of the devices with programs that are not part of the average.
        applied: When the devices had applied the average, if the loop waits for that.
        registered: Whether the loop allows it to be reported.
        closing: Whether averaging has begun: deliveries from now on are too late.
        abandoned: Whether it is never reported.
        tardy: Whether it was reported and will be passed to `learned` once its late devices are
            back.
        lost: Whether it has no average because a process of the job has ended.
    """

    number: int
    at: float
    counts: tuple[int, ...]
    step: int
    absent: frozenset[int]
    ahead: bool
    survey: Survey | None = None
    got: list[Delivery | None] = field(init=False)
    ends: list[float | None] = field(init=False)
    begins: list[float] = field(init=False)
    gaps: list[float] = field(init=False)
    first: float | None = None
    outcome: Outcome | None = None
    late: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    applied: tuple[float, ...] | None = None
    registered: bool = False
    closing: bool = False
    abandoned: bool = False
    tardy: bool = False
    lost: bool = False

    def __post_init__(self) -> None:
        n = len(self.counts)
        self.got, self.ends = [None] * n, [None] * n
        self.begins, self.gaps = [self.at] * n, [0.0] * n

    @property
    def will_be_known(self) -> bool:
        """Whether the times of all its late devices will become known."""
        return bool(self.late) and not self.absent.intersection(self.worked)

    @property
    def complete(self) -> bool:
        """Whether it can be reported: nothing is missing except late deliveries."""
        return self.registered and self.outcome is not None and (self.ahead or bool(self.applied))

    @property
    def worked(self) -> list[int]:
        """Ranks of the devices with work."""
        return [rank for rank, count in enumerate(self.counts) if count]


class Coordinator:
    """Open windows and deliveries; every method may be called from any thread.

    Attributes:
        world_size: Number of devices.
        limits: How long to wait, and how far devices may run ahead.
        done: Called with every window that is over, in order.
        learned: Called with the times of a window once its late devices have delivered.
        failed_: Called with an exception raised in a thread, and with `ExchangeLost` if windows are
            lost that devices have run ahead of.
        changed: Lock and condition of all attributes below, notified of every change.
        stop: Set to end the threads.
        late: Ranks of the devices that are late.
        owed: By rank, number of deliveries still to come.
        free: By rank, when the device delivered last.
        incidents: By rank, how often the device became late since it was last on time.
        windows: Windows that are not over, by number, oldest first.
        unread: Closed windows that the loop has not read yet, if devices run ahead.
        lost: Number of the oldest lost window, if devices run ahead; None if there is none.
        error: The first exception raised in a thread.
    """

    def __init__(
        self, world_size: int, limits: Limits, done: Done, learned: Learned, failed: Failed
    ):
        self.world_size, self.limits = world_size, limits
        self.done, self.learned, self.failed_ = done, learned, failed
        self.changed = Condition()
        self.stop = threading.Event()
        self.late: set[int] = set()
        self.owed = [0] * world_size
        self.free: list[float | None] = [None] * world_size
        self.incidents = [0] * world_size
        self.windows: dict[int, OpenWindow] = {}
        self.unread: deque[tuple[int, Outcome]] = deque()
        self.lost: int | None = None
        self.error: BaseException | None = None

    # -- the loop --------------------------------------------------------------------

    def admit(self, counts: tuple[int, ...]) -> frozenset[int]:
        """Wait until a window with these counts takes no device too far ahead.

        Returns:
            The ranks that are late by then, never all ranks.
        """
        with interruptible(), self.changed:
            self._until(lambda: self._has_room(counts))
            return frozenset(self.late)

    def open(self, window: OpenWindow) -> None:
        """Add a window that is being launched."""
        with self.changed:
            if window.ahead:
                window.gaps = self._gaps(window.at, window.absent)
            self.windows[window.number] = window
            self.owed = [owed + (rank not in window.absent) for rank, owed in enumerate(self.owed)]
            self.changed.notify_all()

    def outcome(self, number: int) -> Outcome:
        """Wait until a window is closed.

        Raises:
            ExchangeLost: If it will never be closed, as a process of the job has ended.
        """
        with interruptible(), self.changed:
            window = self.windows[number]
            # an earlier window, whose state the loop has dropped, may be lost, too
            self._until(lambda: window.outcome or window.lost or self.lost is not None)
            if window.outcome is None:
                raise ExchangeLost
            return window.outcome

    def settled(self) -> list[tuple[int, Outcome]]:
        """Return what `closed` returns next, once all windows are averaged or lost."""
        self.settle()
        with self.changed:
            return list(self.unread)

    def closed(self) -> list[tuple[int, Outcome]]:
        """Return the windows closed since the last call, in order."""
        with self.changed:
            closed, self.unread = self.unread, deque()
            return list(closed)

    def next_closed(self) -> tuple[int, Outcome]:
        """Wait for the oldest closed window that has not been returned yet.

        Raises:
            ExchangeLost: If there will be none, as a process of the job has ended.
        """
        with interruptible(), self.changed:
            self._until(lambda: bool(self.unread) or self.lost is not None)
            if not self.unread:
                raise ExchangeLost
            return self.unread.popleft()

    def take_back(self) -> int | None:
        """Drop all lost windows; return the number of the oldest, or None if there is none.

        Their deliveries are in no mean; those still to come are dropped, too.
        """
        with self.changed:
            first, self.lost = self.lost, None
            for number in [at for at in self.windows if first is not None and at >= first]:
                self.windows.pop(number).closing = True
            self.changed.notify_all()
            return first

    def settle(self) -> None:
        """Wait until all windows are averaged or lost, or threads have ended; see `Averaging`."""
        with interruptible(), self.changed:
            self.changed.wait_for(lambda: self.error or self.stop.is_set() or not self._open)

    def applied(self, number: int, ends: Sequence[float]) -> None:
        """Record when the devices had applied the average of a window."""
        with self.changed:
            self.windows[number].applied = tuple(ends)
        self._report(number)

    def register(self, number: int) -> None:
        """Allow `done` to be called with a window."""
        with self.changed:
            if number in self.windows:
                self.windows[number].registered = True
        self._report(number)

    def accumulated(self, number: int) -> WindowTimes:
        """Return the times so far of a window whose average is being computed."""
        with self.changed:
            return _times(self.windows[number])

    def abandon(self, number: int) -> None:
        """Never report a window."""
        with self.changed:
            window = self.windows.get(number)
            if window is not None and (window.outcome is not None or window.lost):
                del self.windows[number]
            elif window is not None:  # `close` removes it
                window.abandoned = True

    def _gaps(self, at: float, absent: frozenset[int]) -> list[float]:
        """Return each device's idle time so far; for devices without programs, the longest."""
        gaps = [
            0.0 if owed or free is None else max(0.0, at - free)
            for owed, free in zip(self.owed, self.free, strict=True)
        ]
        # the least gap is the cost, and must not be that of a device without programs
        longest = max(gaps)
        return [longest if rank in absent else gap for rank, gap in enumerate(gaps)]

    def _until(self, condition: Callable[[], object]) -> None:
        self.changed.wait_for(lambda: self.error or self.stop.is_set() or condition())
        if self.error is not None:
            raise self.error
        if not condition():
            raise RuntimeError("train: the windows of this run were closed while it trained.")

    @property
    def _open(self) -> list[OpenWindow]:
        """Windows that will have an average and have none yet, oldest first."""
        if self.lost is not None:  # from the oldest on, all are lost
            return []
        return [w for w in self.windows.values() if w.outcome is None and not w.lost]

    def _has_room(self, counts: tuple[int, ...]) -> bool:
        owed = [w for w in self._open if self._missing(w)]
        bounds = [(self._open, self.limits.max_overshoot), (owed, self.limits.max_batch_diff)]
        # one device must be left to run the window, and to copy the state of late devices from
        return len(self.late) < self.world_size and all(
            most is None or beyond([w.counts for w in windows], counts) <= most
            for windows, most in bounds
        )

    # -- the threads -----------------------------------------------------------------

    def delivered(self, rank: int, window: OpenWindow, now: float, delivery: Delivery) -> None:
        """Record a delivery."""
        with self.changed:
            begin, self.free[rank] = self.free[rank], now
            self.owed[rank] -= 1
            if not self.owed[rank]:
                self.late.discard(rank)
            if not window.closing:
                window.got[rank] = delivery
                if window.counts[rank] and rank not in self.late:
                    self.incidents[rank] = 0  # it was on time
                # a device without work delivers at once: the others would seem late
                if window.counts[rank] and window.first is None:
                    window.first = now
            window.ends[rank] = now
            window.begins[rank] = max(window.at, begin or window.at)
            self.changed.notify_all()
        self._report_late(window)

    def _report_late(self, window: OpenWindow) -> None:
        """Call `learned` if a window is over and its last delivery has now arrived.

        It also gets when the devices began, or None if a late device is not known to be slow.
        """
        with self.changed:
            known = all(window.ends[r] is not None for r in window.worked)
            if not (window.tardy and known):
                return
            window.tardy = False
            slow = all(self.incidents[rank] > 1 for rank in window.late)
            times, begins = _times(window), list(window.begins) if slow else None
        # without the lock: a cadence that reads the training step may wait for it
        self.learned(times, begins)

    def next_complete(self) -> tuple[OpenWindow, list[Delivery | None]] | None:
        """Wait until the oldest open window has all its deliveries; None when stopped."""
        with self.changed:
            while not self.stop.is_set():
                window = next(iter(self._open), None)
                left = None
                # no device is late before the first delivery: there would be nothing to average
                if window is not None and any(window.got):
                    missing = self._missing(window)
                    if missing and window.first is not None:
                        left = window.first + self.limits.timeout_s - time.perf_counter()
                    if left is not None and left <= 0:
                        for rank in missing:
                            self.incidents[rank] += 1
                        self.late.update(missing)
                        missing = []
                    if not missing:
                        window.closing = True
                        out = [r for r, got in enumerate(window.got) if got is None]
                        window.late = tuple(r for r in out if window.counts[r])
                        window.missing = tuple(r for r in out if r not in window.absent)
                        return window, list(window.got)
                self.changed.wait(left)  # until a change, or until the missing devices are late
            return None

    def close(self, window: OpenWindow, average: Average) -> None:
        """Record the average of a window."""
        with self.changed:
            window.outcome = outcome = Outcome(
                average, window.late, window.missing, window.ahead, window.will_be_known
            )
            window.got = []
            if window.ahead:
                self.unread.append((window.number, outcome))
            if window.abandoned:
                del self.windows[window.number]
            self.changed.notify_all()
        self._report(window.number)

    def lose(self, window: OpenWindow) -> None:
        """Record that a window has no average, as a process of the job has ended."""
        with self.changed:
            window.lost, window.got = True, []
            if window.ahead:
                self.lost = window.number
            elif window.abandoned:
                del self.windows[window.number]
            self.changed.notify_all()
        if window.ahead:
            self.failed_(ExchangeLost())

    def failed(self, error: BaseException) -> None:
        """Record an exception raised in a thread."""
        with self.changed:
            if self.error is None:
                self.error = error
            self.changed.notify_all()
        self.failed_(error)

    def end(self) -> None:
        """Stop the threads, and wake all that wait."""
        self.stop.set()
        with self.changed:
            self.changed.notify_all()

    def _missing(self, window: OpenWindow) -> list[int]:
        """Return the ranks that a window waits for."""
        there = self.late | window.absent
        return [r for r, got in enumerate(window.got) if got is None and r not in there]

    def _report(self, number: int) -> None:
        with self.changed:
            window = self.windows.get(number)
            if window is None or window.outcome is None or not window.complete:
                return
            del self.windows[number]  # claimed here: `done` is called without the lock
            times, outcome = _times(window), window.outcome
        try:
            self.done(times, outcome)
        except BaseException as error:  # raised by a guard, for example; it must not lose the state
            self.failed(error)
        with self.changed:
            window.outcome = None  # do not keep its arrays alive
            window.tardy = window.will_be_known
        self._report_late(window)


def _times(window: OpenWindow) -> WindowTimes:
    """Return a window's times; a device whose end is unknown counts as done with the last one."""
    known = [end for end in window.ends if end is not None]
    ends = [max(known) if end is None else end for end in window.ends]
    combined = window.applied
    if combined is None:
        combined = tuple(end + gap for end, gap in zip(ends, window.gaps, strict=True))
    # a late device did not wait, so its wait says nothing about the cost of the exchange
    pairs = list(zip(ends, combined, strict=True))
    cost = min(c - a for rank, (a, c) in enumerate(pairs) if rank not in window.missing)
    combined = tuple(a + cost if r in window.missing else c for r, (a, c) in enumerate(pairs))
    return WindowTimes(window.number, window.at, tuple(ends), combined)
