"""An exchange on the host: one thread per device fetches deliveries, another averages them."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import jax

from elche_jax._processes import ExchangeLost
from elche_jax._turns import TURNS
from elche_jax.engine.host.average import Average
from elche_jax.engine.host.coordinator import Coordinator, OpenWindow, Outcome
from elche_jax.engine.host.program import Delivery
from elche_jax.engine.host.session import Session
from elche_jax.engine.job import Measured
from elche_jax.engine.loop import Seconds
from elche_jax.engine.mapped import MappedAcross
from elche_jax.engine.survey import Survey
from elche_jax.engine.threads import DeviceThreads
from elche_jax.engine.timing import Clock, WindowTimes

Averaging = Callable[[Sequence[Delivery | None], int, Survey | None], Average]
Left = Callable[[Session, list[tuple[int, Outcome]]], None]


class LiveExchange(Clock):
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
        left: Called on close with the session and the outcomes of its windows in flight, in
            order, if all of these windows are closed.
    """

    ends_windows: ClassVar[bool] = True

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
        self._loop: threading.Thread | None = None
        self.coordinator = coordinator
        # threads refer only to the coordinator, so they end with the last reference to self
        self._fetch = partial(_fetch, coordinator, seconds)
        self._threads = DeviceThreads(
            "fetch", coordinator.world_size, coordinator.failed, coordinator.end,
            {"average": partial(TURNS.of_windows, partial(_average, coordinator, averaging))},
        )  # fmt: skip

    @property
    def late(self) -> frozenset[int]:
        """Ranks of the devices whose deliveries are overdue."""
        with self.coordinator.changed:
            return frozenset(self.coordinator.late)

    @property
    def lost(self) -> int | None:
        """See `Clock.lost`."""
        return self.coordinator.lost

    @property
    def patience(self) -> float:
        """See `Clock.patience`: the timeout if the next run can continue the session."""
        session = self.session
        # if another thread drops this as garbage, it could wait for itself; when the process ends,
        # no run continues
        waits = self._loop is threading.current_thread() and threading.main_thread().is_alive()
        if session is None or not session.begun or session.state() is None or not waits:
            return 0.0
        return self.coordinator.limits.timeout_s

    def launch(self, window: OpenWindow, deliveries: Sequence[Delivery | None]) -> None:
        """Hand over the deliveries of a window, whose arrays are still being computed.

        Args:
            window: The window; numbers must ascend.
            deliveries: By rank, leaves `(1, ...)` on the device; None for absent devices.
        """
        self.used, self._loop = True, threading.current_thread()
        if window.survey is not None:  # in a job of several processes
            TURNS.begin(self.coordinator)
            MappedAcross.settle()  # all that the loop has launched, before the thread begins
        self.coordinator.open(window)
        for rank, delivery in enumerate(deliveries):
            if delivery is not None:
                self._threads.put(rank, partial(self._fetch, rank, window, delivery))

    def combining(self, window: int, dispatched: float, token: Any, timed: bool = True) -> None:
        """Register a window: from now on `done` may be called with it."""
        self.coordinator.register(window)

    def accumulated(self, window: int) -> WindowTimes:
        """See `Clock.accumulated`."""
        return self.coordinator.accumulated(window)

    def close(self) -> None:
        """End the threads; windows still on the devices are not averaged. Idempotent.

        Gradients of such windows are in no later delivery, see `patience`.
        """
        session, self.session = self.session, None  # do not keep the state alive
        if session is not None and self._left is not None:
            # by number: the loop may not have read outcomes from before this session
            known = dict([*session.due, *self.coordinator.closed()])
            begun = [window.number for window in session.begun]
            # otherwise the next run begins a new session, whose first delivery includes local steps
            if known.keys() >= set(begun):
                self._left(session, [(number, known[number]) for number in begun])
        self._threads.close()


def _fetch(
    coordinator: Coordinator,
    seconds: Seconds | None,
    rank: int,
    window: OpenWindow,
    delivery: Delivery,
) -> None:
    """Fetch a delivery from its device."""
    jax.block_until_ready(delivery)
    # emulated here: on a CPU, programs with a host callback run one device after the other
    if seconds is not None:
        begun = max(window.at, coordinator.free[rank] or 0.0)
        due = begun + seconds(window.step, rank, window.counts[rank])
        # not a sleep, so that closing the run ends it
        coordinator.stop.wait(max(0.0, due - time.perf_counter()))
    now = time.perf_counter()
    host = jax.tree.map(lambda leaf: leaf[0], jax.device_get(delivery))
    coordinator.delivered(rank, window, now, host)


def _average(coordinator: Coordinator, averaging: Averaging) -> None:
    while (found := coordinator.next_complete()) is not None:
        window, deliveries = found
        try:
            if window.survey is not None:
                _measure(coordinator, window, window.survey)
            average = averaging(deliveries, window.step, window.survey)
            coordinator.close(window, average)
            del average, found, window, deliveries  # hold no arrays while waiting
        except ExchangeLost:  # the loop runs the window again, and those after it
            coordinator.lose(found[0])
            del found, window, deliveries
        except BaseException as error:  # handed to the loop, which raises it
            coordinator.failed(error)
            return


def _measure(coordinator: Coordinator, window: OpenWindow, survey: Survey) -> None:
    """Measure what this process tells the others about a window that is being averaged."""
    rows = Measured(*survey.take().T)
    rows.left_out[list(window.late)] = True
    rows.steady[:] *= not window.late
    with coordinator.changed:
        rows.late[list(coordinator.late)] = True
