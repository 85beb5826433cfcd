"""The scheduler at work: takes measured windows, keeps records, hands out plans.

The one mutable home of the cadence's state. The prefetch thread asks for plans, the
watching threads report windows, the user reads; a lock keeps them apart.
"""

import logging
import threading
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elche_jax import _check as check
from elche_jax.cadence import STABLE, Verdict, WindowReport, stronger
from elche_jax.cadence.scheduler import Scheduler, SchedulerState
from elche_jax.config import Recorder
from elche_jax.observe.events import (
    AnchorEvent,
    CompileEvent,
    LossEvent,
    RunEvent,
    SkipEvent,
    VerdictEvent,
)
from elche_jax.observe.records import WindowRecord
from elche_jax.observe.report import imbalance
from elche_jax.observe.timeline import Timeline
from elche_jax.train import speeds

logger = logging.getLogger("elche_jax")

RECORDS_KEPT = 1024
"""Windows that records, and thus the report, look back on."""

HINT_AFTER = 20
"""Steady windows after which an imbalance is worth a hint."""

HINT_MS = 1.0
"""Mean busy time of the devices in a window below which times are mostly noise."""

HINT_ABOVE = 0.15
"""Share of the machine that may idle before the hint comes."""


def windows_to(recorder: Recorder) -> Callable[[WindowRecord], None]:
    """What takes the windows that a training step has measured itself.

    Whatever is no `Timeline` itself, also where it derives from one, has its own `window`.
    """
    return recorder.measured if type(recorder) is Timeline else recorder.window


@dataclass(frozen=True)
class Measured:
    """A window as it was dispatched: what a record needs besides the times.

    `asked` is the moment the loop asked for it, `time.perf_counter` seconds; `first` the
    number of its first microbatch in the epoch.
    """

    window: int
    epoch: int
    counts: tuple[int, ...]
    examples: int
    steady: bool
    asked: float
    first: int = 0


