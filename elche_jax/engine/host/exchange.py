"""An exchange on the host: one thread per device fetches deliveries, one more averages them."""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax

from elche_jax._waiting import interruptible
from elche_jax.engine.host.average import Average
from elche_jax.engine.host.coordinator import Coordinator, Done, Failed, Learned, Limits, Outcome
from elche_jax.engine.host.program import Delivery
from elche_jax.engine.host.session import Session
from elche_jax.engine.loop import Seconds
from elche_jax.engine.timing import device_threads, end_threads

Averaging = Callable[[Sequence[Delivery | None], int], Average]


Left = Callable[[Session, list[tuple[int, Outcome]]], None]


class LiveExchange:
    """The exchange of one run.

    The loop calls `admit`, `launch`, then `outcome` and `applied` (or, running ahead,
    `closed`), then `combining`. `done` is called with a window once it was registered
    with `combining` and is closed (and, without running ahead, applied).

    Attributes:
        session: The runner's session of the state it returned last; dropped on close.
        used: Whether a window was launched.
        limits: How long to wait, and how far devices may run ahead.

    Args:
        world_size: Number of devices.
        averaging: Averages the deliveries of a window.
        limits: How long to wait, and how far devices may run ahead.
        seconds: Emulated durations; or None.
        done: Called with every window that is over, in order.
        learned: Called with the times of a window that ended without some device, once that
            device has delivered.
        failed: Called with an exception raised in a thread.
        left: Called on close with the session and the outcomes of its windows in flight, if all
            of those are closed.
    """

    ends_windows: ClassVar[bool] = True
    inline: ClassVar[bool] = False

    def __init__(
        self,
        world_size: int,
        averaging: Averaging,
        limits: Limits,
        seconds: Seconds | None,
        done: Done,
        learned: Learned,
        failed: Failed,
        left: Left | None = None,
    ):
        self._left = left
        self.session: Session | None = None
        self.used = False
        self.limits = limits
        self._coordinator = coordinator = Coordinator(world_size, limits, done, learned, failed)
        stop = coordinator.stop
        self._queues: list[queue.SimpleQueue[_Job | None]]
        fetch = partial(_fetch, coordinator=coordinator, seconds=seconds)
        threads, self._queues = device_threads("fetch", world_size, fetch)
        threads.append(
            threading.Thread(
                target=_average, args=(coordinator, averaging), name="elche-average", daemon=True
            )
        )
        for thread in threads:
            thread.start()
        self._finish = weakref.finalize(self, _close, threads, self._queues, stop, coordinator)

    @property
    def late(self) -> frozenset[int]:
        """Ranks of the devices whose deliveries are overdue."""
        with self._coordinator.changed:
            return frozenset(self._coordinator.late)

    def admit(self, counts: tuple[int, ...]) -> frozenset[int]:
        """Wait until a window of these counts takes no device too far ahead.

        Returns:
            The ranks that are late then, never all of them.
        """
        return self._coordinator.admit(counts)

    def launch(
        self,
        number: int,
        at: float,
        counts: tuple[int, ...],
        step: int,
        deliveries: Sequence[Delivery | None],
        ahead: bool,
    ) -> None:
        """Hand over the deliveries of a window, arrays that are still being computed.

        Args:
            number: Number of the dispatch, ascending.
            at: When the dispatch began.
            counts: Microbatches per device.
            step: Index of the window in the training state.
            deliveries: By rank, leaves `(1, ...)` on the device; None for a device that got no
                programs.
            ahead: Whether the loop continues before the window is closed.
        """
        self.used = True
        absent = frozenset(rank for rank, one in enumerate(deliveries) if one is None)
        self._coordinator.open(number, at, counts, step, absent, ahead)
        for rank, (jobs, delivery) in enumerate(zip(self._queues, deliveries, strict=True)):
            if delivery is not None:
                jobs.put(_Job(number, at, counts[rank], step, delivery))

    def outcome(self, number: int) -> Outcome:
        """Wait until a window is closed."""
        return self._coordinator.wait(number)

    def closed(self) -> list[tuple[int, Outcome]]:
        """Return the windows closed since the last call, in order."""
        return self._coordinator.take_closed()

    def next_closed(self) -> tuple[int, Outcome]:
        """Wait for the oldest closed window that was not returned yet."""
        return self._coordinator.next_closed()

    def applied(self, number: int, ends: Sequence[float]) -> None:
        """Record when the devices had applied the average of a window."""
        self._coordinator.applied(number, tuple(ends))

    def abandon(self, number: int) -> None:
        """Report a window to no one."""
        self._coordinator.abandon(number)

    def accumulating(self, window: int, dispatched: float, token: Any) -> None:
        """Do nothing: the window was handed over by `launch`."""

    def combining(self, window: int, dispatched: float, token: Any) -> None:
        """Register a window: from now on `done` may be called with it."""
        self._coordinator.register(window)

    def wait(self, changed: threading.Condition, until: Callable[[], object]) -> None:
        """See `Clock.wait`."""
        with interruptible(), changed:
            changed.wait_for(until)

    def close(self) -> None:
        """End the threads; windows still on the devices are not averaged. Idempotent.

        A thread that waits for a device cannot be interrupted. After half a second it is left
        to end by itself, as soon as the device is done.
        """
        session, self.session = self.session, None  # do not keep the state alive
        if session is not None and self._left is not None:
            closed = [*session.due, *self._coordinator.take_closed()]
            if len(closed) == len(session.begun):
                self._left(session, closed)
        self._finish()


@dataclass(frozen=True, slots=True)
class _Job:
    number: int
    at: float
    count: int
    step: int
    delivery: Delivery


def _fetch(
    rank: int,
    jobs: "queue.SimpleQueue[_Job | None]",
    coordinator: Coordinator,
    seconds: Seconds | None,
) -> None:
    free = 0.0
    while (job := jobs.get()) is not None and not coordinator.stop.is_set():
        try:
            jax.block_until_ready(job.delivery)
            if seconds is not None:
                due = max(job.at, free) + seconds(job.step, rank, job.count)
                coordinator.stop.wait(max(0.0, due - time.perf_counter()))
            free = time.perf_counter()
            host = jax.tree.map(lambda leaf: leaf[0], jax.device_get(job.delivery))
            coordinator.delivered(rank, job.number, free, host)
            del job, host  # hold no arrays while waiting
        except BaseException as error:  # handed to the loop, which raises it
            coordinator.failed(error)
            return


def _average(coordinator: Coordinator, averaging: Averaging) -> None:
    while (found := coordinator.next_complete()) is not None:
        window, deliveries = found
        try:
            coordinator.close(window, averaging(deliveries, window.step))
            del found, window, deliveries  # hold no arrays while waiting
        except BaseException as error:  # handed to the loop, which raises it
            coordinator.failed(error)
            return


def _close(
    threads: list[threading.Thread],
    queues: "list[queue.SimpleQueue[_Job | None]]",
    stop: threading.Event,
    coordinator: Coordinator,
) -> None:
    stop.set()
    for jobs in queues:
        jobs.put(None)
    coordinator.wake()
    end_threads(threads)
