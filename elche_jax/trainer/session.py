"""One run of a trainer: the loop and its schedule of evaluations and checkpoints."""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from os.path import exists
from typing import Any

import jax
import numpy as np

from elche_jax import _check as check
from elche_jax.checkpoint.checkpointer import Checkpointer
from elche_jax.checkpoint.errors import beside, none_there
from elche_jax.data.order import Cursor
from elche_jax.engine.replicas import unreplicate
from elche_jax.train.evaluate import EvalStep
from elche_jax.train.in_flight import Window
from elche_jax.train.resume import joined_model_state
from elche_jax.train.step import TrainStep
from elche_jax.trainer.callback import CallbackContext
from elche_jax.trainer.control import Control
from elche_jax.trainer.epochs import NO_MEANS, EpochSums
from elche_jax.trainer.plan import FitPlan
from elche_jax.trainer.recorder import RunRecorder, write_report
from elche_jax.trainer.result import FitResult
from elche_jax.trainer.watching import Watching

PyTree = Any

REFRESH_S = 0.1
"""Seconds between two updates of the metrics and the progress display."""

REASONS = ("max_seconds", "callback", "stop", "interrupt", "exit")
"""Why a process may ask all to stop; if there are several reasons, the first one counts."""

MAX_PENDING = 64
"""Windows whose metrics may wait for an update; they occupy device memory until then."""