class Pace:
    """Plans and records of one training step.

    Args:
        scheduler: The pure scheduler.
        world_size: Number of devices.
        hint: Log one line when devices of one kind turn out to be unequally fast, and the
            cadence makes nothing of it.
        timeline: Told of every window, or None.
        owner: Whose `cadence_state` it is, for messages.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        world_size: int,
        hint: bool,
        timeline: Recorder | None = None,
        owner: str = "TrainStep",
    ):
        self._lock = threading.Lock()
        self._scheduler = scheduler
        self._state = scheduler.init(world_size)
        self._records: deque[WindowRecord] = deque(maxlen=RECORDS_KEPT)
        self._world_size = world_size
        self._history = array("q")
        self._hint = hint and world_size > 1 and not self.adaptive
        self.timeline = timeline
        self._tell = getattr(timeline, "window_metrics", None)  # it takes the losses from them
        self._told = self._owed = STABLE
        self._where = f"{owner}.cadence_state"

    @property
    def adaptive(self) -> bool:
        """Whether plans depend on reports."""
        return self._scheduler.cadence.adaptive

    def compiled(self, key: Any, seconds: float, ahead: bool) -> None:
        """Notes that a program was compiled; its key begins with its name."""
        if self.timeline is not None:
            self.timeline.add(CompileEvent, program=key[0], seconds=seconds, ahead=ahead)

    @property
    def cadence_name(self) -> str:
        """The class of the cadence."""
        return type(self._scheduler.cadence).__name__

    @property
    def scripted(self) -> bool:
        """Whether a recording is replayed."""
        return self._scheduler.cadence.scripted

    @property
    def uses_loss(self) -> bool:
        """Whether the cadence follows the loss."""
        return self._scheduler.cadence.uses_loss

    @property
    def wants_loss(self) -> bool:
        """Whether the loss of a window is used, or recorded here."""
        return self.uses_loss or (self.timeline is not None and self._tell is None)

    def begins(self, names: Sequence[str], window: int, exchange: int, frozen: int) -> None:
        """A run on these devices begins, or goes on, with this window.

        Args:
            names: Names of the devices.
            window: Number of the window.
            exchange: Bytes that each device exchanges.
            frozen: Bytes that frozen parameters would add.
        """
        if self.timeline is not None:
            cadence = self._scheduler.cadence
            self.timeline.add(
                RunEvent, devices=tuple(names), cadence=repr(cadence), windows=window,
                overhead_target=cadence.overhead_target,
                exchange_bytes=exchange, frozen_bytes=frozen,
            )  # fmt: skip

    @property
    def windows(self) -> int:
        """Windows dispatched so far."""
        with self._lock:
            return len(self._history) // self._world_size

    @property
    def counts(self) -> tuple[int, ...]:
        """The plan for the next window; after the end of a script its last counts."""
        cadence, window = self._scheduler.cadence, self.windows
        if not cadence.scripted:
            return self.state.counts
        try:
            return cadence.counts_at(window)
        except ValueError:  # the script is over
            return self.history[-1] if window else cadence.counts_at(0)

    @property
    def throughput(self) -> tuple[float | None, ...]:
        """Microbatches per second of each device; None where it was not measured yet.

        The cadence's own estimate where it has one, else the median over the last steady
        windows, see `elche_jax.train.speeds.throughput`.
        """
        with self._lock:
            state, records = self._state.cadence, list(self._records)
        return speeds.throughput(state, records, self._world_size)

    @property
    def ratios(self) -> tuple[float, ...]:
        """Share of the work that each device should get; they sum to 1.

        See `elche_jax.train.speeds.ratios`.
        """
        counts = self._sound(self.counts, self.windows)
        with self._lock:
            state, records = self._state.cadence, list(self._records)
        return speeds.ratios(state, records, counts)

    @property
    def largest(self) -> int | None:
        """The largest count of a recording; None where plans come as they come."""
        return self._scheduler.cadence.largest_count

    @property
    def state(self) -> SchedulerState:
        """The scheduler's state: plain numbers."""
        with self._lock:
            return self._state

    def restore(self, state: SchedulerState | Mapping[str, Any]) -> None:
        """Takes a state that was saved."""
        if not isinstance(state, Mapping | SchedulerState):
            raise TypeError(
                f"{self._where}: the value must be a SchedulerState or the dict its "
                f"to_dict gave, got {type(state).__name__}."
            )
        if isinstance(state, SchedulerState):
            state = state.to_dict()
        state = self._scheduler.from_dict(state)
        for part in (state.cadence, state.shift):
            for name, values in vars(part).items() if part is not None else ():
                if isinstance(values, tuple):
                    self._check_numbers(name, values)
        with self._lock:
            self._state = state

    def _check_numbers(self, name: str, values: tuple[Any, ...]) -> None:
        where = self._where
        if len(values) != self._world_size:
            raise ValueError(
                f"{where}: {name} must have one entry per device ({self._world_size}), got "
                f"{len(values)}. Speeds of other devices say nothing about these; begin without."
            )
        low = None if name == "runs" else 0  # these tell a direction by their sign
        above = 0 if name in ("ms_per_batch", "throughput") else None  # no device takes none
        known = [value for value in values if value is not None]
        check.reals(where, name, known, low=low, above=above)

    @property
    def records(self) -> list[WindowRecord]:
        """The last windows, oldest first."""
        with self._lock:
            return list(self._records)

    @property
    def history(self) -> list[tuple[int, ...]]:
        """The counts of every window dispatched, in order: what `Replay` takes."""
        with self._lock:
            flat, n = self._history.tolist(), self._world_size
        return [tuple(flat[at : at + n]) for at in range(0, len(flat), n)]

    @property
    def history_array(self) -> NDArray[np.int64]:
        """The same as an array, `(windows, world_size)`."""
        with self._lock:
            return np.array(self._history, np.int64).reshape(-1, self._world_size)

    def restart(self, history: NDArray[np.int64] | None = None) -> None:
        """A run begins, or goes on after windows of these counts: forgets the records, not
        the speeds."""
        with self._lock:
            self._records.clear()
            self._history = array("q", () if history is None else history.ravel().tolist())

    def plan(self, window: int) -> tuple[int, ...]:
        """Counts for a window, were there no end of the data."""
        with self._lock:
            counts = self._scheduler.plan(self._state, window=window)
        return self._sound(counts, window)

    def _sound(self, counts: tuple[int, ...], window: int) -> tuple[int, ...]:
        if len(counts) != self._world_size or min(counts) < 0 or max(counts) == 0:
            cadence = type(self._scheduler.cadence).__name__
            raise ValueError(
                f"{cadence}: counts must have one entry per device ({self._world_size}), none "
                f"below 0 and not all 0, got {counts} for window {window}."
            )
        return counts

    def dispatched(self, counts: tuple[int, ...]) -> None:
        """Notes the counts of a window that was handed to the devices."""
        with self._lock:
            self._history.extend(counts)

    def measured(
        self, record: WindowRecord, verdict: Verdict = STABLE, loss: float | None = None
    ) -> None:
        """Takes a window's times; feeds the cadence where they are steady.

        Args:
            record: The times.
            verdict: The guard's opinion.
            loss: The window's mean loss, for the timeline and a cadence that uses it; None
                where neither asks for it.
        """
        if self.timeline is not None:  # not under the lock: it may write to a disk
            windows_to(self.timeline)(record)
            if verdict.action == "nudge_down" or verdict != self._told:
                self.timeline.add(
                    VerdictEvent, window=record.window, epoch=record.epoch,
                    action=verdict.action, factor=verdict.factor or 1.0,
                )  # fmt: skip
            if loss is not None and isfinite(loss) and self._tell is None:
                where = {"window": record.window, "epoch": record.epoch}
                self.timeline.add(LossEvent, **where, loss=loss)
        self._told = verdict
        with self._lock:
            self._records.append(record)
            self._owed = stronger(self._owed, verdict)
            before = self._anchor
            if not self.scripted and not self._broken(loss):
                self._report(record, loss if self.uses_loss else None)
            anchor = self._anchor
            if self._hint:
                self._give_hint()
        if self.timeline is not None and before != anchor and None not in (before, anchor):
            self.timeline.add(
                AnchorEvent, window=record.window, epoch=record.epoch, before=before, anchor=anchor
            )

    @property
    def _anchor(self) -> int | None:
        """The cadence's anchor; None where it has none."""
        return self._scheduler.cadence.anchor_of(self._state.cadence)

    def _broken(self, loss: float | None) -> bool:
        """Whether a loss that the cadence would use is none."""
        return self.uses_loss and loss is not None and not isfinite(loss)

    def told(self, measured: Measured, metrics: Mapping[str, Any]) -> None:
        """Hands the metrics of a window that is over to a recorder that takes them."""
        if self._tell is not None:
            self._tell(measured.window, measured.epoch, metrics)

    def learned(self, record: WindowRecord) -> None:
        """Takes the times of a window that were not known when it was over."""
        with self._lock:
            if not self.scripted and record.steady:
                self._report(record, None)

    def _report(self, record: WindowRecord, loss: float | None) -> None:
        """Tells the cadence of a window, and what guards have said since it was told last."""
        if record.steady and record.busy_ms:
            report = WindowReport(record.busy_ms, record.counts, record.sync_ms, loss)
            self._state = self._scheduler.update(self._state, report, self._owed)
        elif self._scheduler.cadence.counts_windows:
            self._state = self._scheduler.passed(self._state, record.counts, loss, self._owed)
        else:
            return
        self._owed = STABLE

    def skipped(self, measured: Measured, reason: str) -> None:
        """Notes that a window's update was dropped, and why."""
        if self.timeline is not None:
            self.timeline.add(
                SkipEvent, window=measured.window, epoch=measured.epoch, reason=reason
            )

    def _give_hint(self) -> None:
        steady = [record for record in self._records if record.steady]
        if len(steady) < HINT_AFTER:
            return
        self._hint = False
        idle = imbalance(steady)
        busy = median(sum(record.busy_ms) for record in steady)
        if idle > HINT_ABOVE and busy >= HINT_MS * self._world_size:
            logger.warning(
                "elche: devices of one kind are unequally fast, %.0f %% of the machine "
                "idles; cadence=ElChe() or FixedTotal(n) would use it.",
                100 * idle,
            )
