"""What a run gives."""

from dataclasses import dataclass, field
from typing import Any

from elche_jax.engine.state import TrainState
from elche_jax.observe.report import RunReport
from elche_jax.trainer.epochs import EpochMetrics

PyTree = Any


@dataclass(frozen=True)
class FitResult:
    """What `Trainer.fit` returns.

    Attributes:
        params: One copy of the parameters, averaged if the devices have their own; on
            the first device.
        model_state: The same of the model state, or None.
        history: Every epoch, those before a resume as well; the last one may not be whole.
        stopped: Why it ended: `"epochs"` (all done), `"max_windows"`, `"max_seconds"`,
            `"early_stopping"`, `"callback"`, `"stop"` (`Handle.stop`), `"interrupt"` (Ctrl-C)
            or `"exit"` (the program ended while a run that it had started went on).
        windows: Windows of the run, those before a resume as well.
        seconds: How long this call took.
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
        """The loss of the last epoch; NaN if there was none."""
        return self.history[-1].loss if self.history else float("nan")
