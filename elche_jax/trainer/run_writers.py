"""All that a run shows and writes besides checkpoints: progress, timeline, scalars, page."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elche_jax import _check as check
from elche_jax.data.order import Cursor
from elche_jax.data.source import as_source
from elche_jax.engine.devices import device_summary
from elche_jax.observe.events import EpochEvent, EvaluationEvent
from elche_jax.observe.page import write_page
from elche_jax.observe.progress import Progress
from elche_jax.observe.run import read_run
from elche_jax.observe.timeline import Timeline
from elche_jax.observe.writers import CSVWriter, Writer
from elche_jax.train.step import TrainStep
from elche_jax.trainer.epochs import EpochMetrics, EpochSums
from elche_jax.trainer.plan import FitPlan
from elche_jax.trainer.tee_recorder import TeeRecorder

logger = logging.getLogger("elche_jax")


class RunWriters:
    """Opens them, feeds them, closes them.

    Args:
        plan: What was asked for.
        train: The training step.
        recorder: What the run records to.
    """

    def __init__(self, plan: FitPlan, train: TrainStep, recorder: TeeRecorder):
        self._plan, self._train, self._recorder = plan, train, recorder
        self._names = [str(device) for device in train.devices]
        self.per_epoch = microbatches_per_epoch(plan)
        self._before = 0  # microbatches of the epochs before, where the data do not tell
        self._log = EpochSums(0)
        self._progress: Progress | None = None

    def __enter__(self) -> "RunWriters":
        plan = self._plan
        if plan.folder is not None:
            _make(plan.folder)
        if plan.folder is not None and plan.resume == "never" and _written(plan.folder):
            rule = "hold no run with resume='never'"
            todo = "Pass resume='auto' to go on with it, or another folder."
            raise ValueError(check.message("Trainer.fit", "run_dir", rule, plan.folder, todo))
        with ExitStack() as stack:
            self._writers: list[Writer] = list(plan.writers)
            timeline = None
            if plan.folder is not None:
                timeline = stack.enter_context(_timeline(plan.folder))
                self._writers.append(stack.enter_context(Table(plan.folder / "metrics.csv")))
            self._recorder.begin(len(self._names), timeline)
            stack.callback(self._recorder.end)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    def begin(self) -> None:
        """The run begins, or goes on."""
        plan = self._plan
        if plan.progress:
            total = self.per_epoch * plan.epochs if self.per_epoch and plan.epochs else None
            progress = Progress(total, plan.epochs, self._names)
            progress.line(device_summary(self._train.devices))
            self._progress = self._stack.enter_context(progress)

    def show(self, cursor: Cursor, sums: EpochSums) -> None:
        """Shows the progress; `cursor` is where the epoch has come."""
        if self._progress is None:
            return
        rate = sums.examples / sums.seconds if sums.seconds > 0 else None
        _, busy = self._recorder.devices.of(sums.epoch)
        loss = sums.means().get("loss")
        before = self._before if self.per_epoch is None else self.per_epoch * cursor.epoch
        done = before + cursor.microbatch
        self._progress.update(sums.epoch, done, loss, rate, busy)

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it: the means that are not written yet."""
        return asdict(self._log)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Goes on with what `to_dict` gave."""
        self._log = EpochSums(**saved)

    def folded(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The metrics of a window are known; `step` is its number, from 1."""
        every = self._plan.log_every
        if every is None:
            return
        self._log.fold(metrics)
        if step % every == 0:
            means = self._log.means()
            self.scalars(step, {f"window_{name}": value for name, value in means.items()})
            self._log = EpochSums(0)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Values for whoever writes them; `step` is the number of windows so far."""
        for writer in self._writers:
            writer.scalars(step, values)

    def evaluated(self, at: Cursor, seconds: float, results: Mapping[str, float]) -> None:
        """An evaluation is over, at this place."""
        names, values = _finite(results)
        self._recorder.add(
            EvaluationEvent, window=at.window - 1, epoch=at.epoch, seconds=seconds, names=names,
            values=values,
        )  # fmt: skip

    def epoch(self, end: Cursor, metrics: EpochMetrics, sums: EpochSums) -> None:
        """An epoch is over, at this place."""
        self.show(end, sums)
        self._before += end.microbatch
        self.scalars(end.window, metrics.values)
        names, values = _finite({"loss": metrics.loss, **metrics.metrics})
        self._recorder.add(
            EpochEvent, epoch=metrics.epoch, window=end.window - 1, windows=metrics.windows,
            examples=metrics.examples, seconds=metrics.seconds, names=names, values=values,
        )  # fmt: skip

    def page(self) -> None:
        """Writes the run's page, when everything else is closed."""
        folder = self._plan.folder
        if folder is not None:
            write_page(read_run(folder), folder / "report.html", title=folder.name)


class Table:
    """The table of a run's folder. Where it cannot be written, training goes on, and the
    first error is raised at the end."""

    def __init__(self, path: Path):
        self._path, self._writer = path, CSVWriter(path)
        self._error: OSError | None = None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes a row."""
        if self._error is not None:
            return
        try:
            self._writer.scalars(step, values)
        except OSError as error:
            logger.warning("elche: %s is not written any more: %s", self._path, error)
            self._error = error

    def close(self) -> None:
        """Closes it; raises what kept it from being written."""
        self._writer.close()
        if self._error is not None:
            raise self._error

    def __enter__(self) -> "Table":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.close()
        except OSError as unwritten:
            if error is None:
                raise
            if error is not unwritten:
                error.add_note(f"Besides, {unwritten}")


def _make(folder: Path) -> None:
    """Makes the run's folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = "be a folder that can be made"
        got = f"{folder} ({error.strerror})"
        raise ValueError(check.message("Trainer.fit", "run_dir", rule, got)) from error


def _timeline(folder: Path) -> Timeline:
    """The timeline of a run's folder; one that is damaged is put aside, and a new one begun."""
    path = folder / "timeline.jsonl"
    try:
        return Timeline(path)
    except ValueError as error:  # what is there to be looked at does not decide over the run
        aside = path.with_name(f"timeline-damaged-{time.time_ns()}.jsonl")
        path.rename(aside)
        logger.warning("elche: %s It was renamed to %s.", error, aside)
        return Timeline(path)


def _written(folder: Path) -> bool:
    files = (folder / "timeline.jsonl", folder / "metrics.csv")
    return any(file.exists() and file.stat().st_size > 0 for file in files)


def microbatches_per_epoch(plan: FitPlan) -> int | None:
    """Microbatches of an epoch; None where the data do not tell."""
    size = getattr(as_source(plan.data), "size", None)
    if size is None or plan.batch_size is None:
        return None
    batch = check.integer("data", "batch_size", plan.batch_size, low=1)
    return size // batch if plan.drop_last else -(-size // batch)


def _finite(values: Mapping[str, float]) -> tuple[Sequence[str], Sequence[float]]:
    known = {name: value for name, value in values.items() if math.isfinite(value)}
    return tuple(known), tuple(known.values())
