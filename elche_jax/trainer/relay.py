"""Where a trainer's run is recorded: its own sums, and the timelines there are."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from elche_jax.config import Recorder
from elche_jax.observe.records import WindowRecord
from elche_jax.trainer.epochs import DeviceSums


class Relay:
    """Hands every event of a run on; a `Recorder`.

    Args:
        own: The timeline of the trainer's configuration, or None.
    """

    def __init__(self, own: Recorder | None):
        self._own = [] if own is None else [own]
        self._recorders: list[Recorder] = list(self._own)
        self._metrics: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._running = False  # else it is a loop of the user's own
        self.devices = DeviceSums(0)

    def begin(self, world_size: int, *recorders: Recorder) -> None:
        """A run on so many devices begins, which these record besides."""
        self.devices = DeviceSums(world_size)
        self._recorders = [*self._own, *recorders]
        self._metrics.clear()
        self._running = True

    def end(self) -> None:
        """The run is over: only the configuration's timeline records on."""
        self._recorders = list(self._own)
        self._metrics.clear()
        self._running = False

    @property
    def recording(self) -> bool:
        """Whether anybody records besides the trainer."""
        return bool(self._recorders)

    def window(self, record: WindowRecord) -> None:
        """Takes a window that is over."""
        if self._running:
            self.devices.see(record)
        for recorder in self._recorders:
            recorder.window(record)

    def metrics(self, window: int, metrics: Mapping[str, Any]) -> None:
        """Takes the metrics of a window that is over."""
        if self._running:
            self._metrics.append((window, metrics))

    def add(self, kind: Any, **values: Any) -> None:
        """Takes an event of another kind."""
        for recorder in self._recorders:
            recorder.add(kind, **values)

    def take(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """The metrics that have come since, window by window."""
        while self._metrics:
            yield self._metrics.popleft()
