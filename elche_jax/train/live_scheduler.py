"""The scheduler of a live run: it takes measured windows, keeps records and returns plans.

This is the only place where the cadence's state changes. The prefetch thread asks for plans,
watcher threads report windows, and the user's thread reads.
"""

import threading
from array import array
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elche_jax import _check as check
from elche_jax._log import logger
from elche_jax.averaging.rules import MOST
from elche_jax.cadence import (
    STABLE,
    Controller,
    ControllerState,
    Divergence,
    SchedulerState,
    WindowPlan,
    WindowRecord,
    WindowReport,
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
from elche_jax.train import speeds
from elche_jax.train.recording import EpochRecorder, windows_to
from elche_jax.train.worth import LaneWorth

RECORDS_KEPT = 1024
"""Windows kept in the records, and thus covered by a report."""

KEPT = MOST + 16
"""Number of windows whose resulting state is kept. It exceeds the number of windows planned ahead,
which with a delay on the host is one more than the delay."""

PER_DEVICE = ("counts", "next_counts", "ms_per_batch", "throughput", "ratios", "runs")
"""Fields with one number per device, in the states of cadences and of the shift detector."""

HINT_AFTER = 20
"""Steady windows before an imbalance is worth a hint."""

HINT_MS = 1.0
"""Mean busy time per device and window, in milliseconds, below which times are mostly noise."""

HINT_ABOVE = 0.15
"""Share of the machine that may idle without a hint."""


class LiveScheduler:
    """Plans and records of one training step.

    Attributes:
        cadence: The cadence.
        timeline: The recorder, or None.
        next_window: Number of the next window; windows before a resume on other devices count, too.
        run: Number of the run, which `restart` counts.
        verified: Whether replicas were compared after one of the windows.

    Args:
        controller: The pure controller.
        world_size: Number of devices.
        hint: Log one line if devices of one kind turn out to be unequally fast and the
            cadence does not balance them.
        timeline: Records every window; or None.
        owner: Class that `cadence_state` belongs to, for messages.
        worth: Detects lanes that cost more than they gain; or None.
    """

    def __init__(
        self,
        controller: Controller,
        world_size: int,
        hint: bool,
        timeline: Recorder | None = None,
        owner: str = "TrainStep",
        worth: LaneWorth | None = None,
    ):
        # guards the records and the history; single numbers are read without it
        self._lock = threading.Lock()
        # Held while a new state is computed from the old one. It is reentrant and separate from
        # the lock, as a user's guard or cadence may read the scheduler meanwhile. Reading the
        # state needs no lock, as it is one reference to an immutable value.
        self._observing = threading.RLock()
        self._controller, self.cadence = controller, controller.cadence
        self._state = controller.init(world_size)
        self._records: deque[WindowRecord] = deque(maxlen=RECORDS_KEPT)
        self._world_size = world_size
        self._history = array("q")
        self.next_window = self.run = 0
        self.verified = False
        self._hint = hint and not self.cadence.adaptive
        self.timeline, self._worth = timeline, worth
        self._epochs = timeline if isinstance(timeline, EpochRecorder) else None
        self._recorded_verdict = STABLE
        self._where = f"{owner}.cadence_state"
        # by window, the state after all that became known with it; processes plan from the same
        self._after: dict[int, ControllerState] = {}
        self._before = self._state

    @property
    def wants_loss(self) -> bool:
        """Whether the cadence or the timeline needs the loss of a window."""
        records_loss = self.timeline is not None and self._epochs is None
        return self.cadence.uses_loss or records_loss

    @property
    def windows(self) -> int:
        """Windows dispatched so far, on this number of devices."""
        return len(self._history) // self._world_size

    @property
    def counts(self) -> tuple[int, ...]:
        """The plan for the next window; after the end of a recording, its last counts."""
        cadence, window = self.cadence, self.next_window
        if not cadence.scripted:
            return self._controller.plan(self._state, window)
        try:
            return cadence.counts_at(window)
        except ValueError:  # the recording is over
            return self.history[-1] if self.windows else cadence.counts_at(0)

    @property
    def throughput(self) -> tuple[float | None, ...]:
        """Microbatches per second of each device, see `elche_jax.train.speeds.throughput`."""
        state = self._state
        rates = speeds.throughput(state.schedule.cadence, *self._of(state))
        return state.spread(rates, None)

    def _of(self, state: ControllerState) -> tuple[list[WindowRecord], int]:
        """Return the records as the cadence sees them, and the number of its devices."""
        records = self.records
        if state.lost:
            records = [record.of(state.left) for record in records]
        return records, len(state.left)

    def knows(self, after: int | None = None) -> bool:
        """Return whether plans already follow from measured speeds, or never will.

        Args:
            after: Number of the last window to take into account; None for all windows.
        """
        if self._world_size == 1 or not self.cadence.adaptive:
            return True
        state = self._state_after(after)
        rates = speeds.throughput(state.schedule.cadence, [], len(state.left))
        return state.told or any(rate is not None for rate in rates)

    @property
    def ratios(self) -> tuple[float, ...]:
        """Share of the work that each device should get, see `elche_jax.train.speeds.ratios`."""
        state, planned = self._state, self.counts
        planned = [planned[rank] for rank in state.left]
        counts = self._controller.checked(state, planned, self.next_window)
        records, _ = self._of(state)
        return state.spread(speeds.ratios(state.schedule.cadence, records, counts), 0.0)

    @property
    def state(self) -> SchedulerState:
        """State of the cadence, with the counts: plain numbers."""
        return self._state.schedule

    @property
    def divergence(self) -> list[Divergence]:
        """Divergence of the devices after the last windows, oldest first."""
        return list(self._state.divergence)

    @property
    def records(self) -> list[WindowRecord]:
        """The last windows, oldest first."""
        with self._lock:
            return list(self._records)

    @property
    def history_array(self) -> NDArray[np.int64]:
        """The counts of every window dispatched, in order, `(windows, world_size)`."""
        with self._lock:
            return np.array(self._history, np.int64).reshape(-1, self._world_size)

    @property
    def history(self) -> list[tuple[int, ...]]:
        """The counts of every window dispatched, in order, as `Replay` takes them."""
        return [tuple(counts) for counts in self.history_array.tolist()]

    def restore(self, state: SchedulerState | Mapping[str, Any]) -> None:
        """Set the state to a saved one, after checking its numbers."""
        rule = "be a SchedulerState or the dict that its to_dict returned"
        check.instance(self._where, "the value", state, Mapping | SchedulerState, rule, brief=True)
        if isinstance(state, SchedulerState):
            state = state.to_dict()
        state = self._controller.scheduler.from_dict(state)
        for part in (state.cadence, state.shift):
            fields: dict[str, Any] = {} if part is None else dict(vars(part))
            if part is state.cadence and not self.cadence.scripted:
                fields["counts"] = state.counts  # which may be a property
            for name in PER_DEVICE:  # a user's state may have other fields
                if isinstance(fields.get(name), tuple):
                    self._check_numbers(name, fields[name])
        # with told=False `knows` looks for speeds in the state, as a saved one may have none
        with self._observing:
            restored = replace(self._state, schedule=state, told=False)
            self._state = self._before = self._controller.begin(restored)
            self._after.clear()

    def believe(self, rates: Sequence[float | None]) -> bool:
        """Begin with the speeds that devices are assumed to have, until they are measured.

        Args:
            rates: Microbatches per second, None if unknown, by rank.

        Returns:
            Whether the cadence uses them.
        """
        cadence, state = self.cadence, self._state.schedule
        # cadences that follow the loss or count windows would misread this report
        uses = cadence.estimates and not (cadence.uses_loss or cadence.counts_windows)
        if not uses or len(rates) < 2 or not any(rates):
            return False
        pairs = zip(rates, state.counts, strict=True)
        wall = [0.0 if rate is None else 1e3 * count / rate for rate, count in pairs]
        report = WindowReport(wall, state.counts, 0.0)
        with self._observing:
            schedule = self._controller.scheduler.update(state, report, cost_known=False)
            believed = replace(self._state, schedule=schedule, told=False)
            self._state = self._before = self._controller.begin(believed)
            self._after.clear()
        return True

    def _check_numbers(self, name: str, values: tuple[Any, ...]) -> None:
        where = self._where
        devices = len(self._state.left)
        if len(values) != devices:
            raise ValueError(
                f"{where}: {name} must have one entry per device ({devices}), got {len(values)}. "
                "Speeds of other devices say nothing about these; start without them."
            )
        low = None if name == "runs" else 0  # the sign of `runs` is a direction
        above = 0 if name in ("ms_per_batch", "throughput") else None
        known = [value for value in values if value is not None]
        check.reals(where, name, known, low=low, above=above)

    def restart(
        self,
        history: NDArray[np.int64] | None = None,
        divergence: Sequence[Divergence] = (),
        window: int = 0,
    ) -> None:
        """Begin a run, or resume one: drop the records, keep the speeds.

        Args:
            history: Counts of the windows so far, `(windows, world_size)`; None for none.
            divergence: Divergence after the last windows, oldest first.
            window: Number of the next window.
        """
        with self._observing, self._lock:
            self._records.clear()
            self.run += 1
            # a new run keeps the speeds, but not the verdict on the previous one
            self._recorded_verdict = STABLE
            before, seen = self._state, tuple(divergence)
            new = ControllerState(
                before.schedule, self._world_size, seen, rest=before.rest, lost=before.lost
            )
            self._state = self._before = self._controller.begin(new)
            self._after.clear()
            self._history = array("q", () if history is None else history.ravel().tolist())
            self.next_window = window

    def plan(
        self, window: int, after: int | None = None, late: Collection[int] = ()
    ) -> tuple[int, ...]:
        """Return the counts for a window, regardless of the end of the data.

        Args:
            window: The window.
            after: Number of the last window to take into account, with all that became known
                with it; None for all windows.
            late: Ranks of late devices, which get no work until they deliver.
        """
        counts = self._controller.plan(self._state_after(after), window)
        if self.cadence.scripted:  # the recording decides
            return counts
        left = tuple(0 if rank in late else count for rank, count in enumerate(counts))
        # counts that are all 0 are not a plan, so late devices then keep theirs
        return left if any(left) else counts

    def _state_after(self, window: int | None) -> ControllerState:
        """Return the state after what became known with a window, or the last one before it."""
        if window is None:
            return self._state
        known = [number for number in list(self._after) if number <= window]
        return self._after[max(known)] if known else self._before

    # -- what happens in a run -------------------------------------------------------

    def on_start(self, names: Sequence[str], window: int, exchange: int, frozen: int) -> None:
        """Record the start of a run, or of its continuation.

        Args:
            names: Names of the devices.
            window: Number of the first window.
            exchange: Bytes that each device exchanges per window.
            frozen: Bytes that frozen parameters save.
        """
        with self._observing:  # all that is known now counts, whatever the windows' numbers
            self._before, self._after = self._state, {}
        if self.timeline is not None:
            self.timeline.add(
                RunEvent, devices=tuple(names), cadence=repr(self.cadence), windows=window,
                overhead_target=self.cadence.overhead_target,
                exchange_bytes=exchange, frozen_bytes=frozen,
            )  # fmt: skip

    def on_compile(self, key: Any, seconds: float, ahead: bool) -> None:
        """Record that a program was compiled; its key begins with its name."""
        if self.timeline is not None:
            self.timeline.add(CompileEvent, program=key[0], seconds=seconds, ahead=ahead)

    def on_lost(self, ranks: Sequence[int]) -> None:
        """Plan without these devices from now on; states after earlier windows stay the same."""
        with self._observing:
            self._state = self._controller.without(self._state, ranks)

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks of the devices that plans leave out because they are lost."""
        return self._state.lost

    def on_dispatch(self, plan: WindowPlan, begins: bool = False) -> None:
        """Add the counts of a dispatched window to the history.

        Args:
            plan: The window.
            begins: Whether it is the first of its call of `windows`, which may go back in the
                data, so that numbers do, too. Other windows may be trained again, or out of order.
        """
        after = plan.window + 1
        with self._lock:
            self._history.extend(plan.counts)
            self.next_window = after if begins else max(self.next_window, after)

    def on_taken_back(self, windows: int) -> None:
        """Forget the counts of the last windows, which run again."""
        with self._lock:
            del self._history[len(self._history) - windows * self._world_size :]
            self.next_window -= windows

    def on_skip(self, plan: WindowPlan, reason: str) -> None:
        """Record that a window's update was dropped, and why."""
        if self.timeline is not None:
            self.timeline.add(SkipEvent, window=plan.window, epoch=plan.epoch, reason=reason)

    def on_metrics(self, plan: WindowPlan, metrics: Mapping[str, Any]) -> None:
        """Pass the metrics of a completed window to a recorder that takes them."""
        if self._epochs is not None:
            self._epochs.window_metrics(plan.window, plan.epoch, metrics)

    def observe(self, record: WindowRecord, at: int | None = None, run: int | None = None) -> None:
        """Update the state with a completed window, and record it.

        Args:
            record: The window.
            at: Number of the window with which the record became known; None for its own.
            run: Number of the run that the window belongs to; None for this one. `records` are
                those of this run, but the speeds in a window of an earlier one count.
        """
        with self._observing:  # held here too: no restart between update and record
            before, state = self._update(record, at)
            with self._lock:
                if run in (None, self.run):
                    self._records.append(record)
                idle = self._idle_to_hint_at() if self._hint else None
        # not under a lock: a log handler or a recorder may write to a disk, or read this scheduler
        if idle is not None:
            logger.warning(
                "elche: devices of one kind differ in speed, so that %.0f %% of the machine "
                "idles; cadence=ElChe() or FixedTotal(n) would use it.",
                100 * idle,
            )
        if self._worth is not None:
            self._worth.observe(record)
            if before.rest and state.rest and before.rest.resting != state.rest.resting:
                self._worth.changed(before.rest, state.rest)
        if self.timeline is not None:
            windows_to(self.timeline)(record)
            self._record_changes(self.timeline, record, before, state)

    def observe_late(self, record: WindowRecord) -> None:
        """Update the state with the times of a completed window that became known late."""
        if record.steady:
            self._update(record, observe=self._controller.learn)

    def _update(
        self,
        record: WindowRecord,
        at: int | None = None,
        observe: Callable[[ControllerState, WindowRecord], ControllerState] | None = None,
    ) -> tuple[ControllerState, ControllerState]:
        with self._observing:
            before = self._state
            self._state = state = (observe or self._controller.observe)(before, record)
            self._after[record.window if at is None else at] = state
            if len(self._after) > KEPT:
                del self._after[min(self._after)]
        return before, state

    def _record_changes(
        self,
        timeline: Recorder,
        record: WindowRecord,
        before: ControllerState,
        state: ControllerState,
    ) -> None:
        where = {"window": record.window, "epoch": record.epoch}
        verdict = state.verdict
        if record.divergence is not None:
            # every *nudge down*, as each has its own effect; other verdicts only if they change
            if verdict.action == "nudge_down" or verdict != self._recorded_verdict:
                factor = verdict.factor or 1.0
                timeline.add(VerdictEvent, **where, action=verdict.action, factor=factor)
            self._recorded_verdict = verdict
        if record.loss is not None and isfinite(record.loss) and self._epochs is None:
            timeline.add(LossEvent, **where, loss=record.loss)
        old, anchor = (self.cadence.anchor_of(s.schedule.cadence) for s in (before, state))
        if old != anchor and old is not None and anchor is not None:
            timeline.add(AnchorEvent, **where, before=old, anchor=anchor)

    def _idle_to_hint_at(self) -> float | None:
        """Return the idle share of the machine once it is worth a hint, else None."""
        steady = [record for record in self._records if record.steady]
        if len(steady) < HINT_AFTER:
            return None
        self._hint = False
        idle = imbalance(steady)
        busy = median(sum(record.busy_ms) for record in steady)
        return idle if idle > HINT_ABOVE and busy >= HINT_MS * self._world_size else None


class Scheduled(check.Uncopyable):
    """The part of its scheduler that a training or evaluation step exposes."""

    _scheduler: LiveScheduler

    @property
    def counts(self) -> tuple[int, ...]:
        """Microbatches per device planned for the next window.

        After the end of a replayed recording, the counts of its last window.
        """
        return self._scheduler.counts

    @property
    def cadence_state(self) -> SchedulerState:
        """State of the scheduler: plain numbers, with the cadence's state in `.cadence`.

        Setting it to such a state, or to the dict of its `to_dict`, starts a run with the
        speeds that an earlier one measured:

            saved = json.dumps(train.cadence_state.to_dict())
            train.cadence_state = json.loads(saved)

        Raises:
            TypeError: The value is neither.
            ValueError: The state is of a different cadence or number of devices.
        """
        return self._scheduler.state

    @cadence_state.setter
    def cadence_state(self, state: SchedulerState | Mapping[str, Any]) -> None:
        self._scheduler.restore(state)

    @property
    def records(self) -> list[WindowRecord]:
        """Measurements of the last 1024 windows, oldest first; for an `EvalStep`, of the last
        evaluation."""
        return self._scheduler.records
