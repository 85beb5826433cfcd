"""The controller: cadence, shift detector and guard combined. Pure: records in, plans out.

The training loop and `advise` drive the same object, so that predictions match real runs.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite
from typing import Any, TypeVar

from elche_jax import _check as check
from elche_jax.cadence.base import HOLD_GROWTH, STABLE, Cadence, Verdict, WindowReport, stronger
from elche_jax.cadence.guards import HISTORY, Guard, NoGuard, judge
from elche_jax.cadence.reports import missed
from elche_jax.cadence.rest import Rest, RestState
from elche_jax.cadence.scheduler import Scheduler, SchedulerState
from elche_jax.cadence.shift import Shift
from elche_jax.cadence.window import Divergence, WindowRecord

T = TypeVar("T")


@dataclass(frozen=True)
class ControllerState:
    """State of `Controller`.

    Attributes:
        schedule: State of the cadence and of the shift detector.
        world_size: Number of devices.
        divergence: How far apart the devices were after the last windows, oldest first.
        verdict: The guard's last verdict.
        owed: The strictest verdict since the cadence was last updated.
        told: Whether the cadence has been updated with the times of a window.
        rest: Which devices rest; None if none may.
        lost: Ranks of the lost devices, ascending: they get no work, and the schedule has no
            entries for them.
    """

    schedule: SchedulerState
    world_size: int
    divergence: tuple[Divergence, ...] = ()
    verdict: Verdict = STABLE
    owed: Verdict = STABLE
    told: bool = False
    rest: RestState | None = None
    lost: tuple[int, ...] = ()

    @property
    def left(self) -> tuple[int, ...]:
        """Ranks of the remaining devices."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.lost)

    def spread(self, values: Sequence[T], nothing: T) -> tuple[T, ...]:
        """Return one value per device, ``nothing`` for lost devices.

        Args:
            values: One value per remaining device.
            nothing: The value for lost devices.
        """
        known = dict(zip(self.left, values, strict=True))
        return tuple(known.get(rank, nothing) for rank in range(self.world_size))


