"""Trains windows: dispatches each, and again if a process of the job ends in its exchange."""

import time
from collections import deque
from collections.abc import Sequence

import jax
import numpy as np

from elche_jax._processes import PROCESSES, ExchangeLost
from elche_jax._turns import TURNS
from elche_jax._waiting import HeldInterrupt
from elche_jax.cadence import WindowPlan
from elche_jax.engine.checksum import checksums
from elche_jax.engine.laned import StackedArray
from elche_jax.engine.place import placing
from elche_jax.engine.replicas import ReplicaMismatch, mismatch
from elche_jax.engine.runner import Launch, WindowRunner
from elche_jax.engine.state import TrainState
from elche_jax.engine.survey import Survey
from elche_jax.train.in_flight import InFlight, Window
from elche_jax.train.initial import explain
from elche_jax.train.pipeline import Pipeline
from elche_jax.train.telling import numbered, plan_number, plans_error, unmeasured_rows

Trained = tuple[TrainState, dict[str, jax.Array]]
"""The state after a window, and the metrics."""

VERIFY_IN_JOB = 100
"""Default number of windows between two comparisons of the replicas in a job of several processes.
Each process has its own optimizer: a different learning rate in one of them would let the replicas
drift apart without any other sign, so a job is always checked."""


STATE = (
    "the state is not the one that the last of them returned, or the first of them began with "
    "local steps of an earlier loop"
)


