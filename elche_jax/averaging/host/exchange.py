"""Collecting what devices deliver: one thread per device waits for it, one more averages.

A window is *launched* by the loop, *closed* when every device that had work in it has
delivered and the average is there, and *over* when that has been reported. A device that
has not delivered `timeout_s` after the first one is *late*: the window is closed without
it, no later one waits for it, and it gets no work until it has delivered all it owes.
"""

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from elche_jax.averaging.host.average import Average, Delivery
from elche_jax.engine.loop import Seconds
from elche_jax.engine.timing import WindowTimes, end_threads

Averaging = Callable[[Sequence[Delivery | None], int], Average]


@dataclass(frozen=True)
class Outcome:
    """What came of a window.

    Attributes:
        average: Its average.
        late: Ranks of the devices it was closed without, and that had work in it.
        ahead: Whether devices ran ahead of it.
    """

    average: Average
    late: tuple[int, ...]
    ahead: bool


@dataclass(frozen=True)
class Limits:
    """How long to wait, and how far a device may run ahead.

    Attributes:
        timeout_s: Seconds after the first delivery of a window until a device is late.
        ahead: Whether devices go on while a window is averaged.
        max_overshoot: Microbatches that a device may begin beyond the oldest window that
            is not closed; None for no such bound.
        max_batch_diff: The same beyond the oldest window that not all devices have
            delivered, late ones apart; None for no such bound.
    """

    timeout_s: float
    ahead: bool = False
    max_overshoot: int | None = None
    max_batch_diff: int | None = None


Done = Callable[[WindowTimes, Outcome], None]
Failed = Callable[[BaseException], None]


@dataclass
class _Open:
    """A window that was launched; guarded by the board's lock."""

    number: int
    at: float
    counts: tuple[int, ...]
    step: int
    got: list[Delivery | None]
    ends: list[float | None]
    gaps: list[float]
    first: float | None = None
    average: Average | None = None
    late: tuple[int, ...] = ()
    combined: tuple[float, ...] | None = None
    registered: bool = False
    told: bool = False

    @property
    def worked(self) -> list[int]:
        return [rank for rank, count in enumerate(self.counts) if count]


class HostExchange:
    """The exchange of one run.

    The loop calls `admit`, `launch`, then `wait` and `applied` (or, running ahead,
    `closed`), then `combining`; `done` is told of every window once it was registered
    with `combining` and is closed (and, without running ahead, applied).

    Args:
        world_size: Number of devices.
        averaging: Averages the deliveries of a window.
        limits: How long to wait.
        seconds: Makes devices slower on purpose; or None.
        done: Told of every window that is over, in order.
        failed: Told of an exception in a thread.
    """

    def __init__(
        self,
        world_size: int,
        averaging: Averaging,
        limits: Limits,
        seconds: Seconds | None,
        done: Done,
        failed: Failed,
    ):
        self.session: Any = None
        self.limits = limits
        self._board = board = _Board(world_size, limits, done, failed)
        stop = board.stop
        self._queues: list[queue.SimpleQueue[_Job | None]] = [
            queue.SimpleQueue() for _ in range(world_size)
        ]
        threads = [
            threading.Thread(
                target=_fetch,
                args=(rank, jobs, board, seconds),
                name=f"elche-fetch-{rank}",
                daemon=True,
            )
            for rank, jobs in enumerate(self._queues)
        ]
        threads.append(
            threading.Thread(
                target=_average, args=(board, averaging), name="elche-average", daemon=True
            )
        )
        for thread in threads:
            thread.start()
        self._finish = weakref.finalize(self, _close, threads, self._queues, stop, board)

    @property
    def late(self) -> frozenset[int]:
        """Ranks of the devices that owe something they should have delivered."""
        with self._board.changed:
            return frozenset(self._board.late)

    def admit(self, counts: tuple[int, ...]) -> None:
        """Waits until a window of these counts takes no device too far ahead."""
        self._board.admit(counts)

    def launch(
        self, number: int, at: float, counts: tuple[int, ...], step: int, deliveries: list[Delivery]
    ) -> None:
        """Hands over what the devices deliver of a window, arrays that are yet to come.

        Args:
            number: Number of the dispatch; they come in order.
            at: When the dispatch began.
            counts: Microbatches per device.
            step: Number of the window in the training state.
            deliveries: By rank, leaves `(1, ...)` on the device.
        """
        self._board.open(number, at, counts, step)
        for rank, (jobs, delivery) in enumerate(zip(self._queues, deliveries, strict=True)):
            jobs.put(_Job(number, at, counts[rank], step, delivery))

    def wait(self, number: int) -> Outcome:
        """Waits until a window is closed."""
        return self._board.wait(number)

    def closed(self) -> list[tuple[int, Outcome]]:
        """The windows closed since it was asked last, in order."""
        return self._board.take_closed()

    def applied(self, number: int, ends: Sequence[float]) -> None:
        """Says when the devices had taken up the average of a window."""
        self._board.applied(number, tuple(ends))

    def abandon(self, number: int) -> None:
        """Nobody is to hear of a window any more."""
        self._board.abandon(number)

    def accumulating(self, window: int, dispatched: float, token: Any) -> None:
        """Nothing to do: it was launched."""

    def combining(self, window: int, token: Any) -> None:
        """The loop is ready to hear of a window."""
        self._board.register(window)

    def close(self) -> None:
        """Ends the threads; windows still on the devices are not averaged. Idempotent.

        A thread that waits for a device cannot be interrupted. It is given half a second
        and otherwise ends by itself as soon as the device is done.
        """
        self._finish()


