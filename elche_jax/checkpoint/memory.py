"""The last checkpoint of a generation, kept in memory for the next one until it is on disk."""

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from elche_jax._log import logger
from elche_jax._progress import DESTINATION, MEMORY
from elche_jax.checkpoint.errors import described
from elche_jax.checkpoint.leaves import digest
from elche_jax.checkpoint.options import Checkpoints
from elche_jax.checkpoint.store import Saved, Store

ROOM = 1.25
"""Free memory that a checkpoint requires, as a multiple of its size."""

LIMITS = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Files of a control group that hold its memory limit and usage, in versions 2 and 1."""

AFTER = "after"
"""Key in a kept checkpoint's notes for the newest step on disk when it was kept."""


class Memory:
    """A checkpoint in a folder in memory, which outlives the processes of a generation.

    `elche-jax launch --elastic` passes the folder in an environment variable; without it nothing
    is kept. At the end of the job the launcher removes the folder, unless it holds a checkpoint
    that is not on disk.

    Attributes:
        step: Number of windows trained in the checkpoint that this object has kept; None if there
            is none.

    Args:
        folder: The folder on disk, which identifies the checkpoint.
        checkpoints: The options for the folder on disk; memory keeps only the last checkpoint.
    """

    def __init__(self, folder: Path, checkpoints: Checkpoints):
        given = os.environ.get(MEMORY)
        self._folder = folder
        self._checkpoints = replace(checkpoints, keep_last=1, keep_best=0)
        self._place = Path(given, digest(os.fsencode(folder))) if given else None
        self.step: int | None = None

    def keep(self, step: int, after: int, content: Callable[[], Saved]) -> None:
        """Keep a checkpoint, see `Store.save`; errors are only logged, as the disk comes next.

        Args:
            step: Number of windows trained.
            after: Step of the newest checkpoint on disk, -1 if there is none.
            content: Returns the checkpoint.
        """
        if self._place is None:
            return
        try:
            saved = content()
            need = sum(leaf.nbytes for leaf in saved.leaves.values())
            room = _room(self._place.parent)
            if ROOM * need > room:
                text = f"{need} bytes to keep, {room:.0f} free"
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), text)
            if (there := max(self.steps, default=-1)) >= step:  # of a run that has started over
                self.forget(there)
            self._place.mkdir(exist_ok=True)
            (self._place / DESTINATION).write_text(str(self._folder))
            store = Store(self._place, self._checkpoints)
            store.save(replace(saved, notes={**saved.notes, AFTER: after}))
            self.step = step
        except Exception as error:  # the checkpoint may still reach the disk
            logger.warning(
                "elche: the checkpoint after %d windows is not kept in memory, only on disk: %s",
                step,
                described(error),
            )

    @property
    def steps(self) -> list[int]:
        """Steps of what is kept."""
        if self._place is None or not self._place.exists():
            return []
        return sorted(int(path.name) for path in self._place.iterdir() if path.name.isdecimal())

    def newest(self, on_disk: int, seen: int) -> Saved | None:
        """Read the kept checkpoint; return None unless it is intact and continues the run on disk.

        Args:
            on_disk: Step of the newest intact checkpoint on disk, -1 if there is none.
            seen: Step of the newest one there, intact or not. If it is lower than when the
                checkpoint was kept, the run has started over.
        """
        if self._place is None or max(self.steps, default=-1) <= on_disk:
            return None
        saved = Store(self._place, self._checkpoints).newest()
        return None if saved is None or saved.notes[AFTER] > seen else saved

    def forget(self, step: int) -> None:
        """Free the memory of the kept checkpoint, unless it is of a later step.

        The writing thread may call it while the loop keeps a later one.
        """
        if self._place is not None and self.steps and self.steps[-1] <= step:
            self.step = None
            shutil.rmtree(self._place, ignore_errors=True)


def _room(folder: Path, root: Path = Path("/")) -> float:
    """Return the free bytes, the least of a folder in memory, the host and the control groups.

    Args:
        folder: The folder.
        root: Where `/proc` and `/sys` are.
    """
    rooms = [float(shutil.disk_usage(folder).free)]
    with (root / "proc/meminfo").open() as lines:
        free = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
        rooms += [1024 * float(kib) for kib in free]
    # the control groups around this process, which Slurm and Kubernetes limit
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):  # version 2 names none
            top = root / "sys/fs/cgroup" / controllers
            group = top / path.lstrip("/")
            # in a container, this may name a group outside it; `top` is then the container's own
            rooms += [_left(one) for one in (group, *group.parents) if one.is_relative_to(top)]
    return min(rooms)


def _left(group: Path) -> float:
    """Return how many more bytes a control group may use."""
    for limit, used in LIMITS:
        if (group / limit).exists() and (most := (group / limit).read_text().strip()) != "max":
            return float(most) - float((group / used).read_text())
    return float("inf")
