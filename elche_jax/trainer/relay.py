"""Where a trainer's run is recorded: its own sums, and the timelines there are."""

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
        self._more: list[Recorder] = []
        self.devices = DeviceSums(0)

    def begin(self, world_size: int, *recorders: Recorder) -> None:
        """A run on so many devices begins, which these record besides."""
        self.devices = DeviceSums(world_size)
        self._more = list(recorders)

    def end(self) -> None:
        """The run is over: those besides record no more."""
        self._more = []

    def window(self, record: WindowRecord) -> None:
        """Takes a window that is over."""
        self.devices.see(record)
        for recorder in (*self._own, *self._more):
            recorder.window(record)

    def add(self, kind: Any, **values: Any) -> None:
        """Takes an event of another kind."""
        for recorder in (*self._own, *self._more):
            recorder.add(kind, **values)