@dataclass(frozen=True, slots=True)
class _Job:
    number: int
    at: float
    count: int
    step: int
    delivery: Delivery


@dataclass
class _Board:
    """What the threads of an exchange share."""

    world_size: int
    limits: Limits
    done: Done
    failed_: Failed
    changed: threading.Condition = field(default_factory=threading.Condition)
    stop: threading.Event = field(default_factory=threading.Event)
    late: set[int] = field(default_factory=set)
    owed: list[int] = field(default_factory=list)
    free: list[float | None] = field(default_factory=list)
    windows: dict[int, _Open] = field(default_factory=dict)
    closed: deque[tuple[int, Outcome]] = field(default_factory=deque)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.owed = [0] * self.world_size
        self.free = [None] * self.world_size

    # -- the loop --------------------------------------------------------------------

    def admit(self, counts: tuple[int, ...]) -> None:
        with self.changed:
            self._until(lambda: self._has_room(counts))

    def open(self, number: int, at: float, counts: tuple[int, ...], step: int) -> None:
        with self.changed:
            n = self.world_size
            gaps = [
                0.0 if owed or free is None else max(0.0, at - free)
                for owed, free in zip(self.owed, self.free, strict=True)
            ]
            self.windows[number] = _Open(number, at, counts, step, [None] * n, [None] * n, gaps)
            self.owed = [owed + 1 for owed in self.owed]
            self.changed.notify_all()

    def wait(self, number: int) -> Outcome:
        with self.changed:
            window = self.windows[number]
            self._until(lambda: window.average is not None)
            assert window.average is not None
            return Outcome(window.average, window.late, self.limits.ahead)

    def take_closed(self) -> list[tuple[int, Outcome]]:
        with self.changed:
            taken = list(self.closed)
            self.closed.clear()
            return taken

    def applied(self, number: int, ends: tuple[float, ...]) -> None:
        with self.changed:
            self.windows[number].combined = ends
        self._tell(number)

    def register(self, number: int) -> None:
        with self.changed:
            if number in self.windows:
                self.windows[number].registered = True
        self._tell(number)

    def abandon(self, number: int) -> None:
        with self.changed:
            window = self.windows.get(number)
            if window is not None and window.average is not None:
                del self.windows[number]
            elif window is not None:  # it is let go when it is closed
                window.told = True

    def _until(self, condition: Callable[[], bool]) -> None:
        self.changed.wait_for(lambda: self.error or self.stop.is_set() or condition())
        if self.error is not None:
            raise self.error
        if not condition():
            raise RuntimeError("train: the windows of this run were closed while it trained.")

    def _has_room(self, counts: tuple[int, ...]) -> bool:
        unclosed = [w for w in self.windows.values() if w.average is None]
        owed = [w for w in unclosed if self._missing(w)]
        bounds = [(unclosed, self.limits.max_overshoot), (owed, self.limits.max_batch_diff)]
        return all(
            most is None or not windows or _beyond(windows, counts) <= most
            for windows, most in bounds
        )

    # -- the threads -----------------------------------------------------------------

    def delivered(self, rank: int, job: _Job, now: float, delivery: Delivery) -> None:
        with self.changed:
            window = self.windows.get(job.number)
            self.owed[rank] -= 1
            self.free[rank] = now
            if not self.owed[rank]:
                self.late.discard(rank)
            if window is not None and window.average is None:
                window.got[rank], window.ends[rank] = delivery, now
                if job.count and window.first is None:
                    window.first = now
            self.changed.notify_all()

    def next_complete(self) -> tuple[_Open, list[Delivery | None]] | None:
        """Waits for the oldest window that is not closed; None at the end."""
        with self.changed:
            while not self.stop.is_set():
                window = next((w for w in self.windows.values() if w.average is None), None)
                left = None
                if window is not None and window.first is not None:
                    missing = self._missing(window)
                    left = window.first + self.limits.timeout_s - time.perf_counter()
                    if left <= 0:
                        self.late.update(missing)
                        missing = []
                    if not missing:
                        window.late = tuple(r for r in window.worked if window.got[r] is None)
                        return window, list(window.got)
                self.changed.wait(left)
            return None

    def close(self, window: _Open, average: Average) -> None:
        with self.changed:
            window.average = average
            window.got.clear()
            ends = [end for end in window.ends if end is not None]
            window.ends = [max(ends) if end is None else end for end in window.ends]
            if self.limits.ahead:
                pairs = zip(window.ends, window.gaps, strict=True)
                window.combined = tuple(end + gap for end, gap in pairs if end is not None)
                self.closed.append((window.number, Outcome(average, window.late, ahead=True)))
            if window.told:
                del self.windows[window.number]
            self.changed.notify_all()
        self._tell(window.number)

    def failed(self, error: BaseException) -> None:
        with self.changed:
            if self.error is None:
                self.error = error
            self.changed.notify_all()
        self.failed_(error)

    def wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _missing(self, window: _Open) -> list[int]:
        """Ranks that a window waits for."""
        return [r for r, got in enumerate(window.got) if got is None and r not in self.late]

    def _tell(self, number: int) -> None:
        with self.changed:
            window = self.windows.get(number)
            ready = window is not None and window.registered and window.combined is not None
            if window is None or not ready or window.told:
                return
            window.told = True
            del self.windows[number]
        assert window.combined is not None and window.average is not None
        ends = tuple(end for end in window.ends if end is not None)
        times = WindowTimes(number, window.at, ends, window.combined)
        self.done(times, Outcome(window.average, window.late, self.limits.ahead))


