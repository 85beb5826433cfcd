"""When `Trainer` evaluates, and when it stops early."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from elche_jax import _check as check
from elche_jax.data.source import IterableSource, as_source


@dataclass(frozen=True)
class Evaluation(check.CheckedFields):
    """A periodic evaluation run by `Trainer` on all devices, see `build_eval_step`.

    Attributes:
        metric_fn: `metric_fn(params, batch)`, with model state
            `metric_fn(params, model_state, batch)`, returns a dict of metrics. Metrics
            that are not scalars are passed to callbacks only.
        data: Evaluation data, in any form that `TrainStep.windows` accepts except an iterator, as
            it is read in every evaluation.
        batch_size: Examples per microbatch; None for an iterable.
        every_epochs: Evaluate at the end of every N-th epoch, N at least 1; or None.
        every_windows: Evaluate after every N-th window, N at least 1; or None.
        mask_key: As in `TrainStep.windows`.

    Raises:
        TypeError: `metric_fn` is not callable, `data` is an iterator, a number is not an integer,
            or `batch_size` is missing.
        ValueError: A number is below 1, or `every_epochs` and `every_windows` are both None.

    Examples:
        >>> from elche_jax import Evaluation
        >>> def metric_fn(params, batch):
        ...     return {"error": (batch["x"] @ params["w"] - batch["y"]) ** 2}
        >>> Evaluation(metric_fn, {"x": [], "y": []}, 32, every_epochs=5).every_epochs
        5
    """

    metric_fn: Callable[..., Any]
    data: Any
    batch_size: int | None = field(default=None, metadata={"low": 1})
    every_epochs: int | None = field(default=1, metadata={"low": 1})
    every_windows: int | None = field(default=None, metadata={"low": 1})
    mask_key: str | None = None

    def __post_init__(self) -> None:
        where = "Evaluation"
        check.instance(where, "metric_fn", self.metric_fn, Callable, "be callable")
        super().__post_init__()
        if isinstance(self.data, Iterator):
            rule, got = "be readable in every evaluation", type(self.data).__name__
            todo = "Pass arrays, a dataset, or an object whose __iter__ starts anew."
            raise TypeError(check.message(where, "data", rule, got, todo))
        # checked here, as the evaluation step would raise only after the first epoch
        if self.batch_size is None and not isinstance(as_source(self.data), IterableSource):
            rule = "be an integer unless data is an iterable of microbatches"
            raise TypeError(check.message(where, "batch_size", rule, None))
        if self.every_epochs is None and self.every_windows is None:
            rule = "be at least 1 if every_windows is None"
            raise ValueError(check.message(where, "every_epochs", rule, None))


@dataclass(frozen=True)
class EarlyStopping(check.CheckedFields):
    """Stop a run once a metric has stopped improving.

    Attributes:
        monitor: Name of the metric: an evaluation metric, or `"loss"` or another training
            metric, which are read at the end of each epoch. With an evaluation, a training metric
            can stop the run only after the first evaluation, which may have a metric of that name.
        mode: `"min"` or `"max"`: whether lower or higher values are better.
        patience: Number of consecutive values without improvement after which the run stops,
            at least 1. A value that is not finite is not an improvement.
        min_delta: Smallest change that counts as an improvement, at least 0.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of range.

    Examples:
        >>> from elche_jax import EarlyStopping
        >>> EarlyStopping("accuracy", mode="max", patience=5)
        EarlyStopping(monitor='accuracy', mode='max', patience=5, min_delta=0.0)
    """

    monitor: str = "loss"
    mode: str = "min"
    patience: int = field(default=3, metadata={"low": 1})
    min_delta: float = field(default=0.0, metadata={"low": 0})

    def __post_init__(self) -> None:
        where = "EarlyStopping"
        check.instance(where, "monitor", self.monitor, str)
        check.one_of(where, "mode", self.mode, ("min", "max"))
        super().__post_init__()


@dataclass(frozen=True)
class Patience:
    """Progress of `EarlyStopping` towards its patience.

    Attributes:
        best: The best value so far; None before the first.
        worse: Number of values since then.
    """

    best: float | None = None
    worse: int = 0

    def update(self, rule: EarlyStopping, value: float) -> "Patience":
        """Return the state after one more value."""
        sign = 1 if rule.mode == "max" else -1
        better = self.best is None or sign * (value - self.best) > rule.min_delta
        if math.isfinite(value) and better:
            return Patience(value, 0)
        return replace(self, worse=self.worse + 1)

    def over(self, rule: EarlyStopping) -> bool:
        """Return whether the run should stop."""
        return self.worse >= rule.patience
