"""Where a trainer's run is recorded: its own sums, and the timelines there are."""

from collections import deque
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

import numpy as np

from elche_jax.cadence import WindowRecord
from elche_jax.config import Recorder
from elche_jax.observe.events import LossEvent
from elche_jax.observe.timeline import Timeline
from elche_jax.train.live_scheduler import windows_to
from elche_jax.trainer.epochs import DeviceSums


class TeeRecorder:
    """Hands every event of a run on; a `Recorder`.

    Args:
        own: The timeline of the trainer's configuration, or None.
    """

    def __init__(self, own: Recorder | None):
        self._own = own
        self._timeline: Timeline | None = None
        self._metrics: deque[tuple[int, int, Mapping[str, Any]]] = deque()
        self._running = False  # else it is a loop of the user's own
        self.devices = DeviceSums(0)

    def begin(self, world_size: int, timeline: Timeline | None) -> None:
        """A run on so many devices begins, which the timeline records besides."""
        self.devices = DeviceSums(world_size)
        self._timeline = timeline
        self._metrics.clear()
        self._running = True

    def end(self) -> None:
        """The run is over: only the configuration's timeline records on."""
        self._timeline = None
        self._metrics.clear()
        self._running = False

    def window(self, record: WindowRecord) -> None:
        """Takes a window that is over."""
        own, timeline = self._own, self._timeline
        if self._running:
            self.devices.see(record)
        if own is not None:
            windows_to(own)(record)
        if timeline is not None:
            timeline.measured(record)

    def window_metrics(self, window: int, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Takes the metrics of a window that is over."""
        if self._running:
            self._metrics.append((window, epoch, metrics))
        elif self._own is not None:
            self.loss(window, epoch, float(np.asarray(metrics["loss"])))

    def loss(self, window: int, epoch: int, loss: float) -> None:
        """Takes the loss of a window; one that is not finite is told of as a skip."""
        if isfinite(loss):
            self.add(LossEvent, window=window, epoch=epoch, loss=loss)

    def add(self, kind: Any, **values: Any) -> None:
        """Takes an event of another kind."""
        for recorder in (self._own, self._timeline):
            if recorder is not None:
                recorder.add(kind, **values)

    @property
    def waiting(self) -> int:
        """Windows whose metrics nobody has taken."""
        return len(self._metrics)

    def take(self) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
        """Window, epoch and metrics of the windows that have come since."""
        while self._metrics:
            yield self._metrics.popleft()
