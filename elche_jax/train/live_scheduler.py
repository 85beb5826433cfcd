"""The scheduler at work: takes measured windows, keeps records, hands out plans.

The one mutable home of the cadence's state. The prefetch thread asks for plans, the
watching threads report windows, the user reads; a lock keeps them apart.
"""

import logging
import threading
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elche_jax import _check as check
from elche_jax.cadence import (
    STABLE,
    Cadence,
    Controller,
    ControllerState,
    Divergence,
    SchedulerState,
    WindowPlan,
    WindowRecord,
)
from elche_jax.config import Recorder
from elche_jax.observe.events import (
    AnchorEvent,
    CompileEvent,
    LossEvent,
    RunEvent,
    SkipEvent,
    VerdictEvent,
)
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


class LiveScheduler:
    """Plans and records of one training step.

    Args:
        controller: The pure controller.
        world_size: Number of devices.
        hint: Log one line when devices of one kind turn out to be unequally fast, and the
            cadence makes nothing of it.
        timeline: Told of every window, or None.
        owner: Whose `cadence_state` it is, for messages.
    """

    def __init__(
        self,
        controller: Controller,
        world_size: int,
        hint: bool,
        timeline: Recorder | None = None,
        owner: str = "TrainStep",
    ):
        self._lock = threading.Lock()
        # held while a state follows from the one before; a guard or a cadence, which are the
        # user's, may ask for what is known meanwhile
        self._observing = threading.RLock()
        self._controller = controller
        self._state = controller.init(world_size)
        self._records: deque[WindowRecord] = deque(maxlen=RECORDS_KEPT)
        self._world_size = world_size
        self._history = array("q")
        self._hint = hint and not self.adaptive
        self.timeline = timeline
        self._tell = getattr(timeline, "window_metrics", None)  # it takes the losses from them
        self._told = STABLE
        self._where = f"{owner}.cadence_state"

    @property
    def _cadence(self) -> Cadence[Any]:
        return self._controller.cadence

    @property
    def adaptive(self) -> bool:
        """Whether plans depend on reports."""
        return self._cadence.adaptive

    def compiled(self, key: Any, seconds: float, ahead: bool) -> None:
        """Notes that a program was compiled; its key begins with its name."""
        if self.timeline is not None:
            self.timeline.add(CompileEvent, program=key[0], seconds=seconds, ahead=ahead)

    @property
    def cadence_name(self) -> str:
        """The class of the cadence."""
        return type(self._cadence).__name__

    @property
    def scripted(self) -> bool:
        """Whether a recording is replayed."""
        return self._cadence.scripted

    @property
    def uses_loss(self) -> bool:
        """Whether the cadence follows the loss."""
        return self._cadence.uses_loss

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
            cadence = self._cadence
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
        cadence, window = self._cadence, self.windows
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
            state, records = self._state.schedule.cadence, list(self._records)
        return speeds.throughput(state, records, self._world_size)

    @property
    def knows(self) -> bool:
        """Whether plans follow from measured speeds already, or never will."""
        if self._world_size == 1 or not self.adaptive:
            return True
        with self._lock:
            state = self._state
        rates = speeds.throughput(state.schedule.cadence, [], self._world_size)
        return state.told or any(rate is not None for rate in rates)

    @property
    def ratios(self) -> tuple[float, ...]:
        """Share of the work that each device should get; they sum to 1.

        See `elche_jax.train.speeds.ratios`.
        """
        counts, windows = self.counts, self.windows
        with self._lock:
            state, records = self._state, list(self._records)
        counts = self._controller.checked(state, counts, windows)
        return speeds.ratios(state.schedule.cadence, records, counts)

    @property
    def largest(self) -> int | None:
        """The largest count of a recording; None where plans come as they come."""
        return self._cadence.largest_count

    @property
    def state(self) -> SchedulerState:
        """What is known of the speeds, and the counts: plain numbers."""
        with self._lock:
            return self._state.schedule

    @property
    def divergence(self) -> list[Divergence]:
        """How far the devices were apart after the last windows, oldest first."""
        with self._lock:
            return list(self._state.divergence)

    def restore(self, state: SchedulerState | Mapping[str, Any]) -> None:
        """Takes a state that was saved."""
        if not isinstance(state, Mapping | SchedulerState):
            raise TypeError(
                f"{self._where}: the value must be a SchedulerState or the dict its "
                f"to_dict gave, got {type(state).__name__}."
            )
        if isinstance(state, SchedulerState):
            state = state.to_dict()
        state = self._controller.scheduler.from_dict(state)
        for part in (state.cadence, state.shift):
            for name, values in vars(part).items() if part is not None else ():
                if isinstance(values, tuple):
                    self._check_numbers(name, values)
        with self._observing, self._lock:
            self._state = replace(self._state, schedule=state, told=False)

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

    def restart(
        self,
        history: NDArray[np.int64] | None = None,
        divergence: Sequence[Divergence] = (),
    ) -> None:
        """A run begins, or goes on after windows of these counts and divergences: forgets
        the records, not the speeds."""
        with self._observing, self._lock:
            self._records.clear()
            self._told = STABLE
            self._state = ControllerState(self._state.schedule, self._world_size, tuple(divergence))
            self._history = array("q", () if history is None else history.ravel().tolist())

    def plan(self, window: int) -> tuple[int, ...]:
        """Counts for a window, were there no end of the data."""
        with self._lock:
            return self._controller.plan(self._state, window)

    def dispatched(self, counts: tuple[int, ...]) -> None:
        """Notes the counts of a window that was handed to the devices."""
        with self._lock:
            self._history.extend(counts)

    def measured(self, record: WindowRecord) -> None:
        """Takes a window that is over: tells the timeline, and the controller."""
        timeline = self.timeline
        with self._observing:
            before = self._state
            state = self._controller.observe(before, record)
            with self._lock:
                self._state = state
                self._records.append(record)
                if self._hint:
                    self._give_hint()
        if timeline is not None:
            windows_to(timeline)(record)
            self._tell_changes(timeline, record, before, state)

    def _tell_changes(
        self,
        timeline: Recorder,
        record: WindowRecord,
        before: ControllerState,
        state: ControllerState,
    ) -> None:
        where = {"window": record.window, "epoch": record.epoch}
        if record.divergence is not None:
            told, self._told = self._told, state.verdict
            # every *nudge down*, of the rest what is new
            if state.verdict.action == "nudge_down" or state.verdict != told:
                timeline.add(
                    VerdictEvent, **where, action=state.verdict.action,
                    factor=state.verdict.factor or 1.0,
                )  # fmt: skip
        if record.loss is not None and isfinite(record.loss) and self._tell is None:
            timeline.add(LossEvent, **where, loss=record.loss)
        old, anchor = self._anchor_of(before), self._anchor_of(state)
        if old != anchor and old is not None and anchor is not None:
            timeline.add(AnchorEvent, **where, before=old, anchor=anchor)

    def _anchor_of(self, state: ControllerState) -> int | None:
        """The cadence's anchor; None where it has none."""
        return self._cadence.anchor_of(state.schedule.cadence)

    def told(self, plan: WindowPlan, metrics: Mapping[str, Any]) -> None:
        """Hands the metrics of a window that is over to a recorder that takes them."""
        if self._tell is not None:
            self._tell(plan.window, plan.epoch, metrics)

    def learned(self, record: WindowRecord) -> None:
        """Takes the times of a window that were not known when it was over."""
        if record.steady:
            with self._observing:
                state = self._controller.observe(self._state, record)
                with self._lock:
                    self._state = state

    def skipped(self, plan: WindowPlan, reason: str) -> None:
        """Notes that a window's update was dropped, and why."""
        if self.timeline is not None:
            self.timeline.add(SkipEvent, window=plan.window, epoch=plan.epoch, reason=reason)

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
