"""What becomes of windows when a process of the job ends: the devices that are left take over."""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from elche_jax._processes import PROCESSES, ExchangeLost, ProcessLostError
from elche_jax._turns import TURNS
from elche_jax.cadence import WindowPlan, apportion
from elche_jax.data.order import Cursor
from elche_jax.engine.job import Members
from elche_jax.engine.runner import Call, Launch, WindowRunner
from elche_jax.engine.state import TrainState
from elche_jax.engine.survey import Survey
from elche_jax.engine.timing import Clock
from elche_jax.train.feed import Feed
from elche_jax.train.in_flight import Window
from elche_jax.train.live_scheduler import LiveScheduler
from elche_jax.train.telling import numbered, plan_number, plans_error, unmeasured_rows
from elche_jax.train.window_checks import WindowChecks

STATE = (
    "the state is not the one that the last of them returned, or the first of them began with "
    "local steps of an earlier loop"
)


class TakeOver:
    """Gives the work of devices that are lost to those that are left.

    A window is a range of microbatches, whoever computes them. One whose exchange was lost, and
    those that were planned before, keep their ranges: every example is used once, and all
    processes go on alike. Later windows are planned for the devices that are left.

    Windows that were pending lack what the lost devices had computed for them. They are put back,
    and run again from the last mean: what the others had computed is dropped, too. Windows that are
    pending in the state are put back by their number, see `present`; those of which the loop runs
    ahead by what their exchange has told, see `take_back`.

    Args:
        feed: Loads windows.
        scheduler: Plans them.
        checks: Checks windows that run again.
        pending: Number of windows that are pending in the state between two windows.
    """

    def __init__(self, feed: Feed, scheduler: LiveScheduler, checks: WindowChecks, pending: int):
        self._feed, self._scheduler, self._job = feed, scheduler, feed.fleet.job
        self._checks, self._pending = checks, pending
        self._plans: deque[WindowPlan] = deque(maxlen=pending)  # of those in the state

    def dispatched(self, plan: WindowPlan) -> None:
        """Note that a window was dispatched."""
        self._plans.append(plan)

    def present(
        self, state: TrainState, window: Window, runner: WindowRunner, clock: Clock | None,
        recorded: Callable[[], None],
    ) -> tuple[TrainState, Window]:  # fmt: skip
        """Return a state and a window for the devices that are left.

        Args:
            state: The state before the window; given up if windows run again.
            window: A window that is to be dispatched. If a process was lost since the last one,
                it is the same window in all processes.
            runner: Runs windows.
            clock: The clock of the run, whose threads run them; None if it was closed.
            recorded: Waits until all windows before it are recorded.

        Raises:
            ProcessLostError: If its data cannot be read again, or a recording is replayed.
        """
        TURNS.wait()  # in another thread a process may be found to be lost at any moment
        while self.lose(window.index, recorded):
            if self._pending:
                plans = self._unfinished(state, window.index)
                state = self._run_again(state, plans, runner, clock, recorded)
        return state, self.shared(window)

    def shared(self, window: Window) -> Window:
        """Return a window for the devices that are left, with its data."""
        if window.calls and not any(window.counts[rank] for rank in self._scheduler.lost):
            return window
        plan, calls = self.shared_out(window.plan)
        return replace(window, plan=plan, calls=calls)

    def take_back(
        self, state: TrainState, windows: Sequence[Window], runner: WindowRunner,
        clock: Clock | None, take_back: Callable[[], list[Window]],
    ) -> tuple[TrainState, list[Window]]:  # fmt: skip
        """Return the state before the windows that are lost, and these, to be trained again.

        That is where the loop runs ahead of exchanges. They have no record yet, so all processes
        make the same plans after them. The loop sees none of it.

        Args:
            state: The state after these windows.
            windows: Windows to be dispatched after them, the same in all processes.
            runner: Runs windows.
            clock: The clock of the run; None if it was closed.
            take_back: Takes the lost windows back, once all before them are recorded.

        Returns:
            The state, and all windows that are to be dispatched.

        Raises:
            ProcessLostError: If they cannot run again.
        """
        TURNS.wait()  # in another thread a process may be found to be lost at any moment
        lost = take_back()
        again = [*lost, *windows]
        first = again[0].index
        if clock is None:
            raise self.ended(first)
        before = runner.take_back(state, clock, len(lost))
        if before is None:
            raise self._error(first, STATE)
        self.lose(first, lambda: None)
        return before, again

    def ended(self, window: int) -> ProcessLostError:
        """Return the error that a window and those after it are lost, and their loop has ended."""
        return self._error(window, "their loop has ended")

    def _error(
        self, window: int, why: str, which: str = "that have no mean yet"
    ) -> ProcessLostError:
        members = self._job.members
        said, processes = _loss_of(members, self._new or members.lost, window)
        rule = f"Windows {which} would have to run again, and {why}."
        return ProcessLostError(f"{said} {rule} Resume from a checkpoint.", processes)

    @property
    def _new(self) -> list[int]:
        """Ranks of the devices that are lost and that are still planned for."""
        return [rank for rank in self._job.members.lost if rank not in self._scheduler.lost]

    def shared_out(self, plan: WindowPlan) -> tuple[WindowPlan, tuple[Call, ...]]:
        """Return a window's plan without work for devices that are lost, and its data."""
        counts, lost = plan.counts, self._scheduler.lost
        if any(counts[rank] for rank in lost):
            counts = taken_over(counts, lost)
        reader = self._feed.open_epoch(Cursor(plan.epoch, plan.first, plan.window))
        examples, calls = self._feed.load(counts, plan.first, reader)
        return replace(plan, counts=counts, examples=examples), calls

    def lose(
        self, window: int, recorded: Callable[[], None], where: str = "train", again: bool = True
    ) -> bool:
        """Plan without devices that were lost since the last call; return whether any was.

        Args:
            window: Number of the window that was not complete, for the message.
            recorded: Waits until all windows before it are recorded.
            where: The function the user called, for messages.
            again: Whether data have to be read again.

        Raises:
            ProcessLostError: If they cannot, or a recording is replayed.
        """
        members, ranks = self._job.members, self._new
        if not ranks:
            return False
        said, processes = _loss_of(members, ranks, window, where)
        if self._scheduler.cadence.scripted:
            raise ProcessLostError(f"{said} A recording needs all devices.", processes)
        if again and not self._feed.rereads:
            rule = "The data of a window must be read again, which an iterable cannot."
            todo = "Resume from a checkpoint; iterables must be as long in every process."
            raise ProcessLostError(f"{said} {rule} {todo}", processes)
        PROCESSES.log_loss(processes, said)
        recorded()
        self._scheduler.on_lost(ranks)
        return True

    def _unfinished(self, state: TrainState, window: int) -> list[WindowPlan]:
        """Return the windows that are pending in a state, oldest first."""
        there = min(self._pending, int(np.asarray(state.step)[0]))
        if there > len(self._plans):
            before = "pending since before this call of windows"
            raise self._error(window, "their data are closed", before)
        return list(self._plans)[len(self._plans) - there :]

    def _run_again(
        self, state: TrainState, plans: Sequence[WindowPlan], runner: WindowRunner,
        clock: Clock | None, recorded: Callable[[], None],
    ) -> TrainState:  # fmt: skip
        """Run the windows again that are pending in a state; return the state after them.

        They were dispatched, and their times are known: this is neither recorded nor measured.
        """
        todo, done, own = deque(plans), list[WindowPlan](), list[np.ndarray]()
        state = _put_back(runner, state, plans)
        while todo:
            plan, calls = self.shared_out(todo[0])
            # what it tells of itself is whether its devices are finite: below
            own_rows = unmeasured_rows([True] * self._feed.fleet.world_size)
            rows = numbered(own_rows, plan_number(plan))
            survey = Survey(lambda rows=rows: rows)
            now = time.perf_counter()
            launch = Launch(clock, 0, now, plan.counts, survey=survey, timed=False)
            try:
                state, _, token = runner.run(state, calls, launch)
            except ExchangeLost:  # another process ended
                state = _put_back(runner, state, done)
                todo, done, own = deque([*done, *todo]), [], []
                self.lose(plan.window, recorded)
                continue
            if (error := plans_error(self._job, plan, np.asarray(survey.found))) is not None:
                raise error
            todo.popleft()
            done.append(plan)
            own.append(np.asarray(token))
        self._check_finite(done, own)
        self._plans.extend(done)
        return state

    def _check_finite(self, plans: Sequence[WindowPlan], own: Sequence[np.ndarray]) -> None:
        """Check windows that ran again; `own` are those of this process's devices."""
        if not plans:
            return
        rows, lost = self._job.gather_rows(np.stack(own, 1).astype(np.float32)), self._job.members
        for plan, column in zip(plans, rows.T, strict=True):
            fine = column > 0
            fine[list(lost.lost)] = True
            self._checks.count(plan, bool(fine.all()), fine, 0)