@dataclass(frozen=True)
class Controller:
    """Cadence, guard and shift detector, which together decide the counts of every window.

    Attributes:
        cadence: The rule for the counts.
        guard: The rule for verdicts on divergence.
        shift: The detector of lasting speed changes, or ``None``.
        rest: The rule that lets devices rest while they slow the others down; ``None`` to let
            none rest. It has no effect on a scripted cadence.

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
    rest: Rest | None = None

    def __post_init__(self) -> None:
        check.instance("Controller", "cadence", self.cadence, Cadence)
        check.instance("Controller", "guard", self.guard, Guard)
        check.instance("Controller", "rest", self.rest, Rest | None, "be a Rest or None")

    @cached_property
    def scheduler(self) -> Scheduler:
        """The cadence and the shift detector, without the guard."""
        return Scheduler(self.cadence, self.shift)

    def init(self, world_size: int) -> ControllerState:
        """Return the state before the first window.

        Args:
            world_size: Number of devices.

        Raises:
            TypeError: If ``world_size`` is not an integer, or the cadence's state has no
                ``counts``.
            ValueError: If the cadence does not allow that many devices, or ``rest`` is for a
                different number of devices.
        """
        rest = self.rest and self.rest.init(world_size)
        return ControllerState(self.scheduler.init(world_size), world_size, rest=rest)

    def plan(self, state: ControllerState, window: int) -> tuple[int, ...]:
        """Return the counts of a window, regardless of how much data is left.

        Args:
            state: The state.
            window: Number of the window in the run; used only by a scripted cadence such as
                `Replay`.

        Raises:
            ValueError: If the cadence's counts are invalid, or a replay has no such window.
        """
        counts = self.scheduler.plan(state.schedule, window)
        counts = state.spread(self.checked(state, counts, window), 0)
        if self.rest is None or state.rest is None or self.cadence.scripted:
            return counts
        return self.rest.plan(state.rest, counts)

    def without(self, state: ControllerState, ranks: Collection[int]) -> ControllerState:
        """Return the state after the loss of devices, which get no more work.

        Args:
            state: The current state; it is not modified.
            ranks: Ranks of the lost devices; some may have been lost before.

        Raises:
            ValueError: If no device is left, or the cadence follows a recording.

        Examples:
            >>> from elche_jax.cadence import FixedTotal
            >>> controller = Controller(FixedTotal(6))
            >>> controller.plan(controller.without(controller.init(3), [1]), window=7)
            (3, 0, 3)
        """
        ranks = set(ranks) - set(state.lost)
        left = [rank for rank in state.left if rank not in ranks]
        if not left:
            raise ValueError(check.message("Controller.without", "ranks", "leave a device", "all"))
        if self.cadence.scripted:
            rule, got = "be empty, as a recording needs all devices", sorted(ranks)
            raise ValueError(check.message("Controller.without", "ranks", rule, got))
        # the schedule has entries only for the devices that were there
        at = [place for place, rank in enumerate(state.left) if rank in ranks]
        schedule = self.scheduler.without(state.schedule, at)
        lost = tuple(sorted({*state.lost, *ranks}))
        return replace(state, schedule=schedule, lost=lost, divergence=(), told=False)

    def begin(self, state: ControllerState) -> ControllerState:
        """Return the state at the start of a new run."""
        if self.rest is None or state.rest is None:
            return state
        return replace(state, rest=self.rest.begin(state.rest))

    def checked(
        self, state: ControllerState, counts: Sequence[int], window: int
    ) -> tuple[int, ...]:
        """Return a cadence's counts as plain integers.

        Raises:
            TypeError: If a count is not an integer.
            ValueError: If the counts are not valid for these devices.
        """
        devices = len(state.left)
        counts = check.integers(type(self.cadence).__name__, "counts", counts)
        if len(counts) != devices or min(counts) < 0 or max(counts) == 0:
            rule = f"have one entry per device ({devices}), none below 0 and not all 0"
            got = f"{counts} for window {window}"
            raise ValueError(check.message(type(self.cadence).__name__, "counts", rule, got))
        return counts

    def observe(self, state: ControllerState, record: WindowRecord) -> ControllerState:
        """Return the state after a window.

        The guard is called if the record has a divergence. The cadence is updated if the
        window's times are steady, or if it counts all windows, with the strictest verdict
        since its last update. The cost of the synchronisation is ignored if the window was cold
        or a device rested in it; after a cold window the verdict for a cadence with an overhead
        target is at least *hold growth*. A scripted cadence is never updated, and a cadence
        that follows the loss is not updated with a loss that is not finite.

        Args:
            state: The current state; it is not modified.
            record: The window.

        Raises:
            TypeError: If the record is not a `WindowRecord`, the guard does not return a
                verdict, or the cadence does not return a state.
        """
        check.instance("Controller.observe", "record", record, WindowRecord)
        if self.rest is not None and state.rest is not None and not self.cadence.scripted:
            rest = self.rest.update(state.rest, record)
            state = replace(state, rest=rest)
        if state.lost:
            record = record.of(state.left)
        if record.divergence is not None:
            divergence = (*state.divergence[1 - HISTORY :], record.divergence)
            verdict = judge(self.guard, divergence)
            # kept until a window updates the cadence, which need not be this one
            owed = stronger(state.owed, verdict)
            state = replace(state, divergence=divergence, verdict=verdict, owed=owed)
        return self._updated(state, record)

    def learn(self, state: ControllerState, record: WindowRecord) -> ControllerState:
        """Return the state updated with the times of a window that was observed without them.

        A cadence that counts windows has been updated with this window already: only its estimates
        of speed change. Any other cadence is updated now.

        Args:
            state: The current state; it is not modified.
            record: The window, with its times.

        Examples:
            >>> from elche_jax.cadence import PostLocal
            >>> controller = Controller(PostLocal(switch=4))
            >>> record = WindowRecord(0, 0, (1, 1), 16, (10.0, 90.0), 90.0, 1.0, 0.0, False)
            >>> state = controller.observe(controller.init(2), record)
            >>> cadence = controller.learn(state, replace(record, steady=True)).schedule.cadence
            >>> cadence.windows, cadence.ms_per_batch
            (1, (10.0, 90.0))
        """
        if state.lost:
            record = record.of(state.left)
        if not self.cadence.counts_windows:
            return self._updated(state, record)
        if not _timed(record):
            return state
        report = WindowReport(record.busy_ms, record.counts, record.sync_ms, share=record.share)
        return replace(state, schedule=self.scheduler.learn(state.schedule, report), told=True)

    def _updated(self, state: ControllerState, record: WindowRecord) -> ControllerState:
        """Return the state after a window; the same if the cadence is not updated with it."""
        cadence, loss = self.cadence, record.loss if self.cadence.uses_loss else None
        schedule, verdict, timed = state.schedule, state.owed, _timed(record)
        # a script is read by the number of the window, whatever the state
        if cadence.scripted or (loss is not None and not isfinite(loss)):
            return state
        if timed:
            report = WindowReport(record.busy_ms, record.counts, record.sync_ms, loss, record.share)
            if record.cold and cadence.overhead_target:
                # the first synchronisation costs more than later ones: no reason to grow
                verdict = stronger(verdict, HOLD_GROWTH)
            # The exchange costs less while devices rest. Windows sized by that cost would be too
            # short for all devices, and would change size with every trial.
            rested = self.rest is not None and any(missed(report, schedule.counts))
            schedule = self.scheduler.update(schedule, report, verdict, not (record.cold or rested))
        elif cadence.counts_windows:
            # times of 0 mean not measured, so the estimates stay
            report = WindowReport((0.0,) * len(record.counts), record.counts, 0.0, loss)
            schedule = self.scheduler.update(schedule, report, verdict)
        else:
            return state
        return replace(state, schedule=schedule, owed=STABLE, told=state.told or timed)


def _timed(record: WindowRecord) -> bool:
    """Return whether the cadence may use the window's times."""
    return record.steady and bool(record.busy_ms)
