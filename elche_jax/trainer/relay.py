"""Where a trainer's run is recorded: its own sums, and the timelines there are."""

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

import numpy as np

from elche_jax.config import Recorder
from elche_jax.observe.events import LossEvent
from elche_jax.observe.records import WindowRecord
from elche_jax.observe.timeline import Timeline
from elche_jax.trainer.epochs import DeviceSums

GATHER_S = 0.1
"""How long windows are gathered before the run's timeline has them."""

AT_ONCE = 64
"""Most windows of a moment: together they cost a third of what they cost one by one."""


class Relay:
    """Hands every event of a run on; a `Recorder`.

    Threads report, the loop reads. The trainer's own sums and the timeline of the run's folder
    have windows a moment later, some at once, with the time at which they were over.

    Args:
        own: The timeline of the trainer's configuration, or None. It has all at once.
    """

    def __init__(self, own: Recorder | None):
        self._own = own
        self._timeline: Timeline | None = None
        self._windows: deque[tuple[float, WindowRecord]] = deque()
        self._metrics: deque[tuple[int, int, Mapping[str, Any]]] = deque()
        self._lock = threading.Lock()
        self._due = 0.0
        self._running = False  # else it is a loop of the user's own
        self._devices = DeviceSums(0)

    def begin(self, world_size: int, timeline: Timeline | None) -> None:
        """A run on so many devices begins, which the timeline records besides."""
        self._devices = DeviceSums(world_size)
        self._timeline = timeline
        self._windows.clear()
        self._metrics.clear()
        self._running = True

    def end(self) -> None:
        """The run is over: only the configuration's timeline records on."""
        self.flush()
        self._timeline = None
        self._metrics.clear()
        self._running = False

    @property
    def devices(self) -> DeviceSums:
        """What the devices did."""
        self.flush()
        return self._devices

    def window(self, record: WindowRecord) -> None:
        """Takes a window that is over."""
        if self._own is not None:
            self._own.window(record)
        if self._running:
            now = time.perf_counter()
            self._windows.append((now, record))
            if now >= self._due or len(self._windows) >= AT_ONCE:
                self.flush()

    def flush(self) -> None:
        """Hands on the windows that were gathered."""
        with self._lock:
            while self._windows:
                at, record = self._windows.popleft()
                self._devices.see(record)
                if self._timeline is not None:
                    self._timeline.window(record, at)
            self._due = time.perf_counter() + GATHER_S

    def window_metrics(self, window: int, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Takes the metrics of a window that is over."""
        if self._running:
            self._metrics.append((window, epoch, metrics))
        else:
            self.loss(window, epoch, float(np.asarray(metrics["loss"])))

    def loss(self, window: int, epoch: int, loss: float) -> None:
        """Takes the loss of a window; one that is not finite is told of as a skip."""
        if isfinite(loss) and (self._own is not None or self._timeline is not None):
            self.add(LossEvent, window=window, epoch=epoch, loss=loss)

    def add(self, kind: Any, **values: Any) -> None:
        """Takes an event of another kind."""
        if self._own is not None:
            self._own.add(kind, **values)
        if self._timeline is not None:
            if self._windows:  # what comes after them is told after them
                self.flush()
            self._timeline.add(kind, **values)

    @property
    def waiting(self) -> int:
        """Windows whose metrics nobody has taken."""
        return len(self._metrics)

    def take(self) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
        """Window, epoch and metrics of the windows that have come since."""
        while self._metrics:
            yield self._metrics.popleft()
