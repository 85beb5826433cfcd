"""What is known of an epoch: sums while it goes on, `EpochMetrics` when it is over."""

import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elche_jax.cadence import WindowRecord

NO_MEANS = ("finite", "weight")
"""Metrics of a window that have no mean."""

AT_ONCE = 64
"""Windows that are summed up together: one by one, each costs three times as much."""


@dataclass(frozen=True)
class EpochMetrics:
    """One epoch.

    Attributes:
        epoch: Its number, from 0.
        windows: Windows of it.
        examples: Valid examples.
        loss: Mean loss, by weight, over the windows whose loss is finite; NaN if there is
            none. With `delay=1` a window is reported by the next one, and counts towards its epoch.
        metrics: The `aux` of `loss_fn`, the same means.
        evaluation: The metrics of the last evaluation in it; empty if there was none.
        seconds: How long it took; evaluations, and what callbacks do at its end, left out.
        examples_per_s: Valid examples per second of that.
        throughput: Microbatches per second of every device while it worked; NaN if it
            was not measured.
        share: Share of the microbatches that every device did; they sum to 1.
        busy: Share of the time in which every device worked, 0 to 1. Like `throughput` it
            is of the windows since the last resume.
        skipped: Windows that were not finite: dropped, or averaged without some device.
        whole: Whether it covers the whole epoch; False if the run ended in the middle, or
            began there from a checkpoint of another loop.
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
        """All metrics in one dict; those of the evaluation as `"eval_<name>"`."""
        found = {"loss": self.loss, **self.metrics}
        found |= {f"eval_{name}": value for name, value in self.evaluation.items()}
        return found | {"examples_per_s": self.examples_per_s, "seconds": self.seconds}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "EpochMetrics":
        """Makes one of what `dataclasses.asdict` gave, also by way of JSON."""
        plain: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**plain)


@dataclass
class EpochSums:
    """An epoch so far; plain numbers, for a checkpoint.

    Attributes:
        epoch: Its number.
        windows: Windows trained.
        examples: Valid examples of them.
        counts: Microbatches of every device.
        seconds: Seconds spent.
        skipped: Windows that were not finite.
        sums: For every metric the weighted sum and the weight.
        evaluation: The last evaluation's metrics.
        whole: False if some of its windows are missing here.
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

    def see(self, counts: Sequence[int], examples: int) -> None:
        """Takes a window that was handed to the devices."""
        self.windows += 1
        self.examples += examples
        if len(self.counts) != len(counts):  # at first, and on other devices than before
            self.counts = [0] * len(counts)
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]

    def fold(self, metrics: Mapping[str, Any]) -> float:
        """Takes the metrics of a window; gives its loss.

        With late exchanges the first windows have nothing to report: weight 0 or NaN.
        """
        # by numpy, which reads the buffer: `float` of an array takes six times as long
        found = {name: np.asarray(value) for name, value in metrics.items()}
        weight, loss = float(found["weight"]), float(found["loss"])
        self.skipped += not found["finite"].all()
        if not math.isfinite(loss) or not weight > 0:
            return loss
        for name, value in found.items():
            if name not in NO_MEANS and value.ndim == 0:
                total = self.sums.setdefault(name, [0.0, 0.0])
                total[0] += weight * float(value)
                total[1] += weight
        return loss

    def means(self) -> dict[str, float]:
        """The means so far, by weight."""
        return {name: total / weight for name, (total, weight) in self.sums.items()}

    def metrics(self, devices: "DeviceSums", whole: bool) -> EpochMetrics:
        """The metrics of the epoch; what the devices did in it is then forgotten."""
        throughput, busy = devices.of(self.epoch)
        devices.forget(self.epoch)
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
    """What the devices did in the epochs under way; threads report, the loop reads."""

    def __init__(self, world_size: int):
        self._lock = threading.Lock()
        self._world_size = world_size
        self._new: deque[WindowRecord] = deque()
        self._epochs: dict[int, NDArray[np.float64]] = {}  # counts, busy and wall times

    def see(self, record: WindowRecord) -> None:
        """Takes a window that is over."""
        self._new.append(record)
        if len(self._new) >= AT_ONCE:
            with self._lock:
                self._sum_up()

    def _sum_up(self) -> None:
        while self._new:
            record = self._new.popleft()
            if record.steady:  # times of a window that compiled say nothing
                busy = record.busy_ms or (record.wall_ms,)
                sums = np.array([record.counts, busy, [record.wall_ms] * len(busy)])
                self._epochs[record.epoch] = self._epochs.get(record.epoch, 0.0) + sums

    def forget(self, epoch: int) -> None:
        """Drops what is known of an epoch."""
        with self._lock:
            self._sum_up()
            self._epochs.pop(epoch, None)

    def of(self, epoch: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Throughput and busy share of an epoch."""
        with self._lock:
            self._sum_up()
            counts, busy, wall = self._epochs.get(epoch, np.zeros((3, self._world_size)))
        with np.errstate(divide="ignore", invalid="ignore"):
            throughput = np.where(busy > 0, 1e3 * counts / busy, np.nan)
            working = np.where(wall > 0, np.minimum(1.0, busy / wall), 0.0)
        return tuple(throughput.tolist()), tuple(working.tolist())
