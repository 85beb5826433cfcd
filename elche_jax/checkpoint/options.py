"""`Checkpoints`: where and when, and what is kept."""

from dataclasses import dataclass
from os import PathLike
from os.path import expanduser  # leaves the name of an unknown user as it is
from pathlib import Path

from elche_jax import _check as check

RESUME = ("never", "auto", "must")


@dataclass(frozen=True)
class Checkpoints:
    """Where checkpoints go, how often, and which are kept.

    Attributes:
        folder: The folder, made if it is missing; `~` is the home folder.
            `Trainer.fit(run_dir=...)` has one of its own if this is None.
        every_windows: A checkpoint after every so many windows, at least 1; or None.
        every_seconds: One at the first window after so many seconds, above 0; or None.
        every_epochs: One at the end of every so many epochs, at least 1; or None. Only
            `Trainer` knows of the end of an epoch.
        keep_last: How many of the newest are kept, at least 1.
        keep_best: How many of the best are kept in addition, at least 0; those with
            a new value of `monitor`.
        monitor: The metric that says which are best: the name of one of an evaluation, or
            `"loss"`, which without such an evaluation is the epoch's.
        mode: `"min"` or `"max"`: which of its values are better.
        on_error: `"now"`: what keeps a checkpoint from being written, a full disk say, is
            raised in the loop at the next window. `"end"`: training goes on, and it is
            raised at the end.

    Raises:
        TypeError: A value is of another type.
        ValueError: A value is out of range.

    Examples:
        >>> from elche_jax import Checkpoints
        >>> Checkpoints("runs/digits", every_windows=100, keep_best=1, mode="max")
        ... # doctest: +ELLIPSIS
        Checkpoints(folder='runs/digits', every_windows=100, ...)
    """

    folder: str | PathLike[str] | None = None
    every_windows: int | None = None
    every_seconds: float | None = None
    every_epochs: int | None = 1
    keep_last: int = 3
    keep_best: int = 0
    monitor: str = "loss"
    mode: str = "min"
    on_error: str = "now"

    def __post_init__(self) -> None:
        where = "Checkpoints"
        _ = self.path  # checks the folder
        for name in ("every_windows", "every_epochs"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check.integer(where, name, value, low=1))
        if self.every_seconds is not None:
            check.real(where, "every_seconds", self.every_seconds, above=0)
        check.integer(where, "keep_last", self.keep_last, low=1)
        check.integer(where, "keep_best", self.keep_best, low=0)
        check.instance(where, "monitor", self.monitor, str)
        check.one_of(where, "mode", self.mode, ("min", "max"))
        check.one_of(where, "on_error", self.on_error, ("now", "end"))

    @property
    def path(self) -> Path | None:
        """The folder as a path."""
        if self.folder is None:
            return None
        path = check.path("Checkpoints", "folder", self.folder, rule="be a path or None")
        return Path(expanduser(path))
