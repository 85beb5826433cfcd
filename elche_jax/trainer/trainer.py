"""`Trainer`: the training loop."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import optax

from elche_jax import _check as check
from elche_jax._exit import before_exit
from elche_jax.config import DDPConfig, check_timeline
from elche_jax.train.build import build_train_step
from elche_jax.train.evaluate import EvalStep, build_eval_step
from elche_jax.train.step import TrainStep
from elche_jax.trainer.control import Control, interrupts
from elche_jax.trainer.handle import Handle
from elche_jax.trainer.plan import OPTIONS, FitPlan
from elche_jax.trainer.recorder import RunRecorder
from elche_jax.trainer.result import FitResult
from elche_jax.trainer.session import Session

PyTree = Any

P = ParamSpec("P")
R = TypeVar("R")


def taking(
    like: Callable[P, Any],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Declare to type checkers that a method takes the arguments of another function.

    The method itself names those it uses, and takes the others as keyword arguments.
    """

    def typed(method: Callable[..., R]) -> Callable[Concatenate[Any, P], R]:
        return method

    return typed


class Trainer(check.Uncopyable):
    """Train a model: loop, evaluation, checkpoints, logging and progress display.

    In a job of several processes, all call `fit` alike. The first process writes all files and
    shows the progress; callbacks run in every process.

    Args:
        loss_fn: As in `build_train_step`.
        optimizer: An optax optimizer.
        config: Options as one flat bundle; None for `DDPConfig()`.
        **options: All other arguments of `build_train_step`: `devices`, `cadence`,
            `averaging`, `has_aux`, `nonfinite`, `trainable`, ...

    Raises:
        TypeError, ValueError: As in `build_train_step`.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np, optax
        >>> import elche_jax as elche
        >>> def loss_fn(params, batch, rng):
        ...     return (batch["x"] @ params["w"] - batch["y"]) ** 2
        >>> x = np.random.default_rng(0).normal(size=(256, 3)).astype("float32")
        >>> data = {"x": x, "y": x @ np.array([1.0, -2.0, 3.0], "float32")}
        >>> trainer = elche.Trainer(loss_fn, optax.adam(0.1), cadence=elche.FixedTotal(2))
        >>> result = trainer.fit({"w": np.zeros(3, "float32")}, data, 16, 20, progress=False)
        >>> result.params["w"].round(1).tolist(), len(result.history), result.stopped
        ([1.0, -2.0, 3.0], 20, 'epochs')
    """

    @taking(build_train_step)
    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: optax.GradientTransformation,
        *,
        config: DDPConfig | None = None,
        **options: Any,
    ):
        config = DDPConfig() if config is None else config
        check.instance("Trainer", "config", config, DDPConfig)
        timeline = config.or_given(timeline=options.get("timeline"))["timeline"]
        check_timeline("Trainer", timeline)
        self._recorder = RunRecorder(timeline)
        # the recorder passes everything on to it, and only one of the two may be given
        config = replace(config, timeline=None)
        options["timeline"] = self._recorder
        self._train = build_train_step(loss_fn, optimizer, config=config, **options)
        if not self._train.fleet.job.first:
            self._recorder.forget_own()
        self._emulate = options.get("emulate")
        self._evaluation: tuple[Callable[..., Any], EvalStep] | None = None
        self._busy = threading.Lock()

    @property
    def train(self) -> TrainStep:
        """The training step: `report()`, `counts_history`, `throughput` and more."""
        return self._train

    @taking(FitPlan)
    def fit(
        self,
        params: PyTree,
        data: Any,
        batch_size: int | None = None,
        epochs: int | None = 1,
        **options: Any,
    ) -> FitResult:
        """Train to the end and show progress.

        Ctrl-C stops the run before its next window, writes a checkpoint, closes all files, and
        then raises `KeyboardInterrupt`; a second Ctrl-C raises it immediately.

        Args:
            params: Parameters, a pytree of float arrays; copied.
            data: As in `TrainStep.windows`: arrays, a map-style dataset, or an iterable.
            batch_size: Examples per microbatch; None for an iterable.
            epochs: Number of epochs, counted from the start of the run; None to train until
                something else stops it.

        Keyword Args:
            model_state (PyTree): As in `TrainStep.init`.
            rng (jax.Array | int): As in `TrainStep.init`.
            seed (int): As in `TrainStep.windows`, as are the next five.
            shuffle (bool): Whether to shuffle the data in each epoch.
            drop_last (bool): Whether to drop the examples that do not fill a microbatch.
            mask_key (str | None): Key of the mask of valid examples.
            placement (str): `"stream"`, `"resident"` or `"auto"`.
            window_bytes (int): Most bytes of streamed data per program call.
            evaluation (Evaluation | None): What to evaluate, and when.
            early_stopping (EarlyStopping | None): When to stop before the last epoch.
            max_windows (int | None): Most windows (in gradient mode: optimizer steps), counted
                from the start of the run; at least 1.
            max_seconds (float | None): Most seconds for this call; above 0.
            checkpoints (Checkpoints | None): Where and when to write checkpoints. None: in
                `run_dir` if given, otherwise none.
            resume (str): What to do with existing checkpoints: `"never"` (raise an error),
                `"auto"` (resume from the newest intact one, or start if there is none),
                `"must"` (raise an error if there is none).
            run_dir (str | PathLike | None): Folder for all output: `timeline.jsonl`,
                `metrics.csv`, `checkpoints/` (after each epoch, unless `checkpoints` says
                otherwise) and, at the end, `report.html`. None: nothing is written.
            callbacks (Sequence[Callback]): `Callback` objects.
            writers (Sequence[Writer]): Writers of scalars, called at the end of each epoch,
                after evaluations, and as set by `log_every`: `CSVWriter`, `TensorBoardWriter`,
                or your own. They are not closed.
            log_every (int | None): Write the means over every N windows as `window_loss` and
                so on, N at least 1; None: do not.
            progress (bool): Show the devices and a progress bar on standard error; one line
                per epoch if that is not a terminal.

        Returns:
            Parameters, history, report and state.

        Raises:
            TypeError, ValueError: An argument is invalid, or differs between the processes of a
                job; the message names it.
            RuntimeError: This trainer is already running.
            NonFiniteError: As in `TrainStep`.
            CheckpointError: A checkpoint could not be written. An error raised after training
                has finished holds the result as `error.result`.
            RestartRequested: The job was asked to restart, and a checkpoint is on disk or kept in
                memory.
        """
        run, control = self._session(params, data, batch_size, epochs, options)
        try:
            with interrupts(control, say=options.get("progress", True)):
                run()
            return control.result()
        finally:
            control.error = None  # its traceback refers to the control: avoids a reference cycle

    @taking(FitPlan)
    def start(
        self,
        params: PyTree,
        data: Any,
        batch_size: int | None = None,
        epochs: int | None = 1,
        **options: Any,
    ) -> Handle:
        """Start to train on a new thread and return immediately; same arguments as `fit`.

        Returns:
            A handle to follow, stop and join the run.

        Raises:
            TypeError, ValueError: An argument is invalid. `Handle.join` raises errors found
                later, for instance in the data.
            RuntimeError: This trainer is already running.
        """
        run, control = self._session(params, data, batch_size, epochs, options)
        try:
            return Handle(run, control)
        except BaseException:  # no thread could be started
            self._busy.release()
            raise

    def _session(
        self, params: PyTree, data: Any, batch_size: int | None, epochs: int | None, options: Any
    ) -> tuple[Callable[[], None], Control]:
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            known = ", ".join(OPTIONS)
            raise TypeError(f"Trainer.fit: {unknown[0]} is not an argument; there are {known}.")
        plan = FitPlan(params, data, batch_size, epochs, **options)
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(
                "Trainer.fit: a trainer must do one run at a time, but this one is already "
                "running. Join its handle, or make another trainer."
            )
        control = Control()
        try:
            self._train.fleet.job.check_same("Trainer.fit", **plan.shared())
            session = Session(self._train, self._recorder, plan, control, self._evaluator(plan))
        except BaseException:
            self._busy.release()
            raise

        def run() -> None:
            def end() -> None:
                control.stop("exit")
                control.wait()

            try:
                with ExitStack() as stack:
                    stack.callback(self._busy.release)
                    # Python closes its thread pools before it waits for threads: orbax needs one
                    stack.callback(before_exit(end))
                    result = session.run()
            except BaseException as error:
                control.finish(error=error)
            else:  # last: the next run may begin as soon as the end is known
                control.finish(result)

        return run, control

    def _evaluator(self, plan: FitPlan) -> EvalStep | None:
        """Return the evaluation step, cached with its compiled programs for the next run."""
        if plan.evaluation is None:
            return None
        metric_fn = plan.evaluation.metric_fn
        if self._evaluation is None or self._evaluation[0] is not metric_fn:
            step = build_eval_step(metric_fn, devices=self._train.devices, emulate=self._emulate)
            self._evaluation = metric_fn, step
        return self._evaluation[1]
