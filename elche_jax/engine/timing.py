"""Per-device times of windows, measured by threads that wait for the devices.

Per-device times can be measured only until a collective runs. A window is therefore two programs:
the accumulation, without a collective, and the combine. One thread per device waits for its
shard of the first program's result, then of the second's. With `a[d]` the end of the accumulation,
`c[d]` the end of the combine and `t` the time of dispatch,

    busy[d] = a[d] - max(t, end of the previous program on device d)
    wait[d] = c[d] - a[d] = skew[d] + cost
    cost    = min over d of wait[d],    skew = max - min of wait[d]

because the last device to arrive waits for nothing but the exchange.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, ClassVar, Protocol

import jax

from elche_jax import _progress
from elche_jax._waiting import Condition, HeldInterrupt, interruptible
from elche_jax.engine.threads import DeviceThreads


@dataclass(frozen=True)
class WindowTimes:
    """End times of a window on each device, in seconds of `time.perf_counter`.

    Attributes:
        window: Index of the window.
        dispatched: Time of the dispatch.
        accumulated: End of each device's accumulation; None if it was not observed.
        combined: End of each device's combine.
    """

    window: int
    dispatched: float
    accumulated: tuple[float, ...] | None
    combined: tuple[float, ...]

    @property
    def arrived(self) -> tuple[float, ...]:
        """End of each device's own work, or of its combine if that was not observed."""
        return self.combined if self.accumulated is None else self.accumulated

    def busy_ms(self, free: Sequence[float]) -> tuple[float, ...]:
        """Return each device's milliseconds of work, data transfer included; empty if unknown.

        Args:
            free: When each device became free, see `Ends.before`.
        """
        if self.accumulated is None:
            return ()
        starts = [max(self.dispatched, end) for end in free]
        return tuple(1e3 * (a - s) for a, s in zip(self.accumulated, starts, strict=True))

    @property
    def wait_ms(self) -> tuple[float, ...]:
        """Milliseconds each device spent in the synchronization."""
        return tuple(1e3 * (c - a) for c, a in zip(self.combined, self.arrived, strict=True))

    @property
    def sync_ms(self) -> float:
        """Milliseconds of the exchange itself: the shortest wait."""
        return max(0.0, min(self.wait_ms))

    @property
    def skew_ms(self) -> float:
        """Milliseconds between the first and the last device to arrive."""
        return max(self.wait_ms) - min(self.wait_ms)