class Session:
    """One call of `Trainer.fit`.

    The end of an epoch and the evaluation and checkpoint due with it are handled when the next
    window arrives or the data end: only then is it known whether the epoch is over.

    Args:
        train: The training step.
        recorder: The recorder of the training step.
        plan: The arguments of `Trainer.fit`.
        control: State shared with other threads, which may stop and follow the run.
        evaluator: The evaluation step; None if nothing is evaluated.
    """

    def __init__(
        self,
        train: TrainStep,
        recorder: RunRecorder,
        plan: FitPlan,
        control: Control,
        evaluator: EvalStep | None,
    ):
        self._train, self._recorder, self._plan, self._control = train, recorder, plan, control
        self._evaluator = evaluator
        self._watching = Watching(plan)
        self._window: Window | None = None
        self._cursor = Cursor()  # after the last window, including those before a resume
        self._metrics: Mapping[str, Any] = {}
        self._evaluated: int | None = None
        self._results: dict[str, float] = {}
        self._saver: Checkpointer | None = None
        self._announced: int | None = None
        self._trained = False
        self._stopped = "epochs"
        self._job = train.fleet.job

    def run(self) -> FitResult:
        """Train to the end, or until something stops the run."""
        self._begun = time.perf_counter()
        result: FitResult | None = None
        closing: Exception | None = None
        try:
            try:
                with ExitStack() as stack:
                    with self._open(stack) as self._windows:
                        self._work()
                    result = self._result()
            except Exception as error:
                if not self._trained:
                    raise
                closing = error
            try:
                self._job.raise_alike("Trainer.fit", closing)
            finally:
                del closing  # its traceback refers to this frame: avoids a reference cycle
            assert result is not None
            if self._plan.folder is not None:
                folder = self._plan.folder
                self._job.by_first(lambda: write_report(folder))
        except BaseException as error:
            with beside(error):  # raises pending errors of the last windows
                self._train.settle()
            if self._trained:  # an error after the last window must not lose the result
                self._attach_result(error)
            raise
        self._train.settle()
        return result

    def _work(self) -> None:
        try:
            self._loop()
            self._trained = True
            self._end()
        except BaseException as error:
            with beside(error):  # record the windows that led to the error, too
                self._take_metrics()
            raise

    def _open(self, stack: ExitStack) -> Any:
        plan, train = self._plan, self._train
        folder = plan.saving and plan.saving.path

        def check_there() -> None:
            if plan.resume == "must" and folder is not None and not exists(folder):
                raise none_there(folder)  # before any file is created

        self._job.by_first(check_there)
        stack.enter_context(self._recorder.run(plan, self._job))
        self._state = train.init(plan.params, model_state=plan.model_state, rng=plan.rng)
        if plan.saving is not None:
            self._saver = stack.enter_context(Checkpointer(train, plan.saving))
        cursor = self._restore()
        windows = train.windows(
            plan.data, plan.batch_size, plan.epochs, plan.seed, shuffle=plan.shuffle,
            drop_last=plan.drop_last, mask_key=plan.mask_key, placement=plan.placement,
            window_bytes=plan.window_bytes, cursor=cursor,
        )  # fmt: skip
        self._recorder.begin(plan, train.devices)
        return windows

    def _attach_result(self, error: BaseException) -> None:
        try:
            error.result = self._result()  # pyright: ignore[reportAttributeAccessIssue]  # new
        except Exception as second:
            error.add_note(f"Training had finished, but its result is not available: {second}")
        else:
            error.add_note("Training had finished; its result is this error's `result`.")

    # -- the loop ----------------------------------------------------------------------

    def _loop(self) -> None:
        self._clock = self._due = time.perf_counter()
        for window in self._windows:
            self._between(window)
            if self._stopping():
                return
            self._train_one(window)
        self._drain()  # an error of the last windows is still one of training
        self._trained = True
        self._between(None)
        if self._job.one_process:  # with several processes it is too late to tell the others
            self._stopped = self._control.reason or self._stopped

    def _train_one(self, window: Window) -> None:
        sums = self._recorder.sums
        if sums is None:
            # a checkpoint of the user's own loop has no sums, and may be from mid-epoch
            midway = window.epoch == self._cursor.epoch and self._cursor.microbatch > 0
            sums = self._recorder.sums = EpochSums(window.epoch, whole=not midway)
        self._state, self._metrics = self._train(self._state, window)
        if self._window is None:
            self._watching.training(self._names())
        self._window, self._cursor = window, window.cursor
        sums.add_window(window.counts, window.examples)
        if self._recorder.waiting >= MAX_PENDING or time.perf_counter() >= self._due:
            self._refresh()
        self._call("on_window")
        evaluation = self._plan.evaluation
        if _due(evaluation and evaluation.every_windows, window.index):
            self._evaluate()
            named = {f"eval_{name}": value for name, value in self._results.items()}
            self._recorder.scalars(window.index + 1, named)

    def _between(self, following: Window | None) -> None:
        """Handle the end of an epoch and a checkpoint that are due between two windows."""
        saving, sums, force = self._plan.saving, self._recorder.sums, False
        begun = time.perf_counter()
        if sums is not None and (following is None or following.epoch != sums.epoch):
            force = _due(saving and saving.every_epochs, sums.epoch)
            # before the checkpoint, which takes the score of this epoch's evaluation
            self._end_epoch()
        self._save(force)
        now = time.perf_counter()
        self._windows.exclude(now - begun)  # the devices have not begun the following window
        if following is not None and self._recorder.sums is None:
            self._clock = now  # start of an epoch

    def _stopping(self) -> bool:
        """Return whether to stop before the next window, decided by what all processes know."""
        plan, wish = self._plan, self._control.reason
        limit = plan.max_seconds if self._window is not None else None  # always train one window
        if wish is None and limit is not None and time.perf_counter() - self._begun >= limit:
            wish = "max_seconds"
        agreed = self._windows.agreed(wish)
        if self._recorder.error is not None:
            agreed = self._windows.agreed("failed")
        if "failed" in agreed:
            self._raise_failure()
        reasons = [reason for reason in REASONS if reason in agreed]
        if not reasons and self._watching.over:
            reasons = ["early_stopping"]
        if not reasons and plan.max_windows is not None and self._cursor.window >= plan.max_windows:
            reasons = ["max_windows"]
        if reasons:
            self._stopped = reasons[0]
        return bool(reasons)

    def _raise_failure(self) -> None:
        """Raise in all processes what a callback or an output raised in one of them."""
        self._drain()
        self._job.raise_alike("Trainer.fit", self._recorder.error)

    def _end(self) -> None:
        """Save and report the last windows, and wait for the last checkpoint."""
        # first: when the run is resumed, its history must not hold the partial epoch
        self._save(force=True)
        if self._recorder.sums is not None:
            self._end_epoch(whole=False)
        if self._saver is not None:
            self._saver.wait()
            self._announce()
        self._raise_failure()

    # -- epochs, evaluations, checkpoints -------------------------------------------------

    def _end_epoch(self, whole: bool = True) -> None:
        """Report an epoch after all of its windows have finished."""
        self._drain()
        sums, evaluation = self._recorder.sums, self._plan.evaluation
        assert sums is not None
        if whole and _due(evaluation and evaluation.every_epochs, sums.epoch):
            self._evaluate()
        # after the evaluation, which waits once more; the history is the same in all processes
        seconds = sums.seconds
        sums.seconds = self._job.by_first(lambda: seconds)
        metrics = self._recorder.end_epoch(self._cursor, whole)
        if whole:
            self._watching.epoch(self._cursor.window, {"loss": metrics.loss, **metrics.metrics})
        self._control.add_epoch(metrics)
        self._call("on_epoch", metrics)

    def _evaluate(self) -> None:
        """Evaluate the current state, unless it already was."""
        plan, evaluation = self._plan, self._plan.evaluation
        assert evaluation is not None and self._evaluator is not None
        if self._evaluated == self._cursor.window:
            return
        self._drain()
        begun = time.perf_counter()
        params, model_state = self._variables()
        results = self._evaluator(
            params, evaluation.data, evaluation.batch_size, model_state=model_state,
            mask_key=evaluation.mask_key, window_bytes=plan.window_bytes,
        )  # fmt: skip
        self._evaluated = self._cursor.window
        self._results = {name: x for name, x in results.items() if isinstance(x, float)}
        self._recorder.evaluated(self._cursor, time.perf_counter() - begun, self._results)
        self._watching.evaluation(self._cursor.window, self._results)
        self._call("on_evaluation", results)
        self._clock = time.perf_counter()  # evaluation does not count towards the epoch's time

    def _save(self, force: bool) -> None:
        if self._saver is None or self._window is None:
            return
        due = self._saver.due(self._window)
        if force or due:
            self._drain()
            score = self._watching.score(self._cursor.window)
            # taken now: the thread that writes them runs during the next windows
            notes = self._notes()
            self._saver.save(
                self._state, self._window, force=True, score=score, notes=lambda: notes
            )
        self._announce()

    def _announce(self) -> None:
        assert self._saver is not None
        written = self._saver.written
        if written is not None and written != self._announced:
            self._announced = written
            self._call("on_checkpoint", written)

    def _refresh(self) -> None:
        """Update metrics and progress; several windows together cost less than one by one."""
        self._take_metrics()
        self._due = self._clock + REFRESH_S
        self._recorder.show(self._cursor)

    def _drain(self) -> None:
        """Wait for all dispatched windows to finish, and add up their metrics."""
        if self._window is not None:
            self._state = self._train.whole(self._state, self._window)
        self._windows.drain()
        self._take_metrics()

    def _take_metrics(self) -> None:
        """Add up the metrics of finished windows and the time since the last call."""
        before = self._clock
        self._recorder.fold()
        self._clock = time.perf_counter()
        if self._recorder.sums is not None:
            self._recorder.sums.seconds += self._clock - before

    def _names(self) -> list[str]:
        """Return the names of the scalar training metrics."""
        single = [name for name, value in self._metrics.items() if np.ndim(value) == 0]
        return [name for name in single if name not in NO_MEANS]

    def _call(self, name: str, *arguments: Any) -> None:
        if not self._plan.callbacks:
            return
        context = CallbackContext(
            self._train,
            self._state,
            self._window,
            self._metrics,
            self._recorder.history,
            self._control,
        )
        for callback in self._plan.callbacks:
            with self._recorder.failing():
                getattr(callback, name)(context, *arguments)

    # -- resume ----------------------------------------------------------------------------

    def _notes(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides the state of the training step."""
        return self._recorder.to_dict() | {"watching": self._watching.to_dict()}

    def _restore(self) -> Cursor | None:
        if self._saver is None:
            return None
        self._state, cursor, notes = self._saver.restore_all(self._state, self._plan.resume)
        if cursor is None:
            return None
        # `windows` would reject it with a message about a cursor, which `fit` does not have
        epochs = self._plan.epochs
        if epochs is not None and cursor.epoch >= epochs:
            rule = f"be at least {cursor.epoch + 1}, the epochs that the saved run has begun"
            todo = "Epochs are counted from the start of the run."
            raise ValueError(check.message("Trainer.fit", "epochs", rule, epochs, todo))
        self._cursor = cursor
        if {"sums", "watching"} <= notes.keys():  # a checkpoint of the user's own loop has others
            self._recorder.restore(notes)
            self._watching.restore(notes["watching"])
        return cursor

    # -- result ------------------------------------------------------------------------------

    def _variables(self) -> tuple[PyTree, PyTree]:
        """Return the variables to evaluate: the state, or an average if the devices differ."""
        state = self._state
        if self._train.common(state) is state:
            return state, None
        # given the state, each device would evaluate its own parameters
        return self._train.average(state), self._one_model_state()

    def _one_model_state(self) -> PyTree:
        state, fleet = self._state, self._train.fleet
        if self._train.common(state) is state:
            return unreplicate(state.model_state)
        return jax.device_put(joined_model_state(fleet.job, state.model_state), fleet.devices[0])

    def _result(self) -> FitResult:
        return FitResult(
            params=self._train.average(self._state),
            model_state=self._one_model_state(),
            history=self._recorder.history,
            stopped=self._stopped,
            windows=self._cursor.window,
            seconds=time.perf_counter() - self._begun,
            report=self._train.report(),
            state=self._state,
        )


def _due(every: int | None, number: int) -> bool:
    """Return whether something is due after the epoch or window of this index."""
    return every is not None and (number + 1) % every == 0
