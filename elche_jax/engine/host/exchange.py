"""An exchange on the host: one thread per device takes its deliveries, one averages them."""

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
    `closed`), then `combining`; `done` is told of every window once it was registered
    with `combining` and is closed (and, without running ahead, applied).

    Attributes:
        session: What the runner knows of the state it has returned last; let go when it is
            closed.
        used: Whether a window was launched.
        limits: How long to wait.

    Args:
        world_size: Number of devices.
        averaging: Averages the deliveries of a window.
        limits: How long to wait.
        seconds: Makes devices slower on purpose; or None.
        done: Told of every window that is over, in order.
        learned: Told of the times of a window that was over without some device, once that
            has delivered.
        failed: Told of an exception in a thread.
        left: Given the session at the close, and what came of the windows that the devices have
            not taken up, if all of them are closed.
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
        """Ranks of the devices that owe something they should have delivered."""
        with self._coordinator.changed:
            return frozenset(self._coordinator.late)

    def admit(self, counts: tuple[int, ...]) -> frozenset[int]:
        """Waits until a window of these counts takes no device too far ahead; gives the
        ranks that are late then, never all of them."""
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
        """Hands over what the devices deliver of a window, arrays that are yet to come.

        Args:
            number: Number of the dispatch; they come in order.
            at: When the dispatch began.
            counts: Microbatches per device.
            step: Number of the window in the training state.
            deliveries: By rank, leaves `(1, ...)` on the device; None of one that got no
                programs.
            ahead: Whether the loop goes on before the window is closed.
        """
        self.used = True
        absent = frozenset(rank for rank, one in enumerate(deliveries) if one is None)
        self._coordinator.open(number, at, counts, step, absent, ahead)
        for rank, (jobs, delivery) in enumerate(zip(self._queues, deliveries, strict=True)):
            if delivery is not None:
                jobs.put(_Job(number, at, counts[rank], step, delivery))

    def outcome(self, number: int) -> Outcome:
        """Waits until a window is closed."""
        return self._coordinator.wait(number)

    def closed(self) -> list[tuple[int, Outcome]]:
        """The windows closed since it was asked last, in order."""
        return self._coordinator.take_closed()

    def next_closed(self) -> tuple[int, Outcome]:
        """Waits for the oldest window that is closed, of those not asked for yet."""
        return self._coordinator.next_closed()

    def applied(self, number: int, ends: Sequence[float]) -> None:
        """Says when the devices had taken up the average of a window."""
        self._coordinator.applied(number, tuple(ends))

    def abandon(self, number: int) -> None:
        """Nobody is to hear of a window any more."""
        self._coordinator.abandon(number)

    def accumulating(self, window: int, dispatched: float, token: Any) -> None:
        """Nothing to do: it was launched."""

    def combining(self, window: int, dispatched: float, token: Any) -> None:
        """The loop is ready to hear of a window."""
        self._coordinator.register(window)

    def wait(self, changed: threading.Condition, until: Callable[[], object]) -> None:
        """See `Clock.wait`."""
        with interruptible(), changed:
            changed.wait_for(until)

    def close(self) -> None:
        """Ends the threads; windows still on the devices are not averaged. Idempotent.

        A thread that waits for a device cannot be interrupted. It is given half a second
        and otherwise ends by itself as soon as the device is done.
        """
        session, self.session = self.session, None  # it holds a state
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
            del job, host  # nothing is held while it waits
        except BaseException as error:  # handed to the loop, which raises it
            coordinator.failed(error)
            return


def _average(coordinator: Coordinator, averaging: Averaging) -> None:
    while (found := coordinator.next_complete()) is not None:
        window, deliveries = found
        try:
            coordinator.close(window, averaging(deliveries, window.step))
            del found, window, deliveries  # nothing is held while it waits
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
