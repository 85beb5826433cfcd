"""Metrics of an epoch: running sums during it, `EpochMetrics` at its end."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elche_jax.cadence import WindowRecord

NO_MEANS = ("finite", "weight")
"""Metrics of a window that are not averaged."""


@dataclass(frozen=True)
class EpochMetrics:
    """Metrics of one epoch.

    Attributes:
        epoch: Index of the epoch, from 0.
        windows: Number of windows.
        examples: Number of valid examples.
        loss: Weighted mean loss over the windows with a finite loss; NaN if there are none.
            With `delay=1` the next window reports a window's loss, which counts in the epoch of
            that next window.
        metrics: Weighted means of the `aux` metrics of `loss_fn`, over the same windows; with
            local steps also of `workers` and `exchange_bytes`, see `TrainStep`.
        evaluation: Metrics of the epoch's last evaluation; empty if there was none.
        seconds: Duration in seconds, excluding evaluations and end-of-epoch callbacks.
        examples_per_s: Valid examples per second of that duration.
        throughput: Microbatches per second of each device while it was busy; NaN if not
            measured.
        share: Fraction of the microbatches done by each device; sums to 1.
        busy: Fraction of the time each device was busy, 0 to 1. Like `throughput`, it covers
            the windows since the last resume that were timed, at least one in six.
        skipped: Windows with non-finite values: dropped, or averaged without some devices.
        whole: Whether the metrics cover the whole epoch; False if the run stopped midway or
            resumed midway from the checkpoint of a loop other than `Trainer`.
    """

    epoch: int
    windows: int
    examples: int
    loss: float
    metrics: Mapping[str, float]
    evaluation: Mapping[str, float]
    seconds: float
    examples_per_s: float
    throughput: tuple[float, ...]
    share: tuple[float, ...]
    busy: tuple[float, ...]
    skipped: int = 0
    whole: bool = True

    @property
    def values(self) -> dict[str, float]:
        """All metrics in one dict; evaluation metrics are named `"eval_<name>"`."""
        found = {"loss": self.loss, **self.metrics}
        found |= {f"eval_{name}": value for name, value in self.evaluation.items()}
        return found | {"examples_per_s": self.examples_per_s, "seconds": self.seconds}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "EpochMetrics":
        """Build metrics from the output of `dataclasses.asdict`, possibly read back from JSON."""
        plain: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**plain)


@dataclass
class EpochSums:
    """Running sums of an epoch; plain numbers, so that a checkpoint can hold them.

    Attributes:
        epoch: Index of the epoch.
        windows: Windows trained so far.
        examples: Valid examples in those windows.
        counts: Microbatches of each device.
        seconds: Seconds spent.
        skipped: Windows with non-finite values.
        sums: Weighted sum and total weight of each metric.
        evaluation: Metrics of the last evaluation.
        whole: False if some windows of the epoch are not included.
    """

    epoch: int
    windows: int = 0
    examples: int = 0
    counts: list[int] = field(default_factory=list)
    seconds: float = 0.0
    skipped: int = 0
    sums: dict[str, list[float]] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)
    whole: bool = True

    def add_window(self, counts: Sequence[int], examples: int) -> None:
        """Add a window that was dispatched to the devices."""
        self.windows += 1
        self.examples += examples
        if len(self.counts) != len(counts):  # the first window, or a resume on other devices
            self.counts = [0] * len(counts)
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]

    def add_metrics(self, metrics: Mapping[str, Any]) -> float:
        """Add the metrics of a window and return its loss.

        With late exchanges the first windows report nothing: a weight of 0 or a NaN loss.
        """
        # np.asarray reads the buffer; float() of a jax.Array is six times slower
        found = {name: np.asarray(value) for name, value in metrics.items()}
        weight, loss = float(found["weight"]), float(found["loss"])
        self.skipped += not found["finite"].all()
        known = math.isfinite(loss) and weight > 0
        for name, value in found.items():
            if name not in NO_MEANS and value.ndim == 0:
                total = self.sums.setdefault(name, [0.0, 0.0])
                if known:
                    total[0] += weight * float(value)
                    total[1] += weight
        return loss

    def means(self) -> dict[str, float]:
        """Return the weighted means so far, NaN if no window with a finite loss is among them."""
        pairs = self.sums.items()
        return {name: total / weight if weight else math.nan for name, (total, weight) in pairs}

    def metrics(self, devices: "DeviceSums", whole: bool) -> EpochMetrics:
        """Return the metrics of the epoch and drop its device times."""
        throughput, busy = devices.rates(self.epoch)
        devices.drop(self.epoch)
        work, means = sum(self.counts), self.means()
        return EpochMetrics(
            epoch=self.epoch,
            windows=self.windows,
            examples=self.examples,
            loss=means.pop("loss", math.nan),
            metrics=means,
            evaluation=dict(self.evaluation),
            seconds=self.seconds,
            examples_per_s=self.examples / self.seconds if self.seconds > 0 else 0.0,
            throughput=throughput,
            share=tuple(count / work for count in self.counts),
            busy=busy,
            skipped=self.skipped,
            whole=whole and self.whole,
        )


class DeviceSums:
    """Busy times of the devices per epoch; any thread may add, only the loop's thread reads."""

    def __init__(self, world_size: int):
        self._world_size = world_size
        self._new: deque[WindowRecord] = deque()  # appending and popping need no lock
        self._epochs: dict[int, NDArray[np.float64]] = {}  # counts, busy and wall times

    def add(self, record: WindowRecord) -> None:
        """Add a finished window."""
        self._new.append(record)

    def sum_up(self) -> None:
        """Sum up the added windows; several together cost less than one by one."""
        while self._new:
            record = self._new.popleft()
            if record.steady:  # times of a window that compiled are meaningless
                busy = record.busy_ms or (record.wall_ms,)
                sums = np.array([record.counts, busy, [record.wall_ms] * len(busy)])
                self._epochs[record.epoch] = self._epochs.get(record.epoch, 0.0) + sums

    def drop(self, epoch: int) -> None:
        """Drop the sums of an epoch."""
        self.sum_up()
        self._epochs.pop(epoch, None)

    def rates(self, epoch: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return throughput and busy share of each device in an epoch."""
        self.sum_up()
        counts, busy, wall = self._epochs.get(epoch, np.zeros((3, self._world_size)))
        with np.errstate(divide="ignore", invalid="ignore"):
            throughput = np.where(busy > 0, 1e3 * counts / busy, np.nan)
            working = np.where(wall > 0, np.minimum(1.0, busy / wall), 0.0)
        return tuple(throughput.tolist()), tuple(working.tolist())
