"""The arguments of `Trainer.fit`."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from elche_jax import _check as check
from elche_jax.checkpoint.options import RESUME, Checkpoints
from elche_jax.engine.digests import Described, settings_of
from elche_jax.observe.writers import Writer
from elche_jax.train.loading import WINDOW_BYTES
from elche_jax.trainer.callback import Callback
from elche_jax.trainer.evaluation import EarlyStopping, Evaluation

PyTree = Any


@dataclass(frozen=True)
class FitPlan:
    """The arguments of `Trainer.fit`, which documents them, checked."""

    params: PyTree
    data: Any
    batch_size: int | None = None
    epochs: int | None = 1
    _: KW_ONLY
    model_state: PyTree = None
    rng: Any = 0
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = True
    mask_key: str | None = None
    placement: str = "auto"
    window_bytes: int = WINDOW_BYTES
    evaluation: Evaluation | None = None
    early_stopping: EarlyStopping | None = None
    max_windows: int | None = None
    max_seconds: float | None = None
    checkpoints: Checkpoints | None = None
    resume: str = "never"
    run_dir: str | PathLike[str] | None = None
    callbacks: Sequence[Callback] = ()
    writers: Sequence[Writer] = ()
    log_every: int | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        where = "Trainer.fit"
        for name in ("params", "data"):
            if getattr(self, name) is None:
                raise TypeError(check.message(where, name, "be given", None))
        for name in ("epochs", "max_windows", "log_every"):
            if getattr(self, name) is not None:
                check.integer(where, name, getattr(self, name), low=1)
        if self.max_seconds is not None:
            check.real(where, "max_seconds", self.max_seconds, above=0)
        kinds = {
            "evaluation": Evaluation, "early_stopping": EarlyStopping, "checkpoints": Checkpoints,
        }  # fmt: skip
        for name, kind in kinds.items():
            if getattr(self, name) is not None:
                check.instance(where, name, getattr(self, name), kind)
        # resolved now, in case the working directory changes
        folder, saving = self.folder, self.saving
        check.one_of(where, "resume", self.resume, RESUME)
        check.instance(where, "progress", self.progress, bool)
        parts = (
            ("callbacks", self.callbacks, Callback, ""),
            ("writers", self.writers, Writer, "be a Writer: scalars(step, values) and close()"),
        )
        for name, values, kind, rule in parts:
            for at, value in enumerate(check.items(where, name, values, f"{kind.__name__}s")):
                check.instance(where, f"{name}[{at}]", value, kind, rule, no_class=True)
        if self.resume != "never" and saving is None:
            rule = "be 'never' without checkpoints"
            todo = "Pass checkpoints or run_dir."
            raise ValueError(check.message(where, "resume", rule, repr(self.resume), todo))
        if self.log_every is not None and not self.writers and folder is None:
            rule = "be None without writers and run_dir"
            todo = "There is nothing to write to."
            raise ValueError(check.message(where, "log_every", rule, self.log_every, todo))
        if self.checkpoints is not None and saving is None:
            rule = "have a folder if there is no run_dir"
            raise ValueError(check.message(where, "checkpoints", rule, None))

    @cached_property
    def folder(self) -> Path | None:
        """The run's folder, absolute."""
        if self.run_dir is None:
            return None
        path = check.path("Trainer.fit", "run_dir", self.run_dir, rule="be a path or None")
        return path.absolute()

    @cached_property
    def saving(self) -> Checkpoints | None:
        """The checkpoint options with a folder; None if no checkpoints are written."""
        asked = self.checkpoints
        if asked is not None and asked.folder is not None:
            return asked
        if self.folder is None:
            return None
        return replace(asked or Checkpoints(), folder=self.folder / "checkpoints")

    def shared(self) -> dict[str, Any]:
        """Return the arguments that decide when processes exchange, which all must set alike.

        The arguments of `TrainStep.init` and `TrainStep.windows` are compared there.
        """
        return {
            "run_dir": self.folder and Described.of("a folder"),  # the first process's is used
            "checkpoints": self.saving and self.saving.shared(),
            # the data are compared when they are evaluated; a dataset may hold a path of its host
            "evaluation": settings_of(self.evaluation, without=["data"]),
            "early_stopping": settings_of(self.early_stopping),
            "max_windows": self.max_windows,
        }


OPTIONS = tuple(field.name for field in fields(FitPlan) if field.kw_only)
"""Names of the keyword arguments of `Trainer.fit`."""
