"""The controller: cadence, shift detector and guard together, pure. Records in, plans out.

The training loop and `advise` drive the same object, so that what is predicted is what runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite
from typing import Any

from elche_jax import _check as check
from elche_jax.cadence.base import HOLD_GROWTH, STABLE, Cadence, Verdict, WindowReport, stronger
from elche_jax.cadence.guards import HISTORY, Guard, NoGuard, judge
from elche_jax.cadence.scheduler import Scheduler, SchedulerState
from elche_jax.cadence.shift import Shift
from elche_jax.cadence.window import Divergence, WindowRecord


@dataclass(frozen=True)
class ControllerState:
    """State of `Controller`.

    Attributes:
        schedule: State of the cadence and of the shift detector.
        world_size: Number of devices.
        divergence: How far the devices were apart after the last windows, oldest first.
        verdict: What the guard said last.
        owed: The strongest of what it has said since the cadence was told last.
        told: Whether the cadence was told of a window's times.
    """

    schedule: SchedulerState
    world_size: int
    divergence: tuple[Divergence, ...] = ()
    verdict: Verdict = STABLE
    owed: Verdict = STABLE
    told: bool = False


@dataclass(frozen=True)
class Controller:
    """What decides the counts of every window, from the records of those before.

    Attributes:
        cadence: The rule for the counts.
        guard: The rule for verdicts on divergence.
        shift: The detector of lasting speed changes, or ``None`` for none.

    Examples:
        >>> from elche_jax.cadence import ElChe
        >>> controller = Controller(ElChe(anchor=4))
        >>> state = controller.init(2)
        >>> controller.plan(state, window=0)
        (4, 4)
        >>> record = WindowRecord(0, 0, (4, 4), 64, (80.0, 40.0), 86.0, 6.0, 40.0, True)
        >>> state = controller.observe(state, record)
        >>> controller.plan(state, window=1)
        (4, 8)
    """

    cadence: Cadence[Any]
    guard: Guard = field(default_factory=NoGuard)
    shift: Shift | None = field(default_factory=Shift)

    def __post_init__(self) -> None:
        check.instance("Controller", "cadence", self.cadence, Cadence)
        check.instance("Controller", "guard", self.guard, Guard)

    @cached_property
    def scheduler(self) -> Scheduler:
        """The part that knows of counts alone."""
        return Scheduler(self.cadence, self.shift)

    def init(self, world_size: int) -> ControllerState:
        """Return the state before the first window.

        Args:
            world_size: Number of devices; what the cadence allows.

        Raises:
            TypeError: If ``world_size`` is not an integer, or the cadence's state has no
                ``counts``.
            ValueError: If the cadence does not allow it.
        """
        return ControllerState(self.scheduler.init(world_size), world_size)

    def plan(self, state: ControllerState, window: int) -> tuple[int, ...]:
        """Return the counts of a window, were there no end of the data.

        Args:
            state: The state.
            window: Number of the window in the run; only a recording that is replayed
                reads it.

        Raises:
            ValueError: If the cadence's counts are no counts, or a replay has no such
                window.
        """
        counts = self.scheduler.plan(state.schedule, window)
        return self.checked(state, counts, window)

    def checked(
        self, state: ControllerState, counts: Sequence[int], window: int
    ) -> tuple[int, ...]:
        """Return a cadence's counts as plain integers.

        Raises:
            TypeError: If one is not an integer.
            ValueError: If they are no counts for these devices.
        """
        devices = state.world_size
        counts = check.integers(type(self.cadence).__name__, "counts", counts)
        if len(counts) != devices or min(counts) < 0 or max(counts) == 0:
            rule = f"have one entry per device ({devices}), none below 0 and not all 0"
            got = f"{counts} for window {window}"
            raise ValueError(check.message(type(self.cadence).__name__, "counts", rule, got))
        return counts

    def observe(self, state: ControllerState, record: WindowRecord) -> ControllerState:
        """Return the state after a window.

        The guard is asked if the record has a divergence. The cadence is told of the
        window if its times are steady, or if it wants to hear of every window, and
        of the strongest verdict since it was told last. After a cold window a cadence with
        an overhead target is told at least *hold growth*. A recording that is replayed is
        told nothing, and a cadence that follows the loss nothing of a window whose loss is
        not finite.

        Args:
            state: The state so far; it stays as it is.
            record: The window.

        Raises:
            TypeError: If the record is none, the guard gives no verdict, or the cadence no
                state.
        """
        check.instance("Controller.observe", "record", record, WindowRecord)
        divergence, verdict, owed = state.divergence, state.verdict, state.owed
        if record.divergence is not None:
            divergence = (*divergence[1 - HISTORY :], record.divergence)
            verdict = judge(self.guard, divergence)
            owed = stronger(owed, verdict)
        schedule = self._told(state.schedule, record, owed)
        if schedule is not None:
            told = state.told or _timed(record)
            return ControllerState(schedule, state.world_size, divergence, verdict, told=told)
        if record.divergence is None:
            return state
        return replace(state, divergence=divergence, verdict=verdict, owed=owed)

    def _told(
        self, schedule: SchedulerState, record: WindowRecord, verdict: Verdict
    ) -> SchedulerState | None:
        """The schedule after the cadence was told of a window; None if it is not told."""
        cadence, loss = self.cadence, record.loss if self.cadence.uses_loss else None
        if cadence.scripted or (loss is not None and not isfinite(loss)):
            return None
        if _timed(record):
            report = WindowReport(record.busy_ms, record.counts, record.sync_ms, loss)
            if record.cold and cadence.overhead_target:  # which the cost does not tell yet
                verdict = stronger(verdict, HOLD_GROWTH)
        elif cadence.counts_windows:
            report = WindowReport((0.0,) * len(record.counts), record.counts, 0.0, loss)
        else:
            return None
        return self.scheduler.update(schedule, report, verdict)


def _timed(record: WindowRecord) -> bool:
    """Whether a window's times are to be told."""
    return record.steady and bool(record.busy_ms)
