"""What a training step requires of the recorder of its run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from elche_jax.cadence import WindowRecord
from elche_jax.config import Recorder
from elche_jax.engine.metric_names import Reserved
from elche_jax.observe.timeline import Timeline


@runtime_checkable
class EpochRecorder(Recorder, Protocol):
    """A recorder that sums up epochs in every process of a job, like that of a `Trainer`.

    It reads losses from the metrics itself when it sums them up.

    Attributes:
        reserved: Names that the loss's metrics must not use.
    """

    reserved: Sequence[Reserved]

    def shows_windows(self) -> bool:
        """Return whether it shows each window; if so, all windows must be timed."""
        ...

    def window_metrics(self, window: int, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a finished window, which are on the devices."""
        ...


def windows_to(recorder: Recorder) -> Callable[[WindowRecord], None]:
    """Return the method of a recorder that takes windows measured by the training step.

    That is `measured` for `Timeline` itself, and `window` for any other recorder, including
    subclasses, which may override `window`.
    """
    return recorder.measured if type(recorder) is Timeline else recorder.window