class Ends:
    """End times of the last windows on each device, over all training steps.

    Several training steps may take turns on the same devices (a GAN's two networks, for
    instance), so the previous program may belong to a different step. A runtime that also makes
    programs wait for those of other devices, as the CPU's does, still distorts the times of
    steps whose devices overlap only in part.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[jax.Device, deque[float]] = {}

    def before(
        self,
        devices: Sequence[jax.Device],
        moments: Sequence[float],
        lockstep: Sequence[Sequence[int]] = (),
    ) -> list[float]:
        """Return each device's last end at or before a moment; `-inf` if there is none.

        Windows of two steps may be recorded out of order, hence the moments.

        Args:
            devices: The devices.
            moments: A moment for each of them.
            lockstep: Groups of devices, by index, that begin together when the last one is free.
        """
        with self._lock:
            known = [self._ends.get(device, ()) for device in devices]
            free = [
                max((end for end in ends if end <= moment), default=-inf)
                for ends, moment in zip(known, moments, strict=True)
            ]
        for ranks in lockstep:
            begun = max(free[rank] for rank in ranks)
            for rank in ranks:
                free[rank] = min(begun, moments[rank])
        return free

    def note(self, devices: Sequence[jax.Device], ends: Sequence[float]) -> None:
        """Record the end of a window."""
        with self._lock:
            for device, end in zip(devices, ends, strict=True):
                self._ends.setdefault(device, deque(maxlen=8)).append(end)


ENDS = Ends()
"""The end times of this process."""


Done = Callable[[WindowTimes], None]
Failed = Callable[[BaseException], None]


class Clock(Protocol):
    """Measures the windows of a run."""

    ends_windows: ClassVar[bool] = False
    """Whether the clock ends windows; those in flight when it closes are then dropped."""

    inline: ClassVar[bool] = False
    """Whether windows end in `wait`, called by the loop, without a thread."""

    @property
    def late(self) -> frozenset[int]:
        """Ranks of devices that get no work until they have delivered an overdue contribution."""
        return frozenset()

    @property
    def lost(self) -> int | None:
        """Number of the oldest window that never ends because a process of the job has ended.

        None if there is none. Later windows do not end, either, until the loop has taken it back.
        """
        return None

    def accumulating(
        self, window: int, dispatched: float, token: Any, ranks: Sequence[int] | None = None
    ) -> None:
        """Pass a stacked array whose entry `d` is ready when device `d` has accumulated.

        Args:
            window: Number of the window.
            dispatched: Start of its dispatch, `time.perf_counter` seconds.
            token: The array.
            ranks: Ranks of its entries if it belongs to one lane; None for all devices.
        """
        del window, dispatched, token, ranks  # not every clock uses them

    def combining(self, window: int, dispatched: float, token: Any, timed: bool = True) -> None:
        """Pass a stacked array whose entry `d` is ready when device `d` has combined.

        Args:
            window: Number of the window.
            dispatched: Start of its dispatch, `time.perf_counter` seconds.
            token: The array.
            timed: Whether to measure each device's own times. If not, `accumulating` was not
                called, and all devices get the end time of the last one.
        """
        ...

    def dropped(self, window: int) -> None:
        """Forget a window whose dispatch has failed; it may have passed a token before."""
        del window

    def accumulated(self, window: int) -> WindowTimes | None:
        """Wait until all devices have accumulated; return the times, without those of the combine.

        Return None after a close, or if the window was dropped.
        """
        return None

    def wait(self, changed: Condition, until: Callable[[], object]) -> None:
        """Wait until a condition holds that may become true when a window ends.

        Args:
            changed: Notified of every change; not held by the caller.
            until: Returns whether the condition holds.
        """
        with interruptible(), changed:
            changed.wait_for(until)

    @property
    def patience(self) -> float:
        """Largest number of seconds that a close waits for windows whose work would be lost."""
        return 0.0

    def close(self) -> None:
        """End the clock's threads. Idempotent."""
        ...


class Stopwatch(Clock):
    """Times the windows of one run with one thread per device.

    Args:
        world_size: Number of devices.
        done: Called in one of the threads with the times of every window, in order.
        failed: Called with an exception raised while waiting for a device.
    """

    def __init__(self, world_size: int, done: Done, failed: Failed):
        # the threads refer to the collector only, as dropping the stopwatch ends them
        self._collector = collector = _Collector(world_size, done)
        self._world_size = world_size

        def end(error: BaseException) -> None:
            collector.close()  # no thread may wait for times that never come
            failed(error)

        self._threads = DeviceThreads("watch", world_size, end)

    def accumulating(
        self, window: int, dispatched: float, token: Any, ranks: Sequence[int] | None = None
    ) -> None:
        """See `Clock.accumulating`."""
        wait = partial(self._collector.wait, window, dispatched, combined=False, whole=False)
        self._put(wait, token, range(self._world_size) if ranks is None else ranks)

    def combining(self, window: int, dispatched: float, token: Any, timed: bool = True) -> None:
        """See `Clock.combining`."""
        wait = partial(self._collector.wait, window, dispatched, combined=True, whole=not timed)
        if timed:
            self._put(wait, token, range(self._world_size))
        else:  # waking a thread per device would take longer than the rest of the dispatch
            self._threads.put(0, partial(wait, 0, token))

    def _put(self, wait: Callable[[int, Any], None], token: Any, ranks: Sequence[int]) -> None:
        # here, not in the threads: JAX builds an array's list of shards on first access, in 0.10
        # without a lock, so threads that access it at the same time may see an incomplete list
        for at, rank in enumerate(ranks):
            self._threads.put(rank, partial(wait, rank, token.addressable_data(at)))

    def dropped(self, window: int) -> None:
        """See `Clock.dropped`."""
        self._collector.drop(window)

    def accumulated(self, window: int) -> WindowTimes | None:
        """See `Clock.accumulated`."""
        return self._collector.accumulated(window)

    def release(self) -> None:
        """End all waits in `accumulated`, and let later calls return at once."""
        self._collector.close()

    def close(self) -> None:
        """End the threads; a window that is still running is not measured. Idempotent."""
        self.release()
        self._threads.close()