class Training(Pipeline[WindowRunner]):
    """The windows of a training step, see `Pipeline`.

    Windows that were pending when a process ended lack the contributions of its devices. They are
    put back, and run again from the last mean; what the other devices had computed is dropped, too.
    Windows pending in the state are put back by number, see `_run_again`. If the loop runs ahead of
    exchanges, windows are put back by what their exchange has told, see `_take_back`.
    """

    def train(self, state: TrainState, window: Window | None) -> Trained:
        """Train a window, and retrain lost ones.

        Args:
            state: The state; its buffers are donated.
            window: The window; None to wait until every window has its mean.
        """
        windows = [] if window is None else [window]
        metrics, lost = dict[str, jax.Array](), False
        while True:
            # if an exchange is lost, the state is as before the window, which is run again
            state, windows = self._present(state, windows, lost)
            try:
                for first in windows[:1]:
                    with HeldInterrupt() as interrupt:
                        state, metrics = self._dispatch(state, first, interrupt)
                    if interrupt.came:
                        self._interrupt()
                    windows, lost = windows[1:], False
                if not windows:
                    self._wait_for_means(window)
                    return state, metrics
            except ExchangeLost:
                lost = True

    def _dispatch(self, state: TrainState, window: Window, interrupt: HeldInterrupt) -> Trained:
        runner, fleet = self.runner, self._feed.fleet
        with self.dispatch(window, interrupt.begin) as flight, placing(fleet):
            timed = self._timing.timed(self._scheduler.windows, window.counts, window.epoch)
            # asked only if the window is not timed, so a short run never compiles the fused program
            flight.timed = timed or not runner.fuses(window.calls[-1].payload)
            # tracing and compiling that program disturbs the threads that note times
            flight.used = timed or not runner.may_fuse
            before = state
            try:
                state, flight.metrics, flight.token = runner.run(
                    before, window.calls, flight.launch, fused=not flight.timed
                )
            except BaseException as error:
                # only after a failure: in every window, a check of every leaf would cost too much
                PROCESSES.raised(error)
                explain(before, runner.state, fleet, error)
                raise
            if before.step.is_deleted():  # otherwise it would hold memory
                flight.donated = before
            if not self.late:  # reading the sums would wait for the late device
                flight.sums = self._checksums(state, window.index)
            # if windows are pending, the metrics are those of an earlier one
            flight.finite = flight.token if self._options.pending else flight.metrics["finite"]
            metrics = dict(flight.metrics)  # a copy: the watcher thread reads the original
            if self._one_reader:  # copy the arrays, too
                metrics = {name: array.copy() for name, array in metrics.items()}
        self._plans.append(flight.plan)
        return state, metrics

    def _checksums(self, state: TrainState, window: int) -> StackedArray | None:
        """Launch checksums of the replicas after a window if they are due; do not wait for them.

        They are due every so many windows, and at the first window seen, so that nothing is
        compiled later. With several processes, the exchange of the next window tells the result.
        """
        every = self._options.verify_every or (None if self._job.one_process else VERIFY_IN_JOB)
        if every is None or (self._scheduler.verified and window % every):
            return None
        self._scheduler.verified = True
        return checksums(self.runner.replicated(state), self._feed.fleet)

    def _check_replicas(self, window: InFlight) -> None:
        if window.sums is None:
            return
        where = f"train: after window {window.plan.window}"
        compared = self.runner.replicated(self.runner.state)
        text = mismatch(where, compared, self._feed.fleet.devices, window.sums)
        error = None if text is None else ReplicaMismatch(text)
        self._telling.verified(window.sums, error)
        # with several processes, the next exchange tells it
        if error is not None and self._job.one_process:
            self.errors.keep(error)

    def _interrupt(self) -> None:
        """Raise a Ctrl-C that was held back, once the loop has the new state."""
        if self.closed:
            raise KeyboardInterrupt  # the loop asks for no further window
        self.errors.keep(KeyboardInterrupt())

    def _wait_for_means(self, window: Window | None) -> None:
        """Wait until all windows have a mean, if devices run ahead of means.

        Args:
            window: Wait only if this is the last window of the run; None to always wait.

        Raises:
            ExchangeLost: If some windows are lost.
        """
        if self.runner.runs_ahead and (window is None or window.index == self._last):
            self._wait_for_records()
            if self._lost:
                raise ExchangeLost

    # -- after the loss of a process -------------------------------------------------

    def _present(
        self, state: TrainState, windows: list[Window], lost: bool
    ) -> tuple[TrainState, list[Window]]:
        """Return a state, and the windows to train from it, for the devices that are left.

        Args:
            state: The state before the windows; given up if windows run again.
            windows: Windows to dispatch. If a process was lost since the last one, they are the
                same in all processes.
            lost: Whether an exchange was lost since the last call. If the loop runs ahead of
                exchanges, this process may know of a loss before others do.

        Raises:
            ProcessLostError: If data cannot be read again, or a recording is replayed.
        """
        ahead = self.runner.runs_ahead
        if lost and ahead:
            try:
                state, windows = self._take_back(state, windows)
            except Exception:
                self.errors.raised = True  # here the loop sees it
                raise
        if not windows:
            return state, []
        first, *later = windows
        if not ahead:
            TURNS.wait()  # another thread may find at any moment that a process is lost
            while self.lose(first.index):
                if self._options.pending:
                    state = self._run_again(state, self._unfinished(state, first.index))
        return state, [self.shared(first), *later]

    def _take_back(
        self, state: TrainState, windows: list[Window]
    ) -> tuple[TrainState, list[Window]]:
        """Return the state before the lost windows, and these windows, to be trained again.

        For loops that run ahead of exchanges. The lost windows have no record yet, so all processes
        make the same plans after them. The loop does not notice.

        Args:
            state: The state after these windows.
            windows: Windows to be dispatched after them, the same in all processes.

        Returns:
            The state, and all windows to dispatch.

        Raises:
            ProcessLostError: If they cannot run again.
        """
        clock = self._live_clock
        TURNS.wait()  # another thread may find at any moment that a process is lost
        self._wait_for_records()
        with self._changed:
            flights, self._flights = self._flights, {}
        self._scheduler.on_taken_back(len(flights))
        lost = [flight.again for flight in flights.values() if flight.again is not None]
        again = [*lost, *windows]
        first = again[0].index
        if clock is None:
            raise self.ended(first)
        before = self.runner.take_back(state, clock, len(lost))
        if before is None:
            raise self._loss_error(first, STATE)
        self.lose(first)
        return before, again

    def _unfinished(self, state: TrainState, window: int) -> list[WindowPlan]:
        """Return the windows that are pending in a state, oldest first."""
        there = min(self._options.pending, int(np.asarray(state.step)[0]))
        if there > len(self._plans):
            before = "pending since before this call of windows"
            raise self._loss_error(window, "their data are closed", before)
        return list(self._plans)[len(self._plans) - there :]

    def _run_again(self, state: TrainState, plans: Sequence[WindowPlan]) -> TrainState:
        """Run the windows that are pending in a state again; return the state after them.

        They were dispatched before, and their times are known, so this is neither recorded nor
        measured.
        """
        clock = self._live_clock
        todo, done, own = deque(plans), list[WindowPlan](), list[np.ndarray]()
        state = self.runner.put_back(state, plans)
        while todo:
            plan, calls = self._shared_out(todo[0])
            # `_check_again` tells whether its devices are finite
            own_rows = unmeasured_rows([True] * self._feed.fleet.world_size)
            rows = numbered(own_rows, plan_number(plan))
            survey = Survey(lambda rows=rows: rows)
            now = time.perf_counter()
            launch = Launch(clock, 0, now, plan.counts, survey=survey, timed=False)
            try:
                state, _, token = self.runner.run(state, calls, launch)
            except ExchangeLost:  # another process ended
                state = self.runner.put_back(state, done)
                todo, done, own = deque([*done, *todo]), [], []
                self.lose(plan.window)
                continue
            if (error := plans_error(self._job, plan, np.asarray(survey.found))) is not None:
                raise error
            todo.popleft()
            done.append(plan)
            own.append(np.asarray(token))
        self._check_again(done, own)
        self._plans.extend(done)
        return state

    def _check_again(self, plans: Sequence[WindowPlan], own: Sequence[np.ndarray]) -> None:
        """Check whether windows that ran again are finite; `own` is of this process's devices."""
        if not plans:
            return
        rows, lost = self._job.gather_rows(np.stack(own, 1).astype(np.float32)), self._job.members
        for plan, column in zip(plans, rows.T, strict=True):
            fine = column > 0
            fine[list(lost.lost)] = True
            self._count(plan, bool(fine.all()), fine, 0)