def _put_back(runner: WindowRunner, state: TrainState, plans: Sequence[WindowPlan]) -> TrainState:
    """Return a state before windows that are pending in it."""
    microbatches, examples = sum(sum(p.counts) for p in plans), sum(p.examples for p in plans)
    return runner.put_back(state, len(plans), microbatches, examples)


def _loss_of(
    members: Members, ranks: Sequence[int], window: int, where: str = "train"
) -> tuple[str, list[int]]:
    """Return the message that processes with devices of these ranks were lost, and which.

    Args:
        members: The processes that are left.
        ranks: Ranks of the devices that were lost.
        window: Number of the window that was to run.
        where: The function the user called.
    """
    processes = sorted({members.devices[rank].process_index for rank in ranks})
    several, names = len(processes) > 1, ", ".join(map(str, processes))
    of_devices = "devices" if len(ranks) > 1 else "device"
    said = (
        f"{where}: process{'es' if several else ''} {names} ({of_devices} "
        f"{', '.join(map(str, ranks))}) ended before window {window} was complete; "
        f"{len(members.left)} of {len(members.devices)} devices are left."
    )
    return said, processes


def taken_over(counts: Sequence[int], lost: Collection[int]) -> tuple[int, ...]:
    """Return the counts of a window in which the devices that are left run what others would have.

    They share it in proportion to their own counts, which follow their speeds; alike if none of
    them had work.

    Args:
        counts: Microbatches per device.
        lost: Ranks of the devices that are lost, not all of them.

    Examples:
        >>> taken_over((4, 2, 6), lost=[2])
        (8, 4, 0)
        >>> taken_over((0, 0, 3), lost=[2])
        (2, 1, 0)
    """
    left = [rank for rank in range(len(counts)) if rank not in lost]
    own = [counts[rank] for rank in left]
    # a device without work beside others that have some stays without
    working = [rank for rank, count in zip(left, own, strict=True) if count or not any(own)]
    times = [1.0 / max(1, counts[rank]) for rank in working]
    shares = dict(zip(working, apportion(sum(counts), times), strict=True))
    return tuple(shares.get(rank, 0) for rank in range(len(counts)))
