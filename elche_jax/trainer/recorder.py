"""Output of a run other than checkpoints: progress, timeline, scalars and report page."""

import math
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np

from elche_jax import _check as check
from elche_jax._log import logger
from elche_jax.cadence import WindowRecord
from elche_jax.checkpoint.errors import beside, described
from elche_jax.checkpoint.lock import lock
from elche_jax.config import Recorder
from elche_jax.data.order import Cursor
from elche_jax.data.source import as_source
from elche_jax.engine.devices import device_summary, names_of
from elche_jax.engine.job import Job
from elche_jax.engine.metric_names import EPOCH, Reserved
from elche_jax.observe.events import EpochEvent, EvaluationEvent, LossEvent
from elche_jax.observe.page import write_page
from elche_jax.observe.progress import Progress
from elche_jax.observe.run import read_run
from elche_jax.observe.timeline import Timeline
from elche_jax.observe.writers import CSVWriter, Writer
from elche_jax.train.recording import windows_to
from elche_jax.trainer.epochs import DeviceSums, EpochMetrics, EpochSums
from elche_jax.trainer.plan import FitPlan


class RunRecorder:
    """The recorder of a trainer's training step, an `EpochRecorder`.

    During a run it sums up what is recorded and forwards it to the timeline of the
    configuration, the timeline of the run's folder, the writers and the progress bar. If users
    run their own loop over the same training step, only the configuration's timeline records it.

    Args:
        own: The timeline of the trainer's configuration, or None.
    """

    reserved: Sequence[Reserved] = (EPOCH,)
    """Names that the loss's metrics must not use, as those of an epoch would replace them."""

    error: Exception | None = None
    """The first error of an output or a callback, in a job of several processes."""

    def __init__(self, own: Recorder | None):
        self._own: list[Recorder] = [] if own is None else [own]
        self._timelines = self._own  # during a run, with that of the run's folder
        self._plan: FitPlan | None = None  # of the current run
        # a deque needs no lock: watcher threads append, the loop pops
        self._metrics: deque[tuple[int, int, Mapping[str, Any]]] = deque()

    def shows_windows(self) -> bool:
        """Return whether a timeline shows each window.

        The history needs the times of only some windows per epoch.
        """
        return bool(self._timelines)

    def forget_own(self) -> None:
        """Record nothing in the user's timeline, which only the first process writes."""
        self._own.clear()

    @contextmanager
    def run(self, plan: FitPlan, job: Job) -> Generator[None]:
        """Open the outputs of a run in the first process, and close them at its end."""
        self.history: tuple[EpochMetrics, ...] = ()
        self.sums: EpochSums | None = None  # of the current epoch
        self._devices = DeviceSums(job.world_size)
        self._job, self.error = job, None
        self._log, self._before = EpochSums(0), 0
        self._writers: list[Writer] = list(plan.writers) if job.first else []
        self._progress: Progress | None = None
        with ExitStack() as self._stack:
            try:
                job.by_first(lambda: self._open(plan))
                self._plan = plan
                yield
            finally:
                self._plan, self._timelines = None, self._own
                # metrics hold arrays on the devices
                self._metrics.clear()

    def _open(self, plan: FitPlan) -> None:
        folder = plan.folder
        if folder is None:
            return
        _prepare(folder, plan.resume)
        try:
            self._stack.callback(lock(folder, "run_dir", ".run.lock"))
            timeline = self._stack.enter_context(_timeline(folder))
            self._timelines = [*self._own, timeline]
            self._writers.append(self._stack.enter_context(Table(folder / "metrics.csv")))
        except OSError as error:
            rule, got = "be a folder whose files can be written", f"{folder} ({described(error)})"
            raise OSError(check.message("Trainer.fit", "run_dir", rule, got)) from error

    @contextmanager
    def failing(self) -> Generator[None]:
        """Keep an error of the block in a job of several processes, until all can raise it.

        If a process raised at once, the others would wait for it in the next window.
        """
        try:
            yield
        except Exception as error:
            if self._job.one_process:
                raise
            self.error = self.error or error

    def begin(self, plan: FitPlan, devices: Sequence[jax.Device]) -> None:
        """Start the progress display, once all arguments have been checked."""
        size = getattr(as_source(plan.data), "size", None)
        self._per_epoch: int | None = None  # microbatches, if the size of the data is known
        if size is not None and plan.batch_size is not None:
            missing = 0 if plan.drop_last else -size % plan.batch_size
            self._per_epoch = (size + missing) // plan.batch_size
        if plan.progress and self._job.first:
            total = self._per_epoch * plan.epochs if self._per_epoch and plan.epochs else None
            progress = Progress(total, plan.epochs, names_of(devices))
            progress.line(device_summary(devices))
            self._progress = self._stack.enter_context(progress)

    # -- called by the training step -----------------------------------------------------

    def window(self, record: WindowRecord) -> None:
        """Record a finished window."""
        if self._plan is not None:
            self._devices.add(record)
        for timeline in self._timelines:
            windows_to(timeline)(record)

    def window_metrics(self, window: int, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a finished window."""
        if self._plan is not None:
            self._metrics.append((window, epoch, metrics))
        elif self._own:
            self._loss(window, epoch, float(np.asarray(metrics["loss"])))

    def add(self, kind: Any, **values: Any) -> None:
        """Record an event of another kind."""
        for timeline in self._timelines:
            timeline.add(kind, **values)

    # -- called by the session -----------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Number of windows whose metrics have not been added up yet."""
        return len(self._metrics)

    def fold(self) -> None:
        """Add the metrics of finished windows to the sums of the epoch."""
        every = self._plan and self._plan.log_every
        self._devices.sum_up()
        while self._metrics and self.sums is not None:
            window, epoch, metrics = self._metrics.popleft()
            self._loss(window, epoch, self.sums.add_metrics(metrics))
            if every is None:
                continue
            self._log.add_metrics(metrics)
            if (window + 1) % every == 0:
                means = self._log.means()
                self.scalars(window + 1, {f"window_{name}": x for name, x in means.items()})
                self._log = EpochSums(0)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Pass values to the writers; `step` is the number of windows so far."""
        for writer in self._writers:
            with self.failing():
                writer.scalars(step, values)

    def show(self, cursor: Cursor) -> None:
        """Show the progress; `cursor` is the current position in the data."""
        sums = self.sums
        if self._progress is None or sums is None:
            return
        rate = sums.examples / sums.seconds if sums.seconds > 0 else None
        _, busy = self._devices.rates(sums.epoch)
        before = self._before if self._per_epoch is None else self._per_epoch * cursor.epoch
        done = before + cursor.microbatch
        loss = sums.means().get("loss", math.nan)
        known = None if math.isnan(loss) else loss
        self._progress.update(sums.epoch, done, known, rate, busy)

    def evaluated(self, at: Cursor, seconds: float, results: Mapping[str, float]) -> None:
        """Record an evaluation made at this position in the data."""
        if self.sums is not None:
            self.sums.evaluation = dict(results)
        self.add(
            EvaluationEvent, window=at.window - 1, epoch=at.epoch, seconds=seconds,
            **_finite(results),
        )  # fmt: skip

    def end_epoch(self, end: Cursor, whole: bool) -> EpochMetrics:
        """Return the metrics of the epoch that ended at this position, and record it if whole."""
        assert self.sums is not None
        if whole:
            self.show(end)  # before the devices' times of the epoch are taken
        metrics = self.sums.metrics(self._devices, whole)
        self.history = (*self.history, metrics)
        if whole:
            self._record_epoch(end, metrics)
        return metrics

    def _record_epoch(self, end: Cursor, metrics: EpochMetrics) -> None:
        self.sums = None
        self._before += end.microbatch
        self.scalars(end.window, metrics.values)
        self.add(
            EpochEvent, epoch=metrics.epoch, window=end.window - 1, windows=metrics.windows,
            examples=metrics.examples, seconds=metrics.seconds,
            **_finite({"loss": metrics.loss, **metrics.metrics}),
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return the history and the sums of unfinished epochs, for a checkpoint."""
        return {
            "sums": None if self.sums is None else asdict(self.sums),
            "history": [vars(metrics) for metrics in self.history],
            "log": asdict(self._log),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the output of `to_dict`."""
        self.sums = None if saved["sums"] is None else EpochSums(**saved["sums"])
        self.history = tuple(map(EpochMetrics.from_dict, saved["history"]))
        self._log = EpochSums(**saved["log"])

    def _loss(self, window: int, epoch: int, loss: float) -> None:
        """Record the loss of a window; non-finite losses are recorded as skips elsewhere."""
        if math.isfinite(loss):
            self.add(LossEvent, window=window, epoch=epoch, loss=loss)


class Table(CSVWriter):
    """The metrics table of a run's folder.

    If it cannot be written, training continues, and the first error is raised at the end.
    """

    _lost: OSError | None = None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write a row."""
        if self._lost is not None:
            return
        try:
            super().scalars(step, values)
        except OSError as error:
            logger.warning("elche: %s is no longer written: %s", self._path, error)
            error.filename = error.filename or str(self._path)  # not set if the disk is full
            self._lost = error

    def __enter__(self) -> "Table":
        self.check()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        with beside(error):
            self.close()
            if self._lost is not None:
                raise self._lost


def write_report(folder: Path) -> None:
    """Write the report page of a run; its other files must be closed."""
    try:
        run = read_run(folder)
    except ValueError as error:  # a damaged file, as in `_timeline`
        logger.warning("elche: report.html was not written: %s", error)
        return
    write_page(run, folder / "report.html", title=folder.name)


def _prepare(folder: Path, resume: str) -> None:
    """Create the run's folder; raise if it holds a run that is not to be resumed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule, got = "be a folder that can be created", f"{folder} ({error.strerror})"
        raise ValueError(check.message("Trainer.fit", "run_dir", rule, got)) from error
    files = (folder / "timeline.jsonl", folder / "metrics.csv")
    found = [file for file in files if file.exists() and file.stat().st_size > 0]
    if resume == "never" and found:
        rule, todo = "hold no run with resume='never'", "Pass resume='auto' to resume it, or use "
        todo += "another folder. If the file is not of a run, you may also move it."
        raise ValueError(check.message("Trainer.fit", "run_dir", rule, found[0], todo))


def _timeline(folder: Path) -> Timeline:
    """Open the timeline of a run's folder; if it is damaged, rename it and start a new one."""
    path = folder / "timeline.jsonl"
    try:
        return Timeline(path)
    except ValueError as error:  # a damaged log must not stop the run
        aside = path.with_name(f"timeline-damaged-{time.time_ns()}.jsonl")
        path.rename(aside)
        logger.warning("elche: %s It was renamed to %s.", error, aside)
        return Timeline(path)


def _finite(values: Mapping[str, float]) -> dict[str, Sequence[Any]]:
    """Return the names and values for an event, which holds finite numbers only."""
    known = {name: value for name, value in values.items() if math.isfinite(value)}
    return {"names": tuple(known), "values": tuple(known.values())}
