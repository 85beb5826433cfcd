"""Callbacks of a training run and the context they are called with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elche_jax import _check as check
from elche_jax.engine.state import TrainState
from elche_jax.train.in_flight import Window
from elche_jax.train.step import TrainStep
from elche_jax.trainer.control import Control
from elche_jax.trainer.epochs import EpochMetrics


@dataclass(frozen=True)
class CallbackContext:
    """The view of a training run that callbacks are called with.

    Attributes:
        train: The training step: `report()`, `counts`, `throughput` and more.
        state: The state after the last window. The next window donates its buffers: copy
            whatever you keep.
        window: The last window; None if a resumed run has not trained one yet.
        metrics: Metrics of that window; reading one waits for the window to finish.
        history: Metrics of the finished epochs.
    """

    train: TrainStep
    state: TrainState
    window: Window | None
    metrics: Mapping[str, Any]
    history: tuple[EpochMetrics, ...]
    _control: Control

    def stop(self) -> None:
        """Stop the run before its next window, with a final checkpoint if checkpoints are on.

        In a job of several processes, a call in one suffices: all stop once it has told the others,
        three windows later.
        """
        self._control.stop("callback")


class Callback:
    """Base class for callbacks: subclass it and override the hooks you need.

    All hooks run on the thread of the training loop; in a job of several processes, in every
    process. An exception ends the run: threads are stopped, files are closed, and `Trainer.fit` or
    `Handle.join` raises it.

    Raises:
        TypeError: A subclass defines an unknown `on_...` method, which would never be called.

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
        """Called after each window is dispatched to the devices, before it finishes."""

    def on_epoch(self, context: CallbackContext, metrics: EpochMetrics) -> None:
        """Called at the end of each epoch, after its evaluation."""

    def on_evaluation(self, context: CallbackContext, results: Mapping[str, Any]) -> None:
        """Called after each evaluation."""

    def on_checkpoint(self, context: CallbackContext, step: int) -> None:
        """Called once a checkpoint is on disk; `step` is the number of windows trained by then."""
