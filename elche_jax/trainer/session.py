"""One run of a trainer: the loop, and what happens in it when."""

import copy
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp

from elche_jax.checkpoint.checkpointer import Checkpointer
from elche_jax.data.order import Cursor
from elche_jax.engine.replicas import unreplicate
from elche_jax.train.evaluate import EvalStep
from elche_jax.train.run import IN_FLIGHT, Window
from elche_jax.train.step import TrainStep
from elche_jax.trainer.callback import Moment
from elche_jax.trainer.control import Control
from elche_jax.trainer.epochs import EpochMetrics, EpochSums, epoch_metrics
from elche_jax.trainer.outlets import Outlets
from elche_jax.trainer.plan import FitPlan
from elche_jax.trainer.relay import Relay
from elche_jax.trainer.result import FitResult
from elche_jax.trainer.watching import Watching

PyTree = Any


class Session:
    """One call of `Trainer.fit`.

    Args:
        train: The training step.
        relay: What it records to.
        plan: What was asked for.
        control: Lets other threads stop and follow it.
        evaluate: Evaluates; None where there is nothing to.
    """

    def __init__(
        self,
        train: TrainStep,
        relay: Relay,
        plan: FitPlan,
        control: Control,
        evaluate: EvalStep | None,
    ):
        self._train, self._relay, self._plan, self._control = train, relay, plan, control
        self._evaluator = evaluate
        self._outlets = Outlets(plan, train, relay)
        self._watching = Watching(plan)
        self._sums: EpochSums | None = None
        self._history: list[EpochMetrics] = []
        self._pending: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._window: Window | None = None
        self._index, self._epoch = -1, 0  # of the last window, also of one before a resume
        self._metrics: Mapping[str, Any] = {}
        self._saver: Checkpointer | None = None
        self._announced: int | None = None

    def run(self) -> FitResult:
        """Trains until the end, or until something asks it to stop."""
        plan, train = self._plan, self._train
        self._begun = self._clock = time.perf_counter()
        result: FitResult | None = None
        try:
            with ExitStack() as stack:
                stack.enter_context(self._outlets)
                self._state = train.init(plan.params, model_state=plan.model_state, rng=plan.rng)
                if plan.saving is not None:
                    self._saver = stack.enter_context(Checkpointer(train, plan.saving))
                cursor = self._restore()
                self._outlets.begin(cursor)
                with train.windows(
                    plan.data, plan.batch_size, plan.epochs, plan.seed, shuffle=plan.shuffle,
                    drop_last=plan.drop_last, mask_key=plan.mask_key, placement=plan.placement,
                    window_bytes=plan.window_bytes, cursor=cursor,
                ) as self._windows:  # fmt: skip
                    self._loop()
                    self._end()
                result = self._result()
            self._outlets.page()
        except Exception as error:
            if result is not None:  # what could not be written in the end costs no result
                error.result = result  # pyright: ignore[reportAttributeAccessIssue]
                error.add_note("Training had ended; what it gave is in this error's `result`.")
            raise
        return result

    # -- the loop ----------------------------------------------------------------------

    def _loop(self) -> None:
        for window in self._windows:
            if self._sums is not None and window.epoch != self._sums.epoch:
                self._end_epoch()
            if self._control.reason is not None:
                return
            self._train_one(window)
            self._look_at_limits(window)
            if self._control.reason is not None:
                return

    def _train_one(self, window: Window) -> None:
        if self._sums is None:
            self._sums = EpochSums(window.epoch)
        self._state, self._metrics = self._train(self._state, window)
        self._window, self._index, self._epoch = window, window.index, window.epoch
        self._sums.see(window.counts, window.examples)
        self._pending.append((window.index + 1, self._metrics))
        while len(self._pending) > IN_FLIGHT:  # so that none is waited for
            self._fold()
        self._tick()
        self._outlets.window(window, self._sums)
        self._call("on_window")
        every = None if self._plan.evaluation is None else self._plan.evaluation.every_windows
        if every is not None and (window.index + 1) % every == 0:
            results = self._evaluate()
            named = {f"eval_{name}": value for name, value in results.items()}
            self._outlets.scalars(window.index + 1, named)
        self._save(force=False)

    def _look_at_limits(self, window: Window) -> None:
        plan, stop = self._plan, self._control.stop
        if plan.max_windows is not None and window.index + 1 >= plan.max_windows:
            stop("max_windows")
        if plan.max_seconds is not None and self._clock - self._begun >= plan.max_seconds:
            stop("max_seconds")

    def _end(self) -> None:
        """After the last window: the epoch it is of may be over, or not."""
        window, sums = self._window, self._sums
        cut = self._control.reason is not None and not (
            window is not None and window.cursor.microbatch == self._outlets.per_epoch
        )
        if sums is not None and not cut:
            self._end_epoch()
        self._save(force=True)
        if self._sums is not None:
            self._end_epoch(whole=False)
        if self._saver is not None:
            self._saver.wait()
            self._saver.check()
            self._announce()

    # -- what happens now and then -------------------------------------------------------

    def _end_epoch(self, whole: bool = True) -> None:
        """Tells of an epoch, when all of its windows are over."""
        assert self._sums is not None
        self._drain()
        sums, plan = self._sums, self._plan
        every = None if plan.evaluation is None else plan.evaluation.every_epochs
        if whole and every is not None and (sums.epoch + 1) % every == 0:
            self._evaluate()
        metrics = epoch_metrics(sums, self._relay.devices, whole)
        self._history.append(metrics)
        self._outlets.epoch(self._index, metrics, sums)
        if self._watching.epoch({"loss": metrics.loss, **metrics.metrics}) and whole:
            self._control.stop("early_stopping")
        if whole:
            self._sums = None
        self._control.told(metrics)
        self._call("on_epoch", metrics)
        saving = plan.saving
        often = None if saving is None else saving.every_epochs
        if whole and often is not None and (metrics.epoch + 1) % often == 0:
            self._save(force=True)

    def _evaluate(self) -> dict[str, float]:
        plan, evaluation = self._plan, self._plan.evaluation
        assert evaluation is not None and self._evaluator is not None
        self._drain()
        begun = time.perf_counter()
        params, model_state = self._variables()
        results = self._evaluator(
            params, evaluation.data, evaluation.batch_size, model_state=model_state,
            mask_key=evaluation.mask_key, window_bytes=plan.window_bytes,
        )  # fmt: skip
        scalars = {name: value for name, value in results.items() if isinstance(value, float)}
        if self._sums is not None:
            self._sums.evaluation = scalars
        self._outlets.evaluated(self._index, self._epoch, time.perf_counter() - begun, scalars)
        if self._watching.evaluation(scalars):
            self._control.stop("early_stopping")
        self._call("on_evaluation", results)
        self._clock = time.perf_counter()  # no time of the epoch
        return scalars

    def _save(self, force: bool) -> None:
        if self._saver is None or self._window is None:
            return
        self._saver.check()
        score = self._watching.score
        if self._saver.save(
            self._state, self._window, force=force, score=score, notes=self._notes()
        ):
            self._watching.score = None
        self._announce()

    def _announce(self) -> None:
        assert self._saver is not None
        written = self._saver.written
        if written is not None and written != self._announced:
            self._announced = written
            self._call("on_checkpoint", written)

    def _drain(self) -> None:
        """Waits until the windows so far are over, and takes their metrics."""
        self._windows.drain()
        while self._pending:
            self._fold()
        self._tick()

    def _fold(self) -> None:
        step, metrics = self._pending.popleft()
        assert self._sums is not None
        self._sums.fold(metrics)
        self._outlets.folded(step, metrics)

    def _tick(self) -> None:
        now = time.perf_counter()
        if self._sums is not None:
            self._sums.seconds += now - self._clock
        self._clock = now

    def _call(self, name: str, *arguments: Any) -> None:
        if not self._plan.callbacks:
            return
        moment = Moment(
            self._train, self._state, self._window, self._metrics, tuple(self._history),
            self._control,
        )  # fmt: skip
        for callback in self._plan.callbacks:
            getattr(callback, name)(moment, *arguments)

    # -- stop and go on --------------------------------------------------------------------

    def _notes(self) -> Callable[[], dict[str, Any]]:
        """What a checkpoint has besides the run itself; the thread that writes it calls."""
        sums, pending = copy.deepcopy(self._sums), [metrics for _, metrics in self._pending]
        fixed = {
            "history": [asdict(metrics) for metrics in self._history],
            "watching": self._watching.to_dict(),
        }

        def notes() -> dict[str, Any]:
            if sums is not None:
                for metrics in pending:
                    sums.fold(metrics)
            return fixed | {"sums": None if sums is None else asdict(sums)}

        return notes

    def _restore(self) -> Cursor | None:
        if self._saver is None:
            return None
        restored = self._saver.restore_all(self._state, self._plan.resume)
        self._state = restored.state
        if restored.notes:
            sums = restored.notes["sums"]
            self._sums = None if sums is None else EpochSums(**sums)
            self._history = [EpochMetrics.from_dict(m) for m in restored.notes["history"]]
            self._watching.restore(restored.notes["watching"])
        if restored.cursor is not None:
            self._index, self._epoch = restored.cursor.window - 1, restored.cursor.epoch
        return restored.cursor

    def _variables(self) -> tuple[PyTree, PyTree]:
        """What to evaluate: the state itself, or where the devices differ one copy."""
        state = self._state
        if self._train.common(state) is state:
            return state, None
        return self._train.average(state), self._one_model_state()

    def _one_model_state(self) -> PyTree:
        state = self._state
        same = set(map(id, jax.tree.leaves(self._train.common(state).model_state)))

        def one(leaf: jax.Array) -> jax.Array:
            if id(leaf) in same or not jnp.issubdtype(leaf.dtype, jnp.floating):
                return unreplicate(leaf)
            return jnp.mean(leaf, axis=0)

        return jax.tree.map(one, state.model_state)

    def _result(self) -> FitResult:
        return FitResult(
            params=self._train.average(self._state),
            model_state=self._one_model_state(),
            history=tuple(self._history),
            stopped=self._control.reason or "epochs",
            windows=self._index + 1,
            seconds=time.perf_counter() - self._begun,
            report=self._train.report(),
            state=self._state,
        )
