"""When to evaluate, and when to stop for what came of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from elche_jax import _check as check


@dataclass(frozen=True)
class Evaluation:
    """An evaluation that `Trainer` makes now and then, on all devices, see `build_eval_step`.

    Attributes:
        metric_fn: `metric_fn(params, batch)`, with model state
            `metric_fn(params, model_state, batch)`, returns a dict of metrics. Those that
            are not a single number are passed to callbacks only.
        data: The data, as `TrainStep.windows` takes them.
        batch_size: Examples per microbatch; None for an iterable.
        every_epochs: At the end of every so many epochs, at least 1; or None.
        every_windows: After every so many windows, at least 1; or None.
        mask_key: As in `TrainStep.windows`.

    Raises:
        TypeError: `metric_fn` is not callable, a number is no integer.
        ValueError: A number is below 1; both `every_epochs` and `every_windows` are None.

    Examples:
        >>> from elche_jax import Evaluation
        >>> def metric_fn(params, batch):
        ...     return {"error": (batch["x"] @ params["w"] - batch["y"]) ** 2}
        >>> Evaluation(metric_fn, {"x": [], "y": []}, 32, every_epochs=5).every_epochs
        5
    """

    metric_fn: Callable[..., Any]
    data: Any
    batch_size: int | None = None
    every_epochs: int | None = 1
    every_windows: int | None = None
    mask_key: str | None = None

    def __post_init__(self) -> None:
        where = "Evaluation"
        if not callable(self.metric_fn):
            got = check.describe(self.metric_fn)
            raise TypeError(check.message(where, "metric_fn", "be callable", got))
        for name in ("batch_size", "every_epochs", "every_windows"):
            if getattr(self, name) is not None:
                check.integer(where, name, getattr(self, name), low=1)
        if self.every_epochs is None and self.every_windows is None:
            rule = "be at least 1 where every_windows is None"
            raise ValueError(check.message(where, "every_epochs", rule, None))


@dataclass(frozen=True)
class EarlyStopping:
    """Ends a run when a metric has stopped getting better.

    Attributes:
        monitor: The metric: one of the evaluation, or `"loss"` or another one of the
            training's, which are read at the end of every epoch.
        mode: `"min"` or `"max"`: which of its values are better.
        patience: The run ends after so many values in a row that are not better than the
            best, at least 1. One that is not a number is not better.
        min_delta: By how much a value must be better, at least 0.

    Raises:
        TypeError: A value is of another type.
        ValueError: A value is out of range.

    Examples:
        >>> from elche_jax import EarlyStopping
        >>> EarlyStopping("accuracy", mode="max", patience=5)
        EarlyStopping(monitor='accuracy', mode='max', patience=5, min_delta=0.0)
    """

    monitor: str = "loss"
    mode: str = "min"
    patience: int = 3
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        where = "EarlyStopping"
        check.instance(where, "monitor", self.monitor, str)
        check.one_of(where, "mode", self.mode, ("min", "max"))
        check.integer(where, "patience", self.patience, low=1)
        check.real(where, "min_delta", self.min_delta, low=0)


@dataclass(frozen=True)
class Patience:
    """How `EarlyStopping` stands.

    Attributes:
        best: The best value so far; None before the first.
        worse: Values since then.
    """

    best: float | None = None
    worse: int = 0

    def see(self, rule: EarlyStopping, value: float) -> "Patience":
        """After one more value."""
        sign = 1 if rule.mode == "max" else -1
        number = not math.isnan(value)
        if number and (self.best is None or sign * (value - self.best) > rule.min_delta):
            return Patience(value, 0)
        return replace(self, worse=self.worse + 1)

    def over(self, rule: EarlyStopping) -> bool:
        """Whether the run is to end."""
        return self.worse >= rule.patience
