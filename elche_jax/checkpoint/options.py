"""`Checkpoints`: where and when to save checkpoints, and which to keep."""

from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path

from elche_jax import _check as check
from elche_jax.engine.digests import Described, settings_of

RESUME = ("never", "auto", "must")


@dataclass(frozen=True)
class Checkpoints(check.CheckedFields):
    """Where to save checkpoints, how often, and which to keep.

    Attributes:
        folder: The folder, created if missing; `~` is the home folder. If None,
            `Trainer.fit(run_dir=...)` uses a folder in `run_dir`.
        every_windows: Save after every N-th window, N at least 1; or None.
        every_seconds: Save at the first window after this many seconds, above 0; or None.
        every_epochs: Save at the end of every N-th epoch, N at least 1; or None. Used by
            `Trainer` only.
        keep_last: How many of the newest checkpoints to keep, at least 1.
        keep_best: How many of the best checkpoints to keep in addition, at least 0. Only
            checkpoints with a new value of `monitor` count.
        monitor: The metric that ranks checkpoints: the name of an evaluation metric, or
            `"loss"`, which is the epoch's training loss unless an evaluation has that name. With
            an evaluation, checkpoints before the first evaluation have no training loss to rank by.
        mode: `"min"` or `"max"`: whether lower or higher values are better.
        on_error: `"now"`: if a checkpoint cannot be written, on a full disk for instance, raise
            the error in the loop at the next window. `"end"`: continue training, and raise it
            at the end.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of range.

    Examples:
        >>> from elche_jax import Checkpoints
        >>> Checkpoints("runs/digits", every_windows=100, keep_best=1, mode="max")
        ... # doctest: +ELLIPSIS
        Checkpoints(folder='runs/digits', every_windows=100, ...)
    """

    folder: str | PathLike[str] | None = None
    every_windows: int | None = field(default=None, metadata={"low": 1})
    every_seconds: float | None = field(default=None, metadata={"above": 0})
    every_epochs: int | None = field(default=1, metadata={"low": 1})
    keep_last: int = field(default=3, metadata={"low": 1})
    keep_best: int = field(default=0, metadata={"low": 0})
    monitor: str = "loss"
    mode: str = "min"
    on_error: str = "now"

    def __post_init__(self) -> None:
        where = "Checkpoints"
        _ = self.path  # checks the folder
        super().__post_init__()
        check.instance(where, "monitor", self.monitor, str)
        check.one_of(where, "mode", self.mode, ("min", "max"))
        check.one_of(where, "on_error", self.on_error, ("now", "end"))

    @property
    def path(self) -> Path | None:
        """The folder as a path."""
        if self.folder is None:
            return None
        found = check.path("Checkpoints", "folder", self.folder, rule="be a path or None")
        whole = str(found.absolute())
        try:
            whole.encode()
        except UnicodeEncodeError as error:
            rule, todo = "be valid UTF-8", "Orbax can write to no other."
            raise ValueError(
                check.message("Checkpoints", "folder", rule, repr(whole), todo)
            ) from error
        return found

    def shared(self) -> Described:
        """Return the settings that all processes of a job must share, see `settings_of`.

        `folder` and `every_seconds` may differ: only those of the first process count.
        """
        return settings_of(replace(self, folder=None, every_seconds=None))
