"""The result of a run."""

from dataclasses import dataclass, field
from typing import Any

from elche_jax.engine.state import TrainState
from elche_jax.observe.report import RunReport
from elche_jax.trainer.epochs import EpochMetrics

PyTree = Any


@dataclass(frozen=True)
class FitResult:
    """The result of `Trainer.fit`.

    Attributes:
        params: One copy of the parameters on the first device, averaged if they differ between
            devices.
        model_state: One copy of the model state, or None.
        history: Metrics of all epochs, including those before a resume; the last may be partial.
        stopped: Why the run ended: `"epochs"` (all done), `"max_windows"`, `"max_seconds"`,
            `"early_stopping"`, `"callback"`, `"stop"` (`Handle.stop`), `"interrupt"` (Ctrl-C)
            or `"exit"` (the program ended during a background run).
        windows: Windows trained, including those before a resume.
        seconds: Duration of this call.
        report: Speeds, counts and busy shares, see `TrainStep.report`.
        state: The state on the devices, for `TrainStep` and `elche.predict`.
    """

    params: PyTree = field(repr=False)
    model_state: PyTree = field(repr=False)
    history: tuple[EpochMetrics, ...]
    stopped: str
    windows: int
    seconds: float
    report: RunReport = field(repr=False)
    state: TrainState = field(repr=False)

    @property
    def loss(self) -> float:
        """Loss of the last epoch; NaN if there was none."""
        return self.history[-1].loss if self.history else float("nan")
