"""Trains one window: dispatches it, and again if a process of the job ends in its exchange."""

import jax

from elche_jax._processes import PROCESSES, ExchangeLost
from elche_jax._waiting import HeldInterrupt
from elche_jax.engine.checksum import checksums
from elche_jax.engine.lane import Fleet
from elche_jax.engine.laned import StackedArray
from elche_jax.engine.place import placing
from elche_jax.engine.runner import WindowRunner
from elche_jax.engine.state import TrainState
from elche_jax.train.in_flight import Window
from elche_jax.train.initial import explain
from elche_jax.train.live_scheduler import LiveScheduler
from elche_jax.train.options import Options
from elche_jax.train.pipeline import Pipeline
from elche_jax.train.timing import Timing

Trained = tuple[TrainState, dict[str, jax.Array]]
"""The state after a window, and the metrics."""

VERIFY_IN_JOB = 100
"""Windows between two comparisons of the replicas in a job of several processes, unless a user says
otherwise. Each process has an optimizer of its own: another learning rate in one of them would
train processes apart without any other sign, so a job is always checked."""


class Training:
    """Trains windows of a training step.

    Args:
        fleet: The devices of this process.
        options: The options of the training step.
        scheduler: Counts its windows.
        timing: Decides which windows are timed.
    """

    def __init__(self, fleet: Fleet, options: Options, scheduler: LiveScheduler, timing: Timing):
        self._fleet, self._options, self._scheduler = fleet, options, scheduler
        self._timing = timing
        default = None if fleet.job.one_process else VERIFY_IN_JOB
        self._verify_every = options.verify_every or default
        self._verified = False

    def run(
        self, pipeline: Pipeline[WindowRunner], state: TrainState, window: Window | None
    ) -> Trained:
        """Train a window, and again those that are lost.

        Args:
            pipeline: That of the window.
            state: The state; its buffers are donated.
            window: The window; None to wait until no window lacks its mean.
        """
        windows = [] if window is None else [window]
        metrics, lost = dict[str, jax.Array](), False
        while True:
            # if an exchange is lost, the state is as before the window, which is run again
            state, windows = pipeline.present(state, windows, lost)
            try:
                for first in windows[:1]:
                    with HeldInterrupt() as interrupt:
                        state, metrics = self._dispatch(pipeline, state, first, interrupt)
                    if interrupt.came:
                        _interrupt(pipeline)
                    windows, lost = windows[1:], False
                if not windows:
                    pipeline.wait_for_means(window)
                    return state, metrics
            except ExchangeLost:
                lost = True

    def _dispatch(
        self, pipeline: Pipeline[WindowRunner], state: TrainState, window: Window,
        interrupt: HeldInterrupt,
    ) -> Trained:  # fmt: skip
        runner = pipeline.runner
        with pipeline.dispatch(window, interrupt.begin) as flight, placing(self._fleet):
            timed = self._timing.timed(self._scheduler.windows, window.counts, window.epoch)
            # asked only if the window is not timed, so a short run never compiles the fused program
            flight.timed = timed or not runner.fuses(window.calls[-1].payload)
            try:
                state, flight.metrics, flight.token = runner.run(
                    state, window.calls, flight.launch, fused=not flight.timed
                )
            except BaseException as error:
                # only after a failure: the loop would pay for every leaf in every window
                PROCESSES.raised(error)
                explain(state, runner.state, self._fleet, error)
                raise
            if not pipeline.late:  # reading the sums would wait for the late device
                flight.sums = self._checksums(runner, state, window.index)
            # if windows are pending, the metrics are those of an earlier one
            flight.finite = flight.token if self._options.pending else flight.metrics["finite"]
        return state, dict(flight.metrics)  # a copy: the watcher thread reads the original

    def _checksums(
        self, runner: WindowRunner, state: TrainState, window: int
    ) -> StackedArray | None:
        """Launch checksums of the replicas after a window if they are due; do not wait for them.

        They are due every so many windows, and at the first window seen, so that nothing is
        compiled later. In a job what they say is told in the exchange of the next window.
        """
        every = self._verify_every
        if every is None or (self._verified and window % every):
            return None
        self._verified = True
        return checksums(runner.replicated(state), self._fleet)


def _interrupt(pipeline: Pipeline[WindowRunner]) -> None:
    """Raise a Ctrl-C that was held back once the loop has the new state."""
    if pipeline.closed:
        raise KeyboardInterrupt  # nobody asks for a next window
    pipeline.errors.keep(KeyboardInterrupt())
