"""What is called while a run goes on, and what it sees."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elche_jax import _check as check
from elche_jax.engine.state import TrainState
from elche_jax.train.pipeline import Window
from elche_jax.train.step import TrainStep
from elche_jax.trainer.control import Control
from elche_jax.trainer.epochs import EpochMetrics


@dataclass(frozen=True)
class CallbackContext:
    """A run as a callback sees it.

    Attributes:
        train: The training step: `report()`, `counts`, `throughput` and more.
        state: The state after the last window. Its buffers are given up by the next one:
            copy what is to be kept.
        window: The last window; None if a run that goes on has trained none yet.
        metrics: Its metrics; reading one waits for the window.
        history: The epochs that are over.
    """

    train: TrainStep
    state: TrainState
    window: Window | None
    metrics: Mapping[str, Any]
    history: tuple[EpochMetrics, ...]
    _control: Control

    def stop(self) -> None:
        """Ends the run before its next window, with a checkpoint if there are any."""
        self._control.stop("callback")


class Callback:
    """Derive from it, and write the methods you need; all are called by the loop's thread.

    An exception ends the run: threads end, files are closed, and `fit`, or the handle's
    `join`, raises it.

    Raises:
        TypeError: A class derived from it has a method `on_...` that would never be called.

    Examples:
        >>> import elche_jax as elche
        >>> class Losses(elche.Callback):
        ...     def on_epoch(self, context, metrics):
        ...         print(metrics.epoch, metrics.loss)
        ...         if metrics.loss < 0.1:
        ...             context.stop()
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        known = [name for name in vars(Callback) if name.startswith("on_")]
        for name in vars(cls):
            if name.startswith("on_") and name not in known:
                rule = f"be one of {', '.join(known)}"
                todo = "It would never be called; rename it."
                raise TypeError(check.message(cls.__name__, name, rule, "a method", todo))

    def on_window(self, context: CallbackContext) -> None:
        """After every window was handed to the devices, before it is over."""

    def on_epoch(self, context: CallbackContext, metrics: EpochMetrics) -> None:
        """At the end of every epoch, after its evaluation."""

    def on_evaluation(self, context: CallbackContext, results: Mapping[str, Any]) -> None:
        """After every evaluation."""

    def on_checkpoint(self, context: CallbackContext, step: int) -> None:
        """When a checkpoint is on the disk; `step` is the number of windows it holds."""