class LoopClock(Clock):
    """Times the windows of one device in the loop, without a thread.

    Args:
        done: Called with the times of every window, in order.
    """

    inline: ClassVar[bool] = True

    def __init__(self, done: Done):
        self._done = done
        self._open: deque[tuple[int, float, jax.Array]] = deque()

    def combining(
        self, window: int, dispatched: float, token: jax.Array, timed: bool = True
    ) -> None:
        """See `Clock.combining`; a single device has no times of its own besides the window's."""
        self._open.append((window, dispatched, token))

    def wait(self, changed: Condition, until: Callable[[], object]) -> None:
        """Wait for windows, oldest first, until the condition holds or none is left.

        `changed` is not used, as no other thread changes anything.
        """
        while self._open and not until():
            window, dispatched, token = self._open[0]
            with _progress.phase("window"):
                token.block_until_ready()  # if interrupted, the next call waits for it again
            with HeldInterrupt() as interrupt:
                interrupt.begin()
                self._open.popleft()
                self._done(WindowTimes(window, dispatched, None, (time.perf_counter(),)))
            if interrupt.came:
                raise KeyboardInterrupt

    def close(self) -> None:
        """Drop the windows that are still running."""
        self._open.clear()


@dataclass
class _Open:
    """A window that some devices are not done with; end times by rank."""

    dispatched: float
    accumulated: dict[int, float] = field(default_factory=dict)
    combined: dict[int, float] = field(default_factory=dict)


class _Collector:
    """Waits for the ends of windows; reports a window once both are known for every device."""

    def __init__(self, world_size: int, done: Done):
        self._ranks, self._done = range(world_size), done
        self._lock = threading.Lock()
        # with its own lock: the other is held while a window is recorded, and no close may wait
        # for that
        self._arrived = Condition()
        self._closed = False
        self._open: dict[int, _Open] = {}
        self._dropped: set[int] = set()

    def drop(self, number: int) -> None:
        """Forget a window that later ones would otherwise wait for."""
        with self._lock:
            self._dropped.add(number)
            self._open.pop(number, None)
            with self._arrived:
                self._arrived.notify_all()
            self._report()

    def close(self) -> None:
        """End all waits in `accumulated`, and let later calls return at once."""
        with self._arrived:
            self._closed = True
            self._arrived.notify_all()

    def accumulated(self, number: int) -> WindowTimes | None:
        """See `Clock.accumulated`."""
        with self._arrived:
            while not self._closed and number not in self._dropped:
                window = self._open.get(number)  # read once: `drop` may remove it meanwhile
                if window is not None and len(window.accumulated) == len(self._ranks):
                    found = tuple(window.accumulated[rank] for rank in self._ranks)
                    return WindowTimes(number, window.dispatched, found, found)
                self._arrived.wait()
        return None

    def wait(
        self, number: int, dispatched: float, rank: int, token: Any, combined: bool, whole: bool
    ) -> None:
        """Wait for one device, or for all of them if `whole`, in a thread."""
        with _progress.phase("exchange" if combined and not whole else "window"):
            jax.block_until_ready(token)
        # before the lock, which another thread may hold while it reports a window
        now = time.perf_counter()
        with self._lock:  # held in `_done`, too, so that windows are reported in order
            if number in self._dropped:
                return
            window = self._open.setdefault(number, _Open(dispatched))
            seen = dict.fromkeys(self._ranks if whole else (rank,), now)
            if combined:
                window.combined |= seen
            if whole or not combined:
                window.accumulated |= seen
            with self._arrived:
                self._arrived.notify_all()
            self._report()

    def _report(self) -> None:
        """Report the oldest windows that are complete.

        For some windows, one thread waits for all devices, so it may be ahead of or behind the
        others. No window is missing here, except for dropped ones, as that thread takes part in
        all of them, in order.
        """
        size = len(self._ranks)
        for number, window in sorted(self._open.items()):
            if len(window.combined) < size or len(window.accumulated) < size:
                return
            del self._open[number]
            accumulated, combined = (
                tuple(ends[rank] for rank in self._ranks)
                for ends in (window.accumulated, window.combined)
            )
            self._done(WindowTimes(number, window.dispatched, accumulated, combined))
