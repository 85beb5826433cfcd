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
from elche_jax.engine.host.coordinator import Coordinator, OpenWindow, Outcome
from elche_jax.engine.host.program import Delivery
from elche_jax.engine.host.session import Session
from elche_jax.engine.loop import Seconds
from elche_jax.engine.timing import device_threads, end_threads

Averaging = Callable[[Sequence[Delivery | None], int], Average]
Left = Callable[[Session, list[tuple[int, Outcome]]], None]


class LiveExchange:
    """The exchange of one run: its threads, and the clock of its windows.

    The loop calls `coordinator.admit`, `launch`, then `coordinator.outcome` and `applied` (or,
    running ahead, `closed`), then `combining`.

    Attributes:
        coordinator: The windows of the run.
        session: The runner's session of the state it returned last; dropped on close.
        used: Whether a window was launched.

    Args:
        coordinator: The windows of the run.
        averaging: Averages the deliveries of a window.
        seconds: Emulated durations; or None.
        left: Called on close with the session and the outcomes of its windows in flight, if all
            of those are closed.
    """

    ends_windows: ClassVar[bool] = True
    inline: ClassVar[bool] = False

    def __init__(
        self,
        coordinator: Coordinator,
        averaging: Averaging,
        seconds: Seconds | None,
        left: Left | None = None,
    ):
        self._left = left
        self.session: Session | None = None
        self.used = False
        self.coordinator = coordinator
        self._queues: list[queue.SimpleQueue[_Job | None]]
        # threads refer to the coordinator only, so that they end with the last reference to self
        fetch = partial(_fetch, coordinator=coordinator, seconds=seconds)
        threads, self._queues = device_threads("fetch", coordinator.world_size, fetch)
        average = partial(_average, coordinator, averaging)
        threads.append(threading.Thread(target=average, name="elche-average", daemon=True))
        for thread in threads:
            thread.start()
        self._finish = weakref.finalize(self, _close, threads, self._queues, coordinator)

    @property
    def late(self) -> frozenset[int]:
        """Ranks of the devices whose deliveries are overdue."""
        with self.coordinator.changed:
            return frozenset(self.coordinator.late)

    def launch(self, window: OpenWindow, deliveries: Sequence[Delivery | None]) -> None:
        """Hand over the deliveries of a window, arrays that are still being computed.

        Args:
            window: The window; numbers are ascending.
            deliveries: By rank, leaves `(1, ...)` on the device; None for absent devices.
        """
        self.used = True
        self.coordinator.open(window)
        for jobs, delivery in zip(self._queues, deliveries, strict=True):
            if delivery is not None:
                jobs.put(_Job(window, delivery))

    def accumulating(self, window: int, dispatched: float, token: Any) -> None:
        """Do nothing: the window was handed over by `launch`."""

    def combining(self, window: int, dispatched: float, token: Any) -> None:
        """Register a window: from now on `done` may be called with it."""
        self.coordinator.register(window)

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
            closed = [*session.due, *self.coordinator.closed()]
            if len(closed) == len(session.begun):
                self._left(session, closed)
        self._finish()


@dataclass(frozen=True, slots=True)
class _Job:
    window: OpenWindow
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
                window = job.window
                due = max(window.at, free) + seconds(window.step, rank, window.counts[rank])
                coordinator.stop.wait(max(0.0, due - time.perf_counter()))
            free = time.perf_counter()
            host = jax.tree.map(lambda leaf: leaf[0], jax.device_get(job.delivery))
            coordinator.delivered(rank, job.window.number, free, host)
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
    coordinator: Coordinator,
) -> None:
    coordinator.end()
    for jobs in queues:
        jobs.put(None)
    end_threads(threads)