def _beyond(windows: Sequence[_Open], counts: tuple[int, ...]) -> int:
    """The most microbatches that a device has begun beyond the oldest of some windows."""
    later = [window.counts for window in windows[1:]]
    return max(map(sum, zip(*later, counts, strict=True)))


def _fetch(
    rank: int,
    jobs: "queue.SimpleQueue[_Job | None]",
    board: _Board,
    seconds: Seconds | None,
) -> None:
    free = 0.0
    while (job := jobs.get()) is not None and not board.stop.is_set():
        try:
            jax.block_until_ready(job.delivery)
            if seconds is not None:
                due = max(job.at, free) + seconds(job.step, rank, job.count)
                board.stop.wait(max(0.0, due - time.perf_counter()))
            free = time.perf_counter()
            host = jax.tree.map(lambda leaf: leaf[0], jax.device_get(job.delivery))
            board.delivered(rank, job, free, host)
        except BaseException as error:  # handed to the loop, which raises it
            board.failed(error)
            return


def _average(board: _Board, averaging: Averaging) -> None:
    while (found := board.next_complete()) is not None:
        window, deliveries = found
        try:
            board.close(window, averaging(deliveries, window.step))
        except BaseException as error:  # handed to the loop, which raises it
            board.failed(error)
            return


def _close(
    threads: list[threading.Thread],
    queues: "list[queue.SimpleQueue[_Job | None]]",
    stop: threading.Event,
    board: _Board,
) -> None:
    stop.set()
    for jobs in queues:
        jobs.put(None)
    board.wake()
    end_threads(threads)
